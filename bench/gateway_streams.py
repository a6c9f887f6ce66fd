"""Session open and idle streams: what the gateway's process costs for each, and beside it a bare h2 server.

`session_open`: sessions are opened one after the other as fast as this process can dial (32 at a time), from TCP to
Welcome, and held; processor time of the gateway over all of them, through the look-ups that follow a Hello. The
reference gets the same dials with the same first message. `gateway_streams`: many sessions live, each with a heartbeat
every 10 s and PINGs both ways; share of one core over a window, and how much memory each has added. The reference gets
the same frames, first as the echo server that it is, then answering nothing, as the gateway does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the file also runs by its path

from bench.echo_reference import reference
from bench.measure import Figures, Meter, Usage, allow_many_files, options, report
from bench.stack import BenchNode, BenchStack, add_nodes, stack
from bettercompute.protocol import messages, service
from bettercompute.system import system_world
from bettercompute.transport import streams
from bettercompute.transport.streams import CallEnded, ClientCall, Connection
from bettercompute.world import World

DIALS_AT_ONCE = 32
HEARTBEAT_S = 10.0
# The look-ups that follow a Hello come 50 ms later.
SETTLE_S = 0.3
HEARTBEAT = messages.AgentFrame(
    heartbeat=messages.Heartbeat(
        lanes=[
            messages.LaneState(lane=messages.LANE_CONTROL, free=8),
            messages.LaneState(lane=messages.LANE_BULK, free=2),
        ],
        load=messages.NodeLoad(load1=0.5, load5=0.5, load15=0.5, available_memory_bytes=1 << 36),
    )
).SerializeToString()


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    opened: int
    warm_up: int
    streams: int
    window_s: float
    repeats: int


FULL = Sizes(opened=300, warm_up=50, streams=5_000, window_s=15.0, repeats=3)
QUICK = Sizes(opened=10, warm_up=3, streams=10, window_s=1.0, repeats=1)


class BenchStream:
    """One stream with its heartbeats: less than a FakeDaemon, so that thousands cost this process little."""

    def __init__(self, node: BenchNode, *, url: str, world: World) -> None:
        self._target = replace(node.target, url=url)
        self._hello = messages.AgentFrame(
            hello=messages.Hello(
                node_id=node.node_id,
                role=messages.AGENT_ROLE_NODE,
                boot_id=world.ids.uuid7(),
                journal_id=world.ids.uuid7(),
                process_id=world.ids.uuid7(),
                proto_min=1,
                proto_max=1,
                daemon_version="0.1.0",
                hello_nonce=world.ids.random_bytes(16),
            )
        ).SerializeToString()
        self.lost = ""
        """Why the stream ended by itself, which spoils the figure."""
        self._world = world
        self._connection: Connection | None = None
        self._call: ClientCall
        self._reader: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Dial, say Hello and wait for the answer."""
        self._connection = await streams.dial(self._target, world=self._world)
        call = await self._connection.call(service.SESSION, {})
        call.send(self._hello)
        if await call.receive() is None:
            raise SystemExit(f"refused: {call.status_message}")
        self._call = call
        self._reader = asyncio.create_task(self._read())

    def beat(self) -> None:
        """Send heartbeats from now on, the first one at some moment of the interval."""
        assert self._reader is not None
        delay_s = self._world.dice.uniform(0, HEARTBEAT_S)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._beat)

    async def close(self) -> None:
        """End the stream."""
        if self._timer is not None:
            self._timer.cancel()
        if self._reader is not None:
            self._reader.cancel()
        if self._connection is not None:
            self._connection.close()
            await self._connection.wait_closed()

    async def _read(self) -> None:
        try:
            while await self._call.receive() is not None:
                pass
        except CallEnded as ended:
            self.lost = ended.message
        else:
            self.lost = self._call.status_message

    def _beat(self) -> None:
        if not self.lost:
            self._call.send(HEARTBEAT)
        self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)


async def open_all(nodes: Sequence[BenchNode], *, url: str, world: World, beats: bool = False) -> list[BenchStream]:
    """Open a stream for each node, as fast as this process can."""
    opened = [BenchStream(node, url=url, world=world) for node in nodes]
    waiting = iter(opened)

    async def worker() -> None:
        for stream in waiting:
            await stream.open()
            if beats:
                stream.beat()

    async with asyncio.TaskGroup() as group:
        for _ in range(DIALS_AT_ONCE):
            group.create_task(worker())
    return opened


async def close_all(opened: Sequence[BenchStream]) -> None:
    """Close them; a stream that was lost meanwhile spoils the figure."""
    if lost := [stream.lost for stream in opened if stream.lost]:
        raise SystemExit(f"{len(lost)} streams were lost: {lost[0]}")
    await asyncio.gather(*(stream.close() for stream in opened))
    await asyncio.sleep(SETTLE_S)


async def cpu_ms_per_open(nodes: Sequence[BenchNode], *, process_id: int, url: str, world: World) -> float:
    """Return the processor time that a server spends on each stream until its first answer."""
    meter = Meter(process_id)
    before = meter.read()
    opened = await open_all(nodes, url=url, world=world)
    await asyncio.sleep(SETTLE_S)
    spent_s = meter.read().cpu_s - before.cpu_s
    await close_all(opened)
    return spent_s * 1000 / len(nodes)


async def idle(
    nodes: Sequence[BenchNode],
    sizes: Sizes,
    *,
    process_id: int,
    url: str,
    world: World,
    then: Callable[[], None] | None = None,
) -> tuple[Figures, ...]:
    """Return share of a core and added memory per stream, with all streams live; once more after `then`."""
    meter = Meter(process_id)
    empty = meter.read()
    opened = await open_all(nodes, url=url, world=world, beats=True)
    # Past the first heartbeat, and the flush of what the Hellos left.
    await asyncio.sleep(min(HEARTBEAT_S, sizes.window_s))
    watched = [await _watch(meter, empty, count=len(nodes), window_s=sizes.window_s)]
    if then is not None:
        then()
        watched.append(await _watch(meter, empty, count=len(nodes), window_s=sizes.window_s))
    await close_all(opened)
    return tuple(watched)


async def _watch(meter: Meter, empty: Usage, *, count: int, window_s: float) -> Figures:
    before = meter.read()
    await asyncio.sleep(window_s)
    after = meter.read()
    return {
        "cpu_percent": 100 * (after.cpu_s - before.cpu_s) / window_s,
        "rss_kb_per_stream": (after.rss_kb - empty.rss_kb) / count,
    }


async def measure(running: BenchStack, sizes: Sizes, *, echo_id: int, echo_url: str) -> None:
    """Measure both rows, the gateway and the reference in turn."""
    world = system_world()
    async with running.database() as database:
        nodes = await add_nodes(
            running, database, prefix="streams", count=max(sizes.streams, sizes.opened + sizes.warm_up)
        )
        ends = {"gateway": (running.process_id, running.url), "bare_h2": (echo_id, echo_url)}
        for _, url in ends.values():
            await close_all(await open_all(nodes[-sizes.warm_up :], url=url, world=world))
        live = nodes[: sizes.streams]
        [gateway] = await idle(live, sizes, process_id=running.process_id, url=running.url, world=world)
        silence = partial(os.kill, echo_id, signal.SIGUSR1)
        echo, silent = await idle(live, sizes, process_id=echo_id, url=echo_url, world=world, then=silence)
        report("gateway_streams", [_streams_row(gateway, echo, silent, sizes)], window_s=sizes.window_s)

        opens = []
        for _ in range(sizes.repeats):
            cost = {
                name: await cpu_ms_per_open(nodes[: sizes.opened], process_id=process_id, url=url, world=world)
                for name, (process_id, url) in ends.items()
            }
            opens.append(
                {
                    "gateway_cpu_ms": cost["gateway"],
                    "ratio_to_bare_h2": cost["gateway"] / cost["bare_h2"],
                    "bare_h2_cpu_ms": cost["bare_h2"],
                }
            )
        report("session_open", opens, opened=sizes.opened)


def _streams_row(gateway: Figures, echo: Figures, silent: Figures, sizes: Sizes) -> Figures:
    return {
        "streams": sizes.streams,
        "cpu_percent": gateway["cpu_percent"],
        "ratio_to_bare_h2": gateway["cpu_percent"] / max(echo["cpu_percent"], 0.01),
        "rss_kb_per_stream": gateway["rss_kb_per_stream"],
        "ratio_to_silent_h2": gateway["cpu_percent"] / max(silent["cpu_percent"], 0.01),
        "bare_h2_cpu_percent": echo["cpu_percent"],
        "silent_h2_cpu_percent": silent["cpu_percent"],
        "bare_h2_rss_kb_per_stream": echo["rss_kb_per_stream"],
    }


def main() -> None:
    """Print both rows."""
    parser = options(__doc__)
    parser.add_argument("--streams", type=int)
    parser.add_argument("--window", type=float, help="seconds over which idle streams are watched")
    wanted = parser.parse_args()
    sizes = QUICK if wanted.quick else FULL
    sizes = replace(
        sizes,
        streams=wanted.streams or sizes.streams,
        window_s=wanted.window or sizes.window_s,
        repeats=wanted.repeats or sizes.repeats,
    )
    # Each stream is a descriptor here and one in the gateway.
    sizes = replace(sizes, streams=min(sizes.streams, allow_many_files() - 200))
    with stack() as running, reference(running) as (echo_id, echo_url):
        uvloop.run(measure(running, sizes, echo_id=echo_id, echo_url=echo_url))


if __name__ == "__main__":
    main()
