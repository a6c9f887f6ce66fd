"""The contract of the transport: what a call, a connection and their endings look like, over sockets or in memory.

`server`, `client` and `memory` implement these; one contract suite tests them all. Messages are whole and bounded,
sending never blocks and is bounded, and every ending is told exactly once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

from bettercompute.errors import Unavailable

NO_METADATA: Mapping[str, str] = MappingProxyType({})


class EndKind(StrEnum):
    """Why a call or its connection ended other than by a status."""

    RESET = "reset"
    REFUSED_STREAM = "refused-stream"
    CANCELLED = "cancelled"
    FINISHED = "finished"
    CONNECTION_LOST = "connection-lost"
    GOING_AWAY = "going-away"
    ENHANCE_YOUR_CALM = "enhance-your-calm"
    PROTOCOL = "protocol"
    PING_TIMEOUT = "ping-timeout"
    NOT_HTTP2 = "not-http2"
    IDLE = "idle"
    CLOSED_HERE = "closed-here"
    NO_CERTIFICATE = "no-certificate"
    UNKNOWN_CA = "unknown-ca"
    CERTIFICATE_EXPIRED = "certificate-expired"
    CERTIFICATE_REFUSED = "certificate-refused"
    TLS = "tls"


class CallEnded(Unavailable):
    """A call that ended without a status; `kind` says how, the message why.

    The same call may succeed on a new connection.
    """

    def __init__(self, kind: EndKind, text: str) -> None:
        super().__init__(text, reason=kind.value)
        self.kind = kind


class DialKind(StrEnum):
    """Where a dial failed."""

    BAD_TARGET = "bad-target"
    NAME_LOOKUP = "name-lookup"
    CONNECT = "connect"
    TIMEOUT = "timeout"
    PROXY = "proxy"
    PIN_MISMATCH = "pin-mismatch"
    SERVER_NAME = "server-name"
    SERVER_CERTIFICATE = "server-certificate"
    NO_CERTIFICATE = "no-certificate"
    UNKNOWN_CA = "unknown-ca"
    CERTIFICATE_EXPIRED = "certificate-expired"
    CERTIFICATE_REFUSED = "certificate-refused"
    TLS = "tls"
    NOT_HTTP2 = "not-http2"


class DialFailed(Unavailable):
    """A connection that did not come about; `kind` says where it failed, the message names both ends and the cure."""

    def __init__(self, kind: DialKind, text: str) -> None:
        super().__init__(text, reason=kind.value)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end: the address as the socket says, the chain as TLS verified it (DER, leaf first.

    Empty: none shown).
    """

    address: str
    port: int
    certificate_chain: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Identity:
    """What a dialer shows: its certificate chain, leaf first, and the key, both PEM."""

    certificate_chain_pem: bytes
    private_key_pem: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ServerCertificate:
    """The gateway's verified leaf and its dates, which TLS does not judge.

    The caller does, by the server's own time.
    """

    der: bytes
    not_before_ms: int
    not_after_ms: int


@dataclass(frozen=True, slots=True)
class DialTarget:
    """Where to dial and whom to trust there.

    `serving_ca_spki_sha256` is the pin, 32 bytes. `serving_ca_pem` may hold the pinned certificate itself as an
    earlier dial found it (`Connection.serving_ca_pem`): it saves the probe, and is ignored when it does not match the
    pin. `environment` names the proxies (HTTPS_PROXY, ALL_PROXY, NO_PROXY, either case).
    """

    url: str
    serving_ca_spki_sha256: bytes
    server_name: str | None = None
    serving_ca_pem: bytes | None = None
    identity: Identity | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 20.0


class ServerCall(Protocol):
    """One RPC at the server."""

    path: str
    metadata: Mapping[str, str]
    peer: Peer

    @property
    def queued_bytes(self) -> int:
        """Bytes of messages that were sent and have not left for the peer."""
        ...

    @property
    def last_heard_ms(self) -> int:
        """When anything was last heard on the call's connection, by the monotonic clock."""
        ...

    @property
    def ended(self) -> bool:
        """Whether nothing more can be sent: finished, reset, or the connection is gone."""
        ...

    async def receive(self) -> bytes | None:
        """Return the next whole message, None when the peer has half-closed.

        Raises `CallEnded` when the call was cut.
        """
        ...

    def send(self, message: bytes) -> None:
        """Queue a message.

        A full queue ends the call and raises `Refused` RESOURCE_EXHAUSTED `slow-consumer`; an ended call raises
        `CallEnded`.
        """
        ...

    def finish(self, status: int, message: str = "", trailers: Mapping[str, str] = NO_METADATA) -> None:
        """End the call after what is queued, without a body when nothing was sent. The first one counts."""
        ...

    def never_bill(self, path: str) -> None:
        """Stop billing calls of `path` on this connection to its abuse bucket.

        The tunnels of a session that is proven.
        """
        ...

    async def drained(self) -> None:
        """Wait until everything queued has left for the peer; raises `CallEnded` when it never will."""
        ...

    async def wait_closed(self) -> None:
        """Wait until the call has ended in either direction, however that was."""
        ...


class ClientCall(Protocol):
    """One RPC at the client. `status` and what follows it are set once `receive` has returned None."""

    status: int | None
    status_message: str
    trailers: Mapping[str, str]

    @property
    def queued_bytes(self) -> int:
        """Bytes of messages that were sent and have not left for the peer."""
        ...

    async def receive(self) -> bytes | None:
        """Return the next whole message, None at the end of the answer.

        Raises `CallEnded` when there was no proper end.
        """
        ...

    def send(self, message: bytes) -> None:
        """Queue a message; a full queue raises `Refused` RESOURCE_EXHAUSTED, and the call goes on."""
        ...

    def half_close(self) -> None:
        """Say that nothing more will be sent."""
        ...

    def cancel(self) -> None:
        """End the call at once; what was queued is dropped."""
        ...

    async def drained(self) -> None:
        """Wait until everything queued has left for the peer; raises `CallEnded` when it never will."""
        ...


class Signal(Protocol):
    """What of `asyncio.Event` others may use."""

    def is_set(self) -> bool:
        """Whether it has happened."""
        ...

    async def wait(self) -> object:
        """Wait until it has."""
        ...


class Connection(Protocol):
    """The client's end of a connection."""

    server_certificate: ServerCertificate | None
    serving_ca_pem: bytes | None

    @property
    def closed(self) -> Signal:
        """Set once the connection is gone, or may carry no new call and has none left."""
        ...

    @property
    def end(self) -> CallEnded | None:
        """Why it is gone."""
        ...

    @property
    def last_heard_ms(self) -> int:
        """When anything was last heard from the peer, by the monotonic clock."""
        ...

    async def call(self, path: str, metadata: Mapping[str, str] = NO_METADATA) -> ClientCall:
        """Open a call; raises `CallEnded` when the connection takes no new one."""
        ...

    async def unary(
        self, path: str, request: bytes, *, metadata: Mapping[str, str] = NO_METADATA, timeout_s: float
    ) -> bytes:
        """Send one message and return the one answer.

        A status other than OK raises `Refused` (UNAVAILABLE: `Unavailable`) with its reason and pushback from the
        trailers; no answer in time raises `Refused` DEADLINE_EXCEEDED.
        """
        ...

    def close(self) -> None:
        """End the connection and every call on it."""
        ...

    async def wait_closed(self) -> None:
        """Wait until the connection is gone."""
        ...


Handler = Callable[[ServerCall], Awaitable[None]]
