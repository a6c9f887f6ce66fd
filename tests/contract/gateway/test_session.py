"""A session from Hello to its end, on a real database. See docs/gateway.md, "Liveness"."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from bettercompute.delivery.commands import CommandState
from bettercompute.delivery.desired_state import StoredSpec
from bettercompute.errors import Unavailable
from bettercompute.gateway import dispatch as dispatcher
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Status
from bettercompute.session.inputs import Tick
from bettercompute.store import channels, delivery, sessions
from bettercompute.store.database import Conflict, StatementFailed
from tests.contract.gateway import seed


async def test_hello_is_welcomed_and_the_row_says_so(rig):
    node = await rig.add_node("node-a")
    daemon = await rig.connect(node)
    assert daemon.welcome.epoch == 1
    assert daemon.welcome.gateway_id == rig.gateway.gateway_id
    assert daemon.welcome.heartbeat_interval_ms == 10_000
    assert {(lane.lane, lane.credits) for lane in daemon.welcome.lane_credits} == {(1, 8), (2, 2)}
    row = await rig.row("node-a")
    assert (row["gateway_id"], row["session_epoch"], row["state"]) == (rig.gateway.gateway_id, 1, "connected")
    events = await rig.database.query("SELECT type, payload FROM outbox")
    assert [event["type"] for event in events] == ["node.connected"]


async def test_a_command_goes_out_and_its_result_is_acked_after_the_commit(rig):
    node = await rig.add_node("node-a")
    daemon = await rig.connect(node)
    heard: asyncio.Queue[str] = asyncio.Queue()
    listener = await rig.database.dedicated(application_name="tests")
    for channel in (channels.FINISHED, channels.OUTBOX):
        await listener.listen(channel, heard.put_nowait)
    await seed.add_command(rig.database, "node-a", "c1")
    await rig.database.query("SELECT pg_notify('bc_dispatch', 'node-a')")
    body = await daemon.command()
    assert body.command_id == "c1"
    assert await seed.state_of(rig.database, "c1") == CommandState.DISPATCHED
    daemon.update("c1", messages.COMMAND_STATE_ACKED, attempt=1)
    daemon.update("c1", messages.COMMAND_STATE_RUNNING, attempt=1)
    daemon.update("c1", messages.COMMAND_STATE_SUCCEEDED, attempt=1, result=b"r")
    ack = (await daemon.receive("ack")).ack
    assert list(ack.command_ids) == ["c1"]
    async with asyncio.timeout(30):
        told = {await heard.get()}
        while told != {"c1", ""}:
            told.add(await heard.get())
    await listener.close()
    [row] = await rig.database.query("SELECT state, result, acked_at, running_at FROM commands")
    assert (row["state"], row["result"]) == (CommandState.SUCCEEDED, b"r")
    assert row["acked_at"] is not None
    assert row["running_at"] is not None


async def test_pending_commands_are_found_without_a_notification(rig):
    node = await rig.add_node("node-a")
    await seed.add_command(rig.database, "node-a", "c1")
    daemon = await rig.connect(node)
    assert (await daemon.command()).command_id == "c1"


async def test_credits_bound_what_is_in_flight(rig):
    node = await rig.add_node("node-a")
    for number in range(12):
        await seed.add_command(rig.database, "node-a", f"c{number:02}")
    daemon = await rig.connect(node)
    first = [(await daemon.command()).command_id for _ in range(8)]
    assert first == [f"c{number:02}" for number in range(8)]
    daemon.update("c00", messages.COMMAND_STATE_SUCCEEDED, attempt=1)
    assert (await daemon.command()).command_id == "c08"


async def test_a_backlog_is_worked_off_lane_by_lane_without_a_poll(rig, monkeypatch):
    async def finds_nothing(_: object) -> None:
        pass

    monkeypatch.setattr(dispatcher.Dispatcher, "_poll", finds_nothing)
    node = await rig.add_node("node-a")
    for number in range(30):
        lane = messages.LANE_BULK if number % 3 == 0 else messages.LANE_CONTROL
        await seed.add_command(rig.database, "node-a", f"c{number:02}", lane=lane)
    daemon = await rig.connect(node)
    seen: list[str] = []
    while len(seen) < 30:
        body = await daemon.command()
        seen.append(body.command_id)
        daemon.update(body.command_id, messages.COMMAND_STATE_SUCCEEDED, attempt=1)
    bulk = [command_id for command_id in seen if int(command_id[1:]) % 3 == 0]
    control = [command_id for command_id in seen if int(command_id[1:]) % 3]
    assert bulk == sorted(bulk)
    assert control == sorted(control)


async def test_events_are_acked_once_stored(rig):
    node = await rig.add_node("node-a")
    daemon = await rig.connect(node)
    batch = messages.EventBatch(
        journal_id="journal-1",
        events=[
            messages.Event(seq=seq, event_id=rig.world.ids.uuid7(), type="daemon.started", at_ms=1_700_000_000_000)
            for seq in (1, 2, 3)
        ],
    )
    daemon.send(messages.AgentFrame(events=batch))
    ack = (await daemon.receive("ack")).ack
    assert (ack.journal_id, ack.acked_event_seq) == ("journal-1", 3)
    rows = await rig.database.query("SELECT seq FROM node_events ORDER BY seq")
    assert [row["seq"] for row in rows] == [1, 2, 3]


async def test_a_gap_inside_a_session_ends_it(rig):
    node = await rig.add_node("node-a")
    daemon = await rig.connect(node)
    event = messages.Event(seq=5, event_id=rig.world.ids.uuid7(), type="daemon.started", at_ms=1_700_000_000_000)
    daemon.send(messages.AgentFrame(events=messages.EventBatch(journal_id="journal-1", events=[event])))
    status, reason, _ = await daemon.end()
    assert (status, reason) == (Status.INVALID_ARGUMENT, "event-gap")


async def test_events_that_follow_what_the_database_has_lost_end_the_session(rig):
    node = await rig.add_node("node-a")
    daemon = await rig.connect(node)

    def said(seq: int) -> messages.AgentFrame:
        event = messages.Event(seq=seq, event_id=rig.world.ids.uuid7(), type="daemon.started", at_ms=1_700_000_000_000)
        return messages.AgentFrame(events=messages.EventBatch(journal_id="journal-1", events=[event]))

    daemon.send(said(1))
    assert (await daemon.receive("ack")).ack.acked_event_seq == 1
    # The database is another one, to which the first event is unknown.
    await rig.database.query("DELETE FROM node_events")
    await rig.database.query("UPDATE node_sessions SET acked_event_seq = 0")
    daemon.send(said(2))
    status, reason, _ = await daemon.end()
    assert (status, reason) == (Status.UNAVAILABLE, "database")
    assert await rig.database.query("SELECT seq FROM node_events") == []


async def test_a_spec_that_was_asked_for_comes_also_after_a_conflict(rig, monkeypatch):
    answers: list[object] = []
    looked = []

    async def newer_specs(queries, *, generations):
        looked.append(generations)
        answer = answers.pop(0) if answers else {}
        if isinstance(answer, Conflict):
            raise answer
        return answer

    monkeypatch.setattr(sessions, "newer_specs", newer_specs)
    daemon = await rig.connect(await rig.add_node("node-a"))
    await rig.until(lambda: looked)
    conflict = Conflict("the schema moved under a prepared statement", reason="database")
    answers += [conflict, {"node-a": StoredSpec(generation=1, body=b"body")}]
    daemon.send(messages.AgentFrame(spec_request=messages.SpecRequest()))
    assert (await daemon.receive("desired")).desired.body == b"body"


async def test_busy_puts_the_command_back(rig, monkeypatch):
    # No poll comes: its own timer, from the put-back on, sends it again, however long that was under way.
    monkeypatch.setattr(dispatcher, "POLL_S", 3_600.0)
    put_back = delivery.put_back

    async def slow(queries, busy, **kwargs):
        await asyncio.sleep(0.3)
        return await put_back(queries, busy, **kwargs)

    monkeypatch.setattr(delivery, "put_back", slow)
    node = await rig.add_node("node-a")
    await seed.add_command(rig.database, "node-a", "c1")
    daemon = await rig.connect(node)
    await daemon.command()
    daemon.update(
        "c1",
        messages.COMMAND_STATE_REJECTED,
        attempt=1,
        reject_reason=messages.COMMAND_REJECT_REASON_BUSY,
    )
    await rig.until_state("c1", CommandState.PENDING)
    again = await daemon.receive("command")
    assert again.command.attempt == 2


async def test_a_busy_that_the_store_refuses_costs_its_own_session_and_no_other(rig, monkeypatch):
    put_back = delivery.put_back

    async def refuse_one(queries, busy, **kwargs):
        if any(item.command_id == "c-bad" for item in busy):
            raise StatementFailed("this cannot be stored", sqlstate="22003", constraint=None)
        return await put_back(queries, busy, **kwargs)

    monkeypatch.setattr(delivery, "put_back", refuse_one)
    daemons = {}
    for name in ("bad", "good"):
        node = await rig.add_node(f"node-{name}")
        await seed.add_command(rig.database, f"node-{name}", f"c-{name}")
        daemons[name] = await rig.connect(node)
        await daemons[name].command()
    for name, daemon in daemons.items():
        reject = messages.COMMAND_REJECT_REASON_BUSY
        daemon.update(f"c-{name}", messages.COMMAND_STATE_REJECTED, attempt=1, reject_reason=reject)
    status, reason, message = await daemons["bad"].end()
    assert (status, reason) == (Status.INVALID_ARGUMENT, "invalid-frame")
    assert "this cannot be stored" in message
    assert (await daemons["good"].receive("command")).command.attempt == 2


async def test_a_command_that_had_begun_is_sent_again_after_a_busy(rig):
    node = await rig.add_node("node-a")
    await seed.add_command(rig.database, "node-a", "c1")
    first = await rig.connect(node)
    await first.command()
    first.update("c1", messages.COMMAND_STATE_RUNNING, attempt=1)
    await rig.until_state("c1", CommandState.RUNNING)
    first.connection.close()
    await rig.until_row("node-a", state="disconnected")
    second = await rig.connect(node)
    replayed = await second.receive("command")
    assert (replayed.command.attempt, replayed.command.seen) == (2, messages.COMMAND_STATE_RUNNING)
    second.update("c1", messages.COMMAND_STATE_REJECTED, attempt=2, reject_reason=messages.COMMAND_REJECT_REASON_BUSY)
    again = await second.receive("command")
    assert (again.command.attempt, again.command.seen) == (3, messages.COMMAND_STATE_RUNNING)
    [row] = await rig.database.query("SELECT state, busy_count FROM commands")
    assert (row["state"], row["busy_count"]) == (CommandState.RUNNING, 1)


def lose_an_answer(monkeypatch, *, committed):
    """Let the next dispatch fail as if the connection were lost, before or after its commit."""
    dispatch = delivery.dispatch
    lost: list[object] = []

    async def losing(queries, demands, *, lease):
        if lost:
            return await dispatch(queries, demands, lease=lease)
        lost.append(demands)
        if committed:
            await dispatch(queries, demands, lease=lease)
        raise Unavailable("the database connection is lost")

    monkeypatch.setattr(delivery, "dispatch", losing)
    monkeypatch.setattr(dispatcher, "POLL_S", 0.2)


async def test_a_mark_whose_answer_was_lost_is_found_and_sent(rig, monkeypatch):
    daemon = await rig.connect(await rig.add_node("node-a"))
    await rig.until(lambda: rig.gateway.life.registry.get("node-a").nothing_pending)
    lose_an_answer(monkeypatch, committed=True)
    await seed.add_command(rig.database, "node-a", "c1")
    await rig.database.query("SELECT pg_notify('bc_dispatch', 'node-a')")
    assert (await daemon.receive("command")).command.attempt == 2
    daemon.update("c1", messages.COMMAND_STATE_SUCCEEDED, attempt=2)
    await rig.until_state("c1", CommandState.SUCCEEDED)


async def test_a_mark_that_commits_after_its_connection_was_lost_is_found_too(rig, monkeypatch):
    daemon = await rig.connect(await rig.add_node("node-a"))
    session = rig.gateway.life.registry.get("node-a")
    await rig.until(lambda: session.nothing_pending)
    marked = delivery.marked
    looks: list[object] = []

    async def counted(queries, keys):
        found = await marked(queries, keys)
        looks.append(found)
        return found

    monkeypatch.setattr(delivery, "marked", counted)
    lose_an_answer(monkeypatch, committed=False)
    rig.gateway.life.dispatcher.poke("node-a")
    await rig.until(lambda: looks)
    await seed.add_command(rig.database, "node-a", "c1", state=2, key=session.key)
    assert (await daemon.receive("command")).command.attempt == 2


async def test_a_cancel_reaches_the_daemon(rig):
    node = await rig.add_node("node-a")
    await seed.add_command(rig.database, "node-a", "c1")
    daemon = await rig.connect(node)
    await daemon.command()
    await rig.database.query(
        "UPDATE commands SET cancel_requested_at = compute_now(), cancel_requested_by = 'op', cancel_reason = 'why'"
    )
    await rig.database.query("SELECT pg_notify('bc_dispatch', 'node-a')")
    cancel = (await daemon.receive("cancel")).cancel
    assert (cancel.command_id, cancel.reason) == ("c1", "why")
    daemon.update("c1", messages.COMMAND_STATE_CANCELLED, attempt=1, reason="cancelled")
    await rig.until_state("c1", CommandState.CANCELLED)


async def test_inventory_and_status_are_stored(rig):
    node = await rig.add_node("node-a")
    daemon = await rig.connect(node, inventory_hashes={"cpu": hashlib.sha256(b"cpu").digest()})
    assert list(daemon.welcome.request_sections) == ["cpu"]
    section = messages.InventorySection(name="cpu", body=b"cpu", sha256=hashlib.sha256(b"cpu").digest())
    daemon.send(messages.AgentFrame(inventory=section))
    daemon.send(messages.AgentFrame(status=messages.StatusReport(observed_generation=2, applied_generation=1)))
    await rig.until_query("SELECT 1 FROM nodes WHERE applied_generation = 1")
    await rig.until_query("SELECT 1 FROM inventory_sections")
    rows = await rig.database.query("SELECT body FROM inventory_sections")
    assert [row["body"] for row in rows] == [b"cpu"]
    again = await rig.connect(node, inventory_hashes={"cpu": hashlib.sha256(b"cpu").digest()})
    assert list(again.welcome.request_sections) == []


async def test_a_newer_spec_is_offered(rig):
    node = await rig.add_node("node-a")
    daemon = await rig.connect(node)
    await rig.database.query(
        "UPDATE nodes SET spec_generation = 1, spec_body = 'body', spec_sha256 = sha256('body'),"
        " spec_updated_at = compute_now()"
    )
    await rig.database.query("SELECT pg_notify('bc_dispatch', 'node-a')")
    assert (await daemon.receive("desired")).desired.body == b"body"


async def test_the_daemon_leaving_writes_the_disconnect(rig):
    node = await rig.add_node("node-a")
    daemon = await rig.connect(node)
    daemon.call.half_close()
    await daemon.end()
    await rig.until_row("node-a", state="disconnected", gateway_id=None)
    types = [row["type"] for row in await rig.database.query("SELECT type FROM outbox ORDER BY id")]
    assert types == ["node.connected", "node.disconnected"]


async def test_a_cut_connection_writes_the_disconnect(rig):
    node = await rig.add_node("node-a")
    daemon = await rig.connect(node)
    daemon.connection.close()
    await rig.until_row("node-a", state="disconnected")


async def test_a_superseded_session_ends_aborted_and_writes_nothing(rig):
    node = await rig.add_node("node-a")
    older = await rig.connect(node)
    newer = await rig.connect(node)
    assert newer.welcome.epoch == 2
    status, reason, message = await older.end()
    assert (status, reason, message) == (Status.ABORTED, "superseded", "superseded by a newer session")
    row = await rig.row("node-a")
    assert (row["session_id"], row["state"]) == (newer.welcome.session_id, "connected")
    assert len(rig.gateway.life.registry) == 1


async def test_a_session_taken_over_by_another_gateway_is_found_by_the_flush(rig):
    node = await rig.add_node("node-a")
    older = await rig.connect(node)
    _, other_server = await rig.start_another()
    newer = await rig.connect(node, server=other_server)
    await rig.gateway.life.liveness.flush()
    status, reason, _ = await older.end()
    assert (status, reason) == (Status.ABORTED, "superseded")
    row = await rig.row("node-a")
    assert (row["session_id"], row["state"]) == (newer.welcome.session_id, "connected")


async def test_in_flight_commands_are_replayed_to_the_next_session(rig):
    node = await rig.add_node("node-a")
    await seed.add_command(rig.database, "node-a", "c1")
    first = await rig.connect(node)
    await first.command()
    first.connection.close()
    await rig.until_row("node-a", state="disconnected")
    second = await rig.connect(node)
    again = await second.receive("command")
    assert again.command.attempt == 2
    [row] = await rig.database.query("SELECT session_epoch FROM commands")
    assert row["session_epoch"] == 2


async def test_results_in_hello_are_acked_and_not_replayed(rig):
    node = await rig.add_node("node-a")
    await seed.add_command(rig.database, "node-a", "c1")
    first = await rig.connect(node)
    await first.command()
    first.connection.close()
    result = messages.CommandUpdate(command_id="c1", state=messages.COMMAND_STATE_SUCCEEDED, attempt=1, result=b"r")
    second = await rig.connect(node, done_results=[result], done_ids=["c1"])
    assert list((await second.receive("ack")).ack.command_ids) == ["c1"]
    assert await seed.state_of(rig.database, "c1") == CommandState.SUCCEEDED


async def test_stopping_ends_sessions_and_retires_the_lease(rig):
    node = await rig.add_node("node-a")
    daemon = await rig.connect(node)
    gateway, server = await rig.start_another()
    other = await rig.add_node("node-b")
    moved = await rig.connect(other, server=server)
    gateway_id = gateway.gateway_id
    await gateway.stop()
    status, reason, _ = await moved.end()
    assert (status, reason) == (Status.UNAVAILABLE, "stopping")
    row = await rig.row("node-b")
    assert (row["state"], row["state_reason"]) == ("disconnected", "stopping")
    [lease] = await rig.database.query("SELECT retired_at FROM leases WHERE name = $1", gateway_id)
    assert lease["retired_at"] is not None
    assert (await rig.row("node-a"))["state"] == "connected"
    assert daemon.call.status is None


async def test_revoking_ends_the_session_and_refuses_the_next(rig):
    node = await rig.add_node("node-a")
    daemon = await rig.connect(node)
    await rig.database.query("UPDATE node_certs SET revoked_at = compute_now(), revocation_reason = 'stolen'")
    await rig.database.query("SELECT pg_notify('bc_revocations', 'node-a')")
    notice = (await daemon.receive("revoked")).revoked
    assert (notice.reason, list(notice.serials)) == ("stolen", [node.serial])
    status, reason, _ = await daemon.end()
    assert (status, reason) == (Status.UNAUTHENTICATED, "revoked")
    again = await rig.dial(node)
    assert (await again.end())[:2] == (Status.UNAUTHENTICATED, "revoked")


async def test_a_newer_trust_bundle_rides_in_welcome(rig):
    rig.services.bundle = (4, messages.SignedTrustBundle(body=b"bundle").SerializeToString())
    await rig.gateway.trust.read()
    node = await rig.add_node("node-a")
    assert (await rig.connect(node, trust_version=3)).welcome.trust.body == b"bundle"
    assert not (await rig.connect(node, trust_version=4)).welcome.HasField("trust")


@pytest.mark.parametrize("capability", ["cdi"])
async def test_capabilities_become_labels_and_go_again(rig, capability):
    node = await rig.add_node("node-a")
    await rig.connect(node, capabilities=[capability, "UPPER"])
    rows = await rig.database.query("SELECT key, value FROM node_labels")
    assert [(row["key"], row["value"]) for row in rows] == [("bc.dev/cap.cdi", "1")]
    await rig.connect(node)
    assert await rig.database.query("SELECT FROM node_labels") == []


async def test_a_renewal_says_how_the_gateway_is(rig):
    life = rig.gateway.life
    assert life is not None
    life.renew_now()
    await rig.until_query("SELECT FROM leases WHERE clock_offset_ms IS NOT NULL")
    [row] = await rig.database.query("SELECT clock_offset_ms, revocations_age_ms, serving_not_after FROM leases")
    assert abs(row["clock_offset_ms"]) < 5_000
    assert 0 <= row["revocations_age_ms"] < 60_000
    assert row["serving_not_after"] is None, "without TLS there is no certificate"


async def test_a_session_ends_when_its_certificate_does(rig):
    node = rig.make_node("node-a", lifetime_ms=1_000)
    await seed.add_node(rig.database, "node-a", serial=node.serial)
    daemon = await rig.connect(node)
    life = rig.gateway.life
    assert life is not None

    def ended() -> bool:
        for session in life.registry:
            session.give(Tick())
        return not rig.gateway.session_count

    await rig.until(ended)
    assert (await daemon.end())[:2] == (Status.UNAUTHENTICATED, "certificate-expired")
    await rig.until_row("node-a", state="disconnected", state_reason="certificate-expired")
