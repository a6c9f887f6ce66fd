"""The revocation feed: whom this gateway must not serve, known to every gateway within one liveness tick.

It holds the serials that are revoked and the nodes that an operator has locked or revoked. A change commits with the
time at which its transaction began, so the feed reads again what it has read of the last 60 s, and everything once a
minute: a row that committed late is never missed for longer. See docs/gateway.md, "Liveness"; decisions 0107, 0109 and
0125.
"""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from bettercompute.errors import BetterComputeError, Refused
from bettercompute.gateway.registry import SessionRegistry
from bettercompute.gateway.server_time import ServerTime
from bettercompute.gateway.session import LiveSession
from bettercompute.protocol import messages
from bettercompute.session import standing as standing_rules
from bettercompute.session.announcements import revocation_notice
from bettercompute.session.inputs import Locked, Revoked
from bettercompute.store import certificates, standing
from bettercompute.store.certificates import Revocation
from bettercompute.store.database import Database
from bettercompute.store.standing import NodeStanding
from bettercompute.world import World

log = structlog.get_logger("bettercompute.gateway.revocation")

POLL_S = 5.0
OVERLAP_MS = 60_000
RELOAD_MS = 60_000


class RevocationFeed:
    """The revoked, unexpired serials, and the nodes that are locked or revoked."""

    def __init__(self, database: Database, *, server_time: ServerTime, world: World) -> None:
        self._database = database
        self._server_time = server_time
        self._world = world
        self._serials: dict[str, Revocation] = {}
        self._nodes: dict[str, NodeStanding] = {}
        self._newest_ms = 0
        self._reloaded_at_ms: int | None = None
        self._read_at_ms: int | None = None
        self.first_read = asyncio.Event()
        self._woken = asyncio.Event()
        self._registry: SessionRegistry | None = None

    @property
    def loaded(self) -> bool:
        """Return whether the set has been read at least once."""
        return self.first_read.is_set()

    @property
    def age_ms(self) -> int | None:
        """Return how old the picture is; None: there is none yet."""
        return None if self._read_at_ms is None else self._world.clock.monotonic_ms() - self._read_at_ms

    def notice(self, serial: str) -> messages.RevocationNotice | None:
        """Return what the holder of a certificate that is known to be revoked is told; None when it is not."""
        row = self._serials.get(serial)
        return None if row is None else _notice(row)

    def locked(self, node_id: str) -> Refused | None:
        """Return the refusal of a node that is known to be locked; None when it is not, or no more."""
        found = self._nodes.get(node_id)
        now_ms = self._server_time.now_ms()
        lock = None if found is None else standing_rules.in_force(found.lock, now_ms=now_ms)
        if lock is None:
            return None
        return standing_rules.refuse_locked(node_id, lock, now_ms=now_ms, drawn=self._world.dice.uniform(0, 1))

    def attach(self, registry: SessionRegistry) -> None:
        """End the sessions of this registry when what they stand on is taken away."""
        self._registry = registry

    def look_at(self, session: LiveSession) -> None:
        """End a session whose certificate is known to be revoked, or whose node to be locked.

        A node's own revocation is not asked for: the Hello has just read it, and a re-join may have ended it since.
        """
        row = self._serials.get(session.state.certificate_serial)
        refused = self.locked(session.node_id)
        if row is not None:
            session.give(Revoked(_notice(row)))
        elif refused is not None:
            session.give(Locked(refused.message, refused.pushback_ms or 0))

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
        # The newest may lie ahead, written while the database's clock did: what comes now must not wait for that.
        newest_ms = min(self._newest_ms, self._server_time.now_ms())
        since_ms = 0 if whole else max(0, newest_ms - OVERLAP_MS)
        rows = await certificates.revoked_since(self._database, since_ms=since_ms)
        if whole:
            nodes = await standing.barred(self._database)
            self._serials, self._nodes = {}, {}
            self._reloaded_at_ms = now_ms
        else:
            nodes = await standing.changed_since(self._database, since_ms=since_ms)
        self._take(rows, nodes)
        self._read_at_ms = now_ms
        self.first_read.set()
        if self._registry is not None:
            self._end_sessions(self._registry, rows, nodes)

    def _end_sessions(self, registry: SessionRegistry, rows: list[Revocation], nodes: list[NodeStanding]) -> None:
        for row in rows:
            for session in registry.with_serial(row.serial):
                session.give(Revoked(_notice(row)))
        for one in nodes:
            found = registry.get(one.node_id)
            if found is None:
                continue
            if one.revocation is not None:
                notice = standing_rules.revoked_notice(one.node_id, one.revocation)
                notice.serials[:] = [found.state.certificate_serial]
                found.give(Revoked(notice))
            else:
                self.look_at(found)

    def _take(self, rows: list[Revocation], nodes: list[NodeStanding]) -> None:
        for row in rows:
            self._serials[row.serial] = row
            self._newest_ms = max(self._newest_ms, row.revoked_at_ms)
        for one in nodes:
            self._newest_ms = max(self._newest_ms, one.changed_at_ms)
            if one.lock is None and one.revocation is None:
                self._nodes.pop(one.node_id, None)
            else:
                self._nodes[one.node_id] = one


def _notice(row: Revocation) -> messages.RevocationNotice:
    return revocation_notice(
        serial=row.serial, node_id=row.node_id, reason=row.revocation_reason, kept=row.revocation_notice or b""
    )
