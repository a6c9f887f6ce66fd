"""What the end of a stream means for this node's identity, and how it is told to people: who refused what, in words.

See docs/daemon.md, "When it is not connected".
"""

from __future__ import annotations

from bettercompute.protocol.statuses import Reason, Status
from bettercompute.transport.streams import DialKind

# Endings after which the node comes back by the certificate that it has.
EXPIRED = frozenset({Reason.CERTIFICATE_EXPIRED, DialKind.CERTIFICATE_EXPIRED})
# Endings after which no waiting helps: this identity is of no use any more.
IDENTITY_LOST = frozenset(
    {
        *(Reason.REVOKED, Reason.QUARANTINED, Reason.OLD_GENERATION),
        *(Reason.SUPERSEDED_CERTIFICATE, Reason.NOT_JOINED),
    }
)


def status_of(number: int | None) -> Status:
    """Return a gRPC status by its number; one that is missing or that nobody knows is UNKNOWN."""
    try:
        return Status(Status.UNKNOWN if number is None else number)
    except ValueError:
        return Status.UNKNOWN


def refusal_text(status: Status, message: str) -> str:
    """Return who refused what, with the gateway's own sentence behind it."""
    who = {
        Status.UNAUTHENTICATED: "the gateway refused this node's certificate",
        Status.PERMISSION_DENIED: "the gateway refused this node",
        Status.INVALID_ARGUMENT: "the gateway refused what this node sent",
        Status.ABORTED: "another session of this node took over",
    }.get(status, "the gateway ended the session")
    return f"{who}: {message}" if message else who
