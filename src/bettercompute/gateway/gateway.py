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
from bettercompute.gateway.neighbours import Neighbours
from bettercompute.gateway.revocation import RevocationFeed
from bettercompute.gateway.server_time import ServerTime
from bettercompute.gateway.services import GatewayServices
from bettercompute.gateway.trust import PublishedTrust
from bettercompute.gateway.trust_refresh import TrustRefresh
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import channels, sessions
from bettercompute.store.database import Database
from bettercompute.store.leases import Health, HeldCertificates
from bettercompute.transport.streams import Handler, serve
from bettercompute.world import World

log = structlog.get_logger("bettercompute.gateway")

TIME_POLL_S = 5.0
READY_POLL_S = 0.02
RESTART_S = 1.0
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
        certificates: Callable[[], HeldCertificates | None] = lambda: None,
    ) -> None:
        """Put a gateway together; nothing runs yet.

        `database` is opened with `GATEWAY_LIMITS`. `tls` is asked for the context of each connection; None starts no
        listener: calls then come through `handler`, in memory.
        """
        self.config = config
        self.metrics = metrics or GatewayMetrics()
        self.server_time = ServerTime(world.clock)
        self.revocations = RevocationFeed(database, server_time=self.server_time, world=world)
        self.trust = PublishedTrust(services)
        self.trust_refresh = TrustRefresh(
            self.trust,
            sessions=lambda: () if self._life is None else self._life.registry,
            config=config,
            world=world,
            metrics=self.metrics,
        )
        self.neighbours = Neighbours(database)
        self._database = database
        self._world = world
        self._tls = tls
        self._certificates = certificates
        self._life: GatewayLife | None = None
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
        return self.neighbours.room_elsewhere(own=self.gateway_id)

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
        """Listen, take up a lease, and serve. Returns once the listener is open; `until_ready` waits for the lease.

        Raises `Refused` when the address cannot be had.
        """
        if self._tls is not None:
            host, port = self.config.host, self.config.port
            try:
                server = await serve(self.handler, host=host, port=port, tls=self._tls, world=self._world)
            except OSError as error:
                raise refuse(
                    Reason.INVALID_CONFIG,
                    f"gateway: cannot listen on {host} port {port}: {error.strerror or error}; choose another address "
                    "with host and port under [gateway]",
                ) from None
            self._listener = server
            self._port = server.port
        listener = NotificationListener(
            self._database,
            application_name=f"{self.config.name} notifications",
            channels={
                channels.COMMANDS: self._on_commands,
                channels.DISPATCH: self._on_dispatch,
                channels.REVOCATIONS: lambda _: self.revocations.poke(),
                channels.TRUST: lambda _: self.trust.poke(),
                channels.GATEWAYS: self._on_gateways,
            },
            connected=self._on_connected,
            world=self._world,
        )
        await self.trust.read()
        self._life = self._new_life(drain_requested_by=None)
        for name, work in (
            ("lives", self._live),
            ("revocations", self.revocations.run),
            ("trust", self.trust.run),
            ("trust-refresh", self.trust_refresh.run),
            ("notifications", listener.run),
            ("neighbours", self.neighbours.run),
            ("time", self._watch_time),
        ):
            self._tasks.append(asyncio.create_task(self._keep_up(name, work), name=f"gateway-{name}"))

    async def _keep_up(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a loop that has no end, again after a fault of ours: what it reads anew cures what it got wrong.

        A revocation feed that had ended unheard would let everybody in.
        """
        while True:
            try:
                await work()
            except Exception:
                log.exception("loop failed: it begins again", loop=name)
            await asyncio.sleep(RESTART_S)

    async def until_ready(self) -> None:
        """Wait until the lease is held: sessions are admitted, unless it drains. The caller bounds the wait."""
        await self.revocations.first_read.wait()
        while self._life is None or not self._life.fence.admitting():  # noqa: ASYNC110 - it closes by the clock
            await asyncio.sleep(READY_POLL_S)

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

    # Lives

    async def _live(self) -> None:
        drain_requested_by = None
        while True:
            if self._life is None:
                self._life = self._new_life(drain_requested_by=drain_requested_by)
            life = self._life
            self.revocations.attach(life.registry)
            log.info("gateway id drawn", gateway_id=life.name.gateway_id)
            life.start()
            await life.ended.wait()
            log.error("lease retired: starting over under a new id", gateway_id=life.name.gateway_id)
            self._life = None
            await life.stop()
            # Who asked for a drain meant this process, not one of its ids.
            drain_requested_by = life.drain_requested_by

    def _new_life(self, *, drain_requested_by: str | None) -> GatewayLife:
        name = draw_name(self.config.name, self._world)
        return GatewayLife(
            name,
            config=self.config,
            advertise_url=self.config.advertise_url or f"https://{self.config.host}:{self._port}",
            database=self._database,
            world=self._world,
            metrics=self.metrics,
            server_time=self.server_time,
            others=lambda: self.neighbours.loads(own=name.gateway_id),
            health=self._health,
            drain_requested_by=drain_requested_by,
        )

    def _health(self) -> Health:
        """Say, on the lease's thread, how this gateway is."""
        return Health(
            wall_ms=self._world.clock.now_ms(),
            revocations_age_ms=self.revocations.age_ms,
            certificates=self._certificates(),
        )

    # Notifications

    def _on_commands(self, payload: str) -> None:
        if self._life is not None:
            self._life.dispatcher.enqueued(channels.names(payload))

    def _on_dispatch(self, payload: str) -> None:
        if self._life is not None:
            self._life.dispatcher.notified(channels.names(payload))

    def _on_gateways(self, payload: str) -> None:
        named = channels.names(payload)
        if self._life is not None and (named is None or self.gateway_id in named):
            self._life.renew_now()

    def _on_connected(self) -> None:
        """Look at everything: notifications may have been missed."""
        if self._life is not None:
            self._life.dispatcher.notified(None)
            self._life.renew_now()
        self.revocations.poke()
        self.trust.poke()

    async def _watch_time(self) -> None:
        while True:
            with contextlib.suppress(BetterComputeError):
                await self._read_time()
            await asyncio.sleep(TIME_POLL_S)

    async def _read_time(self) -> None:
        self.server_time.read(await sessions.server_time_ms(self._database))
