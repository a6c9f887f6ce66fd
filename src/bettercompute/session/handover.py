"""Handing sessions over: a drain gives all of them away, a rebalance some, both by Drain frames and never in a burst.

A rebalance is decided once a minute by each gateway for itself, from the counts in the lease rows. Only one that holds
more than its share gives, and never below its share, so that two gateways cannot throw sessions back and forth. It
begins after two looks beyond the tolerance and ends well inside it. What was handed over and came straight back proves
that those nodes have nowhere else to go (their `gateway_url` names this gateway only): then it pauses, longer each
time. See docs/sessions.md, "Closing"; docs/gateway.md, "Handing over"; decisions 0079.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

DRAIN_SHARE = 0.5
"""Of one gateway's handshake rate: who takes over must keep room for nodes that come for other reasons."""
RECONNECT_AFTER_MS = 1_000
"""Told in Drain is a time up to this: enough that neighbours in a rack do not leave in step."""
TOLERANCE = 1.2
"""A gateway this much fuller than the emptiest one begins to give."""
SETTLED = 1.1
"""It goes on until it is no fuller than this: between the two nothing begins and nothing ends."""
EXCESS_MIN = 5
"""A handful of sessions is chance, not imbalance."""
LOOKS_BEFORE = 2
"""An imbalance must outlive one look: a gateway that has just started, or is about to be restarted too, is none."""
LOOK_EVERY_MS = 60_000
GIVEN_SHARE_MAX = 0.05
"""Of a gateway's sessions in one look, ..."""
GIVEN_MAX = 300
"""... and in all: 5 a second, a fortieth of what a gateway admits."""
RETURNED_SHARE = 0.8
RETURNED_OF_MIN = 5
"""So many must have been asked before their coming back proves anything."""
PAUSE_MAX_LOOKS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLoad:
    """How full a gateway is, by its lease row."""

    sessions: int
    sessions_max: int

    @property
    def fill(self) -> float:
        """Return the part of its room that is taken: gateways of different sizes are compared by it."""
        return self.sessions / self.sessions_max


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalance:
    """What a gateway remembers from one look to the next."""

    looks_beyond: int = 0
    giving: bool = False
    asked: int = 0
    """Handed over since it was last known whether they come back."""
    returned: int = 0
    pause_looks: int = 0
    """How long the last pause was; 0: the way out is known to work, or untried."""
    paused_left: int = 0


def drain_per_s(handshakes_per_s: float) -> float:
    """Return how many sessions a second a draining gateway sends away."""
    return handshakes_per_s * DRAIN_SHARE


def look(state: Rebalance, *, own: GatewayLoad, others: Sequence[GatewayLoad], returned: int) -> tuple[Rebalance, int]:
    """Return what to remember and how many sessions to hand over until the next look.

    `others` are the live gateways that do not drain; `returned` is how many of those handed over at the last look are
    here again.
    """
    state = _judged(replace(state, returned=state.returned + returned))
    if state.paused_left > 0:
        return replace(state, paused_left=state.paused_left - 1, giving=False, looks_beyond=0), 0
    excess = _excess(own, others)
    emptiest = min((other.fill for other in others), default=math.inf)
    if state.giving:
        giving = excess >= 1 and own.fill > SETTLED * emptiest
        looks_beyond = 0
    else:
        beyond = excess >= EXCESS_MIN and own.fill > TOLERANCE * emptiest
        looks_beyond = state.looks_beyond + 1 if beyond else 0
        giving = looks_beyond >= LOOKS_BEFORE
    count = _count(own, excess=excess) if giving else 0
    return replace(state, giving=giving, looks_beyond=looks_beyond, asked=state.asked + count), count


def _excess(own: GatewayLoad, others: Sequence[GatewayLoad]) -> float:
    """Return how many sessions a gateway holds above its share, which goes by the size of the gateways."""
    everything = sum(other.sessions for other in others) + own.sessions
    room = sum(other.sessions_max for other in others) + own.sessions_max
    return own.sessions - everything * own.sessions_max / room


def _count(own: GatewayLoad, *, excess: float) -> int:
    """Return a bounded part of the excess: others may give at the same time, and the counts are seconds old."""
    bounded = min(math.ceil(excess / 2), math.ceil(own.sessions * GIVEN_SHARE_MAX), GIVEN_MAX)
    return min(max(bounded, 1), math.floor(excess))


def _judged(state: Rebalance) -> Rebalance:
    """Pause when nearly all of those handed over came back; forget the pauses once most of them stay away."""
    if state.asked < RETURNED_OF_MIN:
        return state
    if state.returned < RETURNED_SHARE * state.asked:
        return replace(state, asked=0, returned=0, pause_looks=0)
    pause_looks = min(PAUSE_MAX_LOOKS, max(1, 2 * state.pause_looks))
    return replace(state, asked=0, returned=0, pause_looks=pause_looks, paused_left=pause_looks)
