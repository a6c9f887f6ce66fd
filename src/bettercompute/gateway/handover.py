"""Hands sessions over by Drain frames: all of them while the gateway drains, some while it holds more than its share.

How many and how fast is `session.handover`'s. Here they are chosen at random and asked one after another, spread over
time. Whoever is asked ends its stream in order within seconds, which is written as a disconnect: to the next gateway it
is no duplicate. See docs/gateway.md, "Handing over".
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

import structlog

from bettercompute.gateway.config import GatewayConfig
from bettercompute.gateway.metrics import GatewayMetrics
from bettercompute.gateway.registry import SessionRegistry
from bettercompute.gateway.session import LiveSession
from bettercompute.session import handover
from bettercompute.session.handover import GatewayLoad, Rebalance
from bettercompute.session.inputs import DrainRequested
from bettercompute.world import World

log = structlog.get_logger("bettercompute.gateway.handover")

# Frames of one turn of the loop: a timer for each would be the larger cost.
TURN_S = 0.05
IDLE_S = 0.5
DRAINING = "draining"
REBALANCE = "rebalance"


class Handover:
    """Gives away the sessions of one gateway id."""

    def __init__(
        self,
        registry: SessionRegistry,
        *,
        others: Callable[[], tuple[GatewayLoad, ...]],
        admitting: Callable[[], bool],
        config: GatewayConfig,
        world: World,
        metrics: GatewayMetrics,
    ) -> None:
        self._registry = registry
        self._others = others
        self._admitting = admitting
        self._config = config
        self._world = world
        self._metrics = metrics
        self._draining = False
        self._changed = asyncio.Event()
        self._memory = Rebalance()
        self._asked: dict[str, str] = {}

    @property
    def giving(self) -> bool:
        """Return whether the last look found that this gateway holds more than its share."""
        return self._memory.giving

    @property
    def draining(self) -> bool:
        """Return whether everything is to be given away, and nothing taken."""
        return self._draining

    def drain(self, wanted: bool) -> None:
        """Begin to drain, or end it: who has been asked goes nevertheless."""
        if wanted != self._draining:
            self._draining = wanted
            log.info("drain begins" if wanted else "drain undone", sessions=len(self._registry))
            self._changed.set()

    async def run(self) -> None:
        """Hand over until cancelled."""
        while True:
            if self._draining:
                await self._drain_turn()
            else:
                await self._look()

    async def _drain_turn(self) -> None:
        """Ask everybody who has not been asked yet; some may still come in, whose Hello began before the drain."""
        going = self._draw(len(self._registry))
        rate_per_s = handover.drain_per_s(self._config.handshakes_per_s)
        at_once = max(1, int(rate_per_s * TURN_S))
        for first in range(0, len(going), at_once):
            self._ask(going[first : first + at_once], reason=DRAINING)
            if not await self._pause(at_once / rate_per_s):
                return
        await self._pause(IDLE_S)

    async def _look(self) -> None:
        """Decide for the time until the next look, and ask as many as that says, evenly spread."""
        period_s = self._config.rebalance_every_ms / 1000
        chosen = self._draw(self._decide()) if self._admitting() else []
        self._asked = {session.node_id: session.state.session_id for session in chosen}
        if chosen:
            log.info("handing sessions over", sessions=len(chosen), of=len(self._registry), seconds=period_s)
        for session in chosen:
            if not await self._pause(period_s / (len(chosen) + 1)):
                return
            self._ask([session], reason=REBALANCE)
        await self._pause(period_s / (len(chosen) + 1))

    def _decide(self) -> int:
        staying = sum(session.state.drain_at_ms is None for session in self._registry)
        own = GatewayLoad(sessions=staying, sessions_max=self._config.streams_max)
        self._memory, count = handover.look(
            self._memory, own=own, others=self._others(), returned=sum(1 for _ in self._returned())
        )
        return count

    def _returned(self) -> Iterable[str]:
        for node_id, session_id in self._asked.items():
            session = self._registry.get(node_id)
            if session is not None and session.state.session_id != session_id:
                yield node_id

    def _draw(self, count: int) -> list[LiveSession]:
        """Return so many sessions that have not been asked yet, at random."""
        if not count:
            return []
        may_go = [session for session in self._registry if session.state.drain_at_ms is None]
        may_go.sort(key=lambda _: self._world.dice.uniform(0, 1))
        return may_go[:count]

    def _ask(self, sessions: Iterable[LiveSession], *, reason: str) -> None:
        for session in sessions:
            if session.ending is None:
                delay_ms = round(self._world.dice.uniform(0, handover.RECONNECT_AFTER_MS))
                session.give(DrainRequested(reconnect_after_ms=delay_ms, reason=reason))
                self._metrics.handed_over.labels(reason=reason).inc()

    async def _pause(self, seconds: float) -> bool:
        """Wait; return whether nothing changed meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
            self._changed.clear()
            return False
        return True
