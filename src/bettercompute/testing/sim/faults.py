"""The faults: each befalls something drawn from the seed, stays for a while, and is over.

A fault returns what it did in words, or None where there was nothing to befall. It leaves the world able to recover by
itself: what was killed is started again, what was cut off is reachable again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping

from bettercompute.errors import BetterComputeError
from bettercompute.store import leases
from bettercompute.testing.sim import clock_faults, database_faults, node_faults, operator_faults
from bettercompute.testing.sim.cluster import GatewayHost
from bettercompute.testing.sim.network import Way
from bettercompute.testing.sim.stage import Stage

Fault = Callable[[Stage, float], Awaitable[None]]


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
    with contextlib.suppress(BetterComputeError):  # it may hold although nobody heard so: undone in any case
        await leases.request_drain(stage.operator, name=name, requested_by="operator")
    await asyncio.sleep(for_s)
    await operator_faults.undo_drain(stage, name)


async def worker_crash(stage: Stage, for_s: float) -> None:
    """Kill a worker and start it again."""
    host = stage.rng.choice(stage.workers)
    if host.process is None:
        return
    stage.tell(f"{host.name} is killed, for {for_s:.1f} s")
    stage.cluster.kill_worker(host)
    await asyncio.sleep(for_s)
    stage.cluster.start_worker(host)


async def worker_pause(stage: Stage, for_s: float) -> None:
    """SIGSTOP a worker, and SIGCONT it: what it has read is old by then, and another one may have gone on."""
    host = stage.rng.choice(stage.workers)
    process = host.process
    if process is None or process.paused:
        return
    stage.tell(f"{host.name} is paused, for {for_s:.1f} s")
    process.pause()
    await asyncio.sleep(for_s)
    process.go_on()


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
    "worker-pause": worker_pause,
    "node-crash": node_faults.node_crash,
    "node-pause": node_faults.node_pause,
    "journal-lost": node_faults.journal_lost,
    "journal-rollback": node_faults.journal_rollback,
    "journal-damage": node_faults.journal_damage,
    "disk-full": node_faults.disk_full,
    "clone": node_faults.clone,
    "revocation": node_faults.revocation,
    "services-away": node_faults.services_away,
    "partition": partition,
    "connection-loss": connection_loss,
    "network-slow": network_slow,
    "database-restart": database_faults.database_restart,
    "database-standby": database_faults.database_standby,
    "database-failover": database_faults.database_failover,
    "database-restored": database_faults.database_restored,
    "database-silent": database_faults.database_silent,
    "database-slow": database_faults.database_slow,
    "lost-commits": database_faults.lost_commits,
    "second-daemon": node_faults.second_daemon,
    "node-locked": operator_faults.node_locked,
    "node-revoked": operator_faults.node_revoked,
    "node-forgotten": operator_faults.node_forgotten,
    "unsigned-intent": operator_faults.unsigned_intent,
    "clock-step": clock_faults.clock_step,
    "host-clock-leap": clock_faults.host_clock_leap,
    "monotonic-leap": clock_faults.monotonic_leap,
    "monotonic-back": clock_faults.monotonic_back,
    "database-clock-step": database_faults.database_clock_step,
}
