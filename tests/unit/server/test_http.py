"""What a server of HTTP owes to a peer that does not read: nothing, after a while."""

from __future__ import annotations

import asyncio
import socket

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from bettercompute.server import http
from bettercompute.server.http import HttpServer, listen

# More than the buffers of a connection hold.
LARGE = b"x" * (32 << 20)


class Site:
    """A server with an answer that is too large for the buffers, and one that never comes."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.lost = lost = asyncio.Event()

        class TellingProtocol(H11Protocol):
            def connection_lost(self, exc: Exception | None) -> None:
                super().connection_lost(exc)
                lost.set()

        self.server = HttpServer(
            Starlette(routes=[Route("/large", self.large), Route("/never", self.never)]),
            listener=listen("127.0.0.1", 0, purpose="tests"),
            protocol=TellingProtocol,
        )

    async def large(self, _: Request) -> Response:
        self.asked.set()
        return Response(LARGE, headers={"connection": "close"})

    async def never(self, _: Request) -> Response:
        self.asked.set()
        await asyncio.Event().wait()
        return Response()

    def ask(self, path: str) -> socket.socket:
        """Ask, and read nothing."""
        reader = socket.create_connection(("127.0.0.1", int(self.server.url.rpartition(":")[2])))
        reader.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        return reader


async def test_who_reads_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "UNREAD_MS_MAX", 300)
    site = Site()
    with site.ask("/large"):
        await asyncio.wait_for(site.lost.wait(), 30)
    await site.server.stop()


@pytest.mark.parametrize("path", ["/large", "/never"])
async def test_a_stop_ends_what_nobody_reads_and_what_does_not_end(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(http, "GRACEFUL_STOP_S", 0.1)
    monkeypatch.setattr(http, "CANCELLED_STOP_S", 0.1)
    site = Site()
    with site.ask(path):
        await asyncio.wait_for(site.asked.wait(), 30)
        await asyncio.wait_for(site.server.stop(), 30)
        await asyncio.wait_for(site.lost.wait(), 30)
