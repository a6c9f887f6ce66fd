"""Group commit: acks after the commit, one guilty frame, a database that is away, and order between sessions."""

from __future__ import annotations

import asyncio

import pytest

from bettercompute.delivery.commands import CommandState
from bettercompute.errors import Unavailable
from bettercompute.gateway import ingest
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Status
from bettercompute.store import delivery, sessions
from bettercompute.store.database import Conflict, StatementFailed
from tests.contract.gateway import seed


class Gate:
    """Holds the write of command facts until a test lets it go, or makes it fail."""

    def __init__(self, real) -> None:
        self.real = real
        self.open = asyncio.Event()
        self.reached = asyncio.Event()
        self.failures: list[Exception] = []
        self.poison: str | None = None
        self.batches: list[list[str]] = []

    async def __call__(self, queries, news, **kwargs):
        self.batches.append([item.command_id for item in news])
        self.reached.set()
        await self.open.wait()
        if self.failures:
            raise self.failures.pop(0)
        if self.poison is not None and any(item.command_id == self.poison for item in news):
            raise StatementFailed("this cannot be stored", sqlstate="22000", constraint=None)
        return await self.real(queries, news, **kwargs)


@pytest.fixture
def gate(monkeypatch) -> Gate:
    gate = Gate(delivery.store_command_news)
    monkeypatch.setattr(delivery, "store_command_news", gate)
    return gate


async def running(rig, node_id: str, command_id: str):
    node = await rig.add_node(node_id)
    await seed.add_command(rig.database, node_id, command_id)
    daemon = await rig.connect(node)
    await daemon.command()
    return daemon


def acked(daemon) -> list[str]:
    return [command_id for frame in daemon.frames for command_id in frame.ack.command_ids]


async def test_no_ack_before_the_commit(rig, gate):
    daemon = await running(rig, "node-a", "c1")
    daemon.update("c1", messages.COMMAND_STATE_SUCCEEDED, attempt=1, output=messages.CommandOutput(data=b"the end"))
    await asyncio.wait_for(gate.reached.wait(), 10)
    waiting = asyncio.create_task(daemon.receive("ack"))
    [row] = await rig.database.query("SELECT data FROM command_output")
    assert row["data"] == b"the end", "whoever follows a command reads no further once it has ended"
    assert not waiting.done()
    assert await seed.state_of(rig.database, "c1") == CommandState.DISPATCHED
    gate.open.set()
    assert list((await waiting).ack.command_ids) == ["c1"]
    assert await seed.state_of(rig.database, "c1") == CommandState.SUCCEEDED


async def test_facts_are_collected_while_a_batch_is_written(rig, gate):
    daemons = {name: await running(rig, f"node-{name}", f"c-{name}") for name in ("a", "b", "c")}
    daemons["a"].update("c-a", messages.COMMAND_STATE_ACKED, attempt=1)
    await asyncio.wait_for(gate.reached.wait(), 10)
    daemons["b"].update("c-b", messages.COMMAND_STATE_SUCCEEDED, attempt=1)
    daemons["c"].update("c-c", messages.COMMAND_STATE_SUCCEEDED, attempt=1)
    life = rig.gateway.life
    await rig.until(lambda: life._ingest.pending("node-b") and life._ingest.pending("node-c"))
    gate.open.set()
    for name in ("b", "c"):
        await daemons[name].receive("ack")
    assert [sorted(batch) for batch in gate.batches] == [["c-a"], ["c-b", "c-c"]]


async def test_the_guilty_frame_costs_only_its_own_session(rig, gate):
    gate.open.set()
    names = ("a", "b", "c", "d", "e")
    daemons = {name: await running(rig, f"node-{name}", f"c-{name}") for name in names}
    gate.open.clear()
    gate.reached.clear()
    daemons["a"].update("c-a", messages.COMMAND_STATE_ACKED, attempt=1)
    await asyncio.wait_for(gate.reached.wait(), 10)
    for name in names[1:]:
        daemons[name].update(f"c-{name}", messages.COMMAND_STATE_SUCCEEDED, attempt=1)
    await rig.until(lambda: all(rig.gateway.life._ingest.pending(f"node-{name}") for name in names[1:]))
    gate.poison = "c-d"
    gate.open.set()
    status, reason, _ = await daemons["d"].end()
    assert (status, reason) == (Status.INVALID_ARGUMENT, "invalid-frame")
    for name in ("b", "c", "e"):
        await daemons[name].receive("ack")
        assert await seed.state_of(rig.database, f"c-{name}") == CommandState.SUCCEEDED
    assert await seed.state_of(rig.database, "c-d") == CommandState.DISPATCHED


async def test_a_command_that_cannot_be_marked_costs_only_its_own_node(rig):
    names = ("a", "b", "c", "d", "e")
    daemons = {name: await rig.connect(await rig.add_node(f"node-{name}")) for name in names}
    for name in names:
        await seed.add_command(rig.database, f"node-{name}", f"c-{name}", attempt=2**31 - 1 if name == "d" else 0)
    rig.gateway.life.dispatcher.notified([f"node-{name}" for name in names])
    for name in ("a", "b", "c", "e"):
        assert (await daemons[name].command()).command_id == f"c-{name}"
    assert await seed.state_of(rig.database, "c-d") == CommandState.PENDING
    await rig.database.query("UPDATE commands SET attempt = 0 WHERE id = 'c-d'")
    rig.gateway.life.dispatcher.notified(["node-d"])
    assert (await daemons["d"].command()).command_id == "c-d"


async def test_a_database_that_comes_back_loses_nothing(rig, gate):
    gate.open.set()
    gate.failures = [Unavailable("away"), Conflict("deadlock"), Unavailable("away")]
    daemon = await running(rig, "node-a", "c1")
    daemon.update("c1", messages.COMMAND_STATE_SUCCEEDED, attempt=1)
    assert list((await daemon.receive("ack")).ack.command_ids) == ["c1"]


async def test_a_database_that_stays_away_ends_the_session_unavailable(rig, gate, monkeypatch):
    monkeypatch.setattr(ingest, "KEEP_MS", 50)
    gate.open.set()
    gate.failures = [Unavailable("away") for _ in range(1_000)]
    daemon = await running(rig, "node-a", "c1")
    daemon.update("c1", messages.COMMAND_STATE_SUCCEEDED, attempt=1)
    status, reason, _ = await daemon.end()
    assert (status, reason) == (Status.UNAVAILABLE, "database")
    assert acked(daemon) == []


async def test_nothing_overtakes_facts_that_were_not_written(rig, gate, monkeypatch):
    monkeypatch.setattr(ingest, "KEEP_MS", 0)
    daemon = await running(rig, "node-a", "c1")
    daemon.update("c1", messages.COMMAND_STATE_SUCCEEDED, attempt=1)
    await asyncio.wait_for(gate.reached.wait(), 10)
    event_id = rig.world.ids.uuid7()
    event = messages.Event(seq=1, event_id=event_id, type="daemon.started", at_ms=1_700_000_000_000)
    daemon.send(messages.AgentFrame(events=messages.EventBatch(journal_id="journal-1", events=[event])))
    queue = rig.gateway.life._ingest
    await rig.until(lambda: queue._by_node.get("node-a") == 2)
    gate.failures = [Unavailable("away")]
    gate.open.set()
    assert (await daemon.end())[0] == Status.UNAVAILABLE
    await rig.until(lambda: not queue.pending("node-a"))
    assert not await rig.database.query("SELECT 1 FROM node_events")
    assert not queue._failed


async def test_a_bug_in_writing_ends_sessions_but_not_the_writer(rig, gate):
    gate.open.set()
    gate.failures = [ValueError("a bug")]
    daemon = await running(rig, "node-a", "c1")
    daemon.update("c1", messages.COMMAND_STATE_SUCCEEDED, attempt=1)
    assert (await daemon.end())[0] == Status.UNAVAILABLE
    other = await running(rig, "node-b", "c2")
    other.update("c2", messages.COMMAND_STATE_SUCCEEDED, attempt=1)
    assert list((await other.receive("ack")).ack.command_ids) == ["c2"]


async def test_hello_waits_for_the_facts_that_are_queued(rig, gate):
    daemon = await running(rig, "node-a", "c1")
    daemon.update("c1", messages.COMMAND_STATE_SUCCEEDED, attempt=1)
    await asyncio.wait_for(gate.reached.wait(), 10)
    node = rig.make_node("node-a")
    second = await rig.dial(node)
    second.say_hello()
    await rig.until(lambda: rig.gateway.life.hellos.pending == 1)
    assert (await rig.row("node-a"))["session_epoch"] == 1
    gate.open.set()
    await second.receive("welcome")
    assert (await rig.row("node-a"))["session_epoch"] == 2
    assert await seed.state_of(rig.database, "c1") == CommandState.SUCCEEDED


async def test_the_disconnect_follows_the_facts(rig, gate):
    daemon = await running(rig, "node-a", "c1")
    daemon.update("c1", messages.COMMAND_STATE_SUCCEEDED, attempt=1)
    await asyncio.wait_for(gate.reached.wait(), 10)
    daemon.connection.close()
    await rig.until(lambda: len(rig.gateway.life.registry) == 0)
    assert (await rig.row("node-a"))["state"] == "connected"
    gate.open.set()
    await rig.until_row("node-a", state="disconnected")
    assert await seed.state_of(rig.database, "c1") == CommandState.SUCCEEDED


async def test_a_disconnect_is_written_again_until_the_database_takes_it(rig, monkeypatch):
    real = sessions.disconnect
    failures = [Unavailable("away"), Unavailable("away")]

    async def sometimes(*args, **kwargs):
        if failures:
            raise failures.pop()
        return await real(*args, **kwargs)

    monkeypatch.setattr(sessions, "disconnect", sometimes)
    daemon = await rig.connect(await rig.add_node("node-a"))
    daemon.connection.close()
    await rig.until_row("node-a", state="disconnected")
    assert failures == []


async def test_a_session_is_not_read_beyond_its_share(rig, gate, monkeypatch):
    monkeypatch.setattr(ingest, "SESSION_BYTES_MAX", 1_000)
    daemon = await running(rig, "node-a", "c1")
    for _ in range(20):
        daemon.update("c1", messages.COMMAND_STATE_RUNNING, attempt=1)
    await asyncio.wait_for(gate.reached.wait(), 10)
    for _ in range(20):
        await asyncio.sleep(0)
    assert rig.gateway.life._ingest._total_bytes < 2_000
    gate.open.set()
    daemon.update("c1", messages.COMMAND_STATE_SUCCEEDED, attempt=1)
    assert list((await daemon.receive("ack")).ack.command_ids) == ["c1"]
