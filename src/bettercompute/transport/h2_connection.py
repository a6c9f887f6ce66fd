"""One HTTP/2 connection that carries gRPC calls, without I/O: bytes and commands in, bytes and events out.

docs/protocol.md, "Transport", over h2: whole bounded messages, trailers, the stream limit, flow control
credited when the application has consumed, orderly and disorderly endings. `H2Core` is what both ends share;
`h2_server` and `h2_client` add who opens calls and what an ending means there. h2's own looseness is bounded in
`h2_bounds`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import h2.events
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError

from bettercompute.errors import BetterComputeError, Refused
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.transport import grpc_call
from bettercompute.transport.calls import CallEnded, EndKind
from bettercompute.transport.grpc_call import LIFECYCLE, PREFIX_BYTES, CallInput, CallState, Headers, MessageReader
from bettercompute.transport.h2_bounds import EnhanceYourCalm
from bettercompute.transport.h2_events import (
    CallLost,
    ConnectionEnded,
    Event,
    GoingAway,
    MessageReceived,
    PingAnswered,
    SettingsReceived,
)
from bettercompute.transport.h2_plain import QuickH2
from bettercompute.transport.limits import FRAME_BYTES_MAX, GOAWAY_TEXT_BYTES_MAX, STREAM_WINDOW_BYTES, Limits

# A message larger than this is credited while it arrives, for h2 announces credit only at half a window; a smaller one
# always fits into what is left, and is credited when it has been consumed.
CREDIT_EARLY_ABOVE_BYTES = STREAM_WINDOW_BYTES // 4


@dataclass(slots=True)
class HoldAllowance:
    """Bytes that a group of connections may make us hold together."""

    bytes_max: int
    used: int = 0


@dataclass(slots=True)
class CallRecord:
    """What a connection knows of one call."""

    stream_id: int
    reader: MessageReader
    state: CallState = CallState.OPEN
    outbound: deque[bytes] = field(default_factory=deque)
    # Bytes of outbound[0] that are sent already.
    head_sent: int = 0
    queued_bytes: int = 0
    headers_sent: bool = False
    # The trailers to send after the queue (server), or that nothing comes after it (client, empty).
    ending: Headers | None = None
    # Flow control: received and not credited; credited before it was consumed; in whole messages not consumed.
    uncredited: int = 0
    credited_ahead: int = 0
    unread: int = 0
    # Memory: received and not consumed.
    held: int = 0
    # The answer's headers, client only.
    http_status: str = ""
    fields: dict[str, str] = field(default_factory=dict)

    def advance(self, happened: CallInput) -> CallState:
        """Move in the lifecycle and return the new state."""
        self.state = LIFECYCLE[self.state, happened]
        return self.state


class H2Core:
    """What both ends share; every method may leave events in `events` and bytes for `output`."""

    _client_side: bool

    def __init__(self, *, limits: Limits, now_ms: int, allowance: HoldAllowance | None = None) -> None:
        self.limits = limits
        self.events: list[Event] = []
        self.ended: ConnectionEnded | None = None
        self._h2 = QuickH2(client_side=self._client_side, limits=limits, now_ms=now_ms)
        self._calls: dict[int, CallRecord] = {}
        self._sendable: dict[int, CallRecord] = {}
        self._held = 0
        # Shared with other connections, and counted only for strangers.
        self._allowance = allowance
        self._is_stranger = False
        self._h2.open()

    # Bytes

    def receive(self, data: memoryview | bytes, *, now_ms: int) -> list[Event]:
        """Process bytes from the peer and return what happened."""
        if self.ended is None:
            try:
                for event in self._h2.receive_at(data, now_ms=now_ms):
                    self._on_event(event)
            except EnhanceYourCalm as calm:
                self._end(EndKind.ENHANCE_YOUR_CALM, str(calm))
            except ProtocolError as error:
                kind = (
                    EndKind.ENHANCE_YOUR_CALM if error.error_code == ErrorCodes.ENHANCE_YOUR_CALM else EndKind.PROTOCOL
                )
                self._end(kind, f"the peer broke HTTP/2: {str(error) or error.__class__.__name__}")
        return self.take_events()

    def take_events(self) -> list[Event]:
        """Return the events since the last time."""
        events, self.events = self.events, []
        return events

    def output(self, bytes_max: int) -> bytes:
        """Return bytes for the peer: what h2 owes, and calls' messages up to `bytes_max` (0: none of these)."""
        room = bytes_max
        while room > 0 and self._sendable and self.ended is None:
            for call in list(self._sendable.values()):
                room -= self._send_some(call)
                if room <= 0:
                    break
        return self._h2.data_to_send()

    @property
    def has_output(self) -> bool:
        """Return whether `output` has bytes or events to give: most frames of an idle call ask for neither."""
        return bool(self._sendable) or bool(self.events) or self._h2.owes_bytes

    def ping(self, payload: bytes) -> None:
        """Queue a PING of 8 bytes."""
        if self.ended is None:
            self._h2.ping(payload)

    def close(self, kind: EndKind, text: str, *, code: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        """Queue a GOAWAY that says why, and end every call."""
        if self.ended is None:
            self._h2.close_connection(code, additional_data=text.encode()[:GOAWAY_TEXT_BYTES_MAX])
            self._end(kind, text)

    def lose(self, kind: EndKind, text: str) -> None:
        """Note that the peer is gone: nothing can be sent."""
        self._end(kind, text)
        self._h2.release()

    # Calls

    @property
    def call_count(self) -> int:
        """Return how many calls are open."""
        return len(self._calls)

    def send(self, stream_id: int, message: bytes) -> None:
        """Queue a message.

        Raises `Refused` when it is too large or the queue is full, `CallEnded` when the call is over.
        """
        call = self._calls.get(stream_id)
        if call is None or call.ending is not None:
            raise CallEnded(EndKind.FINISHED, "the call has ended: nothing more can be sent")
        check_outbound(message, queued_bytes=call.queued_bytes, queued_messages=len(call.outbound), limits=self.limits)
        call.outbound.append(grpc_call.prefix(message) + message)
        call.queued_bytes += PREFIX_BYTES + len(message)
        self._sendable[stream_id] = call

    def queued_bytes(self, stream_id: int) -> int:
        """Return the bytes of a call that have not left."""
        call = self._calls.get(stream_id)
        return call.queued_bytes if call is not None else 0

    def consumed(self, stream_id: int, message: bytes) -> None:
        """Note that the application has taken a message: the peer may send as much again."""
        call = self._calls.get(stream_id)
        if call is None:
            return
        size = PREFIX_BYTES + len(message)
        call.unread -= size
        self._release(call, size)
        ahead = min(call.credited_ahead, size)
        call.credited_ahead -= ahead
        self._credit(call, size - ahead)
        self._credit_early(call)

    # Sending

    def _send_some(self, call: CallRecord) -> int:
        """Send one frame's worth of a call; returns its bytes, at least 1 so that a loop over calls ends."""
        stream_id = call.stream_id
        if call.outbound and not call.headers_sent:
            self._send_response_headers(call)
        if not call.outbound:
            del self._sendable[stream_id]
            if call.ending is not None:
                self._send_ending(call)
            return 1
        room = min(self._h2.local_flow_control_window(stream_id), FRAME_BYTES_MAX)
        if room <= 0:
            del self._sendable[stream_id]  # until the peer opens its window
            return 1
        data = self._take(call, room)
        last = self._client_side and call.ending is not None and not call.outbound
        self._h2.send_data(stream_id, data, end_stream=last)
        if last:
            call.advance(CallInput.WE_END)
        if last or (not call.outbound and call.ending is None):
            del self._sendable[stream_id]
        return len(data)

    def _take(self, call: CallRecord, room: int) -> bytes:
        pieces: list[bytes | memoryview] = []
        taken = 0
        while call.outbound and taken < room:
            head = call.outbound[0]
            left = len(head) - call.head_sent
            size = min(left, room - taken)
            pieces.append(head if size == len(head) else memoryview(head)[call.head_sent : call.head_sent + size])
            taken += size
            if size == left:
                call.outbound.popleft()
                call.head_sent = 0
            else:
                call.head_sent += size
        call.queued_bytes -= taken
        return bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)

    def _send_response_headers(self, call: CallRecord) -> None:
        raise NotImplementedError

    def _send_ending(self, call: CallRecord) -> None:
        raise NotImplementedError

    def _reset(self, stream_id: int, code: ErrorCodes) -> None:
        try:
            self._h2.reset_stream(stream_id, code)
        except ProtocolError:
            return  # closed already: the peer's reset came in the same read

    # Receiving

    def _on_event(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.DataReceived():
                self._on_data(event)
            case h2.events.WindowUpdated():
                self._on_window(event.stream_id)
            case h2.events.StreamEnded():
                if (call := self._calls.get(event.stream_id)) is not None:
                    self._on_peer_ends(call)
            case h2.events.StreamReset():
                if (call := self._calls.get(event.stream_id)) is not None:
                    self._on_reset(call, event)
            case h2.events.PingAckReceived():
                self.events.append(PingAnswered())
            case h2.events.RemoteSettingsChanged():
                self._on_window(0)
                self.events.append(SettingsReceived())
            case h2.events.ConnectionTerminated():
                self._on_goaway(event)
            case _:
                self._on_headers(event)

    def _on_headers(self, event: h2.events.Event) -> None:
        raise NotImplementedError

    def _on_peer_ends(self, call: CallRecord) -> None:
        raise NotImplementedError

    def _refuse(self, call: CallRecord, refusal: BetterComputeError) -> None:
        raise NotImplementedError

    def _on_window(self, stream_id: int) -> None:
        if stream_id:
            if (call := self._calls.get(stream_id)) is not None and call.outbound:
                self._sendable[stream_id] = call
            return
        self._sendable.update((call.stream_id, call) for call in self._calls.values() if call.outbound)

    def _on_data(self, event: h2.events.DataReceived) -> None:
        data = event.data or b""
        size = event.flow_controlled_length or 0
        call = self._calls.get(event.stream_id)
        if call is None or size > len(data):
            # Padding is not kept; nor is what was on its way when the call ended here.
            self._h2.acknowledge_received_data(size - (len(data) if call is not None else 0), event.stream_id)
        if call is None or not data:
            return
        call.uncredited += len(data)
        if not self._hold(call, len(data)):
            self._refuse(
                call,
                refuse(
                    Reason.OVERLOADED,
                    f"the connection holds {self._held} bytes of messages unread or incomplete; the limit is "
                    f"{self.limits.held_bytes_max}, or all strangers' together are too many: send less at once",
                ),
            )
            return
        try:
            messages = call.reader.feed(data)
        except Refused as refusal:
            self._refuse(call, refusal)
            return
        for message in messages:
            call.unread += PREFIX_BYTES + len(message)
            self.events.append(MessageReceived(call.stream_id, message))
        self._credit_early(call)

    def _credit_early(self, call: CallRecord) -> None:
        if not call.unread and call.uncredited and call.reader.needed_bytes > CREDIT_EARLY_ABOVE_BYTES:
            call.credited_ahead += call.uncredited
            self._credit(call, call.uncredited)

    def _credit(self, call: CallRecord, size: int) -> None:
        call.uncredited -= size
        if size and self.ended is None:
            self._h2.acknowledge_received_data(size, call.stream_id)

    def _hold(self, call: CallRecord, size: int) -> bool:
        call.held += size
        self._held += size
        if self._allowance is not None and self._is_stranger:
            self._allowance.used += size
            if self._allowance.used > self._allowance.bytes_max:
                return False
        return self._held <= self.limits.held_bytes_max

    def _release(self, call: CallRecord, size: int) -> None:
        call.held -= size
        self._held -= size
        if self._allowance is not None and self._is_stranger:
            self._allowance.used -= size

    def _on_reset(self, call: CallRecord, event: h2.events.StreamReset) -> None:
        call.advance(CallInput.RESET)
        code = ErrorCodes(event.error_code) if event.error_code in list(ErrorCodes) else None
        kind = {
            ErrorCodes.REFUSED_STREAM: EndKind.REFUSED_STREAM,
            ErrorCodes.ENHANCE_YOUR_CALM: EndKind.ENHANCE_YOUR_CALM,
            ErrorCodes.CANCEL: EndKind.CANCELLED,
        }.get(code or ErrorCodes.INTERNAL_ERROR, EndKind.RESET)
        who = "the peer" if event.remote_reset else "this end"
        self._drop(
            call, CallLost(call.stream_id, kind, f"{who} reset the call: {code.name if code else event.error_code}")
        )

    def _drop(self, call: CallRecord, event: Event | None) -> None:
        """Forget a call that is over, give its room back, and say so."""
        del self._calls[call.stream_id]
        self._sendable.pop(call.stream_id, None)
        self._h2.forget(call.stream_id)
        self._credit(call, call.uncredited)
        self._release(call, call.held)
        call.outbound.clear()
        if event is not None:
            self.events.append(event)

    def _on_goaway(self, event: h2.events.ConnectionTerminated) -> None:
        why = (event.additional_data or b"").decode("utf-8", "replace")
        if event.error_code != ErrorCodes.NO_ERROR:
            calm = event.error_code == ErrorCodes.ENHANCE_YOUR_CALM
            name = event.error_code.name if isinstance(event.error_code, ErrorCodes) else str(event.error_code)
            text = f"the peer ended the connection: {name}{': ' + why if why else ''}"
            self._end(EndKind.ENHANCE_YOUR_CALM if calm else EndKind.PROTOCOL, text)
            return
        text = why or "the peer is going away"
        self.events.append(GoingAway(text))
        if self._client_side:
            for call in [call for call in self._calls.values() if call.stream_id > (event.last_stream_id or 0)]:
                self._drop(call, CallLost(call.stream_id, EndKind.REFUSED_STREAM, text))

    def _end(self, kind: EndKind, text: str) -> None:
        if self.ended is not None:
            return
        self.ended = ConnectionEnded(kind, text)
        for call in list(self._calls.values()):
            call.advance(CallInput.RESET)
            self._drop(call, CallLost(call.stream_id, kind, text))
        self.events.append(self.ended)


def check_outbound(message: bytes, *, queued_bytes: int, queued_messages: int, limits: Limits) -> None:
    """Raise `Refused` when a message is too large to send, or the queue it would join is full."""
    if len(message) > limits.message_bytes_max:
        raise refuse(
            Reason.FRAME_TOO_LARGE,
            f"a message of {len(message)} bytes; the limit is {limits.message_bytes_max}: send less in one message",
        )
    if queued_messages >= limits.outbound_messages_max or queued_bytes + len(message) > limits.outbound_bytes_max:
        raise refuse(
            Reason.SLOW_CONSUMER,
            f"{queued_messages} messages of {queued_bytes} bytes wait for a slow reader; the limits are "
            f"{limits.outbound_messages_max} and {limits.outbound_bytes_max}: read faster",
        )
