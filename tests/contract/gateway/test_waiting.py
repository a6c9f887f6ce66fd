"""What `commands why` says is what the real dispatcher does."""

from __future__ import annotations

import asyncio

from bettercompute.delivery.commands import CommandState
from bettercompute.delivery.waiting import Wait, decide
from bettercompute.gateway import dispatch
from bettercompute.protocol import messages
from bettercompute.protocol.limits import CONTROL_CREDITS
from bettercompute.store import channels, delivery, waiting
from tests.contract.gateway import seed


async def reasons(rig, command_id: str) -> list[Wait]:
    facts = await waiting.facts(rig.database, command_id=command_id)
    assert facts is not None
    return [reason.wait for reason in decide(facts)]


async def test_without_a_session_and_then_on_the_node(rig):
    node = await rig.add_node("node-a")
    await seed.add_command(rig.database, "node-a", "c1")
    assert await reasons(rig, "c1") == [Wait.NO_SESSION]
    daemon = await rig.connect(node)
    await daemon.command()
    assert await reasons(rig, "c1") == [Wait.NODE]
    assert await waiting.facts(rig.database, command_id="nobody") is None


async def test_what_a_session_may_not_be_sent_stays_and_says_why(rig):
    node = await rig.add_node("node-a")
    await rig.database.query("UPDATE node_certs SET allowed_kinds = '{inventory.refresh,node.reboot}'")
    await seed.add_command(rig.database, "node-a", "foreign", kind="logs.collect", lane=messages.LANE_BULK)
    await seed.add_command(rig.database, "node-a", "reboot", kind="node.reboot")
    await seed.add_command(rig.database, "node-a", "later", not_before_s=600)
    await seed.add_command(rig.database, "node-a", "now")
    daemon = await rig.connect(node)
    assert (await daemon.command()).command_id == "now"
    assert await reasons(rig, "foreign") == [Wait.KIND_NOT_ALLOWED]
    assert await reasons(rig, "reboot") == [Wait.CAPABILITY_MISSING]
    assert await reasons(rig, "later") == [Wait.NOT_BEFORE]


async def test_what_falls_due_is_sent_then_and_not_at_some_poll(rig, monkeypatch):
    # No poll comes: what is left is the look after a notification, and the timer that it sets.
    monkeypatch.setattr(dispatch, "POLL_S", 3_600.0)
    node = await rig.add_node("node-a")
    daemon = await rig.connect(node)
    await seed.add_command(rig.database, "node-a", "second", not_before_s=0.4)
    await seed.add_command(rig.database, "node-a", "first", not_before_s=0.2)
    await seed.add_command(rig.database, "node-a", "tonight", not_before_s=3_000)
    await rig.database.query("SELECT pg_notify($1, 'node-a')", channels.DISPATCH)
    assert [(await daemon.command()).command_id for _ in range(2)] == ["first", "second"]
    rows = await rig.database.query("SELECT dispatched_at >= not_before AS after FROM commands WHERE state > 1")
    assert [row["after"] for row in rows] == [True, True]
    assert await reasons(rig, "tonight") == [Wait.NOT_BEFORE]


async def test_a_command_that_may_go_at_once_costs_no_look(rig, monkeypatch):
    monkeypatch.setattr(dispatch, "POLL_S", 3_600.0)
    looks: asyncio.Queue[list[str]] = asyncio.Queue()
    look_at = delivery.look_at

    async def looked(database, node_ids, **arguments):
        found = await look_at(database, node_ids, **arguments)
        looks.put_nowait(list(node_ids))
        return found

    monkeypatch.setattr(delivery, "look_at", looked)
    daemons = {name: await rig.connect(await rig.add_node(name)) for name in ("node-a", "node-b")}
    begun: list[str] = []
    while len(begun) < 2:
        begun += await asyncio.wait_for(looks.get(), 30)
    await seed.add_command(rig.database, "node-b", "c1")
    await rig.database.query("SELECT pg_notify($1, 'node-b')", channels.COMMANDS)
    assert (await daemons["node-b"].command()).command_id == "c1"
    await rig.database.query("SELECT pg_notify($1, 'node-a')", channels.DISPATCH)
    assert await asyncio.wait_for(looks.get(), 30) == ["node-a"]


async def test_what_comes_while_no_lane_has_a_credit_goes_with_the_next_one(rig):
    daemon = await rig.connect(await rig.add_node("node-a"))
    session = rig.gateway.life.registry.get("node-a")

    def told(*, free: int) -> messages.AgentFrame:
        lanes = [messages.LaneState(lane=lane, free=free) for lane in session.state.lanes]
        return messages.AgentFrame(heartbeat=messages.Heartbeat(lanes=lanes))

    await rig.until(lambda: session.nothing_pending)
    daemon.send(told(free=0))
    await rig.until(lambda: not any(lane.available for lane in session.state.lanes.values()))
    await seed.add_command(rig.database, "node-a", "c1")
    rig.gateway.life.dispatcher.enqueued(["node-a"])
    # Of a session that was asked for nothing nothing is known: its next credit asks again, and not the next poll.
    await rig.until(lambda: not session.nothing_pending)
    daemon.send(told(free=2))
    assert (await daemon.command()).command_id == "c1"


async def test_a_capability_lets_its_kind_through(rig):
    node = await rig.add_node("node-a")
    await seed.add_command(rig.database, "node-a", "reboot", kind="node.reboot")
    daemon = await rig.connect(node, capabilities=["reboot"])
    assert (await daemon.command()).command_id == "reboot"


async def test_without_credits_the_holders_are_named(rig):
    node = await rig.add_node("node-a")
    for number in range(9):
        await seed.add_command(rig.database, "node-a", f"c{number}")
    daemon = await rig.connect(node)
    for _ in range(8):
        await daemon.command()
    facts = await waiting.facts(rig.database, command_id="c8")
    assert facts is not None
    assert [holder.command_id for holder in facts.holders] == [f"c{number}" for number in range(8)]
    assert await reasons(rig, "c8") == [Wait.NO_CREDIT]
    await rig.database.query("UPDATE commands SET held_back = true WHERE id = 'c0'")
    facts = await waiting.facts(rig.database, command_id="c8")
    assert facts is not None
    assert [holder.command_id for holder in facts.holders] == [f"c{number}" for number in range(1, 8)]


async def test_what_a_resume_holds_back_says_so(rig):
    node = await rig.add_node("node-a")
    for number in range(3):
        await seed.add_command(rig.database, "node-a", f"c{number}", lane=messages.LANE_BULK, kind="logs.collect")
    daemon = await rig.connect(node)
    for _ in range(2):
        await daemon.command()
    daemon.connection.close()
    await rig.until_row("node-a", state="disconnected")
    await rig.database.query(
        "UPDATE commands SET state = 2, attempt = 1, session_id = s.session_id, session_epoch = s.session_epoch,"
        " dispatched_at = compute_now() FROM node_sessions s WHERE id = 'c2'"
    )
    again = await rig.connect(node)
    for _ in range(2):
        await again.command()
    assert await reasons(rig, "c2") == [Wait.HELD_BACK, Wait.NO_CREDIT]
    again.update("c0", messages.COMMAND_STATE_SUCCEEDED, attempt=2)
    assert (await again.command()).command_id == "c2"
    await rig.until_state("c0", CommandState.SUCCEEDED)
    assert await reasons(rig, "c2") == [Wait.NODE]


async def test_what_is_abandoned_has_failed_is_published_and_stops(rig, monkeypatch):
    monkeypatch.setattr(dispatch, "POLL_S", 3_600.0)
    node = await rig.add_node("node-a")
    for number in range(CONTROL_CREDITS):
        await seed.add_command(rig.database, "node-a", f"c{number}")
    await seed.add_command(rig.database, "node-a", "next")
    daemon = await rig.connect(node)
    for _ in range(CONTROL_CREDITS):
        await daemon.command()
    for abandoned in (True, False):
        async with rig.database.transaction() as transaction:
            assert abandoned == await waiting.abandon(
                transaction,
                command_id="c1",
                abandoned_by="root",
                why="burnt",
                outbox_id="o1",
                event_type="command.finished",
            )
    [row] = await rig.database.query("SELECT state, reason, message FROM commands WHERE id = 'c1'")
    assert (row["state"], row["reason"]) == (CommandState.FAILED, "abandoned")
    assert "abandoned by root: burnt" in row["message"]
    assert len(await rig.database.query("SELECT FROM outbox WHERE id = 'o1'")) == 1
    assert await reasons(rig, "next") == [Wait.NO_CREDIT]
    facts = await waiting.facts(rig.database, command_id="next")
    assert facts is not None
    assert "c1 (inventory.refresh, abandoned, and may run there still)" in decide(facts)[0].sentence
    assert (await daemon.receive("cancel")).cancel.command_id == "c1"
    daemon.update("c1", messages.COMMAND_STATE_CANCELLED, attempt=1)
    assert (await daemon.command()).command_id == "next"
    [row] = await rig.database.query("SELECT state, reason FROM commands WHERE id = 'c1'")
    assert (row["state"], row["reason"]) == (CommandState.FAILED, "abandoned")
