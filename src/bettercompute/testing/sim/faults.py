"""The faults: each befalls something drawn from the seed, stays for a while, and is over.

A fault returns what it did in words, or None where there was nothing to befall. It leaves the world able to recover by
itself: what was killed is started again, what was cut off is reachable again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from bettercompute.errors import BetterComputeError
from bettercompute.session.clock import BACKWARDS_ALLOWED_MS
from bettercompute.store import certificates, leases, nodes
from bettercompute.testing.sim.cluster import GatewayHost, WorkerHost
from bettercompute.testing.sim.network import Way
from bettercompute.testing.sim.node import Node
from bettercompute.testing.sim.stage import Stage
from bettercompute.testing.sim.weather import Fate

Fault = Callable[[Stage, float], Awaitable[None]]
DAY_MS = 86_400_000


async def gateway_crash(stage: Stage, for_s: float) -> None:
    """Kill a gateway and start it again."""
    host = _gateway(stage)
    if host is None:
        return
    stage.tell(f"{host.name} is killed, for {for_s:.1f} s")
    stage.cluster.kill_gateway(host)
    await asyncio.sleep(for_s)
    stage.cluster.start_gateway(host)


async def gateway_restart(stage: Stage, for_s: float) -> None:
    """Stop a gateway in order and start it again."""
    host = _gateway(stage)
    if host is None:
        return
    stage.tell(f"{host.name} is stopped, for {for_s:.1f} s")
    process = host.process
    try:
        async with asyncio.timeout(60):
            await stage.cluster.stop_gateway(host)
    except TimeoutError:
        stage.tell(f"{host.name} does not stop within 60 s")
        if host.process is process:
            stage.cluster.kill_gateway(host)
    await asyncio.sleep(for_s)
    if not host.up:
        stage.cluster.start_gateway(host)


async def gateway_pause(stage: Stage, for_s: float) -> None:
    """SIGSTOP a gateway, and SIGCONT it."""
    host = _gateway(stage)
    if host is None or host.process is None:
        return
    stage.tell(f"{host.name} is paused, for {for_s:.1f} s")
    process = host.process
    process.pause()
    stage.network.refresh()
    await asyncio.sleep(for_s)
    process.go_on()
    stage.network.refresh()


async def gateway_drain(stage: Stage, for_s: float) -> None:
    """Let an operator drain a gateway, and think better of it."""
    host = _gateway(stage)
    if host is None or host.gateway is None:
        return
    name = host.gateway.gateway_id
    stage.tell(f"{name} is to drain, for {for_s:.1f} s")
    try:
        await leases.request_drain(stage.operator, name=name, requested_by="operator")
    except BetterComputeError:
        return
    await asyncio.sleep(for_s)
    while True:
        try:
            await leases.undo_drain(stage.operator, name=name)
        except BetterComputeError:
            await asyncio.sleep(5)
        else:
            return


async def worker_crash(stage: Stage, for_s: float) -> None:
    """Kill a worker and start it again."""
    host = stage.rng.choice(stage.workers)
    if host.process is None:
        return
    stage.tell(f"{host.name} is killed, for {for_s:.1f} s")
    stage.cluster.kill_worker(host)
    await asyncio.sleep(for_s)
    stage.cluster.start_worker(host)


async def node_crash(stage: Stage, for_s: float) -> None:
    """Kill a node's daemon; its journal brings it back."""
    del for_s
    node = stage.rng.choice(stage.nodes)
    reboot = stage.rng.random() < 0.5
    stage.tell(f"{node.node_id} is killed and started again" + (", after a boot" if reboot else ""))
    node.restart(reboot=reboot)


async def node_pause(stage: Stage, for_s: float) -> None:
    """SIGSTOP a node's daemon."""
    node = stage.rng.choice(stage.nodes)
    process = node.process
    if process is None or process.paused:
        return
    stage.tell(f"{node.node_id} is paused, for {for_s:.1f} s")
    process.pause()
    stage.network.refresh()
    await asyncio.sleep(for_s)
    process.go_on()
    stage.network.refresh()


async def journal_lost(stage: Stage, for_s: float) -> None:
    """Lose a node's journal."""
    del for_s
    node = stage.rng.choice(stage.nodes)
    stage.tell(f"{node.node_id} loses its journal")
    node.lose_journal()


async def journal_rollback(stage: Stage, for_s: float) -> None:
    """Restore a node's disk as it was a while before."""
    node = _with_disk(stage)
    if node is None:
        return
    node.remember()
    await asyncio.sleep(for_s)
    stage.tell(f"{node.node_id} is rolled back to its disk of {for_s:.1f} s ago")
    stage.frames.copied_disk(node.node_id)
    node.roll_back()


async def disk_full(stage: Stage, for_s: float) -> None:
    """Fill a node's disk."""
    node = _with_disk(stage)
    if node is None:
        return
    stage.tell(f"the disk of {node.node_id} is full, for {for_s:.1f} s")
    node.fill_disk(True)
    await asyncio.sleep(for_s)
    node.fill_disk(False)


async def partition(stage: Stage, for_s: float) -> None:
    """Stop what one node and one gateway say to each other, in one direction or both."""
    node, host = stage.rng.choice(stage.nodes), stage.rng.choice(stage.gateways)
    directions = stage.rng.choice([(True,), (False,), (True, False)])
    await _blocked(stage, [Way(node.node_id, host.name, up) for up in directions], for_s)


async def gateway_partition(stage: Stage, for_s: float) -> None:
    """Cut a gateway off from all nodes, in one direction or both."""
    host = stage.rng.choice(stage.gateways)
    directions = stage.rng.choice([(True,), (False,), (True, False)])
    await _blocked(stage, [Way(node.node_id, host.name, up) for node in stage.nodes for up in directions], for_s)


async def _blocked(stage: Stage, ways: list[Way], for_s: float) -> None:
    stage.tell(f"nothing passes {ways[0]} and {len(ways) - 1} more, for {for_s:.1f} s")
    stage.network.block(ways)
    await asyncio.sleep(for_s)
    stage.network.unblock(ways)


async def connection_loss(stage: Stage, for_s: float) -> None:
    """Lose a node's connection, as a middlebox that forgets it."""
    del for_s
    node = stage.rng.choice(stage.nodes)
    stage.tell(f"{node.node_id} loses its connection")
    stage.network.cut(host=node.node_id)


async def network_slow(stage: Stage, for_s: float) -> None:
    """Make every message a hundred times later."""
    before = stage.network.latency_s
    stage.tell(f"the network is slow, for {for_s:.1f} s")
    stage.network.latency_s = lambda: 100 * before()
    await asyncio.sleep(for_s)
    stage.network.latency_s = before


async def database_restart(stage: Stage, for_s: float) -> None:
    """Lose every connection to the database, and refuse new ones for a while."""
    if stage.server.weather.down:
        return
    stage.tell(f"the database is down, for {for_s:.1f} s")
    stage.server.weather.down = True
    stage.server.restart()
    stage.transactions.outages.begins(stage.world.clock.monotonic_ms())
    await asyncio.sleep(for_s)
    stage.server.weather.down = False
    stage.transactions.outages.ends(stage.world.clock.monotonic_ms())


async def database_silent(stage: Stage, for_s: float) -> None:
    """Let the database answer nobody for a while."""
    if stage.server.weather.silent:
        return
    stage.tell(f"the database is silent, for {for_s:.1f} s")
    stage.server.weather.silent = True
    await asyncio.sleep(for_s)
    stage.server.weather.silent = False


async def database_slow(stage: Stage, for_s: float) -> None:
    """Make every way to the database a hundred times longer."""
    weather = stage.server.weather
    before = weather.latency_s
    stage.tell(f"the database is slow, for {for_s:.1f} s")
    weather.latency_s = lambda: 100 * before()
    await asyncio.sleep(for_s)
    weather.latency_s = before


async def lost_commits(stage: Stage, for_s: float) -> None:
    """Lose a share of the connections at the COMMIT, before it or after it: nobody knows which."""
    weather = stage.server.weather
    before = weather.fate
    share = stage.rng.uniform(0.02, 0.3)
    rng = stage.rng

    def fate(client: str) -> str:
        if client == stage.operator_process.name or rng.random() >= share:
            return before(client)
        stage.faults["commit-of-unknown-outcome"] += 1
        return rng.choice([Fate.LOST_BEFORE, Fate.LOST_AFTER])

    stage.tell(f"{share:.0%} of the commits have an unknown outcome, for {for_s:.1f} s")
    weather.fate = fate
    await asyncio.sleep(for_s)
    weather.fate = before


async def clock_step(stage: Stage, for_s: float) -> None:
    """Step the wall clock of a host by up to a day, and back."""
    hosts: list[Node | GatewayHost | WorkerHost] = [*stage.nodes, *stage.gateways, *stage.workers]
    host = stage.rng.choice(hosts)
    step_ms = int(stage.rng.uniform(-DAY_MS, DAY_MS))
    name = host.name if isinstance(host, GatewayHost | WorkerHost) else host.node_id
    stage.tell(f"the clock of {name} steps by {step_ms} ms, for {for_s:.1f} s")
    host.clock.wall_offset_ms += step_ms
    await asyncio.sleep(for_s)
    host.clock.wall_offset_ms -= step_ms


async def database_clock_step(stage: Stage, for_s: float) -> None:
    """Step the database's clock, by as much as daemons believe it when it steps back again."""
    if stage.database_clock.wall_offset_ms:
        return
    step_ms = int(stage.rng.uniform(-BACKWARDS_ALLOWED_MS, BACKWARDS_ALLOWED_MS))
    stage.tell(f"the database's clock steps by {step_ms} ms, for {for_s:.1f} s")
    stage.transactions.outages.doubted(stage.world.clock.monotonic_ms())
    stage.database_clock.wall_offset_ms += step_ms
    await asyncio.sleep(for_s)
    stage.database_clock.wall_offset_ms -= step_ms
    stage.transactions.outages.doubted(stage.world.clock.monotonic_ms())


async def clone(stage: Stage, for_s: float) -> None:
    """Run a copy of a node's disk beside it; whoever is revoked joins anew."""
    node = _with_disk(stage)
    if node is None:
        return
    stage.tell(f"{node.node_id} is cloned, for {for_s:.1f} s")
    twin = node.clone(f"{node.node_id}-clone{stage.faults['clone']}")
    stage.frames.copied_disk(node.node_id)
    await asyncio.sleep(for_s)
    twin.end()
    stage.frames.copied_disk(node.node_id)
    stage.mend(node)


async def revocation(stage: Stage, for_s: float) -> None:
    """Revoke a node's certificate; it joins anew later."""
    node = stage.rng.choice(stage.nodes)
    stage.tell(f"{node.node_id} is revoked, and joins anew after {for_s:.1f} s")
    try:
        async with stage.operator.transaction() as transaction:
            await nodes.lock_session(transaction, node_id=node.node_id)
            await certificates.revoke_generation(
                transaction, node_id=node.node_id, identity_generation=node.generation, reason="operator"
            )
    except BetterComputeError:
        return
    await asyncio.sleep(for_s)
    stage.mend(node)


def _with_disk(stage: Stage) -> Node | None:
    """Draw a node whose journal is on a disk."""
    having = [node for node in stage.nodes if node.has_disk]
    return stage.rng.choice(having) if having else None


def _gateway(stage: Stage) -> GatewayHost | None:
    """Draw a gateway whose process runs."""
    host = stage.rng.choice(stage.gateways)
    return host if host.up and host.process is not None and not host.process.paused else None


FAULTS: Mapping[str, Fault] = {
    "gateway-crash": gateway_crash,
    "gateway-restart": gateway_restart,
    "gateway-pause": gateway_pause,
    "gateway-drain": gateway_drain,
    "gateway-partition": gateway_partition,
    "worker-crash": worker_crash,
    "node-crash": node_crash,
    "node-pause": node_pause,
    "journal-lost": journal_lost,
    "partition": partition,
    "connection-loss": connection_loss,
    "network-slow": network_slow,
    "database-restart": database_restart,
    "database-silent": database_silent,
    "database-slow": database_slow,
    "lost-commits": lost_commits,
    "clock-step": clock_step,
    "database-clock-step": database_clock_step,
    "journal-rollback": journal_rollback,
    "disk-full": disk_full,
    "clone": clone,
    "revocation": revocation,
}
