"""Closing: every way a session ends, as one table.

Each cause has the status that the daemon sees, the reason that node.disconnected carries, and whether the
epoch-fenced disconnect write follows. A superseded or fenced session writes nothing: its row belongs to somebody
else. In-flight commands stay as they are in every case, for the next session's replay. See docs/sessions.md, "Closing".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from bettercompute.errors import BetterComputeError
from bettercompute.protocol.statuses import Reason, Status
from bettercompute.session.effects import Close

STREAM_ENDED = "stream-ended"
"""The one reason that never goes over the wire: there is no stream left to tell it on."""


class Cause(Enum):
    """Why a session ends."""

    STREAM_ENDED = auto()
    HEARTBEAT_TIMEOUT = auto()
    CERTIFICATE_EXPIRED = auto()
    REVOKED = auto()
    LOCKED = auto()
    FACTS_FAILED = auto()
    FACTS_POISONED = auto()
    SLOW_CONSUMER = auto()
    DRAINED = auto()
    STOPPING = auto()
    SUPERSEDED_HERE = auto()
    SUPERSEDED_ELSEWHERE = auto()
    FENCED = auto()


@dataclass(frozen=True, slots=True)
class Closing:
    """What belongs to a cause."""

    status: Status
    reason: str
    disconnect_write: bool


CLOSINGS: Mapping[Cause, Closing] = {
    Cause.STREAM_ENDED: Closing(Status.OK, STREAM_ENDED, disconnect_write=True),
    Cause.HEARTBEAT_TIMEOUT: Closing(Status.UNAVAILABLE, Reason.HEARTBEAT_TIMEOUT, disconnect_write=True),
    Cause.CERTIFICATE_EXPIRED: Closing(Status.UNAUTHENTICATED, Reason.CERTIFICATE_EXPIRED, disconnect_write=True),
    Cause.REVOKED: Closing(Status.UNAUTHENTICATED, Reason.REVOKED, disconnect_write=True),
    Cause.LOCKED: Closing(Status.PERMISSION_DENIED, Reason.LOCKED, disconnect_write=True),
    Cause.FACTS_FAILED: Closing(Status.UNAVAILABLE, Reason.DATABASE, disconnect_write=True),
    Cause.FACTS_POISONED: Closing(Status.INVALID_ARGUMENT, Reason.INVALID_FRAME, disconnect_write=True),
    Cause.SLOW_CONSUMER: Closing(Status.RESOURCE_EXHAUSTED, Reason.SLOW_CONSUMER, disconnect_write=True),
    Cause.DRAINED: Closing(Status.UNAVAILABLE, Reason.DRAINING, disconnect_write=True),
    Cause.STOPPING: Closing(Status.UNAVAILABLE, Reason.STOPPING, disconnect_write=True),
    Cause.SUPERSEDED_HERE: Closing(Status.ABORTED, Reason.SUPERSEDED, disconnect_write=False),
    Cause.SUPERSEDED_ELSEWHERE: Closing(Status.ABORTED, Reason.SUPERSEDED, disconnect_write=False),
    Cause.FENCED: Closing(Status.UNAVAILABLE, Reason.FENCED, disconnect_write=False),
}


def close(cause: Cause, message: str, *, pushback_ms: int | None = None) -> Close:
    """Return the closing effect of a cause, with a sentence for the daemon's log and when it may come back."""
    closing = CLOSINGS[cause]
    return Close(closing.status, closing.reason, message, closing.disconnect_write, pushback_ms=pushback_ms)


def close_refused(error: BetterComputeError) -> Close:
    """Return the closing effect of a protocol error, or of any other refusal in the middle of a session."""
    return Close(
        Status(error.status), error.reason, error.message, disconnect_write=True, pushback_ms=error.pushback_ms
    )
