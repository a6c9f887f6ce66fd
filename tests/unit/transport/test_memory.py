"""What a network may do to calls in memory: delay, hold back, cut."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import pytest

from bettercompute.system import system_world
from bettercompute.transport.memory import MemoryServer
from bettercompute.transport.streams import CallEnded, EndKind, Limits, ServerCall

WORLD = system_world()


async def echo(call: ServerCall) -> None:
    while (message := await call.receive()) is not None:
        call.send(message)


@dataclass
class StoppedClock:
    now: int = 1_000_000

    def now_ms(self) -> int:
        return self.now

    def monotonic_ms(self) -> int:
        return self.now


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_latency_delays_and_keeps_the_order():
    loop = asyncio.get_running_loop()
    delays = iter([0.03, 0.0, 0.02, 0.0, 0.0])
    server = MemoryServer(echo, world=WORLD)
    connection = server.connect(latency_s=lambda: next(delays, 0.0))
    started = loop.time()
    call = await connection.call("/m")
    for text in (b"1", b"2", b"3"):
        call.send(text)
    assert [await call.receive() for _ in range(3)] == [b"1", b"2", b"3"]
    # uvloop's clock counts whole milliseconds.
    assert loop.time() - started >= 0.028
    connection.close()
    await server.close(drain_ms=0)


async def test_a_partition_loses_nothing_and_can_be_one_way():
    server = MemoryServer(echo, world=WORLD)
    connection = server.connect()
    call = await connection.call("/m")
    call.send(b"before")
    assert await call.receive() == b"before"
    connection.to_client.hold()
    call.send(b"during")
    await turns()
    answer = asyncio.ensure_future(call.receive())
    await turns()
    assert not answer.done()
    connection.to_client.release()
    assert await answer == b"during"
    connection.close()
    await server.close(drain_ms=0)


async def test_last_heard_stands_still_in_a_partition():
    clock = StoppedClock()
    server = MemoryServer(echo, world=replace(WORLD, clock=clock))
    connection = server.connect()
    assert await connection.unary("/m", b"x", timeout_s=30) == b"x"
    clock.now += 5_000
    assert connection.last_heard_ms == clock.now
    connection.to_server.hold()
    clock.now += 5_000
    assert connection.last_heard_ms == clock.now - 10_000
    connection.close()
    await server.close(drain_ms=0)


async def test_each_end_stamps_what_it_hears_by_its_own_clock():
    # A host's clock that has leapt a day ahead of the gateway's must not make the gateway look silent for a day.
    heard: list[int] = []

    async def stamp(call: ServerCall) -> None:
        heard.append(call.last_heard_ms)
        await echo(call)

    there, here = StoppedClock(), StoppedClock()
    here.now = there.now + 86_400_000
    server = MemoryServer(stamp, world=replace(WORLD, clock=there))
    connection = server.connect(clock=here)
    assert await connection.unary("/m", b"x", timeout_s=30) == b"x"
    for line in (connection.to_server, connection.to_client):
        line.hold()
    assert connection.last_heard_ms == here.now
    assert heard == [there.now]
    connection.close()
    await server.close(drain_ms=0)


async def test_a_partition_that_lasts_ends_as_unanswered_pings_would():
    limits = Limits(ping_interval_ms=10, pings_unanswered_max=2)
    server = MemoryServer(echo, world=WORLD, limits=limits)
    connection = server.connect()
    call = await connection.call("/m")
    connection.to_server.hold()
    with pytest.raises(CallEnded) as end:
        await call.receive()
    assert end.value.kind is EndKind.PING_TIMEOUT
    await connection.wait_closed()
    await server.close(drain_ms=0)


async def test_a_cut_drops_what_is_on_its_way():
    heard: list[bytes] = []

    async def listen(call: ServerCall) -> None:
        while (message := await call.receive()) is not None:
            heard.append(message)

    server = MemoryServer(listen, world=WORLD)
    connection = server.connect(latency_s=lambda: 60.0)
    call = await connection.call("/m")
    call.send(b"lost")
    await turns()
    connection.cut()
    with pytest.raises(CallEnded) as end:
        await call.receive()
    assert end.value.kind is EndKind.CONNECTION_LOST
    await server.close(drain_ms=0)
    assert heard == []
    assert server.connection_count == server.call_count == 0


async def test_a_server_that_is_closed_takes_no_connections():
    server = MemoryServer(echo, world=WORLD)
    await server.close()
    with pytest.raises(CallEnded) as end:
        server.connect()
    assert end.value.kind is EndKind.GOING_AWAY
