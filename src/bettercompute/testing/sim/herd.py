"""Herds: a whole fleet that wants in at once, and how long, how often and against what limits it tries.

Power-on, a gateway that is lost and comes back, a rolling restart, a database that is away: each ends when every node
has a session again. The yardstick is N / rate: no order of admission can be faster. See docs/simulator.md, "Herds".
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bettercompute.gateway.config import GatewayConfig
from bettercompute.testing.fake_daemon import FakeDaemon
from bettercompute.testing.sim.cluster import Cluster
from bettercompute.testing.sim.fake_node import FakeNode
from bettercompute.testing.sim.fleet import Registrar
from bettercompute.testing.sim.invariants import Verdict
from bettercompute.testing.sim.machine import SimulatedClock, make_world
from bettercompute.testing.sim.network import Network
from bettercompute.testing.sim.node import NodeParts
from bettercompute.testing.sim.overheard import overhearing
from bettercompute.testing.sim.postgres import SimulatedServer
from bettercompute.testing.sim.simulation import CHANNELS
from bettercompute.testing.sim.virtual_loop import VirtualLoop

SAMPLE_S = 0.5
GIVE_UP_S = 3_600.0
# Machines of one rack do not reach their network in the same millisecond.
POWER_ON_SPREAD_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Herd:
    """One herd."""

    story: str = "power-on"
    nodes: int = 10_000
    gateways: int = 2
    handshakes_per_s: float = 200
    streams_max: int = 7_500
    seed: int = 1

    @property
    def least_s(self) -> float:
        """Return N / rate: the least that all of them can take."""
        return self.nodes / (self.gateways * self.handshakes_per_s)


@dataclass(frozen=True, slots=True)
class Sample:
    """The herd at one moment, counted since its begin."""

    at_s: float
    connected: int
    attempts: int
    refusals: int
    failed_dials: int
    pending_hellos: int
    statements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HerdOutcome:
    """What came of it."""

    herd: Herd
    all_connected_s: float | None
    """None: not within an hour."""
    attempts_mean: float
    attempts_max: int
    """Dials of one node, until it was connected."""
    refusals_max: int
    """Of one node, by gateways that lived."""
    reasons: Mapping[str, int]
    pending_hellos_max: int
    statements_per_s: float
    statements_per_s_max: float
    """Over a second."""
    dropped: int
    """Nodes that had no session at the worst moment: all of them at power-on."""
    samples: tuple[Sample, ...]
    bugs: tuple[str, ...]
    real_s: float

    @property
    def ratio(self) -> float | None:
        """Return all_connected_s against N / rate."""
        return None if self.all_connected_s is None else self.all_connected_s / self.herd.least_s


@dataclass(slots=True)
class _Pen:
    """What a herd runs in."""

    herd: Herd
    server: SimulatedServer
    network: Network
    cluster: Cluster
    nodes: list[FakeNode]
    samples: list[Sample] = field(default_factory=list)
    began_s: float = 0.0
    dials_before: int = 0
    statements_before: int = 0
    sampling: asyncio.Task[None] | None = None

    @property
    def daemons(self) -> list[FakeDaemon]:
        return [node.daemon for node in self.nodes if node.daemon is not None]

    def connected(self) -> int:
        return sum(daemon.live for daemon in self.daemons)

    def begin(self) -> None:
        """Count from here."""
        self.began_s = asyncio.get_running_loop().time()
        self.dials_before, self.statements_before = self.network.dials, self.server.statements
        for daemon in self.daemons:
            daemon.endings.clear()
        self.sampling = asyncio.create_task(self._sample_for_ever())

    async def _sample_for_ever(self) -> None:
        while True:
            self.samples.append(_sample(self))
            await asyncio.sleep(SAMPLE_S)


def run(herd: Herd, *, dsn: str) -> HerdOutcome:
    """Run a herd on an empty, migrated database of its own."""
    loop = VirtualLoop()
    try:
        with tempfile.TemporaryDirectory(prefix="bc-herd-") as folder:
            return loop.run_until_complete(_run(herd, dsn=dsn, folder=Path(folder)))
    finally:
        loop.close()


async def _run(herd: Herd, *, dsn: str, folder: Path) -> HerdOutcome:
    began = time.perf_counter()
    pen = _pen(herd, dsn=dsn, folder=folder)
    verdict = Verdict(pen.server.now_ms)
    try:
        with overhearing(verdict):
            await STORIES[herd.story](pen)
            all_connected_s = await _until_connected(pen)
            bugs = tuple(violation.text for violation in verdict.violations)
            outcome = _outcome(pen, all_connected_s, bugs=bugs, real_s=time.perf_counter() - began)
            assert pen.sampling is not None
            pen.sampling.cancel()
            pen.server.weather.down = True
            tasks = [task for process in pen.cluster.processes for task in process.bury()]
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        pen.server.close()
    return outcome


def _pen(herd: Herd, *, dsn: str, folder: Path) -> _Pen:
    loop = asyncio.get_running_loop()
    rng = random.Random(f"{herd.seed} herd")  # noqa: S311 - a simulation
    clock = SimulatedClock(loop)
    server = SimulatedServer(dsn, clock=clock, channels=CHANNELS)
    server.weather.latency_s = lambda: rng.uniform(0.0002, 0.001)
    network = Network(lambda: rng.uniform(0.001, 0.03))
    names = tuple(f"gw{number}" for number in range(1, herd.gateways + 1))
    registrar = Registrar(server, world=make_world(f"{herd.seed} herd", clock=clock), folder=folder, gateways=names)
    cluster = Cluster(server, network, registrar=registrar, seed=str(herd.seed))
    for name in names:
        config = GatewayConfig(
            name=name,
            advertise_url=f"https://{name}",
            streams_max=herd.streams_max,
            handshakes_per_s=herd.handshakes_per_s,
            lease_in_thread=False,
        )
        cluster.start_gateway(cluster.add_gateway(config))
    cluster.start_worker(cluster.add_worker("worker1"))
    parts = NodeParts(
        network=network,
        gateways=names,
        registrar=registrar,
        rng=rng,
        new_process=cluster.new_process,
        rules=None,
        seed=str(herd.seed),
        folder=folder,
    )
    joined = registrar.join_many([f"n{number}" for number in range(1, herd.nodes + 1)])
    nodes = [FakeNode(identity, parts, SimulatedClock(loop)) for identity in joined]
    return _Pen(herd, server, network, cluster, nodes)


# Stories


async def _power_on(pen: _Pen) -> None:
    """Every node starts within half a second; the gateways serve."""
    await _gateways_ready(pen)
    pen.begin()
    await _start_all(pen, over_s=POWER_ON_SPREAD_S)


async def _gateway_loss(pen: _Pen) -> None:
    """One of the gateways is killed, and is back 10 s later; the herd is all its nodes."""
    await _connected_fleet(pen)
    host = next(iter(pen.cluster.gateways.values()))
    pen.begin()
    pen.cluster.kill_gateway(host)
    await asyncio.sleep(10)
    pen.cluster.start_gateway(host)


async def _all_restart(pen: _Pen) -> None:
    """Every gateway is killed at once, and is back 5 s later."""
    await _connected_fleet(pen)
    pen.begin()
    for host in pen.cluster.gateways.values():
        pen.cluster.kill_gateway(host)
    await asyncio.sleep(5)
    for host in pen.cluster.gateways.values():
        pen.cluster.start_gateway(host)


async def _rolling_restart(pen: _Pen) -> None:
    """The gateways are stopped in order and started again, one after another."""
    await _connected_fleet(pen)
    pen.begin()
    for host in pen.cluster.gateways.values():
        await pen.cluster.stop_gateway(host)
        pen.cluster.start_gateway(host)
        await asyncio.sleep(30)


async def _database_outage(pen: _Pen) -> None:
    """The database is away for 60 s: every lease runs out, and every session with it."""
    await _connected_fleet(pen)
    pen.server.weather.down = True
    pen.server.restart()
    await asyncio.sleep(60)
    pen.begin()
    pen.server.weather.down = False


STORIES: Mapping[str, Callable[[_Pen], Awaitable[None]]] = {
    "power-on": _power_on,
    "gateway-loss": _gateway_loss,
    "all-restart": _all_restart,
    "rolling-restart": _rolling_restart,
    "database-outage": _database_outage,
}


async def _gateways_ready(pen: _Pen) -> None:
    def ready() -> bool:
        return all(host.gateway is not None and host.gateway.ready for host in pen.cluster.gateways.values())

    while not ready():  # noqa: ASYNC110 - what is looked at has no event
        await asyncio.sleep(0.1)
    # The buckets are full, as those of a gateway that has served for a while.
    await asyncio.sleep(5)


async def _start_all(pen: _Pen, *, over_s: float) -> None:
    for node in pen.nodes:
        node.start()
        await asyncio.sleep(over_s / len(pen.nodes))


async def _connected_fleet(pen: _Pen) -> None:
    await _gateways_ready(pen)
    await _start_all(pen, over_s=1.1 * pen.herd.least_s)
    while pen.connected() < len(pen.nodes):  # noqa: ASYNC110 - as above
        await asyncio.sleep(SAMPLE_S)
    await asyncio.sleep(10)


async def _until_connected(pen: _Pen) -> float | None:
    loop = asyncio.get_running_loop()
    while loop.time() - pen.began_s < GIVE_UP_S:
        if pen.connected() == len(pen.nodes):
            pen.samples.append(_sample(pen))
            return loop.time() - pen.began_s
        await asyncio.sleep(SAMPLE_S)
    return None


def _sample(pen: _Pen) -> Sample:
    lives = [host.gateway.life for host in pen.cluster.gateways.values() if host.gateway is not None]
    refused = [ended for daemon in pen.daemons for ended in daemon.endings if not ended.welcomed]
    refusals = sum(ended.status is not None for ended in refused)
    return Sample(
        at_s=asyncio.get_running_loop().time() - pen.began_s,
        connected=pen.connected(),
        attempts=pen.network.dials - pen.dials_before,
        refusals=refusals,
        failed_dials=len(refused) - refusals,
        pending_hellos=max((life.hellos.pending for life in lives if life is not None), default=0),
        statements=pen.server.statements - pen.statements_before,
    )


def _fullest_second(samples: Sequence[Sample]) -> float:
    """Return the most statements within a second, over neighbouring samples."""
    apart = round(1 / SAMPLE_S)
    pairs = zip(samples, samples[apart:], strict=False)
    return max(
        ((later.statements - sample.statements) / (later.at_s - sample.at_s) for sample, later in pairs), default=0
    )


def _outcome(pen: _Pen, all_connected_s: float | None, *, bugs: tuple[str, ...], real_s: float) -> HerdOutcome:
    reasons: dict[str, int] = {}
    attempts, refusals = [], []
    for daemon in pen.daemons:
        refused = [ended for ended in daemon.endings if not ended.welcomed]
        attempts.append(len(refused) + 1)
        refusals.append(sum(ended.status is not None for ended in refused))
        for ended in refused:
            reasons[ended.reason] = reasons.get(ended.reason, 0) + 1
    last = pen.samples[-1]
    return HerdOutcome(
        herd=pen.herd,
        all_connected_s=all_connected_s,
        attempts_mean=sum(attempts) / len(attempts),
        attempts_max=max(attempts),
        refusals_max=max(refusals),
        reasons=dict(sorted(reasons.items())),
        pending_hellos_max=max(sample.pending_hellos for sample in pen.samples),
        statements_per_s=last.statements / max(last.at_s, SAMPLE_S),
        statements_per_s_max=_fullest_second(pen.samples),
        dropped=pen.herd.nodes - min(sample.connected for sample in pen.samples),
        samples=tuple(pen.samples),
        bugs=bugs,
        real_s=real_s,
    )
