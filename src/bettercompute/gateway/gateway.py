"""The gateway put together: one listener, and under it one life after another, each with an id of its own.

`Gateway(config, database=..., services=..., world=..., tls=...)`, then `start()` and `stop()`. A life whose lease was
retired is dropped and a new one begins under a new id, on the same listener. The handshake bucket, the revocation
feed and the trust bundle belong to the process, not to an id.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import structlog

from bettercompute.errors import BetterComputeError
from bettercompute.gateway.accept import Acceptor
from bettercompute.gateway.config import GatewayConfig
from bettercompute.gateway.lease import draw_name
from bettercompute.gateway.life import GatewayLife
from bettercompute.gateway.listen import NotificationListener
from bettercompute.gateway.metrics import GatewayMetrics
from bettercompute.gateway.revocation import RevocationFeed
from bettercompute.gateway.server_time import ServerTime
from bettercompute.gateway.services import GatewayServices
from bettercompute.gateway.trust import PublishedTrust
from bettercompute.session import opening
from bettercompute.session.inputs import DrainRequested
from bettercompute.store import channels, leases, sessions
from bettercompute.store.database import Database
from bettercompute.transport.streams import Handler, serve
from bettercompute.world import World

log = structlog.get_logger("bettercompute.gateway")

ROOM_POLL_S = 5.0
STOP_DRAIN_MS = 2_000


class Listener(Protocol):
    """Where calls come in: `transport.streams.Server` or its twin in memory."""

    def announce_close(self) -> None:
        """Take no new connections."""
        ...

    async def close(self, *, drain_ms: int | None = None) -> None:
        """Close, giving open calls a moment to end."""
        ...


class Gateway:
    """One gateway process's gateway."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        database: Database,
        services: GatewayServices,
        world: World,
        tls: Callable[[], ssl.SSLContext] | None,
        metrics: GatewayMetrics | None = None,
    ) -> None:
        """Put a gateway together; nothing runs yet.

        `database` is opened with `GATEWAY_LIMITS`. `tls` is asked for the context of each connection; None starts no
        listener: calls then come through `handler`, in memory.
        """
        self.config = config
        self.metrics = metrics or GatewayMetrics()
        self.server_time = ServerTime(world.clock)
        self.revocations = RevocationFeed(database, world=world)
        self.trust = PublishedTrust(services)
        self._database = database
        self._world = world
        self._tls = tls
        self._life: GatewayLife | None = None
        self._new_lives = asyncio.Event()
        self._room_elsewhere = False
        self._listener: Listener | None = None
        self._port = config.port
        self._tasks: list[asyncio.Task[None]] = []
        self._acceptor = Acceptor(
            self,
            config=config,
            database=database,
            services=services,
            world=world,
            revocations=self.revocations,
            trust=self.trust,
            server_time=self.server_time,
            metrics=self.metrics,
        )

    @property
    def life(self) -> GatewayLife | None:
        """Return the present life, None between two."""
        return self._life

    @property
    def room_elsewhere(self) -> bool:
        """Return whether another live gateway has room for the streams that this one refuses."""
        return self._room_elsewhere

    @property
    def handler(self) -> Handler:
        """Return what serves a call."""
        return self._acceptor.handle

    @property
    def port(self) -> int:
        """Return the port that is listened on."""
        return self._port

    @property
    def gateway_id(self) -> str:
        """Return the present id, empty between two."""
        return "" if self._life is None else self._life.name.gateway_id

    @property
    def ready(self) -> bool:
        """Return whether sessions are admitted: what a readiness probe asks."""
        return self._life is not None and self._life.fence.admitting() and not self._life.draining

    @property
    def session_count(self) -> int:
        """Return how many sessions are live here."""
        return 0 if self._life is None else len(self._life.registry)

    async def start(self) -> None:
        """Listen, take up a lease, and serve. Returns once the listener is open; `until_ready` waits for the lease."""
        if self._tls is not None:
            server = await serve(
                self.handler, host=self.config.host, port=self.config.port, tls=self._tls, world=self._world
            )
            self._listener = server
            self._port = server.port
        listener = NotificationListener(
            self._database.dsn,
            application_name=f"{self.config.name} notifications",
            channels={
                channels.DISPATCH: self._on_dispatch,
                channels.REVOCATIONS: lambda _: self.revocations.poke(),
                channels.TRUST: lambda _: self.trust.poke(),
            },
            connected=self._on_connected,
            world=self._world,
        )
        await self.trust.read()
        self._life = self._new_life()
        for name, work in (
            ("lives", self._live()),
            ("revocations", self.revocations.run()),
            ("trust", self.trust.run()),
            ("notifications", listener.run()),
            ("room", self._watch_room()),
        ):
            self._tasks.append(asyncio.create_task(work, name=f"gateway-{name}"))

    async def until_ready(self) -> None:
        """Wait until sessions are admitted. The caller bounds the wait."""
        await self.revocations.first_read.wait()
        while not self.ready:
            await self._new_lives.wait() if self._life is None else await self._life.serving.wait()

    async def stop(self) -> None:
        """End every session in order, with its disconnect written, let the lease go, and close the listener."""
        if self._listener is not None:
            self._listener.announce_close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._life is not None:
            await self._life.stop()
        if self._listener is not None:
            await self._listener.close(drain_ms=STOP_DRAIN_MS)

    async def drain(self) -> int:
        """Refuse new sessions and ask the live ones to reconnect elsewhere, spread over time; return how many."""
        life = self._life
        if life is None:
            return 0
        life.draining = True
        asked = list(life.registry)
        for session in asked:
            delay_ms = round(self._world.dice.uniform(0, self.config.drain_spread_ms))
            session.give(DrainRequested(reconnect_after_ms=delay_ms))
        log.info("draining", sessions=len(asked), spread_ms=self.config.drain_spread_ms)
        return len(asked)

    # Lives

    async def _live(self) -> None:
        while True:
            if self._life is None:
                self._life = self._new_life()
            life = self._life
            self._new_lives.set()
            self._new_lives.clear()
            self.revocations.attach(life.registry)
            log.info("gateway id drawn", gateway_id=life.name.gateway_id)
            life.start()
            await life.ended.wait()
            log.error("lease retired: starting over under a new id", gateway_id=life.name.gateway_id)
            self._life = None
            await life.stop()

    def _new_life(self) -> GatewayLife:
        return GatewayLife(
            draw_name(self.config.name, self._world),
            config=self.config,
            advertise_url=self.config.advertise_url or f"https://{self.config.host}:{self._port}",
            database=self._database,
            world=self._world,
            metrics=self.metrics,
            server_time=self.server_time,
        )

    # Notifications

    def _on_dispatch(self, payload: str) -> None:
        if self._life is not None:
            self._life.dispatcher.notified(channels.names(payload))

    def _on_connected(self) -> None:
        """Look at everything: notifications may have been missed."""
        if self._life is not None:
            self._life.dispatcher.notified(None)
        self.revocations.poke()
        self.trust.poke()

    # The other gateways

    async def _watch_room(self) -> None:
        while True:
            await self._survive(self._read_room())
            await self._survive(self._read_time())
            await asyncio.sleep(ROOM_POLL_S)

    async def _read_room(self) -> None:
        others = [
            lease
            for lease in await leases.list_all(self._database)
            if lease.live and not lease.draining and lease.name != self.gateway_id
        ]
        self._room_elsewhere = any(
            opening.has_room(streams=lease.stream_count, streams_max=lease.stream_limit) for lease in others
        )

    async def _read_time(self) -> None:
        self.server_time.read(await sessions.server_time_ms(self._database))

    async def _survive(self, work: Coroutine[Any, Any, None]) -> None:
        with contextlib.suppress(BetterComputeError):
            await work
