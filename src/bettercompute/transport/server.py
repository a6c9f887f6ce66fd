"""The listener: accepts, lets TLS through in its order, and runs a handler for each call.

It has no policy of its own: who may say what is the handler's business. It bounds what strangers cost: see `limits`.
See docs/protocol.md, "Transport".
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import ipaddress
import socket
import ssl
from collections.abc import Callable, Mapping

import structlog

from bettercompute.errors import BetterComputeError, Bug
from bettercompute.protocol.statuses import PUSHBACK_TRAILER, REASON_TRAILER, Reason, Status, format_pushback
from bettercompute.transport.calls import Handler, Peer, ServerCall
from bettercompute.transport.h2_connection import HoldAllowance
from bettercompute.transport.limits import DEFAULT_LIMITS, SOCKET_BUFFER_BYTES, Limits
from bettercompute.transport.link import bound_stdlib_tls, read_buffer
from bettercompute.transport.server_link import ServerLink, SocketServerCall
from bettercompute.transport.tls_errors import explain_client_refusal
from bettercompute.transport.waiting_room import WaitingRoom
from bettercompute.world import World

log = structlog.get_logger(__name__)

BACKLOG = 1024
ACCEPTS_PER_TURN = 64
# Out of descriptors: accepting again at once would only spin.
ACCEPT_PAUSE_S = 0.1


class Server:
    """A running listener."""

    def __init__(
        self,
        handler: Handler,
        *,
        listener: socket.socket,
        tls_context: Callable[[], ssl.SSLContext],
        world: World,
        limits: Limits,
        admit: Callable[[str], bool] | None,
    ) -> None:
        self.accepting = True
        self.handshakes_refused = 0
        self._handler = handler
        self._listener = listener
        self._tls_context = tls_context
        self._world = world
        self._limits = limits
        self._admit = admit
        self._loop = asyncio.get_running_loop()
        self._buffer = read_buffer()
        self._links: set[ServerLink] = set()
        self._anonymous = 0
        self._allowance = HoldAllowance(limits.anonymous_held_bytes_max)
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._room = WaitingRoom(limits=limits, start=self._start_handshake)
        self._paused: asyncio.TimerHandle | None = None
        bound_stdlib_tls(self._loop)
        self._loop.add_reader(listener.fileno(), self._accept)

    @property
    def host(self) -> str:
        """Return the address that is listened on."""
        return str(self._listener.getsockname()[0])

    @property
    def port(self) -> int:
        """Return the port that is listened on."""
        return int(self._listener.getsockname()[1])

    @property
    def connection_count(self) -> int:
        """Return how many connections are past TLS."""
        return len(self._links)

    @property
    def anonymous_count(self) -> int:
        """Return how many of these showed no certificate."""
        return self._anonymous

    @property
    def call_count(self) -> int:
        """Return how many handlers run."""
        return len(self._calls)

    @property
    def waiting_count(self) -> int:
        """Return how many connections wait before TLS."""
        return self._room.waiting

    @property
    def handshake_count(self) -> int:
        """Return how many TLS handshakes are in progress."""
        return self._room.in_handshake

    def announce_close(self) -> None:
        """Take no new connections, and tell every client to open no new calls; open calls go on."""
        self._stop_accepting()
        for link in list(self._links):
            link.announce_goaway()

    async def close(self, *, drain_ms: int | None = None) -> None:
        """Close, giving open calls `drain_ms` to end; then their handlers are cancelled and connections cut."""
        self.announce_close()
        wait_s = (self._limits.drain_ms if drain_ms is None else drain_ms) / 1000
        if self._calls and wait_s > 0:
            await asyncio.wait(self._calls, timeout=wait_s)
        for task in list(self._calls):
            task.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._calls, *self._tasks, return_exceptions=True)
        links = list(self._links)
        for link in links:
            link.close_for_shutdown()
        await asyncio.gather(*(link.closed.wait() for link in links))

    def _stop_accepting(self) -> None:
        self.accepting = False
        if self._paused is not None:
            self._paused.cancel()
            self._paused = None
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
        self._room.close()

    # From TCP to HTTP/2

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, name = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                log.exception(
                    "transport.accept-failed", error=str(error), cure="raise the limit of open files (ulimit -n)"
                )
                self._loop.remove_reader(self._listener.fileno())
                self._paused = self._loop.call_later(ACCEPT_PAUSE_S, self._accept_again)
                return
            address = (_plain_address(name[0]), int(name[1]))
            full = len(self._links) + self._room.in_handshake >= self._limits.connections_max
            if not self.accepting or full or (self._admit is not None and not self._admit(address[0])):
                sock.close()
                continue
            sock.setblocking(False)
            self._room.enter(sock, address)

    def _accept_again(self) -> None:
        self._paused = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _start_handshake(self, sock: socket.socket, address: tuple[str, int]) -> None:
        task = self._loop.create_task(self._handshake(sock, address))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handshake(self, sock: socket.socket, address: tuple[str, int]) -> None:
        link = ServerLink(
            world=self._world,
            limits=self._limits,
            buffer=self._buffer,
            allowance=self._allowance,
            peer=Peer(*address),
            opened=self._on_link_opened,
            closed=self._on_link_closed,
            start_call=self._start_call,
        )
        try:
            context = self._tls_context()
            # A second descriptor keeps the connection open for the alert, should the handshake fail.
            spare = sock.dup()
        except Exception:
            self._room.handshake_ended()
            sock.close()
            log.exception("transport.handshake-not-started", peer=address[0])
            return
        try:
            await self._loop.connect_accepted_socket(
                lambda: link,
                sock,
                ssl=context,
                ssl_handshake_timeout=self._limits.handshake_ms / 1000,
                ssl_shutdown_timeout=self._limits.close_ms / 1000,
            )
        except OSError as error:
            # What ssl, sockets and timeouts raise alike.
            self.handshakes_refused += 1
            # A peer that left, or was too slow, is not news; one that was refused is.
            level = log.info if isinstance(error, ssl.SSLError) else log.debug
            level("transport.handshake-refused", peer=address[0], why=explain_client_refusal(error))
            alert = getattr(error, "alert", b"")
            self._room.handshake_ended()
            await self._say_alert(spare, alert)
        except BaseException:
            self._room.handshake_ended()
            raise
        else:
            self._room.handshake_ended()
        finally:
            spare.close()

    async def _say_alert(self, sock: socket.socket, alert: bytes) -> None:
        """Send the alert and read away what is still coming: closing with unread bytes would reset it off the wire."""
        if not alert:
            return
        with contextlib.suppress(OSError, TimeoutError):
            sock.send(alert)
            sock.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(self._limits.alert_linger_ms / 1000):
                while await self._loop.sock_recv(sock, 4096):
                    pass

    def _on_link_opened(self, link: ServerLink) -> None:
        self._links.add(link)
        if link.peer.certificate_chain:
            return
        self._anonymous += 1
        if self._anonymous > self._limits.anonymous_connections_max:
            link.refuse(
                f"{self._limits.anonymous_connections_max} connections without a certificate are open; come later"
            )

    def _on_link_closed(self, link: ServerLink) -> None:
        self._links.discard(link)
        if not link.peer.certificate_chain:
            self._anonymous -= 1

    # Calls

    def _start_call(self, call: SocketServerCall) -> None:
        task = self._loop.create_task(self._run(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _run(self, call: SocketServerCall) -> None:
        try:
            # Opened and reset in one read: nobody is there to be answered.
            if not call.ended:
                await run_handler(self._handler, call)
        finally:
            call.handler_done()


async def run_handler(handler: Handler, call: ServerCall) -> None:
    """Run a handler and turn what it raises into the call's status; returning without a status is OK."""
    try:
        await handler(call)
    except asyncio.CancelledError:
        call.finish(Status.UNAVAILABLE, "the server is stopping", {REASON_TRAILER: Reason.STOPPING})
        raise
    except Bug as bug:
        log.exception("transport.handler-bug", path=call.path)
        call.finish(bug.status, "internal error", {REASON_TRAILER: Reason.BUG})
    except BetterComputeError as error:
        call.finish(error.status, error.message, refusal_trailers(error))
    except Exception:
        log.exception("transport.handler-failed", path=call.path)
        call.finish(Status.INTERNAL, "internal error", {REASON_TRAILER: Reason.BUG})
    else:
        call.finish(Status.OK)


def refusal_trailers(error: BetterComputeError) -> dict[str, str]:
    """Return the trailers that a refusal carries: its reason, and when to come back."""
    trailers = {REASON_TRAILER: str(error.reason)}
    if error.pushback_ms is not None:
        trailers[PUSHBACK_TRAILER] = format_pushback(error.pushback_ms)
    return trailers


def by_path(handlers: Mapping[str, Handler]) -> Handler:
    """Return a handler that picks by path; a path without one is refused UNIMPLEMENTED."""

    async def handle(call: ServerCall) -> None:
        handler = handlers.get(call.path)
        if handler is None:
            refuse_unknown_method(call)
        else:
            await handler(call)

    return handle


def refuse_unknown_method(call: ServerCall) -> None:
    """End a call of an unknown path UNIMPLEMENTED."""
    text = f"unknown method {call.path[:200]}; this server speaks bettercompute.agent.v1"
    call.finish(Status.UNIMPLEMENTED, text, {REASON_TRAILER: Reason.UNKNOWN_METHOD})


async def serve(
    handler: Handler,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: Callable[[], ssl.SSLContext],
    world: World,
    limits: Limits = DEFAULT_LIMITS,
    admit: Callable[[str], bool] | None = None,
) -> Server:
    """Listen. `tls` is asked for the context of each connection, so that a new certificate needs no restart.

    `admit` may refuse an address before TLS. Raises OSError when the port cannot be had.
    """
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = infos[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
        # Accepted sockets inherit these.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return Server(handler, listener=listener, tls_context=tls, world=world, limits=limits, admit=admit)


def tune_collector() -> None:
    """Set the garbage collector for thousands of live connections: call once, when all is loaded and before serving.

    The default's pauses at 5,000 connections took the p99 of a handshake to 211 ms; with this it is 34.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 1_000)


def _plain_address(address: str) -> str:
    """Return an IPv4 address that came mapped into IPv6 as itself, and an IPv6 one without its zone."""
    plain = ipaddress.ip_address(address.partition("%")[0])
    mapped = plain.ipv4_mapped if isinstance(plain, ipaddress.IPv6Address) else None
    return str(mapped or plain)
