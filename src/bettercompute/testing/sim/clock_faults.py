"""Faults of clocks: the wall's set wrong, the monotonic one ahead or back, both of a host leaping together."""

from __future__ import annotations

import asyncio

from bettercompute.testing.sim.cluster import GatewayHost, WorkerHost
from bettercompute.testing.sim.node import Node
from bettercompute.testing.sim.stage import Stage

DAY_MS = 86_400_000


async def clock_step(stage: Stage, for_s: float) -> None:
    """Step the wall clock of a host by up to a day, and back."""
    host = stage.rng.choice(_hosts(stage))
    step_ms = int(stage.rng.uniform(-DAY_MS, DAY_MS))
    stage.tell(f"the clock of {_name(host)} steps by {step_ms} ms, for {for_s:.1f} s")
    host.clock.wall_offset_ms += step_ms
    await asyncio.sleep(for_s)
    host.clock.wall_offset_ms -= step_ms


async def host_clock_leap(stage: Stage, for_s: float) -> None:
    """Let both clocks of a host leap ahead together, as their one source does; somebody sets the wall's right later."""
    host = stage.rng.choice(_hosts(stage))
    leap_ms = int(stage.rng.uniform(0, DAY_MS))
    stage.tell(f"both clocks of {_name(host)} leap by {leap_ms} ms; the wall's is set right after {for_s:.1f} s")
    host.clock.leapt_ms += leap_ms
    host.clock.wall_offset_ms += leap_ms
    await asyncio.sleep(for_s)
    host.clock.wall_offset_ms -= leap_ms


async def monotonic_leap(stage: Stage, for_s: float) -> None:
    """Let the monotonic clock of a host leap ahead by up to a day, for good."""
    del for_s
    host = stage.rng.choice(_hosts(stage))
    leap_ms = int(stage.rng.uniform(0, DAY_MS))
    stage.tell(f"the monotonic clock of {_name(host)} leaps by {leap_ms} ms")
    host.clock.leapt_ms += leap_ms


async def monotonic_back(stage: Stage, for_s: float) -> None:
    """Let the monotonic clock of a host step back by up to a day, for good, as under another kernel."""
    del for_s
    host = stage.rng.choice(_hosts(stage))
    back_ms = int(stage.rng.uniform(0, DAY_MS))
    stage.tell(f"the monotonic clock of {_name(host)} steps back by {back_ms} ms")
    host.clock.leapt_ms -= back_ms


def _hosts(stage: Stage) -> list[Node | GatewayHost | WorkerHost]:
    return [*stage.nodes, *stage.gateways, *stage.workers]


def _name(host: Node | GatewayHost | WorkerHost) -> str:
    return host.name if isinstance(host, GatewayHost | WorkerHost) else host.node_id
