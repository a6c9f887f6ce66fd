"""Reconnecting: when a daemon dials again, and how.

Attempt n waits a uniformly drawn time between 0 and min(60 s, 1 s x 2^n) ("full jitter"), so that a herd spreads over
the window instead of coming back in step. A refusal that says when to come back is obeyed exactly, and the doubling
starts over; a Welcome resets everything. See docs/sessions.md, "Reconnecting"; decisions 0102.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bettercompute.protocol.statuses import Reason, Status
from bettercompute.session.effects import Redial

BASE_MS = 1_000
CAP_MS = 60_000
SUPERSEDED_MIN_MS = 5_000
"""Two clones that supersede each other must not spin."""
KEEP_CONNECTION_MAX_MS = 30_000
"""A TLS handshake costs more than an idle connection for this long."""
ATTEMPT_MAX = 1_000_000

_KEEPS_CONNECTION = frozenset({Reason.HANDSHAKES, Reason.HELLOS})


@dataclass(frozen=True, slots=True)
class Backoff:
    """Where a daemon is in its schedule. A new one, and one after a Welcome, is `Backoff()`."""

    attempt: int = 0
    """n of the schedule."""
    bucket_refusals: int = 0
    """Refusals by the handshake bucket since the last Welcome: the `x-bc-attempt` of the next stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a stream or a dial ended. `status` None: without a gRPC status."""

    status: Status | None = None
    reason: str = ""
    pushback_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """What to do until the next attempt."""

    delay_ms: int
    redial: Redial


def window_ms(attempt: int) -> int:
    """Return the width of the window from which attempt n draws its delay."""
    return min(CAP_MS, BASE_MS << min(attempt, 16))


def next_wait(backoff: Backoff, ending: Ending, *, drawn: float) -> tuple[Backoff, Wait]:
    """Return the schedule after an ending and the wait before the next attempt. `drawn` is even from [0, 1)."""
    refusals = backoff.bucket_refusals
    if ending.status is Status.RESOURCE_EXHAUSTED and ending.reason == Reason.HANDSHAKES:
        refusals = min(refusals + 1, ATTEMPT_MAX)
    redial = _redial(ending)
    if ending.pushback_ms is not None:
        return Backoff(bucket_refusals=refusals), Wait(ending.pushback_ms, redial)
    delay_ms = int(drawn * window_ms(backoff.attempt))
    if ending.status is Status.ABORTED:
        delay_ms += SUPERSEDED_MIN_MS
    attempt = min(backoff.attempt + 1, ATTEMPT_MAX)
    return replace(backoff, attempt=attempt, bucket_refusals=refusals), Wait(delay_ms, redial)


def _redial(ending: Ending) -> Redial:
    """Keep the connection over a short wait for a turn; a full or draining gateway, above all, is left."""
    if ending.pushback_ms is None or ending.pushback_ms > KEEP_CONNECTION_MAX_MS:
        return Redial.NEW_CONNECTION
    return Redial.SAME_CONNECTION if ending.reason in _KEEPS_CONNECTION else Redial.NEW_CONNECTION
