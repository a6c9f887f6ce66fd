"""One connection at the client, and the calls on it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from bettercompute.transport.calls import NO_METADATA, CallEnded, EndKind
from bettercompute.transport.h2_client import H2Client
from bettercompute.transport.h2_events import (
    CallLost,
    ConnectionEnded,
    Event,
    GoingAway,
    MessageReceived,
    PeerEnded,
    SettingsReceived,
)
from bettercompute.transport.inbox import Inbox
from bettercompute.transport.limits import Limits
from bettercompute.transport.link import Link, unexpected
from bettercompute.transport.tls import ALPN
from bettercompute.world import World


class ClientLink(Link):
    """A connection to a server. `first_frame` is done when its SETTINGS have come, and fails when they never will."""

    core: H2Client

    def __init__(self, *, world: World, limits: Limits, buffer: memoryview, authority: str) -> None:
        super().__init__(
            core=H2Client(limits=limits, now_ms=world.clock.monotonic_ms(), authority=authority),
            world=world,
            limits=limits,
            buffer=buffer,
            reads_while_writing_is_paused=True,
            on_event=self._on_core_event,
        )
        self.server_leaf: bytes | None = None
        self.first_frame: asyncio.Future[None] = self._loop.create_future()
        self._calls: dict[int, SocketClientCall] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the server's certificate, and begin."""
        ssl_object = transport.get_extra_info("ssl_object")
        self.server_leaf = ssl_object.getpeercert(binary_form=True)
        super().connection_made(transport)
        if ssl_object.selected_alpn_protocol() != ALPN:
            self.lose(EndKind.NOT_HTTP2, "the server does not speak HTTP/2 (ALPN h2)")

    def open_call(self, path: str, metadata: Mapping[str, str]) -> SocketClientCall:
        """Open a call; raises `CallEnded` when the connection takes none."""
        stream_id = self.core.open_call(path, metadata)
        call = SocketClientCall(self, stream_id)
        self._calls[stream_id] = call
        self.flush_soon()
        return call

    def _on_core_event(self, event: Event) -> None:
        match event:
            case MessageReceived(stream_id, message):
                self._calls[stream_id].inbox.put(message)
            case PeerEnded(stream_id, status, message, trailers):
                self._pop(stream_id).set_answered(status, message, trailers)
            case CallLost(stream_id, kind, text):
                self._pop(stream_id).set_lost(CallEnded(kind, text))
            case SettingsReceived():
                if not self.first_frame.done():
                    self.first_frame.set_result(None)
            case ConnectionEnded(kind, text):
                if not self.first_frame.done():
                    self.first_frame.set_exception(CallEnded(kind, text))
                    self.first_frame.exception()  # nobody need be waiting
            case GoingAway():
                self._close_when_unused()
            case _:
                raise unexpected(event)

    def _pop(self, stream_id: int) -> SocketClientCall:
        call = self._calls.pop(stream_id)
        self._loop.call_soon(self._close_when_unused)
        return call

    def _close_when_unused(self) -> None:
        if self.core.going_away is not None and not self._calls and self.core.ended is None:
            self.close(EndKind.GOING_AWAY, self.core.going_away)


class SocketClientCall:
    """A `ClientCall` over a socket."""

    def __init__(self, link: ClientLink, stream_id: int) -> None:
        self.status: int | None = None
        self.status_message = ""
        self.trailers: Mapping[str, str] = NO_METADATA
        self.inbox = Inbox()
        self._link = link
        self._stream_id = stream_id
        self._lost: CallEnded | None = None

    @property
    def queued_bytes(self) -> int:
        """Return the bytes of messages that have not left."""
        return self._link.core.queued_bytes(self._stream_id)

    async def receive(self) -> bytes | None:
        """Return the next message, None at the end of the answer; raises `CallEnded`."""
        message = await self.inbox.get()
        if message is not None:
            self._link.core.consumed(self._stream_id, message)
            if self._link.core.has_output:
                self._link.flush_soon()
        return message

    def send(self, message: bytes) -> None:
        """Queue a message."""
        if self._lost is not None:
            raise CallEnded(self._lost.kind, self._lost.message)
        self._link.core.send(self._stream_id, message)
        self._link.flush_soon()

    def half_close(self) -> None:
        """Say that nothing more will be sent."""
        self._link.core.half_close(self._stream_id)
        self._link.flush_soon()

    def cancel(self) -> None:
        """End the call at once."""
        self._link.core.cancel(self._stream_id)
        self._link.flush_soon()

    async def drained(self) -> None:
        """Wait until nothing is queued."""
        await self._link.drained(self._stream_id)
        if self._lost is not None:
            raise CallEnded(self._lost.kind, self._lost.message)

    def set_answered(self, status: int | None, message: str, trailers: Mapping[str, str]) -> None:
        """Take the answer's end."""
        self.status, self.status_message, self.trailers = status, message, trailers
        self.inbox.end(None)

    def set_lost(self, end: CallEnded) -> None:
        """Take the end of a call that was cut."""
        self._lost = end
        self.inbox.end(end)
