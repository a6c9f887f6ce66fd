"""The statements of delivery against PostgreSQL: facts, events, dispatch, put-back, expiry."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from functools import partial

import pytest

from bettercompute.delivery.commands import FACT_MERGE, CommandState, Merge
from bettercompute.delivery.facts import EventRecord
from bettercompute.protocol import messages
from bettercompute.session.gateway_side import DispatchDemand, LaneDemand
from bettercompute.store import delivery, waiting
from bettercompute.store.sessions import SessionKey
from tests.contract.gateway import seed

KEY = SessionKey(node_id="node-a", session_id="session-a", epoch=7)
_NUMBERS = itertools.count(1)


def news(
    command_id: str, state: CommandState, *, node_id: str = "node-a", reason: str = "", result: bytes = b""
) -> delivery.CommandNews:
    return delivery.CommandNews(
        node_id=node_id,
        command_id=command_id,
        state=state,
        saw_acked=state is CommandState.ACKED,
        saw_running=state is CommandState.RUNNING,
        reason=reason,
        message="",
        result=result,
        signature=b"",
        authenticated=True,
        progress=b"",
        started_at_ms=0,
        outbox_id=f"outbox-{next(_NUMBERS)}",
    )


def demand(
    key: SessionKey = KEY,
    *,
    pending: int = 8,
    held: tuple[str, ...] = (),
    kinds: frozenset[str] | None = None,
    signed_only: bool = False,
) -> DispatchDemand:
    return DispatchDemand(
        node_id=key.node_id,
        session_id=key.session_id,
        epoch=key.epoch,
        boot_id="boot",
        lanes=(LaneDemand(lane=messages.LANE_CONTROL, free=8, held=held, pending=pending),),
        kinds=kinds,
        signed_only=signed_only,
    )


def events(journal_id: str, *seqs: int) -> delivery.EventsNews:
    return delivery.EventsNews(
        node_id="node-a",
        journal_id=journal_id,
        events=tuple(EventRecord(seq=seq, event_id=f"event-{seq}", type="daemon.started", at_ms=1_000) for seq in seqs),
        contiguous_seq=seqs[-1],
    )


async def acked(database, news: delivery.EventsNews) -> int | None:
    acks = await delivery.store_events(database, [news])
    return acks.get((news.node_id, news.journal_id))


@pytest.fixture
async def fleet(database):
    await seed.add_lease(database)
    await seed.add_node(database, "node-a")
    await seed.add_node(database, "node-b")
    await seed.connect_node(database, KEY)
    return database


async def test_a_fact_moves_a_row_exactly_as_the_table_says(fleet):
    for (stored, said), expected in FACT_MERGE.items():
        command_id = f"{stored.name}-{said.name}".lower()
        await seed.add_command(fleet, "node-a", command_id, state=stored, key=KEY if stored > 1 else None)
        counts = await delivery.store_command_news(fleet, [news(command_id, said)], event_type="command.finished")
        moved = expected is Merge.STORE
        assert await seed.state_of(fleet, command_id) == (said if moved else stored), command_id
        assert (counts.moved, counts.late) == (moved, expected is Merge.LATE), command_id


async def test_a_finished_command_is_published_once(fleet):
    await seed.add_command(fleet, "node-a", "c1", state=2, key=KEY)
    for _ in range(2):
        await delivery.store_command_news(
            fleet, [news("c1", CommandState.SUCCEEDED, result=b"done")], event_type="command.finished"
        )
    rows = await fleet.query("SELECT type, node_id, payload->>'commandId' AS id FROM outbox")
    assert [(row["type"], row["node_id"], row["id"]) for row in rows] == [("command.finished", "node-a", "c1")]
    rows = await fleet.query("SELECT result, finished_at FROM commands")
    assert rows[0]["result"] == b"done"
    assert rows[0]["finished_at"] is not None


async def test_another_nodes_command_is_left_alone(fleet):
    await seed.add_command(fleet, "node-a", "c1", state=2, key=KEY)
    counts = await delivery.store_command_news(
        fleet, [news("c1", CommandState.SUCCEEDED, node_id="node-b")], event_type="command.finished"
    )
    assert (counts.moved, counts.late) == (0, 1)
    assert await seed.state_of(fleet, "c1") == CommandState.DISPATCHED


async def test_a_failure_without_a_code_is_stored_as_failed(fleet):
    await seed.add_command(fleet, "node-a", "c1", state=2, key=KEY)
    await delivery.store_command_news(fleet, [news("c1", CommandState.FAILED)], event_type="command.finished")
    rows = await fleet.query("SELECT reason FROM commands")
    assert rows[0]["reason"] == "failed"


async def test_events_are_stored_once_and_acked(fleet):
    assert await acked(fleet, events("journal", 1, 2, 3)) == 3
    assert await acked(fleet, events("journal", 2, 3, 4)) == 4
    rows = await fleet.query("SELECT seq FROM node_events ORDER BY seq")
    assert [row["seq"] for row in rows] == [1, 2, 3, 4]


async def test_an_event_id_is_stored_once_whatever_its_seq(fleet):
    await acked(fleet, events("old", 1, 2))
    recovered = EventRecord(seq=1, event_id="event-1", type="daemon.started", at_ms=1_000, recovered=True)
    again = delivery.EventsNews(node_id="node-a", journal_id="journal", events=(recovered,), contiguous_seq=1)
    assert await acked(fleet, again) == 1
    rows = await fleet.query("SELECT journal_id, seq FROM node_events ORDER BY journal_id, seq")
    assert [(row["journal_id"], row["seq"]) for row in rows] == [("old", 1), ("old", 2)]


async def test_the_ack_is_never_raised_past_a_gap(fleet):
    await acked(fleet, events("journal", 1))
    assert await acked(fleet, events("journal", 5, 6)) == 1
    [row] = await fleet.query("SELECT acked_event_seq FROM node_sessions WHERE node_id = 'node-a'")
    assert row["acked_event_seq"] == 1


async def test_nothing_is_stored_past_a_gap_so_that_order_holds(fleet):
    await acked(fleet, events("journal", 1))
    await acked(fleet, events("journal", 5, 6))
    gapped = replace(events("journal", 2, 3, 5), contiguous_seq=3)
    assert await acked(fleet, gapped) == 3
    assert await acked(fleet, events("journal", 4, 5, 6)) == 6
    rows = await fleet.query("SELECT seq FROM node_events ORDER BY received_at, seq")
    assert [row["seq"] for row in rows] == [1, 2, 3, 4, 5, 6]


async def test_what_a_node_says_of_a_command_that_was_held_back_ends_that(fleet):
    await seed.add_command(fleet, "node-a", "c1", state=3, key=KEY)
    await fleet.query("UPDATE commands SET held_back = true")
    await delivery.store_command_news(fleet, [news("c1", CommandState.RUNNING)], event_type="command.finished")
    [row] = await fleet.query("SELECT held_back FROM commands")
    assert not row["held_back"]


async def test_the_ack_is_raised_for_the_rows_journal_only(fleet):
    assert await acked(fleet, events("another", 1, 2)) is None
    rows = await fleet.query("SELECT acked_event_seq FROM node_sessions WHERE node_id = 'node-a'")
    assert rows[0]["acked_event_seq"] == 0


async def test_a_foreign_node_in_the_same_batch_changes_nothing(fleet):
    await seed.add_command(fleet, "node-a", "c1", state=2, key=KEY)
    batch = [news("c1", CommandState.FAILED, node_id="node-b"), news("c1", CommandState.SUCCEEDED)]
    await delivery.store_command_news(fleet, batch, event_type="command.finished")
    assert await seed.state_of(fleet, "c1") == CommandState.SUCCEEDED


async def test_dispatch_marks_in_order_within_the_credits(fleet):
    for number in range(4):
        await seed.add_command(fleet, "node-a", f"c{number}")
    marked = await delivery.dispatch(fleet, [demand(pending=3)], lease=seed.LEASE)
    assert [item.command.command_id for item in marked] == ["c0", "c1", "c2"]
    assert {item.command.attempt for item in marked} == {1}
    assert {item.command.seen for item in marked} == {None}
    rows = await fleet.query("SELECT session_id, session_epoch, sent_boot_id FROM commands WHERE state = 2")
    assert {(row["session_id"], row["session_epoch"], row["sent_boot_id"]) for row in rows} == {
        ("session-a", 7, "boot")
    }


async def test_dispatch_leaves_what_may_not_go_yet_or_any_more(fleet):
    await seed.add_command(fleet, "node-a", "early", not_before_s=60)
    await seed.add_command(fleet, "node-a", "late", not_after_s=-1)
    await seed.add_command(fleet, "node-a", "kind", kind="node.reboot")
    await seed.add_command(fleet, "node-a", "cancelled")
    await fleet.query(
        "UPDATE commands SET cancel_requested_at = now(), cancel_requested_by = 'op' WHERE id = 'cancelled'"
    )
    marked = await delivery.dispatch(fleet, [demand(kinds=frozenset({"inventory.refresh"}))], lease=seed.LEASE)
    assert marked == []


async def test_what_waits_for_its_time_holds_nothing_back_and_then_has_its_place(fleet):
    for number in range(4):
        await seed.add_command(fleet, "node-a", f"later{number}", not_before_s=60)
    for number in range(2):
        await seed.add_command(fleet, "node-a", f"now{number}")
    [facts] = [await waiting.facts(fleet, command_id="now0")]
    assert facts is not None
    assert facts.ahead == 0
    marked = await delivery.dispatch(fleet, [demand(pending=1)], lease=seed.LEASE)
    assert [item.command.command_id for item in marked] == ["now0"]
    await fleet.query("UPDATE commands SET not_before = compute_now() WHERE id <> 'later0' AND not_before IS NOT NULL")
    marked = await delivery.dispatch(fleet, [demand(pending=4)], lease=seed.LEASE)
    assert [item.command.command_id for item in marked] == ["later1", "later2", "later3", "now1"]


async def test_a_signed_only_session_gets_no_unsigned_command(fleet):
    await seed.add_command(fleet, "node-a", "c1")
    assert await delivery.dispatch(fleet, [demand(signed_only=True)], lease=seed.LEASE) == []


@pytest.mark.parametrize(
    "key",
    [
        SessionKey(node_id="node-a", session_id="session-a", epoch=6),
        SessionKey(node_id="node-a", session_id="another", epoch=7),
    ],
)
async def test_dispatch_of_an_older_session_marks_nothing(fleet, key):
    await seed.add_command(fleet, "node-a", "c1")
    assert await delivery.dispatch(fleet, [demand(key)], lease=seed.LEASE) == []


@pytest.mark.parametrize("fault", ["expired", "other-token", "retired", "nearly-expired"])
async def test_dispatch_without_the_lease_marks_nothing(fleet, fault):
    await seed.add_command(fleet, "node-a", "c1")
    change = {
        "expired": "expires_at = compute_now() - interval '1 second'",
        "other-token": "token = 'stolen'",
        "retired": "retired_at = compute_now()",
        "nearly-expired": "expires_at = compute_now() + interval '2 seconds'",
    }[fault]
    await fleet.query(f"UPDATE leases SET {change}")
    assert await delivery.dispatch(fleet, [demand()], lease=seed.LEASE) == []
    assert await seed.state_of(fleet, "c1") == CommandState.PENDING


async def test_held_commands_are_sent_again_in_their_own_epoch_only(fleet):
    await seed.add_command(fleet, "node-a", "mine", state=3, key=KEY)
    older = SessionKey(node_id="node-a", session_id="older", epoch=6)
    await seed.add_command(fleet, "node-a", "older", state=2, key=older)
    marked = await delivery.dispatch(fleet, [demand(pending=0, held=("mine", "older"))], lease=seed.LEASE)
    assert [(item.command.command_id, item.command.attempt, item.command.seen) for item in marked] == [
        ("mine", 2, CommandState.ACKED)
    ]
    await fleet.query("UPDATE commands SET cancel_requested_at = now(), cancel_requested_by = 'op' WHERE id = 'mine'")
    assert await delivery.dispatch(fleet, [demand(pending=0, held=("mine",))], lease=seed.LEASE) == []


async def test_a_dispatch_that_waited_for_a_hello_marks_nothing(fleet):
    await seed.add_command(fleet, "node-a", "c1")
    async with fleet.transaction() as hello:
        await hello.query("SELECT FROM node_sessions WHERE node_id = 'node-a' FOR NO KEY UPDATE")
        waiting = asyncio.create_task(delivery.dispatch(fleet, [demand()], lease=seed.LEASE))
        await until_blocked(fleet)
        await hello.query("UPDATE node_sessions SET session_epoch = 8, session_id = 'newer' WHERE node_id = 'node-a'")
    assert await asyncio.wait_for(waiting, 30) == []
    assert await seed.state_of(fleet, "c1") == CommandState.PENDING


async def until_blocked(database) -> None:
    for _ in range(2_000):
        rows = await database.query(
            "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        if rows:
            return
    raise AssertionError("nobody waits for a lock")


def busy(command_id: str, *, key: SessionKey = KEY, attempt: int = 1) -> delivery.BusyCommand:
    return delivery.BusyCommand(
        key=key, command_id=command_id, attempt=attempt, back_off_ms=1_000, outbox_id=f"outbox-{command_id}"
    )


async def test_a_busy_command_is_pending_again_later(fleet):
    await seed.add_command(fleet, "node-a", "c1", state=2, key=KEY)
    result = await delivery.put_back(fleet, [busy("c1")], lease=seed.LEASE, event_type="command.finished")
    assert result["c1"].state is CommandState.PENDING
    rows = await fleet.query("SELECT not_before > compute_now() AS later, session_id, busy_count FROM commands")
    assert (rows[0]["later"], rows[0]["session_id"], rows[0]["busy_count"]) == (True, None, 1)


async def test_a_busy_command_is_never_sent_sooner_than_was_asked(fleet):
    await seed.add_command(fleet, "node-a", "c1", state=2, key=KEY)
    await fleet.query("UPDATE commands SET asked_not_before = compute_now() + interval '1 minute'")
    await delivery.put_back(fleet, [busy("c1")], lease=seed.LEASE, event_type="command.finished")
    [row] = await fleet.query("SELECT not_before = asked_not_before AS as_asked FROM commands")
    assert row["as_asked"]


@pytest.mark.parametrize(
    ("state", "says"), [(CommandState.DISPATCHED, "before the node accepted it"), (CommandState.RUNNING, "too busy")]
)
async def test_a_busy_command_with_a_cancel_is_cancelled_and_published(fleet, state, says):
    await seed.add_command(fleet, "node-a", "c1", state=int(state), key=KEY)
    await fleet.query("UPDATE commands SET cancel_requested_at = now(), cancel_requested_by = 'op'")
    result = await delivery.put_back(fleet, [busy("c1")], lease=seed.LEASE, event_type="command.finished")
    assert result["c1"].state is CommandState.CANCELLED
    assert says in (await fleet.query("SELECT message FROM commands"))[0]["message"]
    assert len(await fleet.query("SELECT FROM outbox")) == 1


@pytest.mark.parametrize(
    "said",
    [
        busy("c1", attempt=2),
        busy("c1", key=SessionKey(node_id="node-a", session_id="session-a", epoch=6)),
        busy("c1", key=SessionKey(node_id="node-b", session_id="session-a", epoch=7)),
    ],
)
async def test_a_put_back_of_another_sending_matches_nothing(fleet, said):
    await seed.add_command(fleet, "node-a", "c1", state=2, key=KEY)
    assert await delivery.put_back(fleet, [said], lease=seed.LEASE, event_type="command.finished") == {}
    assert await seed.state_of(fleet, "c1") == CommandState.DISPATCHED


@pytest.mark.parametrize("state", [CommandState.ACKED, CommandState.RUNNING])
async def test_what_was_accepted_once_stays_in_flight_when_refused_busy(fleet, state):
    await seed.add_command(fleet, "node-a", "c1", state=int(state), key=KEY)
    result = await delivery.put_back(fleet, [busy("c1")], lease=seed.LEASE, event_type="command.finished")
    assert (result["c1"].state, result["c1"].command.command_id) == (state, "c1")
    [row] = await fleet.query("SELECT state, session_id, not_before, busy_count, held_back FROM commands")
    assert (row["state"], row["session_id"], row["not_before"], row["busy_count"]) == (state, "session-a", None, 1)
    assert row["held_back"]


async def test_status_generations_and_trust_only_rise(fleet):
    report = messages.StatusReport(
        observed_generation=4,
        conditions=[messages.Condition(type="ClockUnconfirmed", status=messages.CONDITION_STATUS_TRUE, reason="far")],
    )
    status = delivery.StatusNews(
        node_id="node-a",
        observed_generation=4,
        applied_generation=3,
        report=report.SerializeToString(),
        trust_version=5,
        approver_set_epoch=2,
        approver_set_sha256=b"x" * 32,
    )
    await delivery.store_statuses(fleet, [status])
    older = delivery.StatusNews(
        node_id="node-a", observed_generation=2, applied_generation=1, report=b"", trust_version=4, approver_set_epoch=1
    )
    await delivery.store_statuses(fleet, [older])
    rows = await fleet.query(
        "SELECT concat_ws('/', observed_generation, applied_generation, trust_version, approver_set_epoch) AS all"
        " FROM nodes JOIN node_sessions USING (node_id) WHERE node_id = 'node-a'"
    )
    assert rows[0]["all"] == "4/3/5/2"
    assert await fleet.query("SELECT FROM node_conditions") == [], "the newer report names no condition"
    for observed, applied, then in ((5, 1, "5/3"), (1, 4, "5/4"), (1, 6, "6/6")):
        half = delivery.StatusNews(node_id="node-a", observed_generation=observed, applied_generation=applied)
        await delivery.store_statuses(fleet, [half])
        [row] = await fleet.query(
            "SELECT concat_ws('/', observed_generation, applied_generation) AS both FROM nodes WHERE node_id = 'node-a'"
        )
        assert row["both"] == then


async def test_a_daemon_says_nothing_of_conditions_that_others_made(fleet):
    await fleet.query(
        "INSERT INTO node_conditions (node_id, type, source, status)"
        " VALUES ('node-a', 'DuplicateIdentity', 'inventory', 'true')"
    )
    denied = messages.Condition(type="DuplicateIdentity", status=messages.CONDITION_STATUS_FALSE)
    for conditions in ([denied], []):
        report = messages.StatusReport(conditions=conditions).SerializeToString() or b"\x08\x00"
        status = delivery.StatusNews(node_id="node-a", observed_generation=1, applied_generation=1, report=report)
        await delivery.store_statuses(fleet, [status])
        [row] = await fleet.query("SELECT type, source, status FROM node_conditions")
        assert (row["type"], row["source"], row["status"]) == ("DuplicateIdentity", "inventory", "true")


async def test_the_last_output_of_a_command_is_kept(fleet):
    await seed.add_command(fleet, "node-a", "c1", state=4, key=KEY)
    size = 16 * 1024
    for number in range(8):
        piece = delivery.OutputPiece(
            node_id="node-a", command_id="c1", offset=number * size, data=b"x" * size, dropped_bytes=0
        )
        await delivery.store_output(fleet, [piece, piece])
    foreign = delivery.OutputPiece(node_id="node-b", command_id="c1", offset=8 * size, data=b"x", dropped_bytes=0)
    await delivery.store_output(fleet, [foreign])
    rows = await fleet.query("SELECT output_offset FROM command_output ORDER BY output_offset")
    assert [row["output_offset"] // size for row in rows] == [4, 5, 6, 7]
    for number in range(8):  # a daemon whose pieces lie over each other
        piece = delivery.OutputPiece(
            node_id="node-a", command_id="c1", offset=8 * size + number, data=b"x" * size, dropped_bytes=0
        )
        await delivery.store_output(fleet, [piece])
    [row] = await fleet.query("SELECT sum(octet_length(data)) AS bytes FROM command_output")
    assert row["bytes"] == 4 * size


async def test_what_a_command_writes_when_it_runs_again_takes_the_place_of_what_it_wrote_before(fleet):
    def written(offset: int, data: bytes, *, attempt: int, command_id: str = "c1") -> delivery.OutputPiece:
        return delivery.OutputPiece(
            node_id="node-a", command_id=command_id, offset=offset, data=data, dropped_bytes=0, attempt=attempt
        )

    for command_id in ("c1", "c2"):
        await seed.add_command(fleet, "node-a", command_id, state=4, key=KEY)
    before = [written(0, b"other", attempt=2, command_id="c2"), written(0, b"first", attempt=1)]
    await delivery.store_output(fleet, before)
    again = [written(5, b" run", attempt=1), written(0, b"2nd", attempt=2), written(3, b" run", attempt=2)]
    for pieces in (again, again, [written(7, b"!", attempt=2)]):
        await delivery.store_output(fleet, pieces)
    rows = await fleet.query("SELECT data FROM command_output ORDER BY command_id, output_offset")
    assert [row["data"] for row in rows] == [b"2nd", b" run", b"!", b"other"]


async def test_pieces_of_nothing_are_not_kept_without_number(fleet):
    await seed.add_command(fleet, "node-a", "c1", state=4, key=KEY)
    pieces = [
        delivery.OutputPiece(node_id="node-a", command_id="c1", offset=number, data=b"", dropped_bytes=1)
        for number in range(5_000)
    ]
    await delivery.store_output(fleet, pieces)
    [row] = await fleet.query("SELECT count(*) AS pieces, min(output_offset) AS first FROM command_output")
    assert (row["pieces"], row["first"]) == (4_096, 904)


async def test_cancels_and_the_poll_name_the_nodes_with_work(fleet):
    poll = partial(delivery.nodes_with_work, fleet, gateway_id=seed.LEASE.gateway_id)
    await seed.add_command(fleet, "node-a", "later", not_before_s=60)
    await seed.add_command(fleet, "node-a", "held", not_before_s=3600, not_after_s=3600)
    await seed.add_command(fleet, "node-a", "too-late", not_after_s=-1)
    assert await poll(ahead_ms=10_000) == []
    assert await poll(ahead_ms=61_000) == await poll(ahead_ms=3_601_000) == ["node-a"]
    found = await delivery.look_at(fleet, ["node-a", "node-b"], ahead_ms=3_601_000)
    assert (found.cancels, list(found.due_in_ms)) == ((), ["node-a"])
    assert 0 < found.due_in_ms["node-a"] <= 60_000
    await fleet.query("UPDATE commands SET state = 7, finished_at = compute_now() WHERE id = 'later'")
    assert await poll(ahead_ms=3_601_000) == []
    assert (await delivery.look_at(fleet, ["node-a"], ahead_ms=3_601_000)).due_in_ms == {}
    await seed.add_command(fleet, "node-a", "c1", state=3, key=KEY)
    await seed.add_command(fleet, "node-b", "c2")
    await fleet.query(
        "UPDATE commands SET cancel_requested_at = now(), cancel_requested_by = 'op', cancel_reason = 'why'"
        " WHERE id = 'c1'"
    )
    assert await poll(ahead_ms=10_000) == ["node-a"]
    found = await delivery.look_at(fleet, ["node-a", "node-b"], ahead_ms=10_000)
    assert found.cancels == (("node-a", "c1", "why"),)


async def test_expiry_ends_what_is_overdue_in_batches(fleet):
    for number in range(3):
        await seed.add_command(fleet, "node-a", f"c{number}", not_after_s=-1)
    await seed.add_command(fleet, "node-a", "good")
    # c1 was busy twice; c2 once, after a delivery that nothing was heard of.
    await fleet.query("UPDATE commands SET attempt = 2, busy_count = 2 WHERE id = 'c1'")
    await fleet.query("UPDATE commands SET attempt = 2, busy_count = 1 WHERE id = 'c2'")
    said = {"event_type": "command.finished", "message": "nothing begun", "message_unsure": "who knows"}
    first = await delivery.expire(fleet, outbox_ids=["o1", "o2"], **said)
    rest = await delivery.expire(fleet, outbox_ids=["o3", "o4"], **said)
    assert len(first) == 2
    assert len(rest) == 1
    rows = await fleet.query("SELECT id, message FROM commands WHERE state = 8 ORDER BY id")
    assert [(row["id"], row["message"]) for row in rows] == [
        ("c0", "nothing begun"),
        ("c1", "nothing begun"),
        ("c2", "who knows"),
    ]
    assert await seed.state_of(fleet, "good") == CommandState.PENDING
    assert len(await fleet.query("SELECT FROM outbox")) == 3
