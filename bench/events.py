"""Events, durable, from the daemon's journal to its ack: 500 FakeDaemons over TLS, one gateway, PostgreSQL with fsync.

Each FakeDaemon journals (in memory) 100 events, sends them in one frame, and journals the next 100 when the ack has
come; an event is 100 bytes of JSON. The rate counts acked events.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the file also runs by its path

from bench.fakes import connected_fleet
from bench.measure import Figures, Shares, allow_many_files, options, report
from bench.stack import BenchStack, add_nodes, stack
from bettercompute.protocol import messages
from bettercompute.testing.fake_daemon import FakeDaemon

PAYLOAD = '{"sensor":"fan-3","reading_rpm":5400,"threshold_rpm":6000,"message":"below its threshold for 30 s"}'
EVENT = ("sensor.threshold", PAYLOAD)
WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    daemons: int
    batch: int
    batches_each: int
    repeats: int


FULL = Sizes(daemons=500, batch=100, batches_each=2, repeats=3)
QUICK = Sizes(daemons=5, batch=100, batches_each=2, repeats=1)


async def feed(daemon: FakeDaemon, sizes: Sizes) -> None:
    """Journal one batch after the other, each when the one before is acked."""
    for _ in range(sizes.batches_each):
        daemon.record_events([EVENT] * sizes.batch)
        await daemon.until(lambda: len(daemon.events) == 0)


async def run(daemons: Sequence[FakeDaemon], sizes: Sizes, *, shares: Shares) -> Figures:
    """Let every FakeDaemon report its batches."""
    shares.restart()
    began = time.perf_counter()
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        for daemon in daemons:
            group.create_task(feed(daemon, sizes))
    took_s = time.perf_counter() - began
    count = len(daemons) * sizes.batches_each * sizes.batch
    return {"per_s": count / took_s, **shares.per(count)}


async def measure(running: BenchStack, sizes: Sizes) -> None:
    """Measure the row."""
    async with running.database() as database:
        nodes = await add_nodes(running, database, prefix="events", count=sizes.daemons)
        async with connected_fleet(nodes, world=running.world) as daemons:
            shares = running.shares()
            await run(daemons, replace(sizes, batches_each=1), shares=shares)
            runs = [await run(daemons, sizes, shares=shares) for _ in range(sizes.repeats)]
            ended = sum(len(daemon.endings) for daemon in daemons)
        event_bytes = messages.Event(type=EVENT[0], payload_json=PAYLOAD).ByteSize()
        report("events", runs, daemons=sizes.daemons, batch=sizes.batch, event_bytes=event_bytes, streams_lost=ended)


def main() -> None:
    """Print the row."""
    parser = options(__doc__)
    parser.add_argument("--daemons", type=int)
    parser.add_argument("--batch", type=int)
    wanted = parser.parse_args()
    sizes = QUICK if wanted.quick else FULL
    sizes = replace(
        sizes,
        daemons=wanted.daemons or sizes.daemons,
        batch=wanted.batch or sizes.batch,
        repeats=wanted.repeats or sizes.repeats,
    )
    allow_many_files()
    with stack() as running:
        uvloop.run(measure(running, sizes))


if __name__ == "__main__":
    main()
