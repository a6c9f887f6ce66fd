"""The short way for plain DATA frames beside h2 alone: same bytes, same events, same windows, same endings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import methodcaller

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event
from h2.exceptions import ProtocolError
from hyperframe.frame import (
    DataFrame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from bettercompute.transport.h2_bounds import BoundedH2
from bettercompute.transport.h2_plain import QuickH2
from bettercompute.transport.limits import DEFAULT_LIMITS, FRAME_BYTES_MAX, STREAM_WINDOW_BYTES
from tests.unit.transport.wire import GRPC_HEADERS

LENGTH = [*GRPC_HEADERS, ("content-length", "100")]
ANSWER = [(":status", "200"), ("content-type", "application/grpc")]
# Two calls that are open both ways, one that promised its length, one whose answer has begun.
STREAMS = (1, 3, 5)


@dataclass
class Twins:
    """The same server connection twice, by the short way and by h2 alone, and what each has done."""

    ends: list[BoundedH2] = field(default_factory=list)

    def __post_init__(self) -> None:
        client = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        client.initiate_connection()
        for number, headers in zip(STREAMS, (GRPC_HEADERS, LENGTH, GRPC_HEADERS), strict=True):
            client.send_headers(number, headers)
        # Only once SETTINGS are acknowledged a stream has the window that they promise.
        hello = client.data_to_send() + SettingsFrame(0, flags=["ACK"]).serialize()
        for make in (QuickH2, BoundedH2):
            end = make(client_side=False, limits=DEFAULT_LIMITS, now_ms=0)
            end.open()
            end.receive_at(hello, now_ms=0)
            end.send_headers(1, ANSWER)
            end.data_to_send()
            self.ends.append(end)

    def both(self, act: Callable[[BoundedH2], object]) -> object:
        """Do the same to each, and want the same of each: return it."""
        quick, alone = (self._outcome(act, end) for end in self.ends)
        assert quick == alone
        return quick

    def _outcome(self, act: Callable[[BoundedH2], object], end: BoundedH2) -> object:
        try:
            result = act(end)
        except (ProtocolError, KeyError, ValueError) as error:
            result = (type(error).__name__, str(error))
        windows = {
            number: (stream.outbound_flow_control_window, _window(stream._inbound_window_manager))
            for number, stream in sorted(end.streams.items())
        }
        own = (end.outbound_flow_control_window, _window(end._inbound_flow_control_window_manager))
        return result, end.data_to_send(), own, windows, end.state_machine.state, end.bucket.tokens

    def receive(self, data: bytes) -> object:
        return self.both(lambda end: [_told(event) for event in end.receive_at(data, now_ms=0)])


def _window(manager: object) -> tuple[int, ...]:
    return tuple(vars(manager).values())


def _told(event: Event) -> object:
    if isinstance(event, DataReceived):
        return event.stream_id, bytes(event.data or b""), event.flow_controlled_length, event.stream_ended is not None
    return type(event).__name__, sorted((name, str(value)) for name, value in vars(event).items())


def data_frame(stream_id: int, size: int, *flags: str, padding: int = 0) -> bytes:
    frame = DataFrame(stream_id or 1, bytes(size), flags=list(flags))
    if padding:
        frame.flags.add("PADDED")
        frame.pad_length = padding
    data = frame.serialize()
    return data if stream_id else data[:5] + bytes(4) + data[9:]


def _reserved(frame: bytes) -> bytes:
    return frame[:5] + bytes([frame[5] | 0x80]) + frame[6:]


ids = st.sampled_from([*STREAMS, *STREAMS, 2, 7, 0])
sizes = st.one_of(
    st.integers(0, 200), st.sampled_from([100, FRAME_BYTES_MAX - 1, FRAME_BYTES_MAX, FRAME_BYTES_MAX + 1])
)
plain = st.builds(data_frame, ids, sizes)
frames = st.one_of(
    plain,
    plain,
    plain.map(_reserved),
    st.builds(lambda stream, size: data_frame(stream, size, "END_STREAM"), st.sampled_from(STREAMS), sizes),
    st.builds(lambda stream, size: data_frame(stream, size, padding=9), st.sampled_from(STREAMS), st.integers(0, 99)),
    st.builds(lambda stream, by: WindowUpdateFrame(stream, by).serialize(), ids, st.integers(1, 1 << 20)),
    st.builds(lambda stream: RstStreamFrame(stream, 8).serialize(), st.sampled_from(STREAMS)),
    st.builds(lambda size: SettingsFrame(0, {4: size}).serialize(), st.integers(0, 1 << 17)),
    st.just(PingFrame(0, b"12345678").serialize()),
    st.just(GoAwayFrame(0, 0, 0).serialize()),
    st.just(HeadersFrame(1, b"", flags=["END_HEADERS"]).serialize()),
    st.binary(min_size=1, max_size=20),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(frames, max_size=12), st.lists(st.integers(1, 40_000), max_size=6))
def test_what_comes_in_is_taken_as_h2_takes_it(sent: list[bytes], cuts: list[int]):
    twins = Twins()
    data = b"".join(sent)
    for size in [*cuts, len(data)]:
        piece, data = data[:size], data[size:]
        if piece:
            twins.receive(piece)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("send"), ids, sizes),
            st.tuples(st.just("end"), st.sampled_from(STREAMS), st.integers(0, 99)),
            st.tuples(st.just("take"), st.sampled_from(STREAMS), st.integers(1, FRAME_BYTES_MAX)),
            st.tuples(st.just("credit"), ids, st.integers(0, STREAM_WINDOW_BYTES)),
            st.tuples(st.just("reset"), st.sampled_from(STREAMS), st.just(8)),
            st.tuples(st.just("open"), st.sampled_from([0, *STREAMS]), st.integers(1, 1 << 20)),
        ),
        max_size=25,
    )
)
def test_what_goes_out_and_is_credited_is_what_h2_makes_of_it(acts: Sequence[tuple[str, int, int]]):
    twins = Twins()
    for act, stream_id, size in acts:
        match act:
            case "send":
                twins.both(methodcaller("send_data", stream_id, bytes(size)))
            case "end":
                twins.both(methodcaller("send_data", stream_id, bytes(size), end_stream=True))
            case "take":
                twins.receive(data_frame(stream_id, size))
            case "credit":
                twins.both(methodcaller("acknowledge_received_data", size, stream_id))
            case "reset":
                twins.both(methodcaller("reset_stream", stream_id, size))
            case _:
                twins.receive(WindowUpdateFrame(stream_id, size).serialize())


def test_plain_frames_take_the_short_way(monkeypatch: pytest.MonkeyPatch):
    # Else all of the above would compare h2 with itself.
    twins = Twins()
    monkeypatch.setattr(BoundedH2, "_receive_frame", lambda *_: pytest.fail("the long way in"))
    monkeypatch.setattr(H2Connection, "send_data", lambda *_: pytest.fail("the long way out"))
    monkeypatch.setattr(H2Connection, "acknowledge_received_data", lambda *_: pytest.fail("the long way of credit"))
    quick = twins.ends[0]
    data = data_frame(1, 300) + data_frame(5, 1) + data_frame(1, FRAME_BYTES_MAX)
    assert [
        len(event.data or b"") for event in quick.receive_at(data, now_ms=0) if isinstance(event, DataReceived)
    ] == [
        300,
        1,
        FRAME_BYTES_MAX,
    ]
    quick.acknowledge_received_data(300, 1)
    quick.send_data(1, b"answer")
    assert quick.data_to_send() == DataFrame(1, b"answer").serialize()


def test_a_window_that_is_overrun_ends_the_connection_as_h2_ends_it():
    twins = Twins()
    whole, rest = divmod(STREAM_WINDOW_BYTES, FRAME_BYTES_MAX)
    for _ in range(whole):
        twins.receive(data_frame(1, FRAME_BYTES_MAX))
    ended = twins.receive(data_frame(1, rest + 1))
    assert isinstance(ended, tuple)
    assert ended[0] == ("FlowControlError", "Flow control window shrunk below 0")


@pytest.mark.parametrize(
    ("taken", "credited"),
    [
        # With nothing left of the window, after 1,024 bytes; else at half of it.
        (STREAM_WINDOW_BYTES, (1_000, 23, 1, 1, STREAM_WINDOW_BYTES // 2)),
        (STREAM_WINDOW_BYTES - FRAME_BYTES_MAX, (STREAM_WINDOW_BYTES // 2 - 1, 1)),
        (STREAM_WINDOW_BYTES - FRAME_BYTES_MAX, (STREAM_WINDOW_BYTES // 2,)),
    ],
)
def test_credit_is_announced_when_h2_announces_it(taken: int, credited: Sequence[int]):
    twins = Twins()
    for _ in range(taken // FRAME_BYTES_MAX):
        twins.receive(data_frame(1, FRAME_BYTES_MAX))
    for size in credited:
        twins.both(methodcaller("acknowledge_received_data", size, 1))


def test_an_answer_that_begins_without_headers_is_refused_as_h2_refuses_it():
    answers = []
    for make in (QuickH2, BoundedH2):
        client = make(client_side=True, limits=DEFAULT_LIMITS, now_ms=0)
        client.open()
        client.send_headers(1, GRPC_HEADERS)
        client.receive_at(SettingsFrame(0).serialize(), now_ms=0)
        client.data_to_send()
        with pytest.raises(ProtocolError, match="cannot receive data before headers"):
            client.receive_at(data_frame(1, 10), now_ms=0)
        answers.append(client.data_to_send())
    assert answers[0] == answers[1]
