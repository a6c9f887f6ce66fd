"""The controllers of a worker process, poked by the database's notifications."""

from __future__ import annotations

import asyncio
import contextlib

import structlog
from prometheus_client import CollectorRegistry

from bettercompute.controllers import attestation, node_spec, outbox
from bettercompute.controllers.attestation import AttestationController
from bettercompute.controllers.expiry import ExpiryController
from bettercompute.controllers.liveness import LivenessController
from bettercompute.controllers.loop import Controllers
from bettercompute.controllers.node_spec import NodeSpecController
from bettercompute.controllers.outbox import OutboxController
from bettercompute.controllers.retention import DEFAULT_KEEP, Keep, RetentionController
from bettercompute.errors import BetterComputeError
from bettercompute.store import channels
from bettercompute.store.database import Database, DedicatedConnection
from bettercompute.store.signing import Signing
from bettercompute.world import World

log = structlog.get_logger("bettercompute.controllers")

RECONNECT_S = 2.0
PROBE_S = 20.0


class Worker:
    """All controllers, started and stopped together."""

    def __init__(
        self,
        database: Database,
        *,
        world: World,
        holder: str,
        keep: Keep = DEFAULT_KEEP,
        signing: Signing | None = None,
        registry: CollectorRegistry | None = None,
        trust_domain: str | None = None,
    ) -> None:
        """Put them together; `holder` names this process in what they leave behind."""
        self._database = database
        self._world = world
        self._holder = holder
        self._listening: asyncio.Task[None] | None = None
        self.controllers = Controllers(
            [
                OutboxController(database),
                ExpiryController(database, world=world),
                LivenessController(database, world=world, holder=holder),
                NodeSpecController(database, world=world, signing=signing),
                AttestationController(database, world=world, registry=registry, trust_domain=trust_domain),
                RetentionController(database, keep=keep),
            ],
            world=world,
        )

    def start(self) -> None:
        """Start every controller."""
        self.controllers.start()
        self._listening = asyncio.create_task(self._listen(), name="controllers-notifications")

    async def stop(self) -> None:
        """Stop every controller."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        await self.controllers.stop()

    async def _listen(self) -> None:
        while True:
            try:
                connection = await self._database.dedicated(application_name=f"{self._holder} controllers")
                try:
                    await connection.listen(channels.OUTBOX, lambda _: self._poke_for_ends())
                    await connection.listen(channels.NODES, lambda _: self.controllers.poke(node_spec.NAME))
                    await self._watch(connection)
                finally:
                    await connection.close()
            except (BetterComputeError, TimeoutError) as error:
                log.warning("notifications are away: controllers poll", error=str(error))
            await asyncio.sleep(self._world.dice.uniform(0, RECONNECT_S))

    def _poke_for_ends(self) -> None:
        """An event was written: publish it; and it may tell of a command's end, which may need a look."""
        self.controllers.poke(outbox.NAME)
        self.controllers.poke(attestation.NAME)

    async def _watch(self, connection: DedicatedConnection) -> None:
        """Return when the connection is lost, or does not answer."""
        while not connection.lost.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_S):
                    await connection.lost.wait()
            async with asyncio.timeout(PROBE_S):
                await connection.query("SELECT 1")
