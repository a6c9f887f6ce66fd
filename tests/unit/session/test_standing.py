"""Locks and revocations by operators: when they hold, and what a daemon is told."""

from __future__ import annotations

import pytest

from bettercompute.protocol.statuses import Reason, Status
from bettercompute.session import standing
from bettercompute.session.standing import Lock, Revocation

NOW_MS = 1_900_000_000_000


def a_lock(*, left_ms: int | None = None, reason: str = "") -> Lock:
    return Lock(by="ops", reason=reason, until_ms=None if left_ms is None else NOW_MS + left_ms)


@pytest.mark.parametrize(("left_ms", "holds"), [(None, True), (1, True), (0, False), (-1, False)])
def test_a_lock_ends_by_itself(left_ms: int | None, holds: bool) -> None:
    lock = a_lock(left_ms=left_ms)
    assert standing.in_force(lock, now_ms=NOW_MS) == (lock if holds else None)
    assert standing.in_force(None, now_ms=NOW_MS) is None


@pytest.mark.parametrize(
    ("left_ms", "drawn", "wait_ms"),
    [
        (None, 0.0, 30_000),
        (None, 0.999, 59_970),
        (3_600_000, 0.5, 45_000),  # an unlock must be felt, however long the lock would last
        (10_000, 0.0, 10_000),  # not before it ends
        (10_000, 0.5, 12_500),  # a rack whose locks end together does not come back in step
        (1, 0.0, 1),
    ],
)
def test_who_is_locked_is_told_when_to_ask_again(left_ms: int | None, drawn: float, wait_ms: int) -> None:
    refused = standing.refuse_locked("n1", a_lock(left_ms=left_ms), now_ms=NOW_MS, drawn=drawn)
    assert (refused.status, refused.reason, refused.pushback_ms) == (Status.PERMISSION_DENIED, Reason.LOCKED, wait_ms)


def test_who_is_locked_is_told_by_whom_why_and_for_how_long() -> None:
    said = standing.refuse_locked("n1", a_lock(left_ms=1_500, reason="disk swap"), now_ms=NOW_MS, drawn=0).message
    assert said == "node n1 is locked by ops for another 2 s: disk swap"
    said = standing.refuse_locked("n1", a_lock(), now_ms=NOW_MS, drawn=0).message
    assert said == "node n1 is locked by ops until it is unlocked"


def test_who_is_revoked_is_told_by_whom_why_and_the_cure() -> None:
    refused = standing.refuse_revoked("n1", Revocation(by="ops", reason="stolen"))
    assert (refused.status, refused.reason) == (Status.UNAUTHENTICATED, Reason.REVOKED)
    assert refused.message.startswith("node n1 was revoked by ops: stolen; cure: re-join the machine")
