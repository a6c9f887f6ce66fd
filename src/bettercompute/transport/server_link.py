"""One connection at the server, and the calls on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

from bettercompute.errors import Refused
from bettercompute.transport.calls import NO_METADATA, CallEnded, EndKind, Peer
from bettercompute.transport.h2_connection import HoldAllowance
from bettercompute.transport.h2_events import (
    CallDone,
    CallLost,
    CallOpened,
    ConnectionEnded,
    Event,
    GoingAway,
    MessageReceived,
    PeerEnded,
    SettingsReceived,
)
from bettercompute.transport.h2_server import H2Server
from bettercompute.transport.inbox import Inbox
from bettercompute.transport.limits import Limits
from bettercompute.transport.link import Link, unexpected
from bettercompute.transport.tls import ALPN, verified_chain
from bettercompute.world import World


class ServerLink(Link):
    """A client's connection: opens a `SocketServerCall` for each request."""

    core: H2Server

    def __init__(
        self,
        *,
        world: World,
        limits: Limits,
        buffer: memoryview,
        allowance: HoldAllowance,
        peer: Peer,
        opened: Callable[[ServerLink], None],
        closed: Callable[[ServerLink], None],
        start_call: Callable[[SocketServerCall], None],
    ) -> None:
        now_ms = world.clock.monotonic_ms()
        super().__init__(
            core=H2Server(limits=limits, now_ms=now_ms, allowance=allowance),
            world=world,
            limits=limits,
            buffer=buffer,
            reads_while_writing_is_paused=False,
            on_event=self._on_core_event,
        )
        self.peer = peer
        self.never_connected = True
        self.on_tick = self._check_idle
        self._opened = opened
        self._closed = closed
        self._start_call = start_call
        self._calls: dict[int, SocketServerCall] = {}
        self._idle_since_ms = now_ms
        self._first_call_handle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Read who the peer is, and begin; a peer that did not ask for HTTP/2 is cut off."""
        ssl_object = transport.get_extra_info("ssl_object")
        if ssl_object.selected_alpn_protocol() != ALPN:
            cast("asyncio.Transport", transport).abort()
            return
        self.never_connected = False
        chain = verified_chain(ssl_object)
        self.peer = replace(self.peer, certificate_chain=chain)
        if not chain:
            self.core.count_strangers()
        super().connection_made(transport)
        self._opened(self)
        wait_s = self._limits.first_call_ms / 1000
        self._first_call_handle = self._loop.call_later(wait_s, self._first_call_missing)

    def connection_lost(self, exc: Exception | None) -> None:
        """End every call."""
        super().connection_lost(exc)
        if self._first_call_handle is not None:
            self._first_call_handle.cancel()
        if not self.never_connected:
            self._closed(self)

    def announce_goaway(self) -> None:
        """Tell the client to open no new calls; without any open the connection closes."""
        if not self._calls:
            self.close(EndKind.CLOSED_HERE, "the server is going away")
            return
        self.core.announce_goaway()
        self.flush_soon()

    def close_for_shutdown(self) -> None:
        """Close now."""
        self.close(EndKind.CLOSED_HERE, "the server is stopping")

    def refuse(self, text: str) -> None:
        """Close a connection that may not stay."""
        self.close(EndKind.CLOSED_HERE, text)

    def _on_core_event(self, event: Event) -> None:
        match event:
            case MessageReceived(stream_id, message):
                self._calls[stream_id].inbox.put(message)
            case CallOpened(stream_id, path, metadata):
                call = SocketServerCall(self, stream_id, path=path, metadata=metadata)
                self._calls[stream_id] = call
                if self._first_call_handle is not None:
                    self._first_call_handle.cancel()
                    self._first_call_handle = None
                self._start_call(call)
            case PeerEnded(stream_id):
                self._calls[stream_id].inbox.end(None)
            case CallLost(stream_id, kind, text):
                self._end_call(stream_id, CallEnded(kind, text))
            case CallDone(stream_id):
                self._end_call(stream_id, CallEnded(EndKind.FINISHED, "the call was finished here"))
            case ConnectionEnded() | SettingsReceived() | GoingAway():
                pass
            case _:
                raise unexpected(event)

    def _end_call(self, stream_id: int, end: CallEnded) -> None:
        self._calls.pop(stream_id).set_ended(end)
        if not self._calls:
            self._idle_since_ms = self._world.clock.monotonic_ms()

    def _first_call_missing(self) -> None:
        self.close(EndKind.IDLE, f"no request within {self._limits.first_call_ms} ms")

    def _check_idle(self) -> None:
        idle_ms = self._world.clock.monotonic_ms() - self._idle_since_ms
        if not self._calls and idle_ms >= self._limits.idle_ms:
            self.close(EndKind.IDLE, f"no call for {idle_ms} ms; the limit is {self._limits.idle_ms}")


class SocketServerCall:
    """A `ServerCall` over a socket."""

    def __init__(self, link: ServerLink, stream_id: int, *, path: str, metadata: Mapping[str, str]) -> None:
        self.path = path
        self.metadata = metadata
        self.peer = link.peer
        self.inbox = Inbox()
        self._link = link
        self._stream_id = stream_id
        self._end: CallEnded | None = None
        self._finishing = False
        self._closed = asyncio.Event()

    @property
    def queued_bytes(self) -> int:
        """Return the bytes of messages that have not left."""
        return self._link.core.queued_bytes(self._stream_id)

    @property
    def last_heard_ms(self) -> int:
        """Return when anything was last heard on the connection."""
        return self._link.last_heard_ms

    @property
    def ended(self) -> bool:
        """Return whether nothing more can be sent."""
        return self._finishing or self._end is not None

    async def receive(self) -> bytes | None:
        """Return the next message, None at the peer's end; raises `CallEnded`."""
        message = await self.inbox.get()
        if message is not None:
            self._link.core.consumed(self._stream_id, message)
            if self._link.core.has_output:
                self._link.flush_soon()
        return message

    def send(self, message: bytes) -> None:
        """Queue a message."""
        if self._end is not None:
            raise CallEnded(self._end.kind, self._end.message)
        try:
            self._link.core.send(self._stream_id, message)
        except Refused as refusal:
            self._link.core.abort(self._stream_id, refusal)
            self._link.flush()
            raise
        self._link.flush_soon()

    def finish(self, status: int, message: str = "", trailers: Mapping[str, str] = NO_METADATA) -> None:
        """End the call after what is queued."""
        if not self.ended:
            self._finishing = True
            self._link.core.finish(self._stream_id, status, message, trailers)
            self._link.flush_soon()

    def never_bill(self, path: str) -> None:
        """Stop billing calls of `path` on this connection."""
        self._link.core.never_bill(path)

    async def drained(self) -> None:
        """Wait until nothing is queued."""
        await self._link.drained(self._stream_id)
        if self._end is not None and self._end.kind is not EndKind.FINISHED:
            raise CallEnded(self._end.kind, self._end.message)

    async def wait_closed(self) -> None:
        """Wait until the call has ended."""
        await self._closed.wait()

    def set_ended(self, end: CallEnded) -> None:
        """Take the end from the connection."""
        self._end = end
        self.inbox.end(end)
        self._closed.set()

    def handler_done(self) -> None:
        """Give the call's place on the connection back."""
        self._link.core.handler_done()
