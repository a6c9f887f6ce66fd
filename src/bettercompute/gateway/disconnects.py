"""Epoch-fenced disconnect writes, in batches: a gateway that stops closes thousands of sessions at once.

A write that the database does not take now is tried again while the lease lasts, then given up: the row still names a
gateway, and the Liveness controller finds it stale. See docs/sessions.md, "Closing".
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from bettercompute import telemetry
from bettercompute.errors import BetterComputeError, Unavailable
from bettercompute.gateway.fence import Fence
from bettercompute.gateway.ingest import Ingest
from bettercompute.protocol.statuses import Reason
from bettercompute.store import sessions
from bettercompute.store.database import Database
from bettercompute.store.sessions import Disconnect, Lease, SessionKey
from bettercompute.world import World

log = structlog.get_logger("bettercompute.gateway.disconnects")

BATCH_MAX = 500
RETRY_S = 0.5
# Facts of the session come first, but a database that is away must not hold the end back for ever.
FACTS_WAIT_S = 12.0


@dataclass(frozen=True, slots=True)
class _Ending:
    key: SessionKey
    reason: str
    opening: int


class DisconnectWriter:
    """Writes the ends of sessions, after the facts they had queued."""

    def __init__(self, database: Database, *, lease: Lease, fence: Fence, ingest: Ingest, world: World) -> None:
        self._database = database
        self._lease = lease
        self._fence = fence
        self._ingest = ingest
        self._world = world
        self._ready: list[_Ending] = []
        self._waiting: set[asyncio.Task[None]] = set()
        self._woken = asyncio.Event()
        self._progress = asyncio.Event()
        self._writing = False

    def add(self, key: SessionKey, *, reason: str, opening: int) -> None:
        """Write a session's end as soon as its facts are settled."""
        ending = _Ending(key, reason, opening)
        if self._ingest.pending(key.node_id):
            task = asyncio.create_task(self._add_later(ending), name="disconnect-after-facts")
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)
        else:
            self._add_now(ending)

    async def _add_later(self, ending: _Ending) -> None:
        try:
            async with asyncio.timeout(FACTS_WAIT_S):
                await self._ingest.settled(ending.key.node_id)
        except TimeoutError:
            log.warning("disconnect written before its facts", node_id=ending.key.node_id)
        self._add_now(ending)

    def _add_now(self, ending: _Ending) -> None:
        self._ready.append(ending)
        self._woken.set()

    @property
    def idle(self) -> bool:
        """Return whether everything added has been written or given up."""
        return not self._ready and not self._waiting and not self._writing

    async def progress(self) -> None:
        """Wait until something has been written or given up."""
        self._progress.clear()
        await self._progress.wait()

    async def run(self) -> None:
        """Write until cancelled; ends that still wait for their facts are then given up."""
        try:
            while True:
                await self._woken.wait()
                self._woken.clear()
                while self._ready:
                    self._writing = True
                    try:
                        await self._write()
                    finally:
                        self._writing = False
                        self._progress.set()
        finally:
            waiting = [*self._waiting]
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _write(self) -> None:
        batch, self._ready = self._ready[:BATCH_MAX], self._ready[BATCH_MAX:]
        # One node may end twice within a batch; only the newest epoch can match, and a statement takes a row once.
        newest = {ending.key.node_id: ending for ending in sorted(batch, key=lambda ending: ending.key.epoch)}
        batch = [ending for ending in newest.values() if self._fence.holds(ending.opening)]
        while batch:
            try:
                await sessions.disconnect(
                    self._database,
                    lease=self._lease,
                    ends=[self._disconnect(ending) for ending in batch],
                    event_type=telemetry.EVENT_NODE_DISCONNECTED,
                )
            except Unavailable as error:
                if error.reason == Reason.FENCED:
                    return
                await asyncio.sleep(self._world.dice.uniform(RETRY_S / 2, RETRY_S))
                batch = [ending for ending in batch if self._fence.holds(ending.opening)]
            except BetterComputeError:
                log.exception("disconnects not written", nodes=len(batch))
                return
            else:
                return

    def _disconnect(self, ending: _Ending) -> Disconnect:
        return Disconnect(
            key=ending.key,
            reason=ending.reason,
            outbox_id=self._world.ids.uuid7(),
            payload={
                "nodeId": ending.key.node_id,
                "gatewayId": self._lease.gateway_id,
                "sessionId": ending.key.session_id,
                "epoch": ending.key.epoch,
                "reason": ending.reason,
            },
        )
