"""The client's end of an HTTP/2 connection, without I/O: calls opened, and what an answer's ending means."""

from __future__ import annotations

from collections.abc import Mapping

import h2.events
from h2.errors import ErrorCodes
from h2.exceptions import H2Error

from bettercompute.errors import BetterComputeError
from bettercompute.protocol.statuses import Status
from bettercompute.transport import grpc_call
from bettercompute.transport.calls import CallEnded, EndKind
from bettercompute.transport.grpc_call import CallInput, CallState, MessageReader
from bettercompute.transport.h2_connection import CallRecord, H2Core
from bettercompute.transport.h2_events import CallLost, Event, PeerEnded
from bettercompute.transport.limits import Limits


class H2Client(H2Core):
    """The client's end."""

    _client_side = True

    def __init__(self, *, limits: Limits, now_ms: int, authority: str) -> None:
        super().__init__(limits=limits, now_ms=now_ms)
        self._authority = authority
        self.going_away: str | None = None

    def open_call(self, path: str, metadata: Mapping[str, str]) -> int:
        """Open a call and return its stream; raises `CallEnded` when the connection takes no more."""
        if self.ended is not None:
            raise CallEnded(self.ended.kind, self.ended.text)
        if self.going_away is not None:
            raise CallEnded(EndKind.GOING_AWAY, self.going_away)
        stream_id = self._h2.get_next_available_stream_id()
        headers = grpc_call.request_headers(path=path, authority=self._authority, metadata=metadata)
        try:
            self._h2.send_headers(stream_id, headers)
        except H2Error as error:
            raise CallEnded(
                EndKind.REFUSED_STREAM, f"the server takes no more calls on this connection: {error}"
            ) from error
        call = CallRecord(stream_id, MessageReader(limit=self.limits.message_bytes_max), headers_sent=True)
        self._calls[stream_id] = call
        return stream_id

    def half_close(self, stream_id: int) -> None:
        """Say that nothing more will be sent on a call."""
        call = self._calls.get(stream_id)
        if call is not None and call.ending is None:
            call.ending = []
            self._sendable[stream_id] = call

    def cancel(self, stream_id: int) -> None:
        """End a call at once."""
        call = self._calls.get(stream_id)
        if call is not None and self.ended is None:
            self._reset(stream_id, ErrorCodes.CANCEL)
            call.advance(CallInput.RESET)
            self._drop(call, CallLost(stream_id, EndKind.CANCELLED, "the call was cancelled here"))

    def _on_headers(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.ResponseReceived):
            if (call := self._calls.get(event.stream_id)) is not None:
                headers = grpc_call.text_of(event.headers)
                call.http_status = dict(headers).get(":status", "")
                call.fields = grpc_call.metadata_of(headers)
        elif isinstance(event, h2.events.TrailersReceived) and (call := self._calls.get(event.stream_id)) is not None:
            call.fields.update(grpc_call.metadata_of(grpc_call.text_of(event.headers)))

    def _on_data(self, event: h2.events.DataReceived) -> None:
        call = self._calls.get(event.stream_id)
        if call is None or grpc_call.is_grpc(http_status=call.http_status, fields=call.fields):
            super()._on_data(event)
        elif size := event.flow_controlled_length:
            # A proxy's page, or that of a web server: not kept, and not taken for messages.
            self._h2.acknowledge_received_data(size, event.stream_id)

    def _on_peer_ends(self, call: CallRecord) -> None:
        status, message = grpc_call.response_status(http_status=call.http_status, fields=call.fields)
        if status == Status.OK and call.reader.pending_bytes:
            came = f"{call.reader.pending_bytes} of {call.reader.needed_bytes} bytes came"
            text = f"the answer ended inside a message: {came}"
            self._reset(call.stream_id, ErrorCodes.PROTOCOL_ERROR)
            self._drop(call, CallLost(call.stream_id, EndKind.PROTOCOL, text))
            return
        if call.advance(CallInput.PEER_ENDS) is CallState.PEER_DONE:
            self._reset(call.stream_id, ErrorCodes.NO_ERROR)
            call.advance(CallInput.RESET)
        self._drop(call, PeerEnded(call.stream_id, int(status), message, call.fields))

    def _refuse(self, call: CallRecord, refusal: BetterComputeError) -> None:
        self._reset(call.stream_id, ErrorCodes.CANCEL)
        call.advance(CallInput.RESET)
        self._drop(call, CallLost(call.stream_id, EndKind.PROTOCOL, f"the server sent {refusal.message}"))

    def _on_goaway(self, event: h2.events.ConnectionTerminated) -> None:
        super()._on_goaway(event)
        if self.going_away is None:
            self.going_away = (event.additional_data or b"").decode("utf-8", "replace") or "the server is going away"

    def _send_response_headers(self, call: CallRecord) -> None:
        raise AssertionError(f"the headers of call {call.stream_id} went first")

    def _send_ending(self, call: CallRecord, event: Event | None = None) -> None:
        del event
        self._h2.end_stream(call.stream_id)
        call.advance(CallInput.WE_END)
