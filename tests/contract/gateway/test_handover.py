"""Sessions handed over on a real database: a drain asked for by the lease's row, and gateways that even out."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import pytest

from bettercompute.gateway.config import GatewayConfig
from bettercompute.gateway.gateway import Gateway
from bettercompute.gateway.handover import Handover
from bettercompute.protocol.statuses import Status
from bettercompute.store import leases
from bettercompute.testing.fake_daemon import FakeDaemon
from bettercompute.testing.fake_dial import in_memory
from bettercompute.testing.profiles import NEVER_ENDS
from bettercompute.transport.memory import MemoryServer
from tests.contract.gateway import seed
from tests.contract.gateway.rig import WAIT_S, Rig


@contextlib.asynccontextmanager
async def fleet(rig: Rig, count: int, servers: Sequence[MemoryServer]) -> AsyncIterator[list[FakeDaemon]]:
    """Daemons that dial the servers in turn, as `bcd` does, beginning with the first."""
    daemons = []
    for number in range(count):
        node = await rig.add_node(f"node-{number:03}")
        turns = itertools.cycle(servers)
        dial = in_memory(functools.partial(next, turns), certificate_chain=node.chain)
        daemons.append(FakeDaemon(node.node_id, dial=dial, world=rig.world))
    running = [asyncio.create_task(daemon.run()) for daemon in daemons]
    try:
        async with asyncio.timeout(WAIT_S):
            for daemon in daemons:
                await daemon.connected()
        yield daemons
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def assert_orderly(rig: Rig) -> None:
    """Nobody was taken for a clone, and no session was closed but by its daemon."""
    types = {row["type"] for row in await rig.database.query("SELECT DISTINCT type FROM outbox")}
    assert types <= {"node.connected", "node.disconnected", "command.finished"}
    assert not await rig.database.query("SELECT FROM node_sessions WHERE duplicate_hellos > 0")
    rows = await rig.database.query(
        "SELECT payload ->> 'reason' AS reason FROM outbox WHERE type = 'node.disconnected'"
    )
    assert {row["reason"] for row in rows} <= {"stream-ended"}


async def test_a_drain_refuses_new_sessions_and_sends_the_live_ones_away(rig):
    daemon = await rig.connect(await rig.add_node("node-a"))
    await rig.drain()
    assert (await daemon.receive("drain")).drain.reason == "draining"
    another = await rig.dial(await rig.add_node("node-b"))
    status, reason, _ = await another.end()
    assert (status, reason) == (Status.UNAVAILABLE, "draining")
    assert not rig.gateway.ready
    await asyncio.wait_for(rig.gateway.until_ready(), WAIT_S)
    [lease] = await leases.list_all(rig.database)
    assert (lease.live, lease.draining, lease.drain_requested_by) == (True, True, "op")
    await rig.until_query("SELECT FROM leases WHERE draining")


async def test_a_drain_can_be_undone(rig):
    await rig.drain()
    assert await leases.undo_drain(rig.database, name=rig.gateway.gateway_id)
    await rig.until(lambda: rig.gateway.ready)
    await rig.connect(await rig.add_node("node-a"))
    await rig.until_query("SELECT FROM leases WHERE NOT draining")


async def test_a_drain_is_meant_for_the_process_not_for_its_id(rig):
    await rig.drain()
    before = rig.gateway.gateway_id
    await rig.database.query("UPDATE leases SET retired_at = compute_now()")
    rig.gateway.life.renew_now()
    await rig.until(lambda: rig.gateway.gateway_id not in ("", before) and rig.gateway.life.draining)
    await rig.until_query("SELECT FROM leases WHERE retired_at IS NULL AND draining AND drain_requested_by = 'op'")


async def test_unknown_and_retired_gateways_are_not_asked(rig):
    assert not await leases.request_drain(rig.database, name="gw-nowhere", requested_by="op")
    await rig.database.query("UPDATE leases SET retired_at = compute_now()")
    assert not await leases.request_drain(rig.database, name=rig.gateway.gateway_id, requested_by="op")
    assert not await leases.undo_drain(rig.database, name=rig.gateway.gateway_id)


async def test_everybody_leaves_a_draining_gateway_with_their_work(rig):
    other, other_server = await rig.start_another()
    async with fleet(rig, 12, [rig.server, other_server]) as daemons:
        await rig.until(lambda: rig.gateway.session_count == 12)
        held = await leases.held(rig.database, name=rig.gateway.gateway_id)
        assert (held.nodes, held.names[0]) == (12, "node-000")
        for daemon in daemons:
            daemon.levers.answer = NEVER_ENDS
            await seed.add_command(rig.database, daemon.node_id, f"{daemon.node_id}-c")
        await rig.database.query("SELECT pg_notify('bc_dispatch', '*')")
        await rig.until(lambda: all(daemon.commands.held for daemon in daemons))
        await rig.drain()
        await rig.until(lambda: other.session_count == 12)
        await rig.until(lambda: rig.gateway.session_count == 0)
        assert (await leases.held(rig.database, name=rig.gateway.gateway_id)).nodes == 0
        for daemon in daemons:
            daemon.commands.finish(f"{daemon.node_id}-c")
            await rig.until_state(f"{daemon.node_id}-c", 5)
        rows = await rig.database.query("SELECT attempt FROM commands")
        assert {row["attempt"] for row in rows} == {1}, "what runs goes on and is not sent again"
    await assert_orderly(rig)


class Looks:
    """How often each gateway has looked whether it holds more than its share."""

    def __init__(self) -> None:
        self.counts: Counter[Handover] = Counter()

    async def six_more(self, rig: Rig, gateways: Sequence[Gateway]) -> None:
        """Wait for as many looks of each of these."""
        handovers = [gateway.life.handover for gateway in gateways if gateway.life is not None]
        enough = {handover: self.counts[handover] + 6 for handover in handovers}
        await rig.until(lambda: all(self.counts[handover] >= count for handover, count in enough.items()))


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    seen, decide = Looks(), Handover._decide

    def counted(handover: Handover) -> int:
        seen.counts[handover] += 1
        return decide(handover)

    monkeypatch.setattr(Handover, "_decide", counted)
    return seen


class TestRebalance:
    """Two gateways that look often."""

    @pytest.fixture
    def config(self) -> GatewayConfig:
        return GatewayConfig(name="gw", rebalance_every_ms=250)

    @staticmethod
    async def keep_counts_fresh(gateways: Sequence[Gateway]) -> None:
        """Renewals and readings are 5 s apart, which a look each minute does not notice and one each 250 ms would."""
        while True:
            for gateway in gateways:
                assert gateway.life is not None
                gateway.life.renew_now()
                await gateway.neighbours.read()
            await asyncio.sleep(0.02)

    async def test_an_overloaded_gateway_gives_until_both_hold_about_the_same(self, rig, looks):
        other, other_server = await rig.start_another(GatewayConfig(name="other", rebalance_every_ms=250))
        async with fleet(rig, 40, [rig.server, other_server]) as daemons:
            fresh = asyncio.create_task(self.keep_counts_fresh([rig.gateway, other]))
            await rig.until(lambda: rig.gateway.life.handover.giving)
            await rig.until(lambda: not rig.gateway.life.handover.giving)
            await rig.until(lambda: rig.gateway.session_count + other.session_count == 40)
            settled = [daemon.received["drain"] for daemon in daemons]
            await looks.six_more(rig, [rig.gateway, other])
            fresh.cancel()
            await asyncio.gather(fresh, return_exceptions=True)
            assert [daemon.received["drain"] for daemon in daemons] == settled, "balanced, and left alone"
            assert max(settled) == 1, "nobody was sent back"
            # Looks each 250 ms do not see who is on the way, who may be many on a slow machine; looks each minute do.
            assert 14 <= rig.gateway.session_count <= 26
        rows = await rig.database.query("SELECT session_epoch FROM node_sessions")
        assert sorted(row["session_epoch"] for row in rows) == sorted(1 + drains for drains in settled)
        await assert_orderly(rig)

    async def test_a_draining_gateway_is_given_nothing(self, rig, looks):
        other, other_server = await rig.start_another()
        await rig.drain(other)
        async with fleet(rig, 10, [rig.server, other_server]) as daemons:
            fresh = asyncio.create_task(self.keep_counts_fresh([rig.gateway, other]))
            await looks.six_more(rig, [rig.gateway])
            fresh.cancel()
            await asyncio.gather(fresh, return_exceptions=True)
            assert all(daemon.received["drain"] == 0 for daemon in daemons)
