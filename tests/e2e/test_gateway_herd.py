"""A power-on herd against one gateway, over real TLS: everybody in, in time, and nobody refused more than twice.

The long form takes all that two cores can give to gateway, database and daemons together: run it with nothing beside.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bettercompute.protocol.statuses import Reason
from bettercompute.testing.fake_daemon import FakeDaemon
from tests.e2e.gateways import WORLD, Site, open_site

REFUSALS_MAX = 2


@pytest.fixture
async def site(tmp_path: Path, dsn: str) -> AsyncIterator[Site]:
    async with open_site(tmp_path, dsn) as site:
        yield site


async def switch_on(daemon: FakeDaemon, *, after_s: float) -> None:
    await asyncio.sleep(after_s)
    await daemon.run()


@pytest.mark.parametrize(
    ("nodes", "rate_per_s", "spread_s", "slack_s"),
    # A short run on a full machine says that all come in, not how soon.
    [
        (90, 30, 0.0, 50),
        pytest.param(1_000, 100, 0.0, 5, marks=pytest.mark.long),
        pytest.param(1_000, 100, 5.0, 5, marks=pytest.mark.long),
    ],
)
async def test_a_herd_is_let_in_at_the_buckets_rate(
    site: Site, nodes: int, rate_per_s: int, spread_s: float, slack_s: float
) -> None:
    gateway = site.add_gateway("herd", handshakes_per_s=rate_per_s)
    await gateway.start()
    daemons = await site.join(nodes, dial=site.dial_to(gateway))
    site.running += [
        asyncio.create_task(switch_on(daemon, after_s=WORLD.dice.uniform(0, spread_s))) for daemon in daemons
    ]
    took_s = await site.all_connected(within_s=60)
    refusals = [sum(ended.status is not None for ended in daemon.endings) for daemon in daemons]
    reasons = Counter(ended.reason for daemon in daemons for ended in daemon.endings)
    assert set(reasons) <= {Reason.HANDSHAKES, Reason.HELLOS}
    assert max(refusals) <= REFUSALS_MAX, reasons
    assert took_s < nodes / rate_per_s + slack_s
    await site.until_agreed(within_s=30)
    await site.assert_no_clones()
