"""Plain DATA frames past h2's machinery: nearly every frame of a session is one, and costs a fifth of what it would.

h2 carries each frame through an object, two state machines and a dozen log calls, which cost more than all that a
message means to the gateway. A DATA frame without flags, on an open stream and within both windows, changes nothing of
that but the windows, so here only those are moved. Whatever is not plain, and all that follows it in a read, goes to
h2, which keeps every judgement: the states that are looked at are its own. The tests drive this and h2 alone side by
side and want the same bytes, events and windows. See docs/decisions/0181.
"""

from __future__ import annotations

import struct

from h2.connection import ConnectionState
from h2.events import DataReceived, Event
from h2.stream import H2Stream, StreamState
from h2.windows import WindowManager

from bettercompute.transport.h2_bounds import FRAME_HEADER_BYTES, BoundedH2

# Length (24 bits in two pieces), type, flags, stream with its reserved bit.
_HEADER = struct.Struct(">BHBBL")
_DATA = 0
CONNECTED = frozenset({ConnectionState.SERVER_OPEN, ConnectionState.CLIENT_OPEN})
READABLE = frozenset({StreamState.OPEN, StreamState.HALF_CLOSED_LOCAL})
WRITABLE = frozenset({StreamState.OPEN, StreamState.HALF_CLOSED_REMOTE})


class QuickH2(BoundedH2):
    """A bounded h2 connection that takes the short way where nothing depends on the long one."""

    def receive_at(self, data: memoryview | bytes, *, now_ms: int) -> list[Event]:
        """Process received bytes; raises h2's `ProtocolError` after it has queued the GOAWAY."""
        events, taken = self._take_plain(data)
        if taken == len(data):
            return events
        return events + super().receive_at(data[taken:], now_ms=now_ms)

    def send_data(
        self, stream_id: int, data: bytes | memoryview, end_stream: bool = False, pad_length: int | None = None
    ) -> None:
        """Queue a DATA frame."""
        size = len(data)
        stream = self.streams.get(stream_id)
        if (
            stream is None
            or end_stream
            or pad_length is not None
            or self.state_machine.state not in CONNECTED
            or stream.state_machine.state not in WRITABLE
            or not 0 < size <= self.max_outbound_frame_size
            or size > min(self.outbound_flow_control_window, stream.outbound_flow_control_window)
        ):
            super().send_data(stream_id, data, end_stream, pad_length)
            return
        self.outbound_flow_control_window -= size
        stream.outbound_flow_control_window -= size
        self._data_to_send += _HEADER.pack(size >> 16, size & 0xFFFF, _DATA, 0, stream_id)
        self._data_to_send += data

    def acknowledge_received_data(self, acknowledged_size: int, stream_id: int) -> None:
        """Note that bytes have been consumed; the peer is told at half a window."""
        stream = self.streams.get(stream_id)
        if (
            stream is None
            or stream.state_machine.state not in READABLE
            or not _is_counted_only(self._inbound_flow_control_window_manager, acknowledged_size)
            or not _is_counted_only(stream._inbound_window_manager, acknowledged_size)
        ):
            super().acknowledge_received_data(acknowledged_size, stream_id)
            return
        for window in (self._inbound_flow_control_window_manager, stream._inbound_window_manager):
            window._bytes_processed += acknowledged_size

    def _take_plain(self, data: memoryview | bytes) -> tuple[list[Event], int]:
        """Return the events of the plain frames that `data` begins with, and their bytes."""
        events: list[Event] = []
        taken = 0
        if not self.incoming_buffer.is_between_frames or self.state_machine.state not in CONNECTED:
            return events, taken
        left = len(data)
        while left > FRAME_HEADER_BYTES:
            high, low, kind, flags, stream_id = _HEADER.unpack_from(data, taken)
            size = high << 16 | low
            whole = FRAME_HEADER_BYTES + size
            if kind != _DATA or flags or not size or whole > left or size > self.max_inbound_frame_size:
                break
            # One with the reserved bit set is not found here.
            stream = self.streams.get(stream_id)
            if stream is None or not _takes_data(stream):
                break
            shared, own = self._inbound_flow_control_window_manager, stream._inbound_window_manager
            if size > min(shared.current_window_size, own.current_window_size):
                break
            shared.current_window_size -= size
            own.current_window_size -= size
            content = bytes(data[taken + FRAME_HEADER_BYTES : taken + whole])
            events.append(DataReceived(stream_id=stream_id, data=content, flow_controlled_length=size))
            taken += whole
            left -= whole
        return events, taken


def _takes_data(stream: H2Stream) -> bool:
    """Return whether DATA leaves a stream's state as it is: headers have come, and promised no length to be counted."""
    state = stream.state_machine
    return state.state in READABLE and bool(state.headers_received) and stream._expected_content_length is None


def _is_counted_only(window: WindowManager, size: int) -> bool:
    """Return whether h2 would only count these consumed bytes, and announce nothing."""
    return window.current_window_size > 0 and window._bytes_processed + size < window.max_window_size // 2
