"""The revocation feed: which serials are revoked, known to every gateway within one liveness tick.

A revocation commits with the time at which its transaction began, so the feed reads again what it has read of the last
60 s, and everything once a minute: a row that committed late is never missed for longer. See decisions 0107 and 0109.
"""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from bettercompute.errors import BetterComputeError
from bettercompute.gateway.registry import SessionRegistry
from bettercompute.protocol import messages
from bettercompute.session.announcements import revocation_notice
from bettercompute.session.inputs import Revoked
from bettercompute.store import certificates
from bettercompute.store.certificates import Revocation
from bettercompute.store.database import Database
from bettercompute.world import World

log = structlog.get_logger("bettercompute.gateway.revocation")

POLL_S = 5.0
OVERLAP_MS = 60_000
RELOAD_MS = 60_000


class RevocationFeed:
    """The set of revoked, unexpired serials."""

    def __init__(self, database: Database, *, world: World) -> None:
        self._database = database
        self._world = world
        self._serials: dict[str, Revocation] = {}
        self._newest_ms = 0
        self._reloaded_at_ms: int | None = None
        self.first_read = asyncio.Event()
        self._woken = asyncio.Event()
        self._registry: SessionRegistry | None = None

    @property
    def loaded(self) -> bool:
        """Return whether the set has been read at least once."""
        return self.first_read.is_set()

    def notice(self, serial: str) -> messages.RevocationNotice | None:
        """Return what the holder of a certificate that is known to be revoked is told; None when it is not."""
        row = self._serials.get(serial)
        return None if row is None else _notice(row)

    def attach(self, registry: SessionRegistry) -> None:
        """End the sessions of this registry when their certificate is revoked."""
        self._registry = registry

    def poke(self) -> None:
        """Read again now."""
        self._woken.set()

    async def run(self) -> None:
        """Read until cancelled, every 5 s and when poked."""
        while True:
            try:
                await self.read()
            except BetterComputeError as error:
                log.warning("revocations not read", error=error.message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._woken.wait()
            self._woken.clear()

    async def read(self) -> None:
        """Read what is new, or everything when the last whole reading is a minute old; end the sessions concerned."""
        now_ms = self._world.clock.monotonic_ms()
        whole = self._reloaded_at_ms is None or now_ms - self._reloaded_at_ms >= RELOAD_MS
        since_ms = 0 if whole else max(0, self._newest_ms - OVERLAP_MS)
        rows = await certificates.revoked_since(self._database, since_ms=since_ms)
        if whole:
            self._serials = {}
            self._reloaded_at_ms = now_ms
        for row in rows:
            self._serials[row.serial] = row
            self._newest_ms = max(self._newest_ms, row.revoked_at_ms)
        self.first_read.set()
        if self._registry is not None:
            for row in rows:
                for session in self._registry.with_serial(row.serial):
                    session.give(Revoked(_notice(row)))


def _notice(row: Revocation) -> messages.RevocationNotice:
    return revocation_notice(
        serial=row.serial, node_id=row.node_id, reason=row.revocation_reason, kept=row.revocation_notice or b""
    )
