"""Merging of facts: the highest state wins, the last status, events in order and acked without a gap."""

from __future__ import annotations

import itertools

import pytest

from bettercompute.delivery.commands import CommandState
from bettercompute.delivery.facts import (
    AppliedGenerationFact,
    CommandFact,
    EventRecord,
    EventsFact,
    InventoryFact,
    InventoryHashesFact,
    StatusFact,
)
from bettercompute.gateway import fact_batch


def merge(*facts, node_id: str = "node-a"):
    numbers = itertools.count(1)
    return fact_batch.merge(((node_id, fact) for fact in facts), draw_id=lambda: f"id-{next(numbers)}")


def said(state: CommandState, **fields: object) -> CommandFact:
    return CommandFact(command_id="c1", state=state, attempt=1, **fields)  # type: ignore[arg-type] # a test names fields


def test_acked_running_and_succeeded_are_one_row_write():
    batch = merge(said(CommandState.ACKED), said(CommandState.RUNNING), said(CommandState.SUCCEEDED, result=b"r"))
    [news] = batch.commands.values()
    assert (news.state, news.saw_acked, news.saw_running, news.result) == (CommandState.SUCCEEDED, True, True, b"r")


def test_the_first_end_stays():
    batch = merge(said(CommandState.FAILED, reason="timeout"), said(CommandState.SUCCEEDED), said(CommandState.RUNNING))
    [news] = batch.commands.values()
    assert (news.state, news.reason) == (CommandState.FAILED, "timeout")


def test_an_older_state_changes_nothing_but_what_was_seen():
    [news] = merge(said(CommandState.RUNNING), said(CommandState.ACKED)).commands.values()
    assert (news.state, news.saw_acked) == (CommandState.RUNNING, True)


def test_two_nodes_that_name_one_command_stay_apart():
    facts = [("node-a", said(CommandState.ACKED)), ("node-b", said(CommandState.SUCCEEDED))]
    batch = fact_batch.merge(facts, draw_id=lambda: "id")
    assert set(batch.commands) == {("node-a", "c1"), ("node-b", "c1")}


def test_output_is_kept_piece_by_piece():
    batch = merge(
        said(CommandState.RUNNING, output=b"one"),
        said(CommandState.RUNNING, output=b"two", output_offset=3, output_dropped_bytes=0),
    )
    assert [(piece.offset, piece.data) for piece in batch.output] == [(0, b"one"), (3, b"two")]


def events(*seqs: int, journal_id: str = "journal") -> EventsFact:
    return EventsFact(
        journal_id, tuple(EventRecord(seq=seq, event_id=f"event-{seq}", type="t", at_ms=1) for seq in seqs)
    )


@pytest.mark.parametrize(
    ("batches", "contiguous"),
    [([(1, 2), (3, 4)], 4), ([(3, 4), (1, 2)], 4), ([(1, 2), (2, 3)], 3), ([(1, 2), (4, 5)], 2)],
)
def test_events_are_ordered_and_acked_without_a_gap(batches, contiguous):
    [news] = merge(*(events(*seqs) for seqs in batches)).event_news()
    assert [event.seq for event in news.events] == sorted({seq for seqs in batches for seq in seqs})
    assert news.contiguous_seq == contiguous


def test_journals_stay_apart():
    news = merge(events(1), events(1, journal_id="another")).event_news()
    assert [item.journal_id for item in news] == ["another", "journal"]


def test_the_last_status_wins_and_generations_only_rise():
    batch = merge(
        StatusFact(observed_generation=5, applied_generation=4, report=b"one", trust_version=3),
        StatusFact(observed_generation=4, applied_generation=4, report=b"two"),
        AppliedGenerationFact(5),
    )
    [status] = batch.statuses.values()
    assert (status.observed_generation, status.applied_generation, status.report) == (5, 5, b"two")
    assert status.trust_version == 3, "0 says unchanged"


def test_an_applied_generation_alone_replaces_no_report():
    [status] = merge(AppliedGenerationFact(2)).statuses.values()
    assert (status.applied_generation, status.report) == (2, None)


def test_the_last_section_wins_and_hashes_add_up():
    batch = merge(
        InventoryFact(section="cpu", sha256=b"1", body=b"one", collected_at_ms=0),
        InventoryFact(section="cpu", sha256=b"2", body=b"two", collected_at_ms=0),
        InventoryHashesFact({"cpu": b"1"}),
        InventoryHashesFact({"cpu": b"2", "pci": b"3"}),
    )
    [section] = batch.sections.values()
    assert section.body == b"two"
    assert batch.hashes == {"node-a": {"cpu": b"2", "pci": b"3"}}


@pytest.mark.parametrize(
    "fact",
    [
        said(CommandState.SUCCEEDED, result=b"x" * 1_000),
        events(1),
        StatusFact(observed_generation=1, applied_generation=1, report=b"r"),
        InventoryFact(section="cpu", sha256=b"1", body=b"b", collected_at_ms=0),
        InventoryHashesFact({}),
        AppliedGenerationFact(1),
    ],
)
def test_every_fact_weighs_something(fact):
    assert fact_batch.size_bytes(fact) > 0
