"""Has sessions come anew for a trust bundle that was published after their Welcome.

A bundle travels in Welcome, so a node that stays connected would hear of a new one only at its next renewal, up to 16
hours later. When a newer one is published its gateway asks, paced like a drain, each session that was told an older one
to reconnect. A daemon that refuses the bundle is asked once and left alone. See docs/rotation.md, "How nodes hear";
decisions 0132.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

import structlog

from bettercompute.gateway.config import GatewayConfig
from bettercompute.gateway.metrics import GatewayMetrics
from bettercompute.gateway.session import LiveSession
from bettercompute.gateway.trust import PublishedTrust
from bettercompute.session import handover
from bettercompute.session.inputs import DrainRequested
from bettercompute.world import World

log = structlog.get_logger("bettercompute.gateway.trust_refresh")

REASON = "trust"
TURN_S = 0.1
# A Hello that read the last version may still have been under way.
LOOK_AGAIN_S = 60.0


class TrustRefresh:
    """Asks the sessions of this gateway, whichever id it has."""

    def __init__(
        self,
        trust: PublishedTrust,
        *,
        sessions: Callable[[], Iterable[LiveSession]],
        config: GatewayConfig,
        world: World,
        metrics: GatewayMetrics,
    ) -> None:
        self._trust = trust
        self._sessions = sessions
        self._config = config
        self._world = world
        self._metrics = metrics

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            self._trust.renewed.clear()
            await self._ask_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self._trust.renewed.wait()

    async def _ask_all(self) -> None:
        behind = self._behind()
        if not behind:
            return
        log.info("asking sessions to come for a newer trust bundle", sessions=len(behind), version=self._trust.version)
        at_once = max(1, int(handover.drain_per_s(self._config.handshakes_per_s) * TURN_S))
        for first in range(0, len(behind), at_once):
            for session in behind[first : first + at_once]:
                self._ask(session)
            await asyncio.sleep(TURN_S)

    def _behind(self) -> list[LiveSession]:
        version = self._trust.version
        return [session for session in self._sessions() if _heard_of(session) < version]

    def _ask(self, session: LiveSession) -> None:
        if session.ending is None and session.state.drain_at_ms is None and _heard_of(session) < self._trust.version:
            delay_ms = round(self._world.dice.uniform(0, handover.RECONNECT_AFTER_MS))
            session.give(DrainRequested(reconnect_after_ms=delay_ms, reason=REASON))
            self._metrics.handed_over.labels(reason=REASON).inc()


def _heard_of(session: LiveSession) -> int:
    return max(session.state.trust_version, session.state.trust_offered)
