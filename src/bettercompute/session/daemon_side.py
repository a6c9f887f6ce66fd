"""The daemon's end of its sessions: `step` routes each input to the rule of its heading and threads the state
through.

One `DaemonSession` lives as long as the daemon's process: between streams it waits and keeps what it owes, on a
stream it says Hello, judges Welcome (the barrier) and works. Nothing is decided here: the rules live in `hello`,
`welcome`, `clock`, `daemon_commands`, `busy`, `resume`, `liveness`, `reconnect` and in `delivery`.
"""

from __future__ import annotations

from bettercompute.session.daemon_state import Advertised, DaemonFacts, DaemonSession, JournalFacts, Phase
from bettercompute.session.effects import DaemonEffect
from bettercompute.session.inputs import DaemonInput

__all__ = ["Advertised", "DaemonFacts", "DaemonSession", "JournalFacts", "Phase", "next_tick_ms", "start", "step"]


def start(
    facts: DaemonFacts, advertised: Advertised, journal: JournalFacts, *, now_ms: int
) -> tuple[DaemonSession, tuple[DaemonEffect, ...]]:
    """Return the state at process start, after what the previous process left running has been ended, and what to
    write.

    The daemon's half of the resume rules is applied to every unfinished entry of an earlier process; then it dials.
    """
    raise NotImplementedError


def step(state: DaemonSession, given: DaemonInput, now_ms: int) -> tuple[DaemonSession, tuple[DaemonEffect, ...]]:
    """Return the state and the effects that follow from one input."""
    raise NotImplementedError


def next_tick_ms(state: DaemonSession, *, now_ms: int) -> int:
    """Return in how many milliseconds the next `DaemonTick` is due: heartbeat, silence, drain, mark or forgetting."""
    raise NotImplementedError
