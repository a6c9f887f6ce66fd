"""Liveness at the gateway: silent and expired sessions are closed, last-seen times flushed as ages.

A heartbeat writes nothing. Every 15 s one chunk of 500 nodes after the other is flushed; a node missing from a chunk
that committed has said Hello elsewhere, and its stream here ends ABORTED. See docs/sessions.md, "Liveness";
docs/gateway.md, "Liveness".
"""

from __future__ import annotations

import asyncio

import structlog

from bettercompute.errors import BetterComputeError, Unavailable
from bettercompute.gateway.fence import Fence
from bettercompute.gateway.metrics import GatewayMetrics
from bettercompute.gateway.registry import SessionRegistry
from bettercompute.gateway.session import LiveSession
from bettercompute.protocol.statuses import Reason
from bettercompute.session import epochs, liveness
from bettercompute.session.inputs import Tick, ZombieFound
from bettercompute.session.liveness import FlushRow
from bettercompute.store import sessions
from bettercompute.store.database import Database
from bettercompute.store.sessions import Lease, SessionKey
from bettercompute.world import World

log = structlog.get_logger("bettercompute.gateway.liveness")

# Sessions looked at before others get the loop: 5,000 at once would hold it for tens of milliseconds.
TICKS_PER_TURN = 200


class LivenessLoop:
    """Looks at every session of a gateway, twice per heartbeat interval."""

    def __init__(
        self,
        database: Database,
        *,
        lease: Lease,
        fence: Fence,
        registry: SessionRegistry,
        world: World,
        metrics: GatewayMetrics,
    ) -> None:
        self._database = database
        self._lease = lease
        self._fence = fence
        self._registry = registry
        self._world = world
        self._metrics = metrics
        self._flushed_at_ms = world.clock.monotonic_ms()

    def interval_ms(self) -> int:
        """Return the heartbeat interval to tell at Welcome, by the number of live sessions."""
        return liveness.heartbeat_interval_ms(len(self._registry))

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(liveness.check_period_ms(liveness.HEARTBEAT_INTERVAL_MS) / 1000)
            await self.look()

    async def look(self) -> None:
        """Give every session its tick, and flush when it is time."""
        for number, session in enumerate(self._registry, start=1):
            session.give(Tick())
            if number % TICKS_PER_TURN == 0:
                await asyncio.sleep(0)
        now_ms = self._world.clock.monotonic_ms()
        if now_ms - self._flushed_at_ms >= liveness.FLUSH_PERIOD_MS:
            self._flushed_at_ms = now_ms
            await self.flush()

    async def flush(self) -> None:
        """Write ages in sorted chunks, each a transaction of its own; end the zombies of those that committed."""
        now_ms = self._world.clock.monotonic_ms()
        live = {session.state.session_id: session for session in self._registry}
        rows = [
            FlushRow(
                node_id=session.node_id,
                epoch=session.state.epoch,
                session_id=session.state.session_id,
                age_ms=max(0, now_ms - session.state.last_heard_ms),
            )
            for session in live.values()
        ]
        for chunk in liveness.flush_chunks(rows):
            if not self._fence.trusted():
                return
            try:
                await self._flush_chunk(chunk, live)
            except Unavailable as error:
                if error.reason == Reason.FENCED:
                    return
                log.warning("last-seen times not flushed", nodes=len(chunk), error=error.message)
            except BetterComputeError:
                log.exception("last-seen times not flushed", nodes=len(chunk))

    async def _flush_chunk(self, chunk: tuple[FlushRow, ...], live: dict[str, LiveSession]) -> None:
        ages = [
            (SessionKey(node_id=row.node_id, session_id=row.session_id, epoch=row.epoch), row.age_ms) for row in chunk
        ]
        matched = await sessions.flush_last_seen(self._database, lease=self._lease, ages_ms=ages)
        absent = frozenset(epochs.zombies((row.node_id for row in chunk), matched=matched))
        for row in chunk:
            if row.node_id in absent:
                self._metrics.zombies.inc()
                live[row.session_id].give(ZombieFound())
