"""Notifications of the database: hints on a connection of their own, never the only way to learn something.

While the connection is away nothing is heard; when it is back everything is looked at once, and the polls run anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog

from bettercompute.errors import BetterComputeError, Unavailable
from bettercompute.store.database import Database, DedicatedConnection
from bettercompute.world import World

log = structlog.get_logger("bettercompute.gateway.listen")

FIRST_RETRY_S = 0.25
LAST_RETRY_S = 5.0
# A dead peer shows on this connection only when something is sent over it.
PROBE_S = 20.0


class NotificationListener:
    """Keeps a LISTEN connection open and calls back for each notification."""

    def __init__(
        self,
        database: Database,
        *,
        application_name: str,
        channels: Mapping[str, Callable[[str], None]],
        connected: Callable[[], None],
        world: World,
    ) -> None:
        """Call `channels[channel](payload)` for each notification, `connected` whenever some may have been missed."""
        self._database = database
        self._application_name = application_name
        self._channels = channels
        self._connected = connected
        self._world = world

    async def run(self) -> None:
        """Listen until cancelled."""
        retry_s = FIRST_RETRY_S
        while True:
            try:
                connection = await self._database.dedicated(application_name=self._application_name)
            except BetterComputeError as error:
                log.warning("notifications are away", error=error.message)
                await asyncio.sleep(self._world.dice.uniform(retry_s / 2, retry_s))
                retry_s = min(LAST_RETRY_S, retry_s * 2)
                continue
            try:
                for channel, listener in self._channels.items():
                    await connection.listen(channel, listener)
                self._connected()
                retry_s = FIRST_RETRY_S
                await self._watch(connection)
            except BetterComputeError as error:
                log.warning("notifications are away", error=error.message)
            finally:
                await connection.close()
            await asyncio.sleep(self._world.dice.uniform(0, retry_s))

    async def _watch(self, connection: DedicatedConnection) -> None:
        while not connection.lost.is_set():
            try:
                async with asyncio.timeout(PROBE_S):
                    await connection.lost.wait()
            except TimeoutError:
                await self._probe(connection)

    async def _probe(self, connection: DedicatedConnection) -> None:
        try:
            async with asyncio.timeout(PROBE_S):
                await connection.query("SELECT 1")
        except TimeoutError:
            raise Unavailable(
                f"the database does not answer on the connection of notifications since {PROBE_S} s"
            ) from None
