"""Calls without sockets: the contract of `calls` over two lines in memory, for tests and the simulator.

Same bounds, same order, same endings as over TLS; what a network does to it is set on the connection: latency, a line
that holds everything back (a partition: nothing is lost, as with TCP, until the PINGs would have given up), a cut.
Nothing here reads a clock but the world's, or waits but on the loop's.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Mapping

from bettercompute.transport.calls import (
    NO_METADATA,
    CallEnded,
    EndKind,
    Handler,
    Peer,
    ServerCertificate,
)
from bettercompute.transport.client import unary_on
from bettercompute.transport.limits import DEFAULT_LIMITS, Limits
from bettercompute.transport.memory_calls import NETWORK, Line, MemoryClientCall, MemoryServerCall
from bettercompute.transport.server import run_handler
from bettercompute.world import Clock, World


class MemoryServer:
    """What `Server` is to sockets: `connect` takes the place of listening and dialing."""

    def __init__(self, handler: Handler, *, world: World, limits: Limits = DEFAULT_LIMITS) -> None:
        self.accepting = True
        self._handler = handler
        self._world = world
        self._limits = limits
        # Kept in the order of their making: who is told first must not depend on where things lie in memory.
        self._connections: dict[MemoryConnection, None] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        # A handler runs as what the server belongs to, not as whoever dials.
        self._context = contextvars.copy_context()

    @property
    def connection_count(self) -> int:
        """Return how many connections are open."""
        return len(self._connections)

    @property
    def call_count(self) -> int:
        """Return how many handlers run."""
        return len(self._tasks)

    def connect(
        self,
        *,
        certificate_chain: tuple[bytes, ...] = (),
        address: str = "127.0.0.1",
        port: int = 0,
        server_certificate: ServerCertificate | None = None,
        latency_s: Callable[[], float] | None = None,
        clock: Clock | None = None,
    ) -> MemoryConnection:
        """Return a new connection to this server; raises `CallEnded` when it takes none.

        `clock` is what the client's end stamps what it hears with, where its host is another than the server's.
        """
        if not self.accepting:
            raise CallEnded(EndKind.GOING_AWAY, "the server takes no connections")
        connection = MemoryConnection(
            self,
            peer=Peer(address, port, certificate_chain),
            server_certificate=server_certificate,
            latency_s=latency_s,
            clock=self._world.clock if clock is None else clock,
        )
        self._connections[connection] = None
        return connection

    def announce_close(self) -> None:
        """Take no new connections or calls; open calls go on."""
        self.accepting = False
        for connection in list(self._connections):
            connection.going_away()

    async def close(self, *, drain_ms: int | None = None) -> None:
        """Close as `Server.close` does."""
        self.announce_close()
        wait_s = (self._limits.drain_ms if drain_ms is None else drain_ms) / 1000
        if self._tasks and wait_s > 0:
            await asyncio.wait(self._tasks, timeout=wait_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in list(self._connections):
            connection.cut(EndKind.CLOSED_HERE, "the server is stopping")

    def start(self, call: MemoryServerCall) -> None:
        """Run the handler for a call."""
        running = run_handler(self._handler, call)
        task = asyncio.get_running_loop().create_task(running, context=self._context.copy())
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    def forget(self, connection: MemoryConnection) -> None:
        """Drop a connection that is gone."""
        self._connections.pop(connection, None)

    @property
    def world(self) -> World:
        """Return the world that the server lives in."""
        return self._world

    @property
    def limits(self) -> Limits:
        """Return its limits."""
        return self._limits


class MemoryConnection:
    """A `Connection` in memory, seen by both ends, and the network between them."""

    def __init__(
        self,
        server: MemoryServer,
        *,
        peer: Peer,
        server_certificate: ServerCertificate | None,
        latency_s: Callable[[], float] | None,
        clock: Clock,
    ) -> None:
        self.server_certificate = server_certificate
        self.serving_ca_pem: bytes | None = None
        self.closed = asyncio.Event()
        self.end: CallEnded | None = None
        self.peer = peer
        self._server = server
        self._limits = server.limits
        self._calls: dict[MemoryClientCall, None] = {}
        self._going_away = False
        self._ping_timeout: asyncio.TimerHandle | None = None
        self.to_server = Line(clock=server.world.clock, latency_s=latency_s, changed=self._on_line_changed)
        self.to_client = Line(clock=clock, latency_s=latency_s, changed=self._on_line_changed)

    @property
    def last_heard_ms(self) -> int:
        """Return when the client last heard the server; PINGs would keep it fresh while both lines are open."""
        return self.to_client.heard_ms(answering=self.to_server)

    @property
    def server_heard_ms(self) -> int:
        """Return when the server last heard the client."""
        return self.to_server.heard_ms(answering=self.to_client)

    async def call(self, path: str, metadata: Mapping[str, str] = NO_METADATA) -> MemoryClientCall:
        """Open a call."""
        if self.end is not None:
            raise CallEnded(self.end.kind, self.end.message)
        if self._going_away:
            raise CallEnded(EndKind.GOING_AWAY, "the server is going away")
        if len(self._calls) >= self._limits.streams_max:
            raise CallEnded(
                EndKind.REFUSED_STREAM,
                f"the server takes no more calls on this connection: {len(self._calls)} of {self._limits.streams_max}",
            )
        call = MemoryClientCall(limits=self._limits, ended=self._on_call_ended)
        other = MemoryServerCall(
            path=path,
            metadata=dict(metadata),
            peer=self.peer,
            limits=self._limits,
            heard_ms=lambda: self.server_heard_ms,
        )
        call.join(other, to_server=self.to_server, to_client=self.to_client)
        self._calls[call] = None
        self.to_server.deliver(lambda: self._server.start(other))
        return call

    async def unary(
        self, path: str, request: bytes, *, metadata: Mapping[str, str] = NO_METADATA, timeout_s: float
    ) -> bytes:
        """Send one message and return the one answer."""
        return await unary_on(await self.call(path, metadata), request, timeout_s=timeout_s)

    def close(self) -> None:
        """End the connection."""
        self.cut(EndKind.CLOSED_HERE, "the connection was closed here")

    async def wait_closed(self) -> None:
        """Wait until it is gone."""
        await self.closed.wait()

    # The network

    def cut(self, kind: EndKind = EndKind.CONNECTION_LOST, text: str = "the connection was lost") -> None:
        """End the connection for both ends now, with all that is on its way."""
        if self.end is not None:
            return
        self.end = CallEnded(kind, text)
        self.to_server.close()
        self.to_client.close()
        if self._ping_timeout is not None:
            self._ping_timeout.cancel()
        for call in list(self._calls):
            call.cut(self.end)
        self._server.forget(self)
        self.closed.set()

    def going_away(self) -> None:
        """Say GOAWAY: no new calls, and the end when there is none."""
        self._going_away = True
        self._close_when_unused()

    def _on_call_ended(self, call: MemoryClientCall) -> None:
        self._calls.pop(call, None)
        self._close_when_unused()

    def _close_when_unused(self) -> None:
        if self._going_away and not self._calls:
            self.cut(EndKind.GOING_AWAY, "the server is going away")

    def _on_line_changed(self) -> None:
        held = self.to_server.held or self.to_client.held
        if held and self._ping_timeout is None:
            wait_s = self._limits.ping_interval_ms * self._limits.pings_unanswered_max / 1000
            text = "no PING was answered"
            self._ping_timeout = asyncio.get_running_loop().call_later(
                wait_s, self.cut, EndKind.PING_TIMEOUT, text, context=NETWORK
            )
        elif not held and self._ping_timeout is not None:
            self._ping_timeout.cancel()
            self._ping_timeout = None
