"""The asyncio end of one TLS connection: bytes between transport and sans-I/O core, PINGs, back-pressure, the end.

Both sides share it. Writing goes in pieces until the transport says stop; a server then stops reading too, so that a
peer that never reads cannot make it hold more. A client goes on reading: were both to stop, two full pipes would wait
for each other. After a GOAWAY for abuse nothing more is read, and the connection is cut.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import ssl
from collections.abc import Callable
from typing import cast

from h2.exceptions import H2Error

from bettercompute.errors import Bug
from bettercompute.transport.calls import CallEnded, EndKind
from bettercompute.transport.h2_connection import H2Core
from bettercompute.transport.h2_events import ConnectionEnded, Event, PingAnswered
from bettercompute.transport.limits import READ_BUFFER_BYTES, STDLIB_TLS_BUFFER_BYTES, WRITE_BYTES_MAX, Limits
from bettercompute.transport.tls_errors import explain_tls_error
from bettercompute.world import World

ABUSE_KINDS = frozenset({EndKind.ENHANCE_YOUR_CALM, EndKind.PROTOCOL})
PING_PAYLOAD = b"\x00bc-ping"


def read_buffer() -> memoryview:
    """Return a buffer for TLS to decrypt into.

    The connections of one loop may share it, since each read is used at once.
    """
    return memoryview(bytearray(READ_BUFFER_BYTES))


def bound_stdlib_tls(loop: asyncio.AbstractEventLoop) -> None:
    """Make stdlib asyncio hold 16 KiB for each TLS connection instead of 256; uvloop has no need of it."""
    if not type(loop).__module__.startswith("uvloop"):
        asyncio.sslproto.SSLProtocol.max_size = STDLIB_TLS_BUFFER_BYTES


def _heard_by_nobody(event: Event) -> None:
    """Take an event after the connection's end."""


class Link(asyncio.BufferedProtocol):
    """One connection. `on_event` hears what is not the link's own business, in order."""

    def __init__(
        self,
        *,
        core: H2Core,
        world: World,
        limits: Limits,
        buffer: memoryview,
        reads_while_writing_is_paused: bool,
        on_event: Callable[[Event], None],
    ) -> None:
        self.core = core
        self.last_heard_ms = world.clock.monotonic_ms()
        self.on_tick: Callable[[], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._world = world
        self._limits = limits
        self._buffer = buffer
        self._reads_while_writing_is_paused = reads_while_writing_is_paused
        self._on_event = on_event
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self._flush_handle: asyncio.Handle | None = None
        self._tick_handle: asyncio.TimerHandle | None = None
        self._cut_handle: asyncio.TimerHandle | None = None
        self._pings_unanswered = 0
        self._drained: dict[int, list[asyncio.Future[None]]] = {}
        self.closed = asyncio.Event()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the preface and start the PINGs."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class is none of asyncio's
        # TLS transports would take 512 KiB from us before they say stop.
        self._transport.set_write_buffer_limits(high=WRITE_BYTES_MAX)
        self._schedule_tick()
        self.flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Lend the shared buffer."""
        del sizehint
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Take what was read."""
        if self.core.ended is not None:
            return
        self.last_heard_ms = self._world.clock.monotonic_ms()
        try:
            events = self.core.receive(self._buffer[:nbytes], now_ms=self.last_heard_ms)
        except Exception as error:  # noqa: BLE001 - what h2 did not foresee ends this connection and no other
            self.lose(EndKind.PROTOCOL, f"the peer sent what HTTP/2 does not foresee: {error!r}")
            return
        self._dispatch(events)
        if self.core.has_output:
            self.flush_soon()

    def eof_received(self) -> bool:
        """Let the transport close."""
        return False

    def pause_writing(self) -> None:
        """Stop sending, and at a server reading."""
        self._paused = True
        if not self._reads_while_writing_is_paused and self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Go on."""
        self._paused = False
        if not self._reads_while_writing_is_paused and self._transport is not None and self.core.ended is None:
            self._transport.resume_reading()
        self.flush_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every call, and forget the transport."""
        kind, text = EndKind.CONNECTION_LOST, f"the connection was lost{f': {exc}' if exc else ''}"
        if isinstance(exc, ssl.SSLError):
            dial_kind, text = explain_tls_error(exc)
            kind = EndKind(dial_kind.value) if dial_kind.value in list(EndKind) else EndKind.TLS
        self._transport = None
        for handle in (self._flush_handle, self._tick_handle, self._cut_handle):
            if handle is not None:
                handle.cancel()
        self.core.lose(kind, text)
        self._dispatch(self.core.take_events())
        # No cycle may be left behind: the collector runs rarely.
        self.on_tick = None
        self._on_event = _heard_by_nobody
        self.closed.set()

    # Our side

    @property
    def end(self) -> CallEnded | None:
        """Return why the connection is over."""
        ended = self.core.ended
        return CallEnded(ended.kind, ended.text) if ended is not None else None

    def flush_soon(self) -> None:
        """Send what there is at the end of this turn of the loop, so that its messages share frames and writes."""
        if self._flush_handle is None and self._transport is not None:
            self._flush_handle = self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send what the peer and the transport take now."""
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        transport = self._transport
        while transport is not None and not transport.is_closing():
            try:
                data = self.core.output(0 if self._paused else WRITE_BYTES_MAX)
            except H2Error as error:
                # We and h2 disagree on what may be sent: this connection's end, and no other's.
                self.lose(EndKind.PROTOCOL, f"HTTP/2 went out of step: {error!r}")
                return
            if not data:
                break
            for start in range(0, len(data), WRITE_BYTES_MAX):
                transport.write(data[start : start + WRITE_BYTES_MAX])
        self._dispatch(self.core.take_events())
        self._wake_drained()

    async def drained(self, stream_id: int) -> None:
        """Wait until a call has nothing queued; raises `CallEnded` when the connection is lost before."""
        if self.core.queued_bytes(stream_id) == 0:
            return
        waiter = self._loop.create_future()
        self._drained.setdefault(stream_id, []).append(waiter)
        await waiter

    def close(self, kind: EndKind, text: str) -> None:
        """Say GOAWAY and close, within `close_ms`."""
        self.core.close(kind, text)
        self.flush()
        self._finish_closing()

    def lose(self, kind: EndKind, text: str) -> None:
        """Give the connection up at once."""
        self.core.lose(kind, text)
        self._dispatch(self.core.take_events())
        if self._transport is not None:
            self._transport.abort()

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, PingAnswered):
                self._pings_unanswered = 0
                continue
            self._on_event(event)
            if isinstance(event, ConnectionEnded):
                self._wake_drained()
                if event.kind in ABUSE_KINDS:
                    self.flush()
                    self._finish_closing()

    def _finish_closing(self) -> None:
        if self._transport is None or self._cut_handle is not None:
            return
        abuse = self.core.ended is not None and self.core.ended.kind in ABUSE_KINDS
        if abuse:
            self._transport.pause_reading()
        else:
            self._transport.close()
        wait_ms = self._limits.abuse_linger_ms if abuse else self._limits.close_ms
        self._cut_handle = self._loop.call_later(wait_ms / 1000, self._transport.abort)

    def _wake_drained(self) -> None:
        if not self._drained:
            return
        for stream_id in list(self._drained):
            if self.core.queued_bytes(stream_id):
                continue
            for waiter in self._drained.pop(stream_id):
                if waiter.done():
                    continue
                if self.end is not None:
                    waiter.set_exception(self.end)
                else:
                    waiter.set_result(None)

    # PINGs

    def _schedule_tick(self) -> None:
        jitter = self._limits.ping_jitter
        delay_ms = self._limits.ping_interval_ms * self._world.dice.uniform(1 - jitter, 1 + jitter)
        self._tick_handle = self._loop.call_later(delay_ms / 1000, self._tick)

    def _tick(self) -> None:
        # Counted in ticks, not in time: a process that was stopped for minutes must not take its own silence for the
        # peer's.
        if self._pings_unanswered >= self._limits.pings_unanswered_max:
            self.lose(EndKind.PING_TIMEOUT, f"the peer answered none of {self._pings_unanswered} PINGs")
            return
        self._pings_unanswered += 1
        self.core.ping(PING_PAYLOAD)
        self._schedule_tick()
        if self.on_tick is not None:
            self.on_tick()
        self.flush()


def unexpected(event: Event) -> Bug:
    """Return the error for an event that this end of a connection cannot have."""
    return Bug(f"{event!r} at the wrong end of a connection")
