"""One run: a scenario and a seed, put together, run through its phases, and judged."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bettercompute.errors import Bug
from bettercompute.gateway.config import GatewayConfig
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import channels
from bettercompute.store.limits import SERVER_LIMITS
from bettercompute.testing.postgres import MEMORY
from bettercompute.testing.sim import ledger, operator_faults, proving, settling, work
from bettercompute.testing.sim.bcd_node import BcdNode
from bettercompute.testing.sim.cluster import Cluster
from bettercompute.testing.sim.fake_node import FakeNode
from bettercompute.testing.sim.faults import FAULTS
from bettercompute.testing.sim.fleet import Registrar
from bettercompute.testing.sim.invariants import TransactionRules, Verdict, Violation
from bettercompute.testing.sim.links import SimulatedDatabase
from bettercompute.testing.sim.machine import SimulatedClock, make_world
from bettercompute.testing.sim.network import Network
from bettercompute.testing.sim.node import NodeParts
from bettercompute.testing.sim.overheard import overhearing
from bettercompute.testing.sim.postgres import SimulatedServer
from bettercompute.testing.sim.scenario import FaultPlan, Range, Scenario
from bettercompute.testing.sim.stage import Stage
from bettercompute.testing.sim.taps import FrameRules
from bettercompute.testing.sim.virtual_loop import VirtualLoop

CHANNELS = (
    channels.COMMANDS,
    channels.DISPATCH,
    channels.REVOCATIONS,
    channels.OUTBOX,
    channels.STREAM,
    channels.FINISHED,
    channels.TRUST,
    channels.GATEWAYS,
    ledger.CHANNEL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a run."""

    scenario: str
    seed: int
    violations: tuple[Violation, ...]
    story: tuple[str, ...]
    virtual_s: float
    real_s: float
    settled_s: float | None
    """How long after the last fault everything had settled."""
    faults: Mapping[str, int]
    met: Mapping[str, int]
    """What they have led to: that a rule was put to the test at all."""
    statements: int
    frames: int
    commands: int
    events: int
    trace: str
    """Of everything that was committed and befell it: equal for equal seeds."""

    @property
    def faults_total(self) -> int:
        """Return how many faults befell it."""
        return sum(self.faults.values())


def run(scenario: Scenario, *, seed: int, dsn: str) -> Outcome:
    """Run a scenario on an empty, migrated database of its own."""
    for plan in scenario.faults:
        if plan.kind not in FAULTS:
            raise refuse(
                Reason.BAD_REQUEST, f"scenario {scenario.name} has a fault {plan.kind!r}: there are {', '.join(FAULTS)}"
            )
    loop = VirtualLoop()
    try:
        with tempfile.TemporaryDirectory(prefix="bc-sim-", dir=_memory()) as folder:
            return loop.run_until_complete(_run(scenario, seed=seed, dsn=dsn, folder=Path(folder)))
    finally:
        loop.close()


def _memory() -> Path | None:
    """Return where files cost nothing, if there is such a place: what a simulated disk loses is decided elsewhere."""
    return MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else None


async def _run(scenario: Scenario, *, seed: int, dsn: str, folder: Path) -> Outcome:
    began = time.perf_counter()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    stage = _stage(scenario, seed=seed, dsn=dsn, folder=folder)
    try:
        with overhearing(stage.verdict):
            await stage.registrar.publish(stage.operator)
            _populate(stage)
            settled_s = await _phases(stage)
            violations = tuple(stage.verdict.violations)
            await _bury(stage)
    finally:
        stage.server.close()
    return Outcome(
        scenario=scenario.name,
        seed=seed,
        violations=violations,
        story=tuple(stage.story),
        virtual_s=loop.time() - began_s,
        real_s=time.perf_counter() - began,
        settled_s=settled_s,
        faults=dict(stage.faults),
        met=dict(stage.frames.met),
        statements=stage.server.statements,
        frames=stage.frames.frames,
        commands=len(stage.ledger.rows["commands"]),
        events=len(stage.ledger.rows["node_events"]),
        trace=stage.trace.hexdigest(),
    )


def _stage(scenario: Scenario, *, seed: int, dsn: str, folder: Path) -> Stage:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    rng = random.Random(f"{seed} {scenario.name}")  # noqa: S311 - a simulation
    clock = SimulatedClock(loop)
    server = SimulatedServer(dsn, clock=clock, channels=CHANNELS)
    ledger.install(server)
    server.weather.latency_s = _drawn(rng, scenario.times.database_ms)
    loop.disk_latency_s = _drawn(rng, scenario.times.disk_ms)
    network = Network(_drawn(rng, scenario.times.network_ms))
    world = make_world(f"{seed} simulator", clock=SimulatedClock(loop))
    gateways = tuple(f"gw{number}" for number in range(1, scenario.fleet.gateways + 1))
    registrar = Registrar(
        server,
        world=world,
        folder=folder,
        gateways=gateways,
        certificate_life_ms=int(scenario.fleet.certificate_life_s * 1000),
        signing=scenario.fleet.signing,
    )
    cluster = Cluster(server, network, registrar=registrar, seed=str(seed))
    operator_process = cluster.new_process("operator")
    kept = ledger.Ledger()
    verdict = Verdict(server.now_ms)
    frames = FrameRules(kept, verdict, monotonic_ms=world.clock.monotonic_ms)
    stage = Stage(
        scenario=scenario,
        rng=rng,
        server=server,
        database_clock=clock,
        network=network,
        cluster=cluster,
        registrar=registrar,
        ledger=kept,
        verdict=verdict,
        transactions=TransactionRules(kept, verdict, monotonic_ms=world.clock.monotonic_ms),
        frames=frames,
        operator=SimulatedDatabase(server, dice=world.dice, client=operator_process.name, limits=SERVER_LIMITS),
        operator_process=operator_process,
        world=world,
        signing=registrar.signing(world),
        node_parts=NodeParts(
            network=network,
            registrar=registrar,
            folder=folder,
            gateways=gateways,
            rng=rng,
            new_process=cluster.new_process,
            rules=frames,
            seed=str(seed),
        ),
    )
    stage.transactions.told_events = frames.told_events
    server.on_commit = stage.committed
    return stage


def _drawn(rng: random.Random, bounds_ms: Range) -> Any:
    low, high = bounds_ms[0] / 1000, bounds_ms[1] / 1000
    return lambda: rng.uniform(low, high)


def _populate(stage: Stage) -> None:
    loop = asyncio.get_running_loop()
    fleet = stage.scenario.fleet
    for name in stage.node_parts.gateways:
        config = GatewayConfig(
            name=name,
            advertise_url=f"https://{name}",
            streams_max=fleet.streams_max,
            handshakes_per_s=fleet.handshakes_per_s,
            lease_in_thread=False,
        )
        stage.cluster.start_gateway(stage.cluster.add_gateway(config))
    for number in range(1, fleet.workers + 1):
        stage.cluster.start_worker(stage.cluster.add_worker(f"worker{number}"))
    for number in range(1, fleet.nodes + 1):
        joined = stage.registrar.join(f"n{number}")
        stage.nodes.append(FakeNode(joined, stage.node_parts, SimulatedClock(loop)))
    stage.frames.checks_signatures = {f"d{number}" for number in range(1, fleet.daemons + 1)}
    for number in range(1, fleet.daemons + 1):
        stage.nodes.append(BcdNode.make(f"d{number}", parts=stage.node_parts, clock=SimulatedClock(loop)))
    for node in stage.nodes:
        node.start()


async def _phases(stage: Stage) -> float | None:
    phases = stage.scenario.phases
    working = [
        stage.operator_process.spawn(work.enqueue_for_ever(stage)),
        stage.operator_process.spawn(work.events_for_ever(stage)),
        stage.operator_process.spawn(work.abandon_for_ever(stage)),
        stage.operator_process.spawn(work.specs_for_ever(stage)),
        stage.operator_process.spawn(work.attend_for_ever(stage)),
    ]
    await _while_sound(stage, asyncio.sleep(phases.calm_s))
    befalling = [asyncio.create_task(_befall(stage, plan)) for plan in stage.scenario.faults]
    await _while_sound(stage, asyncio.sleep(phases.faults_s))
    for task in (*befalling, *working):
        task.cancel()
    for came in await asyncio.gather(*befalling, *working, return_exceptions=True):
        if isinstance(came, Exception):
            raise Bug("what befalls the simulation, or works in it, has ended by itself") from came
    if stage.verdict.violations:
        return None
    stage.tell("no more faults")
    settled_s = await _settle(stage)
    if settled_s is not None:
        await proving.prove(stage)
    return settled_s


async def _while_sound(stage: Stage, lasting: Coroutine[Any, Any, None]) -> None:
    """Wait, and no longer once a promise was broken."""
    waiting = asyncio.ensure_future(lasting)
    while not waiting.done() and not stage.verdict.violations:
        await asyncio.wait({waiting}, timeout=1)
    waiting.cancel()


async def _befall(stage: Stage, plan: FaultPlan) -> None:
    """Let one kind of fault happen again and again. Whoever ends this ends the fault that is on, too."""
    fault = FAULTS[plan.kind]
    while True:
        await asyncio.sleep(stage.rng.expovariate(1 / plan.every_s))
        stage.faults[plan.kind] += 1
        # What was begun is undone, also when the phase is over meanwhile.
        running = asyncio.ensure_future(fault(stage, stage.rng.uniform(*plan.for_s)))
        stage.running_faults.add(running)
        running.add_done_callback(stage.running_faults.discard)
        await asyncio.shield(running)


async def _settle(stage: Stage) -> float | None:
    if stage.running_faults:
        await asyncio.wait(stage.running_faults)
    await operator_faults.unlock_all(stage)
    await operator_faults.undo_drains(stage)
    for node in stage.nodes:
        await stage.mend(node)
    return await settling.settle(stage, after="the last fault")


async def _bury(stage: Stage) -> None:
    """Put every process away, so that nothing of this run is left in the memory of the next."""
    stage.server.weather.down = True
    for running in stage.running_faults:
        running.cancel()
    tasks = [task for process in stage.cluster.processes for task in process.bury()]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(600):
            await asyncio.gather(*tasks, *stage.running_faults, return_exceptions=True)
