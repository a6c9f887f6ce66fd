"""Reaching a gateway: which URL, under which identity and pin, and the one connection that everything uses.

When to dial, and whether on the connection that is there, is decided by `session.reconnect`; here it is carried out.
The identity is read anew at each dial, so a renewed certificate is used from the next one on. URLs are taken in random
order, each of them once before any of them twice. See docs/daemon.md, "When it is not connected".
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from bettercompute.daemon.identity import Identity
from bettercompute.errors import Unavailable
from bettercompute.protocol import service
from bettercompute.protocol.statuses import ATTEMPT_METADATA
from bettercompute.session.effects import Redial
from bettercompute.transport import streams
from bettercompute.transport.streams import ClientCall, Connection, DialFailed, DialKind, DialTarget
from bettercompute.world import World

Dial = Callable[[DialTarget], Awaitable[Connection]]


@dataclass(frozen=True, slots=True)
class DialSettings:
    """What the configuration and the environment say about the way to a gateway."""

    gateway_url: tuple[str, ...] = ()
    """Empty: the identity's."""
    server_name: str = ""
    environment: Mapping[str, str] | None = None
    """Names the proxies."""


@dataclass(frozen=True, slots=True)
class Stream:
    """An open Session stream, before Hello."""

    call: ClientCall
    connection: Connection
    url: str


class GatewayLink:
    """The daemon's way to the gateways. `serving_ca_pem` is the pinned certificate as an earlier dial found it."""

    def __init__(
        self,
        *,
        world: World,
        identity: Callable[[], Awaitable[Identity]],
        settings: Callable[[], DialSettings],
        serving_ca_pem: bytes | None = None,
        dial: Dial | None = None,
    ) -> None:
        self.connection: Connection | None = None
        self.url = ""
        self.serial = ""
        """The certificate that was dialed with last."""
        self.serving_ca_pem = serving_ca_pem
        self.on_serving_ca: Callable[[bytes], None] = lambda _: None
        self._world = world
        self._identity = identity
        self._settings = settings
        self._dial = dial or self._dial_socket
        self._untried: list[str] = []
        self._dialing = asyncio.Lock()

    @property
    def last_heard_ms(self) -> int:
        """When the connection last gave a sign of life, on the monotonic clock; 0 without one."""
        return 0 if self.connection is None else self.connection.last_heard_ms

    async def open_stream(self, *, redial: Redial, attempt: int) -> Stream:
        """Open a Session stream, on the connection that is there if `redial` says so and it still lives.

        Raises `DialFailed`, `CallEnded`, or what reading the identity raises.
        """
        if redial is Redial.NEW_CONNECTION:
            self.close()
        connection = await self.connected()
        call = await connection.call(service.SESSION, {ATTEMPT_METADATA: str(attempt)})
        return Stream(call, connection, self.url)

    async def connected(self) -> Connection:
        """Return the connection, dialing one when there is none; who asks meanwhile, a renewal, gets the same."""
        async with self._dialing:
            return await self._connected()

    async def _connected(self) -> Connection:
        if self.connection is not None and not self.connection.closed.is_set():
            return self.connection
        self._world.dice.reseed()
        identity = await self._identity()
        self.serial = identity.record.certificate_serial
        settings = self._settings()
        self.url = self._next_url(settings.gateway_url or identity.record.gateway_urls)
        self.connection = await self._dial_pinned(identity, settings)
        pem = self.connection.serving_ca_pem
        if pem is not None and pem != self.serving_ca_pem:
            self.serving_ca_pem = pem
            self.on_serving_ca(pem)
        return self.connection

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    async def _dial_pinned(self, identity: Identity, settings: DialSettings) -> Connection:
        """Dial under each pinned serving CA, the one in use first: during a rotation there are two."""
        mismatch: DialFailed | None = None
        for pin in identity.trust.content.serving_ca_pins:
            target = DialTarget(
                url=self.url,
                serving_ca_spki_sha256=bytes.fromhex(pin),
                server_name=settings.server_name or None,
                serving_ca_pem=self.serving_ca_pem,
                identity=streams.Identity(identity.chain_pem, identity.key_pem),
                environment=settings.environment or {},
            )
            try:
                return await self._dial(target)
            except DialFailed as failure:
                if failure.kind is not DialKind.PIN_MISMATCH:
                    raise
                mismatch = failure
        raise mismatch or Unavailable(
            "the trust bundle pins no serving CA: re-join this node with a new join token", reason="no-pin"
        )

    async def _dial_socket(self, target: DialTarget) -> Connection:
        return await streams.dial(target, world=self._world)

    def _next_url(self, urls: tuple[str, ...]) -> str:
        self._untried = [url for url in self._untried if url in urls]
        if not self._untried:
            self._untried = sorted(urls, key=lambda _: self._world.dice.uniform(0, 1))
            if len(urls) > 1 and self._untried[-1] == self.url:
                # The last of one round is not the first of the next: it may be the one that does not answer.
                self._untried.insert(0, self._untried.pop())
        if not self._untried:
            raise Unavailable("no gateway to dial: set gateway_url in the configuration", reason="no-gateway")
        return self._untried.pop()
