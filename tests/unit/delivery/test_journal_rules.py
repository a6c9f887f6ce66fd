"""What the journal may forget, and when it has no room."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bettercompute.delivery import journal_rules
from bettercompute.delivery.commands import TERMINAL, CommandState
from bettercompute.delivery.journal_rules import DELIVERY_GRACE_MS, IDS_MAX, KEEP_MS, JournalEntry
from bettercompute.protocol.limits import MAX_DONE_RESULTS, MAX_NOT_AFTER_MS

DONE = JournalEntry(
    command_id="c",
    kind="inventory.refresh",
    lane=1,
    attempt=1,
    state=CommandState.SUCCEEDED,
    not_after_ms=5_000,
    process_id="p",
    started=True,
    done_mark_ms=1_000,
    acked=True,
)
LATE = 10 * KEEP_MS


def test_a_day_after_it_was_done_and_acked() -> None:
    assert not journal_rules.entry_may_go(DONE, mark_ms=1_000 + KEEP_MS - 1)
    assert journal_rules.entry_may_go(DONE, mark_ms=1_000 + KEEP_MS)


def test_not_while_a_delivery_can_be_valid() -> None:
    entry = replace(DONE, not_after_ms=LATE)
    assert not journal_rules.entry_may_go(entry, mark_ms=LATE + DELIVERY_GRACE_MS - 1)
    assert journal_rules.entry_may_go(entry, mark_ms=LATE + DELIVERY_GRACE_MS)


@pytest.mark.parametrize("state", list(CommandState))
@pytest.mark.parametrize("acked", [True, False])
def test_only_what_is_done_and_acked(state: CommandState, *, acked: bool) -> None:
    entry = replace(DONE, state=state, acked=acked)
    may_go = acked and (state in TERMINAL or state is CommandState.REJECTED)
    assert journal_rules.entry_may_go(entry, mark_ms=LATE) is may_go


def test_a_cancelled_id_outlives_the_longest_deadline() -> None:
    last = 7 + MAX_NOT_AFTER_MS + DELIVERY_GRACE_MS
    assert not journal_rules.cancelled_may_go(7, mark_ms=last - 1)
    assert journal_rules.cancelled_may_go(7, mark_ms=last)


def test_what_an_earlier_process_left_goes_once_no_delivery_can_be_valid() -> None:
    left = replace(DONE, state=CommandState.RUNNING, acked=False)
    last = 5_000 + DELIVERY_GRACE_MS + KEEP_MS
    assert not journal_rules.left_may_go(left, process_id="p", mark_ms=LATE), "this process runs it"
    assert not journal_rules.left_may_go(left, process_id="q", mark_ms=last - 1)
    assert journal_rules.left_may_go(left, process_id="q", mark_ms=last)
    assert not journal_rules.left_may_go(replace(DONE, acked=False), process_id="q", mark_ms=LATE), "a result is owed"


def test_forgettable_names_them_all() -> None:
    kept = replace(DONE, command_id="kept", acked=False)
    gone = journal_rules.forgettable((DONE, kept), {"x": 0, "y": LATE}, process_id="p", mark_ms=LATE)
    assert gone == ("c", "x")


@pytest.mark.parametrize(
    ("done_unacked", "ids", "full", "room"),
    [
        (0, 0, False, True),
        (MAX_DONE_RESULTS - 1, IDS_MAX - 1, False, True),
        (MAX_DONE_RESULTS, 0, False, False),
        (0, IDS_MAX, False, False),
        (0, 0, True, False),
    ],
)
def test_at_a_bound_there_is_no_room(done_unacked: int, ids: int, *, full: bool, room: bool) -> None:
    assert journal_rules.has_room(done_unacked=done_unacked, ids=ids, journal_full=full) is room
