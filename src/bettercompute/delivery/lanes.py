"""Lanes and credits, both sides, and the exact resync.

The gateway sends at most as many commands of a lane as the node has credits; the daemon holds a credit from the
moment a command frame arrives until it *sends* the terminal update, after the last child process has been reaped.
Both ends count on their own. Every heartbeat carries the daemon's free credits and how many command frames of the
lane it has received on this stream; because frames are ordered, what the gateway has sent beyond that is exactly what
is still on its way. See docs/delivery.md, "Lanes"; decisions 0052.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from bettercompute.protocol.limits import BULK_CREDITS, CONTROL_CREDITS


class Lane(IntEnum):
    """A queue of commands of one node; the numbers of the wire."""

    CONTROL = 1
    BULK = 2


DEFAULT_CREDITS: Mapping[Lane, int] = {Lane.CONTROL: CONTROL_CREDITS, Lane.BULK: BULK_CREDITS}
"""Control is short and local; bulk fills disks and links, where two at once already compete."""


DAEMON_CREDITS_MAX = 100
"""What a daemon takes of a lane at most, whatever a gateway grants: what runs must fit its next Hello."""


@dataclass(frozen=True, slots=True)
class GatewayLane:
    """The gateway's count of one lane of one session."""

    credits: int
    free: int
    """What may still be sent. Below 0 while more is in flight than the credits of this session allow."""
    sent: int = 0
    """Command frames of this lane sent on this stream."""
    holders: frozenset[str] = frozenset()
    """Commands that hold a credit, as far as this gateway knows."""

    @property
    def available(self) -> int:
        """Return how many commands may be sent now."""
        return max(0, self.free)


def open_gateway_lane(*, granted: int, running: Iterable[str]) -> GatewayLane:
    """Return the count at Welcome: credits start anew from what Hello named as running, also when that is more."""
    holders = frozenset(running)
    return GatewayLane(credits=granted, free=granted - len(holders), holders=holders)


def sent(lane: GatewayLane, *command_ids: str) -> GatewayLane:
    """Return the count after a command frame was queued for each of these."""
    count = len(command_ids)
    return GatewayLane(
        credits=lane.credits,
        free=lane.free - count,
        sent=lane.sent + count,
        holders=lane.holders.union(command_ids),
    )


def freed(lane: GatewayLane, *command_ids: str) -> GatewayLane:
    """Return the count after a terminal update, or a BUSY, for each of these; who held no credit changes nothing."""
    gone = lane.holders.intersection(command_ids)
    if not gone:
        return lane
    return GatewayLane(
        credits=lane.credits,
        free=min(lane.credits, lane.free + len(gone)),
        sent=lane.sent,
        holders=lane.holders - gone,
    )


def resynchronized(lane: GatewayLane, *, free: int, received: int) -> GatewayLane:
    """Return the count after a heartbeat: free = min(credits, free) - (sent on this stream - received).

    A daemon that says 0 may hold more than its credits, which the number cannot tell; then the holders known here
    decide. `received` above what was sent is a daemon's miscount and adds nothing.
    """
    on_the_way = max(0, lane.sent - received)
    exact = min(lane.credits, free) - on_the_way
    if free == 0:
        exact = min(exact, lane.credits - len(lane.holders))
    return lane if exact == lane.free else replace(lane, free=exact)


@dataclass(frozen=True, slots=True)
class DaemonLane:
    """The daemon's count of one lane."""

    credits: int
    received: int = 0
    """Command frames of this lane received on this stream, whatever became of them."""
    holders: frozenset[str] = frozenset()
    """Commands accepted by this process whose terminal update has not been sent."""

    @property
    def free(self) -> int:
        """Return the credits that no command holds."""
        return max(0, self.credits - len(self.holders))


def open_daemon_lane(*, granted: int, holders: Iterable[str]) -> DaemonLane:
    """Return the count at Welcome: the daemon takes what it is given, also fewer credits than it has commands
    running.
    """
    return DaemonLane(credits=min(granted, DAEMON_CREDITS_MAX), holders=frozenset(holders))


def received(lane: DaemonLane) -> DaemonLane:
    """Return the count after a command frame arrived."""
    return replace(lane, received=lane.received + 1)


def held(lane: DaemonLane, command_id: str) -> DaemonLane:
    """Return the count after a command was accepted."""
    return replace(lane, holders=lane.holders | {command_id})


def let_go(lane: DaemonLane, command_id: str) -> DaemonLane:
    """Return the count after the terminal update of a command was sent."""
    return replace(lane, holders=lane.holders - {command_id})
