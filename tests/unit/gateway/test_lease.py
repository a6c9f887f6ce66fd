"""The lease's keeper: claims, renews, stops for a silent loop, and ends for good when its row is gone."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from bettercompute.errors import Unavailable
from bettercompute.gateway import lease
from bettercompute.gateway.fence import LOOP_SILENCE_MS, TRUST_MS, Fence
from bettercompute.system import SystemDice, SystemIds, system_world
from bettercompute.world import World
from tests.unit.gateway.test_fence import ManualClock

WAIT_S = 30.0


@dataclass
class Table:
    """The lease row and a script of faults, shared by the connections opened to it."""

    held: bool = False
    streams: list[int] = field(default_factory=list)
    faults: list[BaseException] = field(default_factory=list)
    connections: int = 0
    closed: int = 0
    renewing_takes_ms: int = 0


class Connection:
    def __init__(self, table: Table, clock: ManualClock) -> None:
        self.table = table
        self.clock = clock

    def fail(self) -> None:
        if self.table.faults:
            raise self.table.faults.pop(0)

    async def claim(self) -> bool:
        self.fail()
        self.table.held = True
        return True

    async def renew(self, *, streams: int) -> bool:
        self.fail()
        self.clock.now += self.table.renewing_takes_ms
        self.table.streams.append(streams)
        return self.table.held

    async def release(self) -> None:
        self.table.held = False

    async def close(self) -> None:
        self.table.closed += 1


@dataclass
class Rig:
    clock: ManualClock
    table: Table
    fence: Fence
    keeper: lease.LeaseKeeper
    changes: list[int]
    changed: asyncio.Event


@pytest.fixture
def rig() -> Rig:
    clock = ManualClock()
    table = Table()
    fence = Fence(clock)
    changes: list[int] = []
    changed = asyncio.Event()

    def note_change() -> None:
        changes.append(fence.opening)
        changed.set()

    async def connect() -> Connection:
        table.connections += 1
        return Connection(table, clock)

    keeper = lease.LeaseKeeper(
        fence=fence,
        world=World(clock=clock, dice=SystemDice(), ids=SystemIds()),
        connect=connect,
        streams=lambda: 7,
        changed=note_change,
    )
    return Rig(clock, table, fence, keeper, changes, changed)


async def test_the_first_attempt_claims_and_the_next_renew(rig):
    assert await rig.keeper.attempt()
    assert rig.table.held
    assert rig.table.streams == []
    rig.clock.now += 5_000
    rig.fence.tick()
    assert await rig.keeper.attempt()
    assert rig.table.streams == [7]
    assert rig.table.connections == 1
    assert rig.changes == [1, 1]


async def test_a_slow_renewal_is_trusted_from_its_start(rig):
    await rig.keeper.attempt()
    rig.table.renewing_takes_ms = 2_500
    await rig.keeper.attempt()
    assert rig.fence.view().trust_left_ms == TRUST_MS - 2_500


async def test_a_failed_renewal_reconnects_and_keeps_the_trust_it_has(rig):
    await rig.keeper.attempt()
    rig.table.faults = [Unavailable("the database is away"), TimeoutError()]
    assert not await rig.keeper.attempt()
    assert not await rig.keeper.attempt()
    assert rig.fence.trusted()
    assert await rig.keeper.attempt()
    assert (rig.table.connections, rig.table.closed) == (3, 2)
    assert rig.fence.opening == 1


async def test_a_claim_whose_reply_was_lost_is_claimed_again(rig):
    rig.table.faults = [ConnectionResetError()]
    assert not await rig.keeper.attempt()
    assert await rig.keeper.attempt()
    assert rig.fence.opening == 1


async def test_no_row_matched_retires_for_good(rig):
    await rig.keeper.attempt()
    rig.table.held = False
    assert not await rig.keeper.attempt()
    assert rig.fence.retired
    assert rig.changes[-1] == 1
    await asyncio.wait_for(rig.keeper.run(), WAIT_S)


async def test_a_silent_main_loop_is_not_renewed_for(rig):
    await rig.keeper.attempt()
    rig.clock.now += LOOP_SILENCE_MS + 1
    assert not await rig.keeper.attempt()
    assert rig.table.streams == []
    rig.fence.tick()
    assert await rig.keeper.attempt()


async def test_stopping_deletes_the_row_and_closes_the_connection(rig):
    running = asyncio.create_task(rig.keeper.run())
    await asyncio.wait_for(rig.changed.wait(), WAIT_S)
    rig.keeper.stop()
    await asyncio.wait_for(running, WAIT_S)
    assert not rig.table.held
    assert rig.table.closed == 1
    assert not rig.fence.admitting()


async def test_a_poke_renews_at_once(rig, monkeypatch):
    # Without it nothing would be renewed while this test runs.
    monkeypatch.setattr(lease, "RENEW_EVERY_MS", 3_600_000)
    running = asyncio.create_task(rig.keeper.run())
    await asyncio.wait_for(rig.changed.wait(), WAIT_S)
    rig.changed.clear()
    rig.keeper.poke()
    await asyncio.wait_for(rig.changed.wait(), WAIT_S)
    assert rig.table.streams == [7]
    rig.keeper.stop()
    await asyncio.wait_for(running, WAIT_S)


async def test_the_thread_renews_while_the_main_loop_is_busy():
    world = system_world()
    table = Table()
    fence = Fence(world.clock)
    claimed = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def connect() -> Connection:
        return Connection(table, ManualClock())

    thread = lease.LeaseThread(
        lease.LeaseKeeper(
            fence=fence,
            world=world,
            connect=connect,
            streams=lambda: 0,
            changed=lambda: loop.call_soon_threadsafe(claimed.set),
        )
    )
    thread.start()
    await asyncio.wait_for(claimed.wait(), WAIT_S)
    assert fence.trusted()
    await asyncio.wait_for(thread.stop(), WAIT_S)
    assert not table.held
    assert fence.retired


def test_a_gateway_id_is_drawn_anew_each_time():
    first = lease.draw_name("gw", system_world())
    second = lease.draw_name("gw", system_world())
    assert first.gateway_id.startswith("gw-")
    assert len(first.gateway_id) == len("gw-") + 8
    assert first.gateway_id != second.gateway_id
    assert first.token != second.token
