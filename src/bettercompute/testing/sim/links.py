"""Simulated connections to the database, in the shape of asyncpg's, and the pool that production code opens on them."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any, cast

from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store.database import (
    CLIENT_GRACE_MS,
    CONNECT_TIMEOUT_MS,
    POOL_SIZE,
    Database,
    DedicatedConnection,
    Row,
)
from bettercompute.store.limits import NO_LIMITS, Limits
from bettercompute.testing.sim.postgres import SimulatedServer
from bettercompute.testing.sim.process import PROCESS
from bettercompute.testing.sim.weather import Fate
from bettercompute.world import Dice

# What a client waits that has set no timeout: TCP's own patience is longer than any scenario's fault.
SILENCE_S = 900.0


class Link:
    """One simulated connection to the server, in the shape of asyncpg's."""

    def __init__(self, server: SimulatedServer, *, client: str, timeout_s: float | None) -> None:
        self.client = client
        self.lost = False
        self._server = server
        self._timeout_s = timeout_s
        self._terminated: list[Callable[[Any], None]] = []
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self.process = PROCESS.get()
        self._number = server.enter(self)

    # asyncpg's names

    def add_termination_listener(self, listener: Callable[[Any], None]) -> None:
        """Call `listener` once the connection is lost."""
        self._terminated.append(listener)

    async def add_listener(self, channel: str, listener: Callable[..., None]) -> None:
        """LISTEN."""
        await self.travel()
        self._server.listen(self._number, channel, self, lambda payload: listener(self, 0, channel, payload))

    async def fetch(self, sql: str, *arguments: Any) -> list[Row]:
        """Run a statement: inside a transaction at once, else as one of its own, with its latencies and its fate."""
        if self._server.inside(self):
            return self._server.run(self, sql, arguments)
        await self.travel()
        fate = self._server.weather.fate(self.client)
        if fate == Fate.LOST_BEFORE:
            raise self.break_off("before its statement")
        rows = self._server.run(self, sql, arguments)
        if fate == Fate.LOST_AFTER:
            raise self.break_off("after its statement")
        await self.travel()
        return rows

    async def execute(self, sql: str) -> None:
        """Run a statement without arguments."""
        await self.fetch(sql)

    def transaction(self) -> LinkTransaction:
        """Return a transaction to start."""
        return LinkTransaction(self, self._server)

    async def close(self, *, timeout: float | None = None) -> None:
        """Close."""
        del timeout
        self.terminate()

    def terminate(self) -> None:
        """Close at once."""
        self.lost = True
        self._server.leave(self._number)

    # The way to the server

    async def travel(self) -> None:
        """Take the time of one way, or fail."""
        weather = self._server.weather
        if not self.lost and not weather.down and not weather.silent:
            await asyncio.sleep(weather.latency_s())
        if weather.silent and not self.lost:
            await asyncio.sleep(self._timeout_s if self._timeout_s is not None else SILENCE_S)
            raise TimeoutError("the server does not answer")
        if self.lost or weather.down:
            raise self.break_off("on the way")

    def break_off(self, where: str) -> OSError:
        """Lose the connection and return the error that its user sees."""
        self.lose()
        return ConnectionResetError(f"the connection was lost {where}")

    def lose(self) -> None:
        """Lose the connection: its user is told at the next use, and whoever listens for it now."""
        if not self.lost:
            self.terminate()
            for listener in self._terminated:
                self._loop.call_soon(listener, self, context=self._context)

    def hear(self, listener: Callable[[str], None], payload: str) -> None:
        """Bring a notification, which takes its time and may find nobody any more."""
        if not self._server.weather.silent:
            latency_s = self._server.weather.latency_s()
            self._loop.call_later(latency_s, self._heard, listener, payload, context=self._context)

    def _heard(self, listener: Callable[[str], None], payload: str) -> None:
        if not self.lost:
            listener(payload)


class LinkTransaction:
    """One transaction, in the shape of asyncpg's."""

    def __init__(self, link: Link, server: SimulatedServer) -> None:
        self._link = link
        self._server = server

    async def start(self) -> None:
        """Travel, then begin: from here to the end nothing else happens in the simulation."""
        await self._link.travel()
        self._server.begin(self._link)

    async def commit(self) -> None:
        """Commit, or lose the connection before or after it."""
        fate = self._server.weather.fate(self._link.client)
        self._server.end(self._link, commit=fate != Fate.LOST_BEFORE)
        if fate != Fate.FINE:
            raise self._link.break_off("at its COMMIT")
        await self._link.travel()

    async def rollback(self) -> None:
        """Roll back."""
        self._server.end(self._link, commit=False)


class SimulatedPool:
    """What `Database` needs of an asyncpg pool: links that are kept while nobody uses them."""

    def __init__(self, server: SimulatedServer, *, client: str, limits: Limits) -> None:
        self._server = server
        self._client = client
        self._limits = limits
        self._idle: list[Link] = []

    async def acquire(self) -> Link:
        """Return a link, new or used before."""
        while self._idle:
            link = self._idle.pop()
            if not link.lost:
                return link
        return await connect(self._server, client=self._client, limits=self._limits)

    async def release(self, link: Link, *, timeout: float) -> None:
        """Take a link back."""
        del timeout
        if not link.lost:
            self._idle.append(link)

    async def close(self) -> None:
        """Close."""
        self.terminate()

    def terminate(self) -> None:
        """Close at once."""
        for link in self._idle:
            link.terminate()


async def connect(server: SimulatedServer, *, client: str, limits: Limits) -> Link:
    """Open a link, or fail as connecting fails."""
    timeout_ms = limits.statement_timeout_ms
    link = Link(server, client=client, timeout_s=None if timeout_ms is None else (timeout_ms + CLIENT_GRACE_MS) / 1000)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_MS / 1000):
            await link.travel()
            await link.travel()
    except BaseException:
        link.terminate()
        raise
    return link


class SimulatedDatabase(Database):
    """The production pool of connections, on simulated ones."""

    def __init__(
        self,
        server: SimulatedServer,
        *,
        dice: Dice,
        client: str,
        pool_size: int = POOL_SIZE,
        limits: Limits = NO_LIMITS,
    ) -> None:
        pool = SimulatedPool(server, client=client, limits=limits)
        super().__init__(cast("Any", pool), dsn="simulated", dice=dice, pool_size=pool_size)
        self._server = server
        self._client = client

    async def dedicated(self, *, application_name: str, limits: Limits = NO_LIMITS) -> DedicatedConnection:
        """Connect outside the pool."""
        del application_name
        try:
            link = await connect(self._server, client=self._client, limits=limits)
        except (OSError, TimeoutError) as error:
            raise refuse(Reason.DATABASE, f"the database cannot be reached: {error}") from error
        return DedicatedConnection(cast("Any", link))
