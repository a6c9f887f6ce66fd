"""Event batches: no gap inside a session, gaps at Hello, the daemon's window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bettercompute.delivery import events
from bettercompute.delivery.facts import EventRecord, EventsFact
from bettercompute.errors import Refused
from bettercompute.protocol.statuses import Reason, Status


def batch(*seqs: int, journal_id: str = "j") -> EventsFact:
    return EventsFact(journal_id, tuple(EventRecord(seq=seq, event_id=f"e{seq}", type="t", at_ms=1) for seq in seqs))


@pytest.mark.parametrize(
    ("seqs", "next_seq", "then"), [((1, 2, 3), 1, 4), ((5,), 5, 6), ((3, 4), 5, 5), ((3, 4, 5, 6), 5, 7)]
)
def test_batches_that_go_on(seqs: tuple[int, ...], next_seq: int, then: int) -> None:
    assert events.checked_batch(batch(*seqs), journal_id="j", next_seq=next_seq) == then


@pytest.mark.parametrize(
    ("fact", "next_seq", "reason"),
    [
        (batch(2), 1, Reason.EVENT_GAP),
        (batch(1, 3), 1, Reason.EVENT_GAP),
        (batch(1, 1), 1, Reason.EVENT_GAP),
        (batch(2, 1), 2, Reason.EVENT_GAP),
        (batch(1, journal_id="other"), 1, Reason.EVENT_GAP),
        (batch(), 1, Reason.INVALID_FRAME),
    ],
)
def test_batches_that_end_the_session(fact: EventsFact, next_seq: int, reason: Reason) -> None:
    with pytest.raises(Refused) as refused:
        events.checked_batch(fact, journal_id="j", next_seq=next_seq)
    assert refused.value.status == Status.INVALID_ARGUMENT
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    ("acked", "first", "last", "then"),
    [
        (0, 0, 0, events.Cursor(0, None)),
        (5, 6, 9, events.Cursor(5, None)),
        (5, 4, 9, events.Cursor(5, None)),
        (5, 0, 5, events.Cursor(5, None)),
        (5, 8, 9, events.Cursor(7, (6, 7))),
        (5, 0, 9, events.Cursor(9, (6, 9))),
    ],
)
def test_where_events_go_on_after_hello(acked: int, first: int, last: int, then: events.Cursor) -> None:
    assert events.cursor_at_hello(row_acked_seq=acked, first_unacked_seq=first, last_seq=last) == then


@given(st.integers(0, 10_000), st.integers(0, 5_000), st.integers(0, 5_000))
def test_the_window(acked: int, on_the_way: int, waiting: int) -> None:
    sent = acked + on_the_way
    due = events.batch_to_send(acked_seq=acked, sent_seq=sent, last_seq=sent + waiting)
    if due is None:
        assert waiting == 0 or on_the_way >= events.WINDOW_EVENTS
    else:
        after, through = due
        assert after == sent
        assert 0 < through - after <= events.BATCH_EVENTS_MAX
        assert through - acked <= events.WINDOW_EVENTS
        assert through <= sent + waiting
