"""The server's end of an HTTP/2 connection, without I/O.

Requests judged, calls refused by number, statuses said once.
"""

from __future__ import annotations

from collections.abc import Mapping

import h2.events
from h2.errors import ErrorCodes
from h2.exceptions import StreamClosedError

from bettercompute.errors import BetterComputeError, Refused
from bettercompute.protocol.statuses import REASON_TRAILER
from bettercompute.transport import grpc_call
from bettercompute.transport.calls import EndKind
from bettercompute.transport.grpc_call import CallInput, CallState, Headers, MessageReader
from bettercompute.transport.h2_connection import CallRecord, H2Core
from bettercompute.transport.h2_events import CallDone, CallLost, CallOpened, Event, PeerEnded


class H2Server(H2Core):
    """The server's end."""

    _client_side = False
    _going_away = False

    def finish(self, stream_id: int, status: int, message: str, extra: Mapping[str, str]) -> None:
        """End a call with a status after what is queued; a call that is over stays as it is."""
        call = self._calls.get(stream_id)
        if call is not None and call.ending is None:
            call.ending = grpc_call.trailers(status=status, message=message, extra=extra)
            self._sendable[stream_id] = call

    def handler_done(self) -> None:
        """Note that a handler has returned: only then may another call take its place."""
        self._h2.running -= 1

    def count_strangers(self) -> None:
        """Count what this connection makes us hold with that of all strangers, and bear with less."""
        self._is_stranger = True
        self._h2.bucket.lower_burst(self.limits.anonymous_abuse_burst)
        self._h2.bill_calls = True

    def never_bill(self, path: str) -> None:
        """Stop billing calls of `path`."""
        self._h2.free_paths.add(path)

    def announce_goaway(self) -> None:
        """Tell the client to open no new calls here; those on their way are refused, as it will expect."""
        self._going_away = True
        if self.ended is None:
            self._h2.announce_goaway()

    def _on_headers(self, event: h2.events.Event) -> None:
        # A request's trailers end it, and their StreamEnded follows.
        if not isinstance(event, h2.events.RequestReceived):
            return
        stream_id = event.stream_id
        fields = grpc_call.text_of(event.headers)
        headers = dict(fields)
        if self._going_away or max(len(self._calls), self._h2.running) >= self.limits.streams_max:
            self._reset(stream_id, ErrorCodes.REFUSED_STREAM)
            self._h2.forget(stream_id)
            return
        if (refusal := grpc_call.http_refusal(headers)) is not None:
            self._refuse_by_http(stream_id, refusal, may_have_body=headers.get(":method") != "HEAD")
            if event.stream_ended is None:
                self._reset(stream_id, ErrorCodes.NO_ERROR)
            return
        self._h2.running += 1
        path = headers[":path"]
        limit = self.limits.message_bytes_max_by_path.get(path, self.limits.message_bytes_max)
        self._calls[stream_id] = CallRecord(stream_id, MessageReader(limit=limit))
        self.events.append(CallOpened(stream_id, path, grpc_call.metadata_of(fields)))

    def _refuse_by_http(self, stream_id: int, refusal: int, *, may_have_body: bool) -> None:
        allow = [("allow", "POST")] if refusal == 405 else []
        headers = [(":status", str(refusal)), *allow, ("content-type", "text/plain")]
        body = grpc_call.HTTP_REFUSALS[refusal].encode()
        try:
            # What the client's window has no room for is left out: nobody waits here for an answer to be read.
            if not may_have_body or self._h2.local_flow_control_window(stream_id) < len(body):
                self._send_last(stream_id, headers)
                return
            self._h2.answered(stream_id)
            self._h2.send_headers(stream_id, headers)
            self._h2.send_data(stream_id, body, end_stream=True)
        except StreamClosedError:
            return  # the client's reset came in the same read

    def _on_peer_ends(self, call: CallRecord) -> None:
        call.advance(CallInput.PEER_ENDS)
        try:
            call.reader.finish()
        except Refused as refusal:
            self._refuse(call, refusal)
        else:
            self.events.append(PeerEnded(call.stream_id))

    def _refuse(self, call: CallRecord, refusal: BetterComputeError) -> None:
        self.abort(call.stream_id, refusal)

    def abort(self, stream_id: int, refusal: BetterComputeError) -> None:
        """End a call at once with the status of `refusal`; what was queued is dropped."""
        call = self._calls.get(stream_id)
        if call is None or self.ended is not None:
            return
        call.outbound.clear()
        call.ending = grpc_call.trailers(
            status=refusal.status, message=refusal.message, extra={REASON_TRAILER: refusal.reason}
        )
        self._send_ending(call, CallLost(stream_id, EndKind.FINISHED, f"the call was refused: {refusal.message}"))

    def _send_response_headers(self, call: CallRecord) -> None:
        call.headers_sent = True
        self._h2.answered(call.stream_id)
        self._h2.send_headers(call.stream_id, grpc_call.response_headers())

    def _send_ending(self, call: CallRecord, event: Event | None = None) -> None:
        assert call.ending is not None
        headers = call.ending if call.headers_sent else [*grpc_call.response_headers(), *call.ending]
        self._send_last(call.stream_id, headers)
        if call.advance(CallInput.WE_END) is CallState.WE_DONE:
            # The status is said: whatever the client still sends is of no use.
            self._reset(call.stream_id, ErrorCodes.NO_ERROR)
            call.advance(CallInput.RESET)
        self._drop(call, event or CallDone(call.stream_id))

    def _send_last(self, stream_id: int, headers: Headers) -> None:
        self._h2.answered(stream_id)
        try:
            self._h2.send_headers(stream_id, headers, end_stream=True)
        except StreamClosedError:
            return  # the client's reset came in the same read as what is refused here
