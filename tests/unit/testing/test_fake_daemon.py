"""The FakeDaemon against a real gateway on a real database, in memory and over TLS, and each of its levers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from bettercompute.delivery.commands import CommandState
from bettercompute.gateway.config import GatewayConfig
from bettercompute.pki import certificates
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Status
from bettercompute.store.database import Database
from bettercompute.testing.fake_daemon import FakeDaemon
from bettercompute.testing.fake_dial import in_memory
from bettercompute.testing.profiles import BELOW_MINIMUM, BUSY, N_MINUS_2, NEVER_ACKED, NEVER_ENDS, Answer, Levers
from bettercompute.transport.memory import MemoryServer
from tests.contract.gateway import seed
from tests.contract.gateway.rig import WAIT_S, Node, Rig, Services, make_gateway, make_world

Start = Callable[..., FakeDaemon]


@pytest.fixture
async def rig(database: Database) -> AsyncIterator[Rig]:
    world = make_world()
    services = Services()
    gateway = make_gateway(database, world, services, GatewayConfig(name="gw"))
    await gateway.start()
    await asyncio.wait_for(gateway.until_ready(), WAIT_S)
    server = MemoryServer(gateway.handler, world=world)
    node_ca = certificates.make_node_ca(serial=world.ids.random_bytes(16), now_ms=world.clock.now_ms())
    yield Rig(database, world, services, gateway, server, node_ca)
    await gateway.stop()
    await server.close(drain_ms=0)


@pytest.fixture
async def start(rig: Rig) -> AsyncIterator[Start]:
    """Start a FakeDaemon for a joined node; all of them end with the test."""
    tasks: list[asyncio.Task[None]] = []

    def begin(node: Node, **options: Any) -> FakeDaemon:
        dial = in_memory(lambda: rig.server, certificate_chain=node.chain)
        daemon = FakeDaemon(node.node_id, dial=dial, world=rig.world, **options)
        tasks.append(asyncio.create_task(daemon.run()))
        return daemon

    async with asyncio.timeout(3 * WAIT_S):
        yield begin
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def enqueue(rig: Rig, command_id: str, *, kind: str = "inventory.refresh") -> None:
    await seed.add_command(rig.database, "n1", command_id, kind=kind)
    assert rig.gateway.life is not None
    rig.gateway.life.dispatcher.notified(["n1"])


async def test_it_is_welcomed_runs_a_command_and_is_acked(rig: Rig, start: Start) -> None:
    daemon = start(await rig.add_node("n1"))
    await daemon.connected()
    await enqueue(rig, "c1")
    await daemon.until(lambda: "c1" in daemon.commands.settled)
    assert await seed.state_of(rig.database, "c1") == CommandState.SUCCEEDED
    assert not daemon.commands.held
    assert daemon.received["command"] == 1


async def test_events_are_acked_in_order_and_forgotten(rig: Rig, start: Start) -> None:
    daemon = start(await rig.add_node("n1"))
    daemon.record_events(("fan.failed", f'{{"fan": {number}}}') for number in range(1_200))
    await daemon.until(lambda: daemon.welcomes == 1 and len(daemon.events) == 0)
    rows = await rig.database.query("SELECT seq FROM node_events WHERE node_id = 'n1' ORDER BY seq")
    assert [row["seq"] for row in rows] == list(range(1, 1_201))


async def test_it_comes_back_after_a_lost_connection_with_the_result_it_owes(rig: Rig, start: Start) -> None:
    node = await rig.add_node("n1")
    daemon = start(node, levers=Levers(answer=NEVER_ENDS))
    await daemon.connected()
    await enqueue(rig, "c1")
    await daemon.until(lambda: "c1" in daemon.commands.held)
    daemon.hang_up()
    await daemon.until(lambda: not daemon.live)
    daemon.commands.finish("c1", Answer(state=CommandState.FAILED, reason="broken"))
    await daemon.until(lambda: daemon.welcomes == 2 and "c1" in daemon.commands.settled)
    assert await seed.state_of(rig.database, "c1") == CommandState.FAILED
    assert daemon.state.last_epoch == 2


async def test_what_ends_between_hello_and_welcome_is_told_after_it(rig: Rig, start: Start) -> None:
    daemon = start(await rig.add_node("n1"), levers=Levers(answer=NEVER_ENDS))
    await daemon.connected()
    await enqueue(rig, "c1")
    await daemon.until(lambda: "c1" in daemon.commands.held)

    def ends_after_hello(frame: messages.AgentFrame) -> bytes:
        if frame.HasField("hello"):
            asyncio.get_running_loop().call_soon(daemon.commands.finish, "c1")
        return frame.SerializeToString()

    daemon.levers.rewrite = ends_after_hello
    daemon.hang_up()
    await daemon.until(lambda: daemon.welcomes == 2 and "c1" in daemon.commands.settled)
    assert await seed.state_of(rig.database, "c1") == CommandState.SUCCEEDED


async def test_a_restart_forgets_what_ran_and_runs_it_when_it_is_sent_again(rig: Rig, start: Start) -> None:
    daemon = start(await rig.add_node("n1"), levers=Levers(answer=NEVER_ENDS))
    await daemon.connected()
    await enqueue(rig, "c1")
    await daemon.until(lambda: "c1" in daemon.commands.held)
    daemon.levers.answer = Answer()
    daemon.reboot("boot-2")
    await daemon.until(lambda: "c1" in daemon.commands.settled)
    assert daemon.commands.delivered == 2
    assert (await rig.row("n1"))["session_epoch"] == 2


async def test_a_lost_journal_has_a_new_name_and_no_memory(rig: Rig, start: Start) -> None:
    daemon = start(await rig.add_node("n1"), levers=Levers(answer=NEVER_ENDS))
    await daemon.connected()
    before = daemon.state.journal_id
    await enqueue(rig, "c1", kind="gpu.reset")
    await daemon.until(lambda: "c1" in daemon.commands.held)
    daemon.lose_journal()
    assert daemon.state.journal_id != before
    await daemon.until(lambda: daemon.welcomes == 2)
    await rig.until_state("c1", CommandState.FAILED)


async def test_busy_is_put_back(rig: Rig, start: Start) -> None:
    daemon = start(await rig.add_node("n1"), levers=Levers(answers={"inventory.refresh": BUSY}))
    await daemon.connected()
    await enqueue(rig, "c1")
    await rig.until_query("SELECT FROM commands WHERE busy_count = 1 AND state = 1")
    assert not daemon.commands.held


async def test_never_acked_and_finished_by_hand(rig: Rig, start: Start) -> None:
    daemon = start(await rig.add_node("n1"), levers=Levers(answer=NEVER_ACKED))
    await daemon.connected()
    await enqueue(rig, "c1")
    await daemon.until(lambda: "c1" in daemon.commands.held)
    assert await seed.state_of(rig.database, "c1") == CommandState.DISPATCHED
    daemon.commands.finish("c1")
    await daemon.until(lambda: "c1" in daemon.commands.settled)


async def test_an_older_line_rejects_what_it_lacks(rig: Rig, start: Start) -> None:
    sent: list[messages.AgentFrame] = []

    def watch(frame: messages.AgentFrame) -> bytes:
        sent.append(frame)
        return frame.SerializeToString()

    profile = N_MINUS_2
    daemon = start(await rig.add_node("n1"), profile=profile, levers=Levers(rewrite=watch))
    await daemon.connected()
    assert sent[0].hello.daemon_version == "0.3.0"
    await enqueue(rig, "c1", kind="instance.snapshot")
    await rig.until_state("c1", CommandState.FAILED)


async def test_below_the_minimum_it_takes_upgrades_only(rig: Rig, start: Start) -> None:
    daemon = start(await rig.add_node("n1"), profile=BELOW_MINIMUM)
    await daemon.connected()
    assert daemon.state.upgrade_only


async def test_without_heartbeats_nothing_is_sent_after_hello(rig: Rig, start: Start) -> None:
    sent: list[str] = []

    def watch(frame: messages.AgentFrame) -> bytes:
        sent.append(frame.WhichOneof("frame") or "")
        return frame.SerializeToString()

    daemon = start(await rig.add_node("n1"), levers=Levers(heartbeats=False, rewrite=watch))
    await daemon.connected()
    beat_now(daemon)
    assert sent == ["hello"]
    daemon.levers.heartbeats = True
    beat_now(daemon)
    assert sent == ["hello", "heartbeat"]


def beat_now(daemon: FakeDaemon) -> None:
    daemon.state = replace(daemon.state, next_heartbeat_at_ms=0)
    daemon._tick()


async def test_a_wrong_frame_ends_the_stream_and_is_told(rig: Rig, start: Start) -> None:
    daemon = start(await rig.add_node("n1"), levers=Levers(redials=False))
    await daemon.connected()
    daemon.send_bytes(b"\xff\xff")
    await daemon.until(lambda: len(daemon.endings) == 1)
    assert (daemon.endings[0].status, daemon.endings[0].welcomed) == (Status.INVALID_ARGUMENT, True)


async def test_a_superseded_one_is_told(rig: Rig, start: Start) -> None:
    node = await rig.add_node("n1")
    first = start(node, boot_id="one")
    await first.connected()
    second = start(node, boot_id="two", levers=Levers(redials=False))
    await second.connected()
    await first.until(lambda: len(first.endings) == 1)
    assert first.endings[0].status is Status.ABORTED


async def test_what_it_does_not_read_piles_up_at_the_gateway(rig: Rig, start: Start) -> None:
    daemon = start(await rig.add_node("n1"))
    await daemon.connected()
    daemon.stop_reading()
    await enqueue(rig, "c1")
    await enqueue(rig, "c2")
    await rig.until_state("c2", CommandState.DISPATCHED)
    daemon.read_on()
    await daemon.until(lambda: {"c1", "c2"} <= daemon.commands.settled.keys())


async def test_an_unknown_cancel_is_answered_and_remembered(rig: Rig, start: Start) -> None:
    daemon = start(await rig.add_node("n1"), levers=Levers(answer=NEVER_ENDS))
    await daemon.connected()
    await enqueue(rig, "c1")
    await daemon.until(lambda: "c1" in daemon.commands.held)
    daemon.commands.cancel(messages.Cancel(command_id="c1"))
    await rig.until_state("c1", CommandState.CANCELLED)
    daemon.commands.cancel(messages.Cancel(command_id="unknown"))
    assert daemon.commands.settled["unknown"].state == messages.COMMAND_STATE_CANCELLED


async def test_two_hundred_share_a_process(rig: Rig, start: Start) -> None:
    daemons = [start(await rig.add_node(f"n{number}"), levers=Levers(obeys_waits=False)) for number in range(200)]
    await asyncio.gather(*(daemon.connected() for daemon in daemons))
    assert rig.gateway.session_count == 200
    assert {daemon.welcomes for daemon in daemons} == {1}
