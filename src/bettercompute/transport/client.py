"""The dialer: a TLS connection to a gateway that the pin vouches for, directly or through a proxy, and the calls on it.

A dial is over only when the gateway's first frame has come: in TLS 1.3 that is the earliest moment at which a client
knows that its certificate was taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Mapping
from typing import cast
from urllib.parse import urlsplit

from bettercompute.errors import Refused
from bettercompute.protocol.statuses import PUSHBACK_TRAILER, REASON_TRAILER, Status, parse_pushback
from bettercompute.transport import tls
from bettercompute.transport.calls import (
    NO_METADATA,
    CallEnded,
    ClientCall,
    DialFailed,
    DialKind,
    DialTarget,
    EndKind,
    ServerCertificate,
)
from bettercompute.transport.client_link import ClientLink, SocketClientCall
from bettercompute.transport.limits import DEFAULT_LIMITS, Limits
from bettercompute.transport.link import bound_stdlib_tls, read_buffer
from bettercompute.transport.proxy import authority_of, connect_through, proxy_for
from bettercompute.transport.tls_errors import PIN_MISMATCH, explain_tls_error
from bettercompute.world import World

DEFAULT_PORT = 443


class CallRefused(Refused):
    """A status other than OK, with all its trailers."""

    def __init__(self, *, status: int, message: str, trailers: Mapping[str, str]) -> None:
        super().__init__(
            message or f"refused with status {status}",
            status=status,
            reason=trailers.get(REASON_TRAILER, ""),
            pushback_ms=parse_pushback(trailers.get(PUSHBACK_TRAILER)),
        )
        self.trailers = trailers


async def unary_on(call: ClientCall, request: bytes, *, timeout_s: float) -> bytes:
    """Send one message on a new call and return the one answer; see `Connection.unary`."""
    try:
        async with asyncio.timeout(timeout_s):
            call.send(request)
            call.half_close()
            answer = await call.receive()
            if answer is not None and await call.receive() is not None:
                raise CallEnded(EndKind.PROTOCOL, "the server answered a unary call with more than one message")
    except TimeoutError as error:
        raise Refused(
            f"no answer within {timeout_s} s; try again", status=Status.DEADLINE_EXCEEDED, reason="deadline-exceeded"
        ) from error
    finally:
        call.cancel()
    raise_for_status(call)
    if answer is None:
        raise CallEnded(EndKind.PROTOCOL, "the server answered a unary call with OK and no message")
    return answer


def raise_for_status(call: ClientCall) -> None:
    """Raise `CallRefused` when a call has ended with another status than OK."""
    if call.status:
        raise CallRefused(status=call.status, message=call.status_message, trailers=call.trailers)


class SocketConnection:
    """A `Connection` over a socket."""

    def __init__(
        self, link: ClientLink, *, server_certificate: ServerCertificate | None, serving_ca_pem: bytes | None
    ) -> None:
        self.server_certificate = server_certificate
        self.serving_ca_pem = serving_ca_pem
        self._link = link

    @property
    def closed(self) -> asyncio.Event:
        """Return the signal that the connection is gone."""
        return self._link.closed

    @property
    def end(self) -> CallEnded | None:
        """Return why it is gone."""
        return self._link.end

    @property
    def last_heard_ms(self) -> int:
        """Return when anything was last heard."""
        return self._link.last_heard_ms

    async def call(self, path: str, metadata: Mapping[str, str] = NO_METADATA) -> SocketClientCall:
        """Open a call."""
        return self._link.open_call(path, metadata)

    async def unary(
        self, path: str, request: bytes, *, metadata: Mapping[str, str] = NO_METADATA, timeout_s: float
    ) -> bytes:
        """Send one message and return the one answer."""
        return await unary_on(await self.call(path, metadata), request, timeout_s=timeout_s)

    def close(self) -> None:
        """End the connection."""
        self._link.close(EndKind.CLOSED_HERE, "the connection was closed here")

    async def wait_closed(self) -> None:
        """Wait until it is gone."""
        await self._link.closed.wait()


def prepare(target: DialTarget) -> ssl.SSLContext | None:
    """Return what `dial` can be given to spare it reading the keys, or None where it must look at the chain first."""
    pem = target.serving_ca_pem
    if pem is None or not tls.pem_matches(pem, pin=target.serving_ca_spki_sha256):
        return None
    return tls.dialer_context(serving_ca_pem=pem, identity=target.identity)


async def dial(
    target: DialTarget, *, world: World, limits: Limits = DEFAULT_LIMITS, prepared: ssl.SSLContext | None = None
) -> SocketConnection:
    """Connect to a gateway; `prepared` is of the same target. Raises `DialFailed`, within `target.timeout_s`."""
    host, port = parse_gateway_url(target.url)
    where = authority_of(host, port)
    if len(target.serving_ca_spki_sha256) != tls.PIN_BYTES:
        raise DialFailed(DialKind.BAD_TARGET, "the serving CA's pin must be the 32 bytes of a SHA-256")
    bound_stdlib_tls(asyncio.get_running_loop())
    try:
        async with asyncio.timeout(target.timeout_s):
            return await _Dial(target, host=host, port=port, world=world, limits=limits).run(prepared)
    except TimeoutError as error:
        raise DialFailed(DialKind.TIMEOUT, f"{where}: no connection within {target.timeout_s} s") from error
    except DialFailed as failure:
        raise DialFailed(failure.kind, f"{where}: {failure.message}") from failure


def parse_gateway_url(url: str) -> tuple[str, int]:
    """Return host and port of `https://host[:port]`; IPv6 in brackets.

    Raises `DialFailed` BAD_TARGET for anything else.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise DialFailed(DialKind.BAD_TARGET, f"gateway_url {url!r} is malformed: {error}") from error
    plain = parts.path in ("", "/") and not parts.query and not parts.fragment and parts.username is None
    if parts.scheme != "https" or not host or not plain:
        raise DialFailed(DialKind.BAD_TARGET, f"gateway_url {url!r} is not of the form https://host:port")
    return host, port or DEFAULT_PORT


class _Dial:
    """One dial: its parts in order, and what each found out."""

    def __init__(self, target: DialTarget, *, host: str, port: int, world: World, limits: Limits) -> None:
        self._target = target
        self._host = host
        self._port = port
        self._world = world
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._name = target.server_name or host

    async def run(self, prepared: ssl.SSLContext | None) -> SocketConnection:
        cached = self._target.serving_ca_pem
        context = prepared or prepare(self._target)
        if cached is not None and context is not None:
            try:
                return await self._connect(cached, context)
            except DialFailed as failure:
                # The CA may have been issued anew for the same key: look again, once.
                if failure.kind is not DialKind.PIN_MISMATCH:
                    raise
        found = await self._probe()
        return await self._connect(found, tls.dialer_context(serving_ca_pem=found, identity=self._target.identity))

    async def _connect(self, serving_ca_pem: bytes, context: ssl.SSLContext) -> SocketConnection:
        link = ClientLink(
            world=self._world,
            limits=self._limits,
            buffer=read_buffer(),
            authority=authority_of(self._name, self._port),
        )
        await self._start_tls(link, context, server_hostname=self._name)
        try:
            await link.first_frame
        except CallEnded as end:
            raise self._refused(end) from end
        except BaseException:
            link.lose(EndKind.CLOSED_HERE, "the dial was given up")
            raise
        leaf = link.server_leaf
        return SocketConnection(
            link,
            server_certificate=tls.server_certificate(leaf) if leaf is not None else None,
            serving_ca_pem=serving_ca_pem,
        )

    def _refused(self, end: CallEnded) -> DialFailed:
        if end.kind is EndKind.CERTIFICATE_REFUSED and self._target.identity is not None:
            # TLS has no alert for "not yet valid", and whose clock is wrong only people can tell.
            return DialFailed(DialKind.CERTIFICATE_REFUSED, f"{end.message}; {tls.validity(self._target.identity)}")
        if end.kind.value in list(DialKind):
            return DialFailed(DialKind(end.kind.value), end.message)
        if end.kind is EndKind.CONNECTION_LOST and self._target.identity is not None:
            return DialFailed(
                DialKind.CERTIFICATE_REFUSED,
                f"{end.message} right after the TLS handshake, without a reason: our certificate was refused, likely",
            )
        return DialFailed(DialKind.CONNECT, end.message)

    async def _probe(self) -> bytes:
        """Return the pinned certificate from the chain that the server shows, having shown it nothing."""
        protocol = _Probe()
        await self._start_tls(protocol, tls.probe_context(), server_hostname=self._name)
        pinned = tls.find_pinned(protocol.chain, pin=self._target.serving_ca_spki_sha256)
        if pinned is None:
            raise DialFailed(DialKind.PIN_MISMATCH, PIN_MISMATCH)
        return pinned

    async def _start_tls(
        self, protocol: asyncio.BaseProtocol, context: ssl.SSLContext, *, server_hostname: str
    ) -> None:
        sock = await self._connect_socket()
        try:
            await self._loop.create_connection(
                lambda: protocol,
                sock=sock,
                ssl=context,
                server_hostname=server_hostname,
                ssl_handshake_timeout=self._limits.handshake_ms / 1000,
                ssl_shutdown_timeout=self._limits.close_ms / 1000,
            )
        except ssl.SSLError as error:
            kind, text = explain_tls_error(error)
            raise DialFailed(kind, text) from error
        except ValueError as error:
            raise DialFailed(DialKind.BAD_TARGET, f"gateway_server_name {server_hostname!r}: {error}") from error
        except OSError as error:
            raise DialFailed(DialKind.CONNECT, f"the connection was lost in the TLS handshake: {error}") from error

    async def _connect_socket(self) -> socket.socket:
        proxy = proxy_for(self._host, self._port, self._target.environment)
        if proxy is None:
            return await self._connect_to(self._host, self._port)
        sock = await self._connect_to(proxy.host, proxy.port, what="the proxy ")
        try:
            await connect_through(sock, proxy=proxy, host=self._host, port=self._port)
        except OSError as error:
            sock.close()
            where = authority_of(proxy.host, proxy.port)
            raise DialFailed(DialKind.PROXY, f"the proxy {where} was lost: {error}") from error
        except BaseException:
            sock.close()
            raise
        return sock

    async def _connect_to(self, host: str, port: int, *, what: str = "") -> socket.socket:
        """Connect to the first address that answers; the time for all is shared evenly."""
        try:
            infos = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise DialFailed(DialKind.NAME_LOOKUP, f"{what}{host} has no address: {error}") from error
        failures: list[str] = []
        for family, kind, protocol, _, address in infos:
            try:
                sock = socket.socket(family, kind, protocol)
            except OSError as error:
                # A name may have IPv6 addresses where the kernel has no IPv6.
                failures.append(f"{address[0]}: {error.strerror or error}")
                continue
            sock.setblocking(False)
            try:
                async with asyncio.timeout(self._target.timeout_s / len(infos)):
                    await self._loop.sock_connect(sock, address)
            except TimeoutError:
                failures.append(f"{address[0]}: no answer")
            except OSError as error:
                failures.append(f"{address[0]}: {error.strerror or error}")
            except BaseException:
                sock.close()
                raise
            else:
                return sock
            sock.close()
        raise DialFailed(
            DialKind.CONNECT, f"cannot connect to {what}{authority_of(host, port)} ({'; '.join(failures)})"
        )


class _Probe(asyncio.Protocol):
    """Reads the chain a server shows, and leaves."""

    def __init__(self) -> None:
        self.chain: tuple[bytes, ...] = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        with contextlib.suppress(ssl.SSLError):
            self.chain = tls.shown_chain(transport.get_extra_info("ssl_object"))
        cast("asyncio.Transport", transport).close()
