"""BUSY's back-off, epochs, and the table of closings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bettercompute.delivery.lanes import DaemonLane
from bettercompute.errors import Unavailable
from bettercompute.protocol.limits import MAX_DONE_RESULTS
from bettercompute.protocol.statuses import STATUS_OF, Reason, Status
from bettercompute.session import busy, closing, epochs
from bettercompute.session.busy import WhyBusy
from bettercompute.session.closing import CLOSINGS, Cause


def test_a_command_waits_longer_each_time_it_is_refused() -> None:
    counts: dict[str, int] = {}
    waits = []
    for _ in range(7):
        refused, wait_ms = busy.refused(counts, "a")
        counts = dict(refused)
        waits.append(wait_ms)
    assert waits == [1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000]
    assert busy.refused(counts, "b")[1] == 1_000, "per command"
    assert busy.refused(busy.settled(counts, "a"), "a")[1] == 1_000
    assert busy.settled(counts, "unknown") == counts


@given(st.integers(1, 10**9))
def test_a_back_off_is_bounded(refusals: int) -> None:
    assert 1_000 <= busy.back_off_ms(refusals) <= 30_000


@pytest.mark.parametrize(
    ("not_before_ms", "early"),
    [
        (0, False),
        (1_000_000, False),
        (1_000_000 + busy.EARLY_ALLOWED_MS, False),
        (1_000_001 + busy.EARLY_ALLOWED_MS, True),
    ],
)
def test_how_early_is_too_early(not_before_ms: int, *, early: bool) -> None:
    assert busy.too_early(not_before_ms=not_before_ms, time_ms=1_000_000) is early


@pytest.mark.parametrize(
    ("lane", "done", "full", "why"),
    [
        (DaemonLane(credits=1), 0, False, None),
        (DaemonLane(credits=1, holders=frozenset({"a"})), 0, False, WhyBusy.NO_CREDIT),
        (DaemonLane(credits=0), 0, True, WhyBusy.NO_CREDIT),
        (DaemonLane(credits=1), 0, True, WhyBusy.JOURNAL_FULL),
        (DaemonLane(credits=1), MAX_DONE_RESULTS, False, WhyBusy.JOURNAL_FULL),
    ],
)
def test_why_a_daemon_is_busy(lane: DaemonLane, done: int, why: WhyBusy | None, *, full: bool) -> None:
    assert busy.why_busy(lane, done_unacked=done, ids=done, journal_full=full) is why


@pytest.mark.parametrize(
    ("row", "last", "epoch", "behind"),
    [
        (0, 0, 1, False),
        (7, 3, 8, False),
        (7, 7, 8, False),
        (7, 9, 10, True),
        (7, 1_000_007, 1_000_008, True),
        (7, 1_000_008, 8, True),
        (7, 2**63 - 1, 8, True),
    ],
)
def test_epochs_rise_also_after_a_restore(row: int, last: int, epoch: int, *, behind: bool) -> None:
    assert epochs.next_epoch(row_epoch=row, last_epoch=last) == epochs.NextEpoch(epoch, behind)


@pytest.mark.parametrize(
    ("row", "last", "behind"),
    [(7, 6, False), (7, 7, False), (7, 8, True), (7, 1_000_007, True), (7, 1_000_008, False)],
)
def test_a_row_is_behind_only_what_is_later_and_credible(row: int, last: int, *, behind: bool) -> None:
    """Equal is not behind: a restored row switches the search for forks off."""
    assert epochs.is_behind(row_epoch=row, last_epoch=last) is behind


@pytest.mark.parametrize(
    ("told", "kept"), [(-1, 5), (0, 5), (1, 1), (4, 4), (2**63 - 1, 2**63 - 1), (2**63, 5)], ids=str
)
def test_a_daemon_keeps_the_epoch_it_is_told_if_it_can_be_one(told: int, kept: int) -> None:
    assert epochs.remembered(5, told=told) == kept
    assert epochs.is_possible(told) is (kept == told)


def test_what_is_kept_already_needs_a_credit_and_no_room() -> None:
    assert busy.why_busy(DaemonLane(credits=1), done_unacked=0, ids=0, journal_full=True, kept=True) is None
    no_credit = busy.why_busy(DaemonLane(credits=0), done_unacked=0, ids=0, journal_full=False, kept=True)
    assert no_credit is WhyBusy.NO_CREDIT


@pytest.mark.parametrize(
    ("epoch", "session_id", "gateway_id", "holds"),
    [(3, "s", "g", True), (4, "s", "g", False), (3, "t", "g", False), (3, "s", "h", False), (3, "s", "", False)],
)
def test_a_fence_compares_all_three(epoch: int, session_id: str, gateway_id: str, *, holds: bool) -> None:
    fence = epochs.Fence(node_id="n", session_epoch=3, session_id="s", gateway_id="g")
    assert epochs.holds(fence, row_epoch=epoch, row_session_id=session_id, row_gateway_id=gateway_id) is holds


def test_zombies_are_what_a_chunk_did_not_match() -> None:
    assert epochs.zombies(["a", "b", "c"], matched={"b"}) == ("a", "c")


def test_every_cause_has_its_closing_with_the_status_of_its_reason() -> None:
    assert set(CLOSINGS) == set(Cause)
    for cause, row in CLOSINGS.items():
        if cause is not Cause.STREAM_ENDED:
            assert STATUS_OF[Reason(row.reason)] is row.status
    assert {cause for cause, row in CLOSINGS.items() if not row.disconnect_write} == {
        Cause.SUPERSEDED_HERE,
        Cause.SUPERSEDED_ELSEWHERE,
        Cause.FENCED,
    }, "whose row belongs to somebody else"


def test_any_refusal_closes_with_its_own_status() -> None:
    effect = closing.close_refused(Unavailable("the database is away", reason=Reason.DATABASE, pushback_ms=7))
    assert (effect.status, effect.reason, effect.pushback_ms, effect.disconnect_write) == (
        Status.UNAVAILABLE,
        "database",
        7,
        True,
    )
