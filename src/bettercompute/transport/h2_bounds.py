"""What h2 leaves unbounded, bounded: the abuse bucket (decisions 0021), frame and header block sizes, closed streams.

h2 speaks HTTP/2 correctly and trusts its peer to be reasonable. This subclass bills each frame before it is
processed, refuses a frame on its header instead of after 16 MiB of it have been buffered, and counts the resets that
a peer forces out of us as well as those it sends. It reaches into h2's per-frame methods, so the lock file pins h2
and the tests here are those to run after a new one. Pure: the time comes in with the data.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, Event, RequestReceived
from h2.exceptions import FrameTooLargeError, ProtocolError
from h2.frame_buffer import FrameBuffer
from h2.settings import SettingCodes, Settings
from hpack import Encoder, HeaderTuple
from hyperframe.frame import (
    AltSvcFrame,
    ContinuationFrame,
    DataFrame,
    ExtensionFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
)

from bettercompute.transport.limits import (
    CLOSED_STREAMS_REMEMBERED_MAX,
    FRAME_BYTES_MAX,
    GOAWAY_TEXT_BYTES_MAX,
    HEADER_BLOCK_BYTES_MAX,
    STREAM_WINDOW_BYTES,
    Limits,
)

HPACK_TABLE_BYTES = 4096
FRAME_HEADER_BYTES = 9
KNOWN_SETTINGS = frozenset(SettingCodes)


def silence_hot_paths() -> None:
    """Stop hyperframe from formatting each frame and hpack from logging each header: a tenth of a message's cost."""

    def say_nothing(*_arguments: object, **_options: object) -> None:
        return None

    def short_repr(frame: Frame) -> str:
        return frame.__class__.__name__

    for name in ("hpack.hpack", "hpack.table"):
        logging.getLogger(name).debug = say_nothing  # type: ignore[method-assign] # isEnabledFor alone costs as much
    Frame.__repr__ = short_repr  # type: ignore[method-assign] # h2 formats each frame for a logger that drops it


silence_hot_paths()


class EnhanceYourCalm(ProtocolError):
    """The peer has spent its bucket."""

    error_code = ErrorCodes.ENHANCE_YOUR_CALM


@dataclass(slots=True)
class AbuseBucket:
    """Tokens of one connection.

    `burst` at first, `per_s` more each second, one spent for each frame that only costs us.
    """

    burst: int
    per_s: int
    tokens: float
    updated_ms: int

    @classmethod
    def full(cls, limits: Limits, *, now_ms: int) -> AbuseBucket:
        """Return the bucket of a new connection."""
        return cls(burst=limits.abuse_burst, per_s=limits.abuse_per_s, tokens=limits.abuse_burst, updated_ms=now_ms)

    def lower_burst(self, burst: int) -> None:
        """Hold no more than `burst` tokens from now on."""
        self.burst = min(self.burst, burst)
        self.tokens = min(self.tokens, self.burst)

    def spend(self, what: str, *, now_ms: int) -> None:
        """Take one token, or raise `EnhanceYourCalm` when there is none."""
        elapsed_ms = max(0, now_ms - self.updated_ms)
        self.updated_ms = max(now_ms, self.updated_ms)
        self.tokens = min(float(self.burst), self.tokens + elapsed_ms * self.per_s / 1000)
        if self.tokens < 1:
            raise EnhanceYourCalm(
                f"too many {what}: the limit for frames that carry nothing is {self.burst} at once, then "
                f"{self.per_s}/s; slow down"
            )
        self.tokens -= 1


class BoundedFrameBuffer(FrameBuffer):
    """h2's splitter of bytes into frames, which refuses a frame or header block by its size before holding it."""

    _header_block_bytes = 0

    @property
    def is_between_frames(self) -> bool:
        """Return whether nothing is held: neither part of a frame or header block nor a preface to come."""
        return not (self._data or self._preamble_len or self._headers_buffer)

    def __next__(self) -> Frame:
        """Return the next whole frame; the length is judged as soon as the 9-byte header is there."""
        data = self._data
        if len(data) >= FRAME_HEADER_BYTES:
            length = data[0] << 16 | data[1] << 8 | data[2]
            if length > self.max_frame_size:
                raise FrameTooLargeError(f"a frame of {length} bytes; this end takes {self.max_frame_size}")
        return super().__next__()

    def _update_header_buffer(self, f: Frame | None) -> Frame | None:
        if isinstance(f, HeadersFrame | PushPromiseFrame):
            self._header_block_bytes = len(f.data)
        elif isinstance(f, ContinuationFrame):
            self._header_block_bytes += len(f.data)
            if self._header_block_bytes > HEADER_BLOCK_BYTES_MAX:
                raise EnhanceYourCalm(
                    f"a header block over {HEADER_BLOCK_BYTES_MAX} bytes; send fewer or shorter headers"
                )
        return super()._update_header_buffer(f)


class _Values(list[int]):
    """The values of one setting, which h2 keeps in a deque: 760 bytes, a dozen times per connection."""

    __slots__ = ()

    def popleft(self) -> int:
        return self.pop(0)


class LeanSettings(Settings):
    """h2's settings in a tenth of the memory."""

    def __init__(self, *, client: bool, initial_values: dict[SettingCodes, int] | None = None) -> None:
        super().__init__(client=client, initial_values=initial_values)
        for code, values in self._settings.items():
            self._settings[code] = cast("deque[int]", _Values(values))

    def __setitem__(self, key: SettingCodes | int, value: int) -> None:
        """Add a value that holds once it is acknowledged."""
        super().__setitem__(key, value)
        if not isinstance(self._settings[key], _Values):
            self._settings[key] = cast("deque[int]", _Values(self._settings[key]))


class PlainEncoder(Encoder):
    """hpack's encoder without the Huffman code, which in Python costs more than the fifth of a header that it saves.

    At both ends: what is not coded need not be decoded.
    """

    def encode(
        self,
        headers: Iterable[HeaderTuple | tuple[bytes | str, bytes | str] | tuple[bytes | str, bytes | str, bool | None]]
        | dict[bytes | str, bytes | str],
        huffman: bool = False,
    ) -> bytes:
        """Return a header block."""
        return super().encode(headers, huffman=huffman)


def _configuration(*, client_side: bool) -> H2Configuration:
    """Return h2's settings: what this package sends is lower-case, stripped and whole as it is made."""
    return H2Configuration(client_side=client_side, validate_outbound_headers=False, normalize_outbound_headers=False)


class BoundedH2(H2Connection):
    """An h2 connection that bills its peer and holds no more than `Limits` says."""

    MAX_CLOSED_STREAMS = CLOSED_STREAMS_REMEMBERED_MAX

    def __init__(self, *, client_side: bool, limits: Limits, now_ms: int) -> None:
        """Prepare a connection; `initiate_connection` and the window come from `open`."""
        super().__init__(_configuration(client_side=client_side))
        self.limits = limits
        self.now_ms = now_ms
        self.bucket = AbuseBucket.full(limits, now_ms=now_ms)
        self.bill_peer = not client_side
        # A stranger's calls are billed whatever becomes of them: it has one Join to make, and each answer costs.
        self.bill_calls = False
        # Paths whose calls are never billed (tunnels of a proven session), and the open streams that are such calls.
        self.free_paths: set[str] = set()
        self.free_streams: set[int] = set()
        # Streams without a response yet, and when each was opened.
        self.unanswered: dict[int, int] = {}
        # Calls whose handler still runs, although its stream may be gone.
        self.running = 0
        self._receiving = False
        self.encoder = PlainEncoder()
        self.incoming_buffer: BoundedFrameBuffer = BoundedFrameBuffer(server=not client_side)
        # Our first SETTINGS: what a peer must keep to from its first frame, so it holds before it is acknowledged.
        values = {
            SettingCodes.HEADER_TABLE_SIZE: HPACK_TABLE_BYTES,
            SettingCodes.MAX_CONCURRENT_STREAMS: limits.streams_max,
            SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
            SettingCodes.MAX_FRAME_SIZE: FRAME_BYTES_MAX,
            SettingCodes.MAX_HEADER_LIST_SIZE: limits.header_list_bytes_max,
        }
        if client_side:
            values[SettingCodes.ENABLE_PUSH] = 0
        self.local_settings = LeanSettings(client=client_side, initial_values=values)
        self.remote_settings = LeanSettings(client=not client_side)
        self.max_inbound_frame_size = FRAME_BYTES_MAX
        self.decoder.max_header_list_size = limits.header_list_bytes_max

    def open(self) -> None:
        """Queue the preface, SETTINGS, and the connection's window."""
        self.initiate_connection()
        self.increment_flow_control_window(self.limits.connection_window_bytes - self.inbound_flow_control_window)

    def receive_at(self, data: memoryview | bytes, *, now_ms: int) -> list[Event]:
        """Process received bytes; raises h2's `ProtocolError` after it has queued the GOAWAY."""
        self.now_ms = now_ms
        self._receiving = True
        try:
            return self.receive_data(data)
        finally:
            self._receiving = False

    def bill(self, what: str) -> None:
        """Charge the peer for one `what`."""
        if self.bill_peer:
            self.bucket.spend(what, now_ms=self.now_ms)

    def release(self) -> None:
        """Let go of what refers back to this connection, once nothing more is read.

        h2 keeps a table of its own methods: without this every connection would wait for the collector, which runs
        rarely here, and a flood of them would fill the memory.
        """
        self._frame_dispatch_table.clear()

    @property
    def owes_bytes(self) -> bool:
        """Return whether `data_to_send` would return any."""
        return bool(self._data_to_send)

    def announce_goaway(self) -> None:
        """Queue a GOAWAY that lets the open streams finish, which h2's own does not."""
        self._prepare_for_sending([GoAwayFrame(0, last_stream_id=self.highest_inbound_stream_id)])

    def answered(self, stream_id: int) -> None:
        """Note that a response has begun: a reset from here on is the peer's good right."""
        self.unanswered.pop(stream_id, None)

    def forget(self, stream_id: int) -> None:
        """Drop what is kept of a stream that has ended."""
        self.unanswered.pop(stream_id, None)
        self.free_streams.discard(stream_id)

    @property
    def open_inbound_streams(self) -> int:
        """Return 0 after billing: h2 would end the connection at the limit, where the caller refuses the one stream."""
        if max(self._open_streams(int(not self.config.client_side)), self.running) >= self.limits.streams_max:
            self.bill("streams over the limit")
        return 0

    def _receive_frame(self, frame: Frame) -> list[Event]:
        if isinstance(frame, SettingsFrame):
            # h2 keeps every code it is sent, known or not: 65,536 of them would take 50 MB.
            frame.settings = {code: value for code, value in frame.settings.items() if code in KNOWN_SETTINGS}
        if not self.bill_peer:
            return super()._receive_frame(frame)
        if isinstance(frame, DataFrame):
            if not frame.data and "END_STREAM" not in frame.flags and frame.stream_id not in self.free_streams:
                self.bill("empty DATA frames")
        elif isinstance(frame, PingFrame):
            if "ACK" not in frame.flags:
                self.bill("PING frames")
        elif isinstance(frame, RstStreamFrame):
            opened_ms = self.unanswered.pop(frame.stream_id, None)
            if opened_ms is not None and self.now_ms - opened_ms < self.limits.early_reset_ms:
                self.bill("resets of new streams")
        elif isinstance(frame, HeadersFrame):
            events = super()._receive_frame(frame)
            for event in events:
                if isinstance(event, RequestReceived):
                    self._note_request(event)
            return events
        elif isinstance(frame, SettingsFrame):
            self.bill("SETTINGS frames")
        elif isinstance(frame, PriorityFrame | ExtensionFrame | AltSvcFrame):
            self.bill("frames that this end has no use for")
        return super()._receive_frame(frame)

    def _note_request(self, event: RequestReceived) -> None:
        if self.bill_calls:
            self.bill("calls without a certificate")
        if self.free_paths and any(
            name == b":path" and value.decode("latin-1") in self.free_paths for name, value in event.headers
        ):
            self.free_streams.add(event.stream_id)
        else:
            self.unanswered[event.stream_id] = self.now_ms

    def _prepare_for_sending(self, frames: list[Frame]) -> None:
        # While receiving, h2 itself answers a frame on a closed or broken stream with a reset: the peer forced it. What
        # was on its way when a tunnel ended is nobody's fault.
        if self._receiving and self.bill_peer and not self.free_paths:
            for frame in frames:
                if isinstance(frame, RstStreamFrame):
                    self.bill("frames on closed streams")
        super()._prepare_for_sending(frames)

    def _terminate_connection(self, error_code: ErrorCodes) -> None:
        # h2 calls this while it handles the error, and does not pass its words on.
        self.close_connection(error_code, additional_data=str(sys.exception() or "").encode()[:GOAWAY_TEXT_BYTES_MAX])

    def _acknowledge_settings(self) -> list[Frame]:
        frames = super()._acknowledge_settings()
        # A peer may offer a table of 4 GiB; we need not fill it.
        if self.encoder.header_table_size > HPACK_TABLE_BYTES:
            self.encoder.header_table_size = HPACK_TABLE_BYTES
        return frames

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
        if frame.error_code != ErrorCodes.NO_ERROR:
            return super()._receive_goaway_frame(frame)
        # An orderly one: streams up to last_stream_id go on, so the state machine must not close as h2's does.
        event = ConnectionTerminated()
        event.error_code = ErrorCodes.NO_ERROR
        event.last_stream_id = frame.last_stream_id
        event.additional_data = frame.additional_data or None
        return [], [event]
