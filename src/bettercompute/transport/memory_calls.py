"""The two ends of a call in memory, and the lines that carry it."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bettercompute.errors import BetterComputeError, Refused
from bettercompute.protocol.statuses import REASON_TRAILER, Reason, refuse
from bettercompute.transport.calls import NO_METADATA, CallEnded, EndKind, Peer
from bettercompute.transport.grpc_call import PREFIX_BYTES
from bettercompute.transport.h2_connection import check_outbound
from bettercompute.transport.inbox import Inbox
from bettercompute.transport.limits import STREAM_WINDOW_BYTES, Limits
from bettercompute.world import Clock

# What is on its way belongs neither to who sent it nor to who will get it.
NETWORK = contextvars.Context()


class Line:
    """One direction of a connection: everything arrives in order, later by its latency, not at all while it is held."""

    def __init__(self, *, clock: Clock, latency_s: Callable[[], float] | None, changed: Callable[[], None]) -> None:
        self.held = False
        self._clock = clock
        self._latency_s = latency_s
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._on_its_way: deque[tuple[float, Callable[[], None]]] = deque()
        self._handle: asyncio.Handle | None = None
        self._last_arrival_ms = clock.monotonic_ms()
        self._closed = False

    def deliver(self, arrive: Callable[[], None]) -> None:
        """Let something arrive at the other end."""
        if self._closed:
            return
        at = self._loop.time() + self._latency_s() if self._latency_s is not None else 0.0
        if self._on_its_way:
            at = max(at, self._on_its_way[-1][0])
        self._on_its_way.append((at, arrive))
        self._schedule()

    def hold(self) -> None:
        """Stop delivering: a partition in this direction."""
        self.held = True
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._changed()

    def release(self) -> None:
        """Deliver again, first what was held back."""
        self.held = False
        self._changed()
        self._schedule()

    def close(self) -> None:
        """Drop what is on its way, for good."""
        self._closed = True
        self._on_its_way.clear()
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def heard_ms(self, *, answering: Line) -> int:
        """Return when something last arrived here; with both lines open a PING's answer would be fresh at any time."""
        if not self.held and not answering.held and not self._closed:
            return self._clock.monotonic_ms()
        return self._last_arrival_ms

    def _schedule(self) -> None:
        if self._handle is not None or self.held or not self._on_its_way:
            return
        at = self._on_its_way[0][0]
        if at <= self._loop.time():
            self._handle = self._loop.call_soon(self._arrive, context=NETWORK)
        else:
            self._handle = self._loop.call_at(at, self._arrive, context=NETWORK)

    def _arrive(self) -> None:
        self._handle = None
        now = self._loop.time()
        self._last_arrival_ms = self._clock.monotonic_ms()
        while self._on_its_way and self._on_its_way[0][0] <= now and not self.held:
            self._on_its_way.popleft()[1]()
        self._schedule()


@dataclass(frozen=True, slots=True)
class _Ending:
    """The end of one direction: a status from the server, nothing from the client."""

    status: int = 0
    message: str = ""
    trailers: Mapping[str, str] = field(default_factory=dict)


class _Pipe:
    """Messages of one call in one direction, with the queue and the window that HTTP/2 would give it."""

    def __init__(
        self,
        *,
        limits: Limits,
        line: Line,
        inbox: Inbox,
        ending: Callable[[_Ending], None],
        sent_all: Callable[[], None],
    ) -> None:
        self.queued_bytes = 0
        self.message_bytes_max: int | None = None
        self.too_large: Callable[[int], None] | None = None
        self._limits = limits
        self._line = line
        self._inbox = inbox
        self._ending = ending
        self._sent_all = sent_all
        self._loop = asyncio.get_running_loop()
        self._queue: deque[bytes] = deque()
        self._end: _Ending | None = None
        self._unread_bytes = 0
        self._pump_handle: asyncio.Handle | None = None
        self._closed = False

    @property
    def ending(self) -> bool:
        """Whether nothing more can be queued."""
        return self._closed or self._end is not None

    def send(self, message: bytes) -> None:
        check_outbound(message, queued_bytes=self.queued_bytes, queued_messages=len(self._queue), limits=self._limits)
        self._queue.append(message)
        self.queued_bytes += PREFIX_BYTES + len(message)
        self._pump_soon()

    def finish(self, end: _Ending, *, now: bool = False) -> None:
        if self._end is None:
            self._end = end
        if now:
            self._queue.clear()
            self.queued_bytes = 0
        self._pump_soon()

    def close(self) -> None:
        """Carry nothing more."""
        self._closed = True
        self._queue.clear()
        self.queued_bytes = 0

    def consumed(self, message: bytes) -> None:
        self._unread_bytes -= PREFIX_BYTES + len(message)
        if self._queue:
            self._pump_soon()

    def _pump_soon(self) -> None:
        if self._pump_handle is None:
            self._pump_handle = self._loop.call_soon(self._pump, context=NETWORK)

    def _pump(self) -> None:
        self._pump_handle = None
        while self._queue:
            size = PREFIX_BYTES + len(self._queue[0])
            # A message larger than the window is credited while it is read, so that it passes when nothing is before
            # it.
            if self._unread_bytes and self._unread_bytes + size > STREAM_WINDOW_BYTES:
                return
            message = self._queue.popleft()
            self.queued_bytes -= size
            self._unread_bytes += size
            self._line.deliver(lambda message=message: self._arrived(message))  # type: ignore[misc] # bound per message
        self._sent_all()
        if self._end is not None and not self._closed:
            self._closed = True
            end = self._end
            self._line.deliver(lambda: self._ending(end))

    def _arrived(self, message: bytes) -> None:
        if self.message_bytes_max is not None and len(message) > self.message_bytes_max and self.too_large is not None:
            self.too_large(len(message))
        else:
            self._inbox.put(message)


class _End:
    """What both ends of a call in memory share."""

    _out: _Pipe
    _in: _Pipe

    def __init__(self, *, limits: Limits) -> None:
        self.inbox = Inbox()
        self._limits = limits
        self._lost: CallEnded | None = None
        self._drained = asyncio.Event()
        self._drained.set()

    @property
    def queued_bytes(self) -> int:
        """Return the bytes of messages that have not left."""
        return self._out.queued_bytes

    async def receive(self) -> bytes | None:
        """Return the next message, None at the peer's end; raises `CallEnded`."""
        message = await self.inbox.get()
        if message is not None:
            self._in.consumed(message)
        return message

    async def drained(self) -> None:
        """Wait until nothing is queued."""
        await self._drained.wait()
        if self._lost is not None and self._lost.kind is not EndKind.FINISHED:
            raise CallEnded(self._lost.kind, self._lost.message)

    def _queue(self, message: bytes) -> None:
        if self._lost is not None:
            raise CallEnded(self._lost.kind, self._lost.message)
        if self._out.ending:
            raise CallEnded(EndKind.FINISHED, "the call has ended: nothing more can be sent")
        self._out.send(message)
        self._drained.clear()

    def _lose(self, end: CallEnded) -> None:
        if self._lost is None:
            self._lost = end
            self._out.close()
            self._in.close()
            self.inbox.end(end)
            self._drained.set()


class MemoryServerCall(_End):
    """A `ServerCall` in memory."""

    def __init__(
        self, *, path: str, metadata: Mapping[str, str], peer: Peer, limits: Limits, heard_ms: Callable[[], int]
    ) -> None:
        super().__init__(limits=limits)
        self.path = path
        self.metadata = metadata
        self.peer = peer
        self._heard_ms = heard_ms
        self._finishing = False
        self._closed = asyncio.Event()

    @property
    def last_heard_ms(self) -> int:
        """Return when anything was last heard on the connection."""
        return self._heard_ms()

    @property
    def ended(self) -> bool:
        """Return whether nothing more can be sent."""
        return self._finishing or self._lost is not None

    def send(self, message: bytes) -> None:
        """Queue a message."""
        try:
            self._queue(message)
        except Refused as refusal:
            self._abort(refusal)
            raise

    def finish(self, status: int, message: str = "", trailers: Mapping[str, str] = NO_METADATA) -> None:
        """End the call after what is queued."""
        if not self.ended:
            self._finishing = True
            self._out.finish(_Ending(int(status), message, dict(trailers)))

    def never_bill(self, path: str) -> None:
        """Do nothing: there is no bucket here."""

    async def wait_closed(self) -> None:
        """Wait until the call has ended."""
        await self._closed.wait()

    def refuse_large(self, size: int) -> None:
        """End the call because of a message over its path's limit."""
        text = f"a message of {size} bytes; the limit is {self._in.message_bytes_max}: send less in one message"
        self._abort(refuse(Reason.FRAME_TOO_LARGE, text))

    def lose(self, end: CallEnded) -> None:
        """Take the end from the connection or the client."""
        self._finishing = True
        self._lose(end)
        self._closed.set()

    def on_sent_all(self) -> None:
        """Note that the queue has left, and with it the call's end if it was said."""
        self._drained.set()
        if self._finishing and self._lost is None:
            end = CallEnded(EndKind.FINISHED, "the call was finished here")
            self._lost = end
            self.inbox.end(end)
            self._closed.set()

    def on_half_close(self, end: _Ending) -> None:
        """Take the client's end."""
        del end
        self.inbox.end(None)

    def _abort(self, refusal: BetterComputeError) -> None:
        self._finishing = True
        self._out.finish(_Ending(refusal.status, refusal.message, {REASON_TRAILER: str(refusal.reason)}), now=True)
        self.inbox.end(CallEnded(EndKind.FINISHED, f"the call was refused: {refusal.message}"))


class MemoryClientCall(_End):
    """A `ClientCall` in memory."""

    def __init__(self, *, limits: Limits, ended: Callable[[MemoryClientCall], None]) -> None:
        super().__init__(limits=limits)
        self.status: int | None = None
        self.status_message = ""
        self.trailers: Mapping[str, str] = NO_METADATA
        self._ended = ended

    def join(self, other: MemoryServerCall, *, to_server: Line, to_client: Line) -> None:
        """Connect the two ends."""
        up = _Pipe(
            limits=self._limits,
            line=to_server,
            inbox=other.inbox,
            ending=other.on_half_close,
            sent_all=self._drained.set,
        )
        up.message_bytes_max = self._limits.message_bytes_max_by_path.get(other.path)
        up.too_large = other.refuse_large
        down = _Pipe(
            limits=self._limits, line=to_client, inbox=self.inbox, ending=self._on_answer, sent_all=other.on_sent_all
        )
        self._out, self._in = up, down
        other._out, other._in = down, up  # noqa: SLF001 - the two ends of one call, of one class
        self._other = other
        self._to_server = to_server

    def send(self, message: bytes) -> None:
        """Queue a message."""
        self._queue(message)

    def half_close(self) -> None:
        """Say that nothing more will be sent."""
        if not self._out.ending:
            self._out.finish(_Ending())

    def cancel(self) -> None:
        """End the call at once."""
        if self.status is not None or self._lost is not None:
            return
        self._lose(CallEnded(EndKind.CANCELLED, "the call was cancelled here"))
        reset = CallEnded(EndKind.CANCELLED, "the peer reset the call: CANCEL")
        self._to_server.deliver(lambda: self._other.lose(reset))
        self._ended(self)

    def cut(self, end: CallEnded) -> None:
        """Take the end of the connection, at both ends of the call."""
        if self.status is None:
            self._lose(end)
        self._other.lose(end)
        self._ended(self)

    def _on_answer(self, end: _Ending) -> None:
        if self.status is None and self._lost is None:
            self.status, self.status_message, self.trailers = end.status, end.message, end.trailers
            self._out.close()
            self._drained.set()
            self.inbox.end(None)
            self._ended(self)
