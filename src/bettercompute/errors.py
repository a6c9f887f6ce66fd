"""Errors by who must act: the peer (`Refused`), nobody but time (`Unavailable`), or us (`Bug`).

Each carries what goes on the wire: a gRPC status number (`protocol.statuses.Status`), a short stable reason code
(`x-bc-reason`), a sentence that names the thing, the value, the limit and the cure, and for some when to come back.
"""

from __future__ import annotations

STATUS_UNAVAILABLE = 14
STATUS_INTERNAL = 13


class BetterComputeError(Exception):
    """What all of our own errors are."""

    def __init__(self, message: str, *, status: int, reason: str, pushback_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.reason = reason
        self.pushback_ms = pushback_ms


class Refused(BetterComputeError):
    """The peer or the user asked for what cannot be given: it must change something, or wait for `pushback_ms`."""


class Unavailable(BetterComputeError):
    """A passing fault: the same request may succeed later without any change."""

    def __init__(self, message: str, *, reason: str = "unavailable", pushback_ms: int | None = None) -> None:
        super().__init__(message, status=STATUS_UNAVAILABLE, reason=reason, pushback_ms=pushback_ms)


class Bug(BetterComputeError):
    """An invariant of ours is broken. Never caught to go on, only to end the one thing that is broken."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=STATUS_INTERNAL, reason="bug")
