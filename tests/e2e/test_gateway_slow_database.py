"""Two gateways whose database takes half a second for every round trip: slow, but never wrong and never fenced."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bettercompute.session import liveness
from bettercompute.testing.profiles import Answer
from tests.e2e.gateways import Site, open_site, until
from tests.e2e.slow_database import SlowDatabase, slow_database

ROUND_TRIP_S = 0.5
NODES = 40
# What a session that went silent may take to be noticed: three intervals and a flush period.
LIVENESS_BOUND_S = (liveness.MISSED_MAX * liveness.HEARTBEAT_INTERVAL_MS + liveness.FLUSH_PERIOD_MS) / 1000


@pytest.fixture
async def slow(dsn: str) -> AsyncIterator[SlowDatabase]:
    # A socket's path is short.
    with tempfile.TemporaryDirectory(prefix="bc-slow-") as folder:
        async with slow_database(Path(folder), dsn) as running:
            yield running


@dataclass
class Watch:
    """What was seen from beside the gateways, over a connection that is not slow."""

    site: Site
    since: dict[str, float] = field(default_factory=dict)
    longest_s: float = 0.0
    lease_left_s: list[float] = field(default_factory=list)

    async def look(self) -> None:
        now = time.monotonic()
        found = await self.site.disagreements()
        self.since = {node_id: self.since.get(node_id, now) for node_id in found}
        self.longest_s = max([self.longest_s, *(now - since for since in self.since.values())])
        rows = await self.site.database.query(
            "SELECT extract(epoch FROM expires_at - compute_now())::float8 AS left_s FROM leases"
        )
        self.lease_left_s += [row["left_s"] for row in rows]

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(0.25)


@pytest.mark.parametrize("seconds", [5, pytest.param(60, marks=pytest.mark.long)])
async def test_no_zombies_and_the_lease_holds(tmp_path: Path, dsn: str, slow: SlowDatabase, seconds: int) -> None:
    async with open_site(tmp_path, dsn) as site:
        site.gateway_dsn = slow.dsn
        gateways = await site.start_gateways("first", "second")
        ids = [await site.gateway_id(gateway) for gateway in gateways]
        daemons = await site.join(NODES)
        for daemon in daemons:
            daemon.levers.answer = Answer(delay_ms=200)
        site.run(daemons)
        await site.all_connected(within_s=30)
        slow.round_trip_s = ROUND_TRIP_S
        watch = Watch(site)
        watching = asyncio.create_task(watch.run())
        command_ids: list[str] = []
        for second in range(seconds):
            command_ids += await site.enqueue([daemon.node_id for daemon in daemons], per_node=1, prefix=f"s{second}")
            for daemon in daemons:
                daemon.record_events([("daemon.started", "{}")])
            # Two nodes lose their connection each second, and say Hello anew.
            for daemon in daemons[2 * second % NODES :][:2]:
                daemon.hang_up()
            await asyncio.sleep(1)
        slow.round_trip_s = 0.0
        await site.all_connected(within_s=30)
        await site.until_ended(command_ids, within_s=30)
        await until(lambda: not any(len(daemon.events) for daemon in daemons), what="the acks of events", within_s=20)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await site.until_agreed(within_s=30)
        await site.assert_events_whole()
        await site.assert_no_clones()
        assert watch.longest_s < LIVENESS_BOUND_S
        assert min(watch.lease_left_s) > 3, "no routing statement would have been refused"
        assert [await site.gateway_id(gateway) for gateway in gateways] == ids
        assert not any('"reason": "fenced"' in gateway.log.read_text() for gateway in gateways)
