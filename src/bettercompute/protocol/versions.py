"""Which protocol version two sides speak (docs/protocol.md, "Version skew").

The highest version inside both ranges wins. Where there is none, the daemon is told `upgrade_required` and gets nothing
but `daemon.upgrade`, so that a fleet can be lifted over any gap without touching a machine by hand.
"""

from __future__ import annotations

from dataclasses import dataclass

from bettercompute.errors import Refused
from bettercompute.protocol.statuses import STATUS_OF, Reason

UPGRADE_KIND = "daemon.upgrade"


class InvalidConfig(Refused):
    """A configured value that cannot be meant: refused at construction, before anything runs with it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=STATUS_OF[Reason.INVALID_CONFIG], reason=Reason.INVALID_CONFIG)


@dataclass(frozen=True, slots=True)
class ProtocolRange:
    """The versions that a gateway or a daemon of ours speaks, both ends included.

    Raises:
        InvalidConfig: a bound is no integer, the lower one is below 1, or the upper one is below the lower.
    """

    min: int
    max: int

    def __post_init__(self) -> None:
        for name, bound in (("min", self.min), ("max", self.max)):
            # A bool is an int to Python, and never meant here.
            if type(bound) is not int:
                raise InvalidConfig(f"protocol {name} is {bound!r}: it must be a whole number")
        if self.min < 1:
            raise InvalidConfig(f"protocol min is {self.min}: versions begin at 1")
        if self.max < self.min:
            raise InvalidConfig(f"protocol max is {self.max}, below min {self.min}: swap or widen them")


# What this release speaks, on both sides.
PROTOCOL_VERSION = ProtocolRange(min=1, max=1)


@dataclass(frozen=True, slots=True)
class Negotiated:
    """What Welcome says of versions."""

    protocol_version: int
    upgrade_required: bool


def negotiate(gateway: ProtocolRange, *, proto_min: int, proto_max: int) -> Negotiated:
    """Return the highest version inside the gateway's range and the one that a Hello names.

    The daemon's range is a claim: one of versions that nobody speaks any more (0 to 0), or yet, overlaps nothing. Nor
    would one that is upside down, which `session.opening` refuses.
    """
    highest = min(gateway.max, proto_max)
    if highest >= max(gateway.min, proto_min):
        return Negotiated(protocol_version=highest, upgrade_required=False)
    return Negotiated(protocol_version=gateway.min, upgrade_required=True)
