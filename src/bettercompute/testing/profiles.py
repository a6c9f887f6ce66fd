"""How a FakeDaemon answers and which line of bcd it plays: all that a test chooses about it and no rule decides.

A `Profile` is what an older release would say and lack (the skew matrix). `Levers` are how it misbehaves, and may be
moved while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from bettercompute.delivery.commands import CommandState
from bettercompute.protocol import messages
from bettercompute.protocol.versions import PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One line of bcd: the version and range it says, and what it does not have."""

    daemon_version: str
    proto_min: int = PROTOCOL_VERSION.min
    proto_max: int = PROTOCOL_VERSION.max
    capabilities: tuple[str, ...] = ("reboot",)
    lacks_kinds: frozenset[str] = frozenset()
    """Answered UNSUPPORTED."""
    lacks_sections: frozenset[str] = frozenset()
    """Sections of a spec that it reports UNSUPPORTED, by their field number, and does not converge."""
    lacks_fields: frozenset[str] = frozenset()
    """Fields of Hello and of StatusReport that it never sends."""


CURRENT = Profile(daemon_version="0.5.0")
N_MINUS_1 = Profile(daemon_version="0.4.0", lacks_kinds=frozenset({"instance.snapshot"}))
N_MINUS_2 = Profile(
    daemon_version="0.3.0",
    lacks_kinds=N_MINUS_1.lacks_kinds,
    lacks_sections=frozenset({"daemon"}),
    lacks_fields=frozenset({"trust_version"}),
)
BELOW_MINIMUM = Profile(daemon_version="0.1.0", proto_min=0, proto_max=0)

PROFILES: Mapping[str, Profile] = MappingProxyType(
    {"n": CURRENT, "n-1": N_MINUS_1, "n-2": N_MINUS_2, "below-minimum": BELOW_MINIMUM}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What becomes of a command of some kind."""

    state: CommandState = CommandState.SUCCEEDED
    """SUCCEEDED, FAILED or CANCELLED."""
    delay_ms: int = 0
    """From its arrival to its end."""
    result: bytes = b""
    reason: str = ""
    message: str = ""
    reject: messages.CommandRejectReason.ValueType | None = None
    """Refused with this reason in place of all above: BUSY, UNSUPPORTED, ..."""
    says_running: bool = True
    """Off: nothing is heard of it before its end, as if its ack were lost."""
    ends: bool = True
    """Off: it runs until `FakeDaemon.finish` or a cancel. With both off it is never acked."""


SUCCEEDS = Answer()
BUSY = Answer(reject=messages.COMMAND_REJECT_REASON_BUSY)
NEVER_ENDS = Answer(ends=False)
NEVER_ACKED = Answer(says_running=False, ends=False)

Rewrite = Callable[[messages.AgentFrame], bytes | None]
"""Returns the bytes to send in a frame's place; None: it is not sent."""


@dataclass(slots=True, kw_only=True)
class Levers:
    """How a FakeDaemon misbehaves. The defaults are a daemon that does not."""

    answers: dict[str, Answer] = field(default_factory=dict)
    """By kind."""
    answer: Answer = SUCCEEDS
    """To every other kind."""
    heartbeats: bool = True
    obeys_cancel: bool = True
    """Off: what runs goes on, and its real end is reported (too late)."""
    counts_credits: bool = True
    """Off: it takes more commands of a lane than it has credits."""
    redials: bool = True
    """Off: the first end of a stream, or failed dial, ends `run`."""
    obeys_waits: bool = True
    """Off: it dials again at once, whatever it was told."""
    says_attempt: bool = True
    """Off: no `x-bc-attempt`, as a foreign client."""
    rewrite: Rewrite | None = None
    """Sees every frame before it is sent, Hello too: wrong fields, wrong bytes, no frame at all."""

    def answer_to(self, kind: str) -> Answer:
        """Return what becomes of a command of this kind."""
        return self.answers.get(kind, self.answer)
