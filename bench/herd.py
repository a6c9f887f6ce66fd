"""The herd over real TLS: FakeDaemons whose gateway is killed and started again; when are all of them back?

Time counts from the moment the new process listens. The bucket lets in `rate` a second, so N/rate is the least.
`attempts_max` is the most refusals that one node had from the living gateway before it was welcomed.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the file also runs by its path

from bench.fakes import connected_fleet
from bench.measure import Figures, allow_many_files, options, report
from bench.stack import BenchStack, add_nodes, stack
from bettercompute.protocol.statuses import Reason
from bettercompute.testing.fake_daemon import FakeDaemon

# What a gateway says before it lives.
NOT_LIVING = frozenset({Reason.STARTING, Reason.NO_LEASE})


@dataclass(frozen=True, slots=True)
class Sizes:
    """The herd."""

    nodes: int
    rate: int
    repeats: int


FULL = Sizes(nodes=600, rate=100, repeats=1)
QUICK = Sizes(nodes=20, rate=50, repeats=1)


def _is_down(daemon: FakeDaemon) -> Callable[[], bool]:
    return lambda: not daemon.live


def _is_back(daemon: FakeDaemon, welcomes: int) -> Callable[[], bool]:
    return lambda: daemon.welcomes > welcomes


async def come_back(
    running: BenchStack, daemons: Sequence[FakeDaemon], *, limit_s: float
) -> tuple[float, list[list[str]]]:
    """Kill the gateway, start it anew, and return when all are back and why each was refused before."""
    before = {daemon.node_id: daemon.welcomes for daemon in daemons}
    for daemon in daemons:
        daemon.endings.clear()
    running.stop(kill=True)
    await asyncio.gather(*(daemon.until(_is_down(daemon)) for daemon in daemons))
    running.start()
    await running.listening()
    began = time.perf_counter()
    async with asyncio.timeout(limit_s):
        await asyncio.gather(*(daemon.until(_is_back(daemon, before[daemon.node_id])) for daemon in daemons))
    took_s = time.perf_counter() - began
    refusals = [
        [end.reason for end in daemon.endings if end.status is not None and not end.welcomed] for daemon in daemons
    ]
    return took_s, [[reason for reason in told if reason not in NOT_LIVING] for told in refusals]


async def measure(running: BenchStack, sizes: Sizes) -> None:
    """Measure the row."""
    least_s = sizes.nodes / sizes.rate
    async with running.database() as database:
        nodes = await add_nodes(running, database, prefix="herd", count=sizes.nodes)
        async with connected_fleet(nodes, world=running.world, limit_s=3 * least_s + 60) as daemons:
            runs: list[Figures] = []
            reasons: Counter[str] = Counter()
            for _ in range(sizes.repeats):
                took_s, refusals = await come_back(running, daemons, limit_s=3 * least_s + 60)
                runs.append(
                    {
                        "nodes": sizes.nodes,
                        "rate": sizes.rate,
                        "all_connected_s": took_s,
                        "ratio_to_n_over_rate": took_s / least_s,
                        "attempts_max": max(len(told) for told in refusals),
                    }
                )
                reasons.update(reason for told in refusals for reason in told)
    report("herd", runs, transport="tls", refusals=dict(reasons))


def main() -> None:
    """Print the row."""
    parser = options(__doc__)
    parser.add_argument("--real", action="store_true", help="over real TLS (what this bench always does)")
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--rate", type=int, help="handshakes a second")
    wanted = parser.parse_args()
    sizes = QUICK if wanted.quick else FULL
    sizes = replace(
        sizes,
        nodes=wanted.nodes or sizes.nodes,
        rate=wanted.rate or sizes.rate,
        repeats=wanted.repeats or sizes.repeats,
    )
    allow_many_files()
    with stack(handshakes_per_s=sizes.rate) as running:
        uvloop.run(measure(running, sizes))


if __name__ == "__main__":
    main()
