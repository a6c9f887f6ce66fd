"""FakeDaemons over real TLS for the benches: a fleet of them, connected and looked after until the bench ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from bench.stack import BenchNode
from bettercompute.testing.fake_daemon import FakeDaemon
from bettercompute.testing.fake_dial import over_tls
from bettercompute.transport.streams import tune_collector
from bettercompute.world import World

# Dials at once: more than 64 pending Hellos are refused and would come back later.
CONNECTS_AT_ONCE = 32
CONNECT_S = 120.0


@contextlib.asynccontextmanager
async def connected_fleet(
    nodes: Sequence[BenchNode], *, world: World, limit_s: float = CONNECT_S
) -> AsyncIterator[list[FakeDaemon]]:
    """Give one connected FakeDaemon for each node, until the block ends."""
    daemons = [FakeDaemon(node.node_id, dial=over_tls(node.target, world=world), world=world) for node in nodes]
    tasks: list[asyncio.Task[None]] = []
    waiting = iter(daemons)

    async def connect() -> None:
        for daemon in waiting:
            tasks.append(asyncio.create_task(daemon.run()))
            await daemon.connected()

    try:
        async with asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
            for _ in range(CONNECTS_AT_ONCE):
                group.create_task(connect())
        # A pause of the bench's own collector, over all these objects, would be told as the gateway's.
        tune_collector()
        yield daemons
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
