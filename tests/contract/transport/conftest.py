"""Both event loops, and both transports, for every test here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import pytest
import uvloop

from bettercompute.system import system_world
from bettercompute.transport.memory import MemoryServer
from bettercompute.transport.streams import (
    DEFAULT_LIMITS,
    Connection,
    DialTarget,
    Handler,
    Limits,
    dial,
    serve,
    server_context,
)
from tests.contract.transport.authority import shared_pki


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


Open = Callable[..., Awaitable[Connection]]


@pytest.fixture(params=["sockets", "memory"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Open]:
    """Start a server for a handler and return a connection to it."""
    servers: list[object] = []
    connections: list[Connection] = []
    pki = shared_pki()
    world = system_world()

    async def open_connection(handler: Handler, *, limits: Limits = DEFAULT_LIMITS) -> Connection:
        connection: Connection
        if request.param == "memory":
            memory = MemoryServer(handler, world=world, limits=limits)
            servers.append(memory)
            connection = memory.connect(certificate_chain=(b"leaf",))
        else:
            context = server_context(pki.server_secrets)
            server = await serve(handler, tls=lambda: context, world=world, limits=limits)
            servers.append(server)
            target = DialTarget(
                f"https://127.0.0.1:{server.port}",
                pki.serving_ca.pin,
                serving_ca_pem=pki.serving_ca.pem,
                identity=pki.node,
            )
            connection = await dial(target, world=world, limits=limits)
        connections.append(connection)
        return connection

    open_connection.servers = servers  # type: ignore[attr-defined]
    yield open_connection
    for connection in connections:
        connection.close()
        await connection.wait_closed()
    for server in servers:
        await server.close(drain_ms=0)  # type: ignore[attr-defined]
