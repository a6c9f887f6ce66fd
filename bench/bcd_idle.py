"""An idle `bcd`: a real process with a real session, whose inventory has been sent and who has nothing to do.

What it holds and what share of one core it takes over a window of heartbeats.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the file also runs by its path

from bench.measure import Figures, Meter, options, report
from bench.stack import BenchStack, stack
from bettercompute.cli.client import ApiClient
from bettercompute.cli.provisioning import write_identity
from bettercompute.server.keys import OPERATOR_TOKEN_FILE
from bettercompute.store.database import Database

NODE_ID = "idle"
CONNECT_S = 30.0
CONNECTED = "SELECT FROM nodes JOIN inventory_sections USING (node_id) WHERE node_id = $1 AND state = 'connected'"
BCD = (sys.executable, "-m", "bettercompute.cli.bcd")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long is looked."""

    settle_s: float
    window_s: float
    repeats: int


FULL = Sizes(settle_s=8.0, window_s=12.0, repeats=2)
QUICK = Sizes(settle_s=0.2, window_s=0.5, repeats=1)


async def connected(database: Database) -> None:
    """Wait until the node is connected and its inventory is stored."""
    async with asyncio.timeout(CONNECT_S):
        while True:
            if await database.query(CONNECTED, NODE_ID):
                return
            await asyncio.sleep(0.1)


async def measure(running: BenchStack, sizes: Sizes) -> None:
    """Measure the row."""
    async with running.database() as database:
        home = running.folder / "bcd"
        bcd = await asyncio.to_thread(_start, running, home)
        try:
            await connected(database)
            await asyncio.sleep(sizes.settle_s)
            runs = [await _watch(Meter(bcd.pid), sizes) for _ in range(sizes.repeats)]
        except TimeoutError:
            raise SystemExit((home / "bcd.log").read_text(encoding="utf-8")[-2_000:]) from None
        finally:
            bcd.terminate()
            bcd.wait()
    report("bcd_idle", runs, window_s=sizes.window_s)


def _start(running: BenchStack, home: Path) -> subprocess.Popen[bytes]:
    """Give the node its identity and start it."""
    home.mkdir()
    _provision(running, home / "identity")
    config = home / "config.toml"
    config.write_text(
        f'state_dir = "{home / "state"}"\nidentity_import = "{home / "identity"}"\n'
        f'gateway_url = ["{running.url}"]\n\n[reboot]\nallowed = false\n',
        encoding="utf-8",
    )
    with (home / "bcd.log").open("wb") as log:
        return subprocess.Popen([*BCD, "node", "--config", str(config)], stdout=log, stderr=subprocess.STDOUT)


def _provision(running: BenchStack, out: Path) -> None:
    token = (running.folder / OPERATOR_TOKEN_FILE).read_text(encoding="utf-8").strip()
    client = ApiClient(address=running.api_url, token=token)
    try:
        write_identity(client, node_id=NODE_ID, site=None, role="node", out=out)
    finally:
        client.close()


async def _watch(meter: Meter, sizes: Sizes) -> Figures:
    before = meter.read()
    await asyncio.sleep(sizes.window_s)
    after = meter.read()
    return {"rss_mb": after.rss_kb / 1024, "cpu_percent": 100 * (after.cpu_s - before.cpu_s) / sizes.window_s}


def main() -> None:
    """Print the row."""
    wanted = options(__doc__).parse_args()
    sizes = QUICK if wanted.quick else FULL
    sizes = replace(sizes, repeats=wanted.repeats or sizes.repeats)
    with stack(roles=("gateway", "api")) as running:
        uvloop.run(measure(running, sizes))


if __name__ == "__main__":
    main()
