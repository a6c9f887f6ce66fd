"""The other gateways, as their lease rows tell: whether one has room, and how full each is."""

from __future__ import annotations

import asyncio

import structlog

from bettercompute.errors import BetterComputeError
from bettercompute.session import opening
from bettercompute.session.handover import GatewayLoad
from bettercompute.store import leases
from bettercompute.store.database import Database

log = structlog.get_logger("bettercompute.gateway.neighbours")

POLL_S = 5.0
"""The counts in the rows are as old as a renewal."""


class Neighbours:
    """The live gateways beside one's own that take sessions."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._loads: dict[str, GatewayLoad] = {}

    def loads(self, *, own: str) -> tuple[GatewayLoad, ...]:
        """Return how full the others are; `own` is the gateway that asks."""
        return tuple(load for name, load in self._loads.items() if name != own)

    def room_elsewhere(self, *, own: str) -> bool:
        """Return whether another gateway has room for what this one refuses."""
        return any(
            opening.has_room(streams=load.sessions, streams_max=load.sessions_max) for load in self.loads(own=own)
        )

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            try:
                await self.read()
            except BetterComputeError as error:
                log.info("the other gateways' leases were not read", error=error.message)
            await asyncio.sleep(POLL_S)

    async def read(self) -> None:
        """Read the rows."""
        self._loads = {
            lease.name: GatewayLoad(sessions=lease.stream_count, sessions_max=lease.stream_limit)
            for lease in await leases.list_all(self._database)
            if lease.live and not lease.draining
        }
