"""One ASGI application on one port, inside an event loop that others share."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from bettercompute.errors import Refused
from bettercompute.protocol.statuses import Reason, Status

BACKLOG = 512
# Requests that wait for a command to end are told to come back; the others are short.
GRACEFUL_STOP_S = 3
# And then what is cancelled may say so, unless its peer does not read.
CANCELLED_STOP_S = 1
# Whoever takes nothing of an answer for so long is gone: longer than a reader of events is given, twice. Neither ASGI
# nor uvicorn bounds it, and a connection that is closed stays until its peer has read what was written.
UNREAD_MS_MAX = 60_000


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process decides when it stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


class HttpServer:
    """A running application."""

    def __init__(
        self,
        app: Starlette,
        *,
        listener: socket.socket,
        tls: ssl.SSLContext | None = None,
        protocol: type[asyncio.Protocol] | None = None,
        connections_max: int | None = None,
    ) -> None:
        """Serve `app` at once. `protocol` is the class of each connection, by default uvicorn's own."""
        self._listener = listener
        self._scheme = "http" if tls is None else "https"
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=GRACEFUL_STOP_S,
            h11_max_incomplete_event_size=64 << 10,
            limit_concurrency=connections_max,
            ssl_context_factory=None if tls is None else lambda *_: tls,
            http=protocol or "auto",
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="api")

    @property
    def url(self) -> str:
        """Where it listens; a wildcard address is told as loopback."""
        host, port = self._listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
        return f"{self._scheme}://[{host}]:{port}" if ":" in host else f"{self._scheme}://{host}:{port}"

    async def stop(self) -> None:
        """Stop listening, give open requests a moment, end with every connection."""
        self._server.should_exit = True
        await self._task
        self._listener.close()
        # uvicorn has cancelled what took longer, and waits neither for that nor for the connections.
        state = self._server.server_state
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=CANCELLED_STOP_S)
        for connection in state.connections:
            # To close it would wait until its peer has read all.
            connection.transport.abort()
        if state.tasks:
            await asyncio.wait(state.tasks)


def listen(host: str, port: int, *, purpose: str) -> socket.socket:
    """Return a listening socket, or refuse with the cure when the address cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise Refused(
            f"{purpose}: cannot listen on {host} port {port}: {error.strerror or error}; choose another port",
            status=Status.FAILED_PRECONDITION,
            reason=Reason.INVALID_CONFIG,
        ) from None
    listener.setblocking(False)
    # Connections inherit it; without it a body that follows its head waits 40 ms for the client's delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS_MAX)
    return listener
