"""Certificates of one installation, a service that does as it is told, and both ends of the internal HTTP over real
TLS."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from bettercompute.errors import BetterComputeError
from bettercompute.gateway.services import GatewayServices
from bettercompute.pki import certificates, keyfiles
from bettercompute.pki.certificates import Authority
from bettercompute.pki.identity import NodeIdentity
from bettercompute.protocol import messages
from bettercompute.server.http import HttpServer, listen
from bettercompute.server.internal_client import RemoteServices
from bettercompute.server.internal_server import CallerProtocol, create_internal_app
from bettercompute.server.internal_tls import dialer_tls, listener_tls
from bettercompute.system import system_world
from bettercompute.transport.tls import ServerSecrets

WORLD = system_world()
NODE = NodeIdentity(trust_domain="bc.local", site="default", node_id="n1", role="node", tenant_controlled=False)
CHAIN = (b"\x30leaf", b"\x30ca")
JOIN = messages.JoinRequest(sealed_token="sealed", csr=b"csr", attestor="join-token")
RENEW = messages.RenewRequest(csr=b"csr", client_time_ms=1)


def serial() -> bytes:
    return WORLD.ids.random_bytes(certificates.SERIAL_BYTES)


def secrets_of(chain: Sequence[x509.Certificate], key: object, *, believes: x509.Certificate) -> ServerSecrets:
    return ServerSecrets(
        b"".join(certificate.public_bytes(Encoding.PEM) for certificate in chain),
        keyfiles.key_to_pem(key),  # type: ignore[arg-type]
        believes.public_bytes(Encoding.PEM),
    )


@dataclass
class Site:
    """A serving CA and a node CA."""

    serving_ca: Authority = field(
        default_factory=lambda: certificates.make_serving_ca(serial=serial(), now_ms=WORLD.clock.now_ms())
    )
    node_ca: Authority = field(
        default_factory=lambda: certificates.make_node_ca(serial=serial(), now_ms=WORLD.clock.now_ms())
    )

    def serving(self, *names: str, ca: Authority | None = None, issued_ms_ago: int = 0, **more: int) -> ServerSecrets:
        """A leaf for `names`, of the serving CA unless another one is named; it believes the serving CA."""
        issuer, key = ca or self.serving_ca, certificates.generate_key()
        leaf = certificates.make_serving_leaf(
            issuer,
            public_key=key.public_key(),
            names=names or ("127.0.0.1",),
            serial=serial(),
            now_ms=WORLD.clock.now_ms() - issued_ms_ago,
            **more,
        )
        return secrets_of((leaf, issuer.certificate), key, believes=self.serving_ca.certificate)

    def node(self, ca: Authority) -> ServerSecrets:
        """A node's leaf."""
        key = certificates.generate_key()
        leaf = certificates.make_node_leaf(
            ca, public_key=key.public_key(), identity=NODE, serial=serial(), now_ms=WORLD.clock.now_ms()
        )
        return secrets_of((leaf, ca.certificate), key, believes=self.serving_ca.certificate)


@dataclass
class Told:
    """Services that answer what they are told, and remember what they were asked."""

    error: BaseException | None = None
    bundle: tuple[int, bytes] | None = None
    body: bytes = b"body"
    asked: list[tuple[object, object]] = field(default_factory=list)
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    gate: asyncio.Event | None = None

    async def join(self, request: messages.JoinRequest, *, source: str) -> messages.JoinResponse:
        await self._hear(request, source)
        return messages.JoinResponse(body=self.body)

    async def renew(self, request: messages.RenewRequest, *, peer_chain: Sequence[bytes]) -> messages.RenewResponse:
        await self._hear(request, tuple(peer_chain))
        return messages.RenewResponse(body=self.body)

    async def trust_bundle(self) -> tuple[int, bytes] | None:
        await self._hear(None, None)
        return self.bundle

    async def _hear(self, request: object, beside: object) -> None:
        self.asked.append((request, beside))
        self.entered.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error


@contextlib.asynccontextmanager
async def serving(
    services: GatewayServices, secrets: ServerSecrets, *, gateway_names: Sequence[str] = (), port: int = 0
) -> AsyncIterator[str]:
    """Serve; gives the URL by address."""
    server = HttpServer(
        create_internal_app(services, gateway_names=gateway_names),
        listener=listen("127.0.0.1", port, purpose="tests"),
        tls=listener_tls(lambda: secrets),
        protocol=CallerProtocol,
    )
    try:
        yield server.url
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def calling(url: str, secrets: ServerSecrets) -> AsyncIterator[RemoteServices]:
    """Give a gateway's client."""
    client = RemoteServices(url, tls=dialer_tls(lambda: secrets), world=WORLD)
    try:
        yield client
    finally:
        await client.close()


async def refused_by(client: RemoteServices) -> BetterComputeError:
    """Return what a join raises."""
    try:
        await client.join(JOIN, source="192.0.2.1")
    except BetterComputeError as error:
        return error
    raise AssertionError("the join was answered")
