"""Both ends of our own HTTP/2 joined without sockets: any pieces, sizes and reading speed; and who holds how much."""

from __future__ import annotations

from collections import deque
from typing import cast

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, ResponseReceived, StreamEnded, StreamReset
from h2.settings import SettingCodes
from hypothesis import given, settings
from hypothesis import strategies as st

from bettercompute.errors import Refused
from bettercompute.protocol.statuses import Reason, Status, refuse
from bettercompute.transport import grpc_call
from bettercompute.transport.calls import CallEnded, EndKind
from bettercompute.transport.h2_client import H2Client
from bettercompute.transport.h2_connection import H2Core, HoldAllowance
from bettercompute.transport.h2_events import (
    CallDone,
    CallLost,
    CallOpened,
    ConnectionEnded,
    Event,
    GoingAway,
    MessageReceived,
    PeerEnded,
    PingAnswered,
)
from bettercompute.transport.h2_server import H2Server
from bettercompute.transport.limits import DEFAULT_LIMITS, STREAM_WINDOW_BYTES, Limits
from tests.unit.transport.wire import Wire

MIB = 1024 * 1024


class Pair:
    """A client and a server core, with bytes in between that are carried in pieces."""

    def __init__(self, *, limits: Limits = DEFAULT_LIMITS, piece: int = 1 << 20) -> None:
        self.client = H2Client(limits=limits, now_ms=0, authority="gateway.test")
        self.server = H2Server(limits=limits, now_ms=0)
        self.piece = piece
        self.client_events: list[Event] = []
        self.server_events: list[Event] = []

    def carry(self, *, rounds: int = 10_000) -> None:
        for _ in range(rounds):
            moved = self._move(self.client, self.server, self.server_events)
            moved |= self._move(self.server, self.client, self.client_events)
            if not moved:
                return
        raise AssertionError("the two never come to rest")

    def _move(self, source: H2Core, target: H2Core, events: list[Event]) -> bool:
        data = source.output(1 << 16)
        (self.client_events if source is self.client else self.server_events).extend(source.take_events())
        for start in range(0, len(data), self.piece):
            events.extend(target.receive(data[start : start + self.piece], now_ms=0))
        return bool(data)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 300_000), min_size=1, max_size=6),
    st.lists(st.integers(0, 300_000), max_size=6),
    st.sampled_from([1_000, 16_393, 1 << 20]),
    st.integers(1, 3),
)
def test_everything_arrives_whatever_the_pieces(up: list[int], down: list[int], piece: int, calls: int):
    pair = Pair(piece=piece)
    streams = [pair.client.open_call("/m", {}) for _ in range(calls)]
    pair.carry()
    for stream_id in streams:
        for size in up:
            pair.client.send(stream_id, bytes(size))
        pair.client.half_close(stream_id)
        for size in down:
            pair.server.send(stream_id, bytes(size))
        pair.server.finish(stream_id, 0, "", {})
    got: dict[tuple[str, int], list[int]] = {}
    unread: deque[tuple[H2Core, MessageReceived]] = deque()
    while True:
        pair.carry()
        ends: list[tuple[str, H2Core, list[Event]]] = [
            ("s", pair.server, pair.server_events),
            ("c", pair.client, pair.client_events),
        ]
        for who, core, events in ends:
            unread.extend((core, event) for event in events if isinstance(event, MessageReceived))
            for event in events:
                if isinstance(event, MessageReceived):
                    got.setdefault((who, event.stream_id), []).append(len(event.message))
            events[:] = [event for event in events if not isinstance(event, MessageReceived)]
        if not unread:
            break
        core, event = unread.popleft()
        core.consumed(event.stream_id, event.message)
    for stream_id in streams:
        # A server that has ended a call needs the rest of its request no more; what came is a prefix, in order.
        arrived = got.get(("s", stream_id), [])
        assert arrived == up[: len(arrived)]
        assert got.get(("c", stream_id), []) == down
    assert [event.status for event in pair.client_events if isinstance(event, PeerEnded)] == [0] * calls
    assert pair.server._held == pair.client._held == 0
    assert pair.client.call_count == pair.server.call_count == 0


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=10), st.sampled_from([700, 1 << 20]))
def test_credit_comes_back_whole(sizes: list[int], piece: int):
    pair = Pair(piece=piece)
    stream_id = pair.client.open_call("/m", {})
    for _ in range(3):
        for size in sizes:
            pair.client.send(stream_id, bytes(size))
        seen = 0
        while seen < len(sizes):
            pair.carry()
            messages = [event for event in pair.server_events if isinstance(event, MessageReceived)]
            pair.server_events.clear()
            seen += len(messages)
            for event in messages:
                pair.server.consumed(stream_id, event.message)
        pair.carry()
    call = pair.server._calls[stream_id]
    assert (call.uncredited, call.credited_ahead, call.unread, call.held) == (0, 0, 0, 0)
    assert pair.client._h2.local_flow_control_window(stream_id) > STREAM_WINDOW_BYTES // 2


def test_an_unread_stream_stops_at_its_window_and_blocks_no_other():
    pair = Pair()
    slow, good = pair.client.open_call("/slow", {}), pair.client.open_call("/good", {})
    for _ in range(100):
        pair.client.send(slow, bytes(10_000))
    pair.carry()
    assert pair.server._held <= STREAM_WINDOW_BYTES
    pair.client.send(good, b"here")
    pair.carry()
    assert MessageReceived(good, b"here") in pair.server_events
    assert pair.client.queued_bytes(slow) > 800_000


def test_all_streams_unread_still_leave_the_connection_room():
    pair = Pair()
    streams = [pair.client.open_call("/m", {}) for _ in range(DEFAULT_LIMITS.streams_max)]
    for stream_id in streams[1:]:
        for _ in range(20):
            pair.client.send(stream_id, bytes(10_000))
    pair.carry()
    pair.client.send(streams[0], bytes(100_000))
    pair.carry()
    assert MessageReceived(streams[0], bytes(100_000)) in pair.server_events


def test_incomplete_messages_are_bounded_per_connection():
    pair = Pair()
    streams = [pair.client.open_call("/m", {}) for _ in range(5)]
    for stream_id in streams:
        pair.client.send(stream_id, bytes(5 * MIB))
    # Only ever a frame of each in turn: all are incomplete together.
    pair.carry()
    refused = [event for event in pair.client_events if isinstance(event, PeerEnded)]
    assert refused
    assert {event.trailers["x-bc-reason"] for event in refused} == {"overloaded"}
    assert pair.server._held <= DEFAULT_LIMITS.held_bytes_max


def test_strangers_share_one_allowance_and_give_it_back():
    allowance = HoldAllowance(bytes_max=300_000)
    wires = [Wire(allowance=allowance) for _ in range(3)]
    for wire in wires:
        wire.server.count_strangers()
        stream_id = wire.open_call()
        wire.client.send_data(stream_id, grpc_call.prefix(bytes(200_000)), end_stream=False)
        for _ in range(8):
            wire.exchange()
            room = min(wire.client.local_flow_control_window(stream_id), 16_384)
            wire.client.send_data(stream_id, bytes(room))
        wire.exchange()
        if wire is wires[1]:
            break
    assert allowance.used <= 300_000
    wires[2].server.lose(EndKind.CONNECTION_LOST, "gone")
    for wire in wires:
        wire.server.lose(EndKind.CONNECTION_LOST, "gone")
    assert allowance.used == 0


def test_data_for_a_call_that_has_ended_is_credited_to_the_connection():
    wire = Wire()
    stream_id = wire.open_call()
    wire.exchange()
    before = wire.client.outbound_flow_control_window
    # On its way while the server refuses: the client does not know yet.
    for _ in range(8):
        wire.client.send_data(stream_id, bytes(8_000))
    late = wire.client.data_to_send()
    wire.server.abort(stream_id, refuse(Reason.OVERLOADED, "no"))
    wire.server.receive(late, now_ms=0)
    manager = wire.server._h2._inbound_flow_control_window_manager
    assert manager.current_window_size + manager._bytes_processed == before
    assert wire.server._held == 0


@pytest.mark.parametrize("reader_consumes", [False, True])
def test_a_message_cut_off_by_the_end_of_the_request_is_refused(reader_consumes: bool):
    wire = Wire()
    stream_id = wire.open_call()
    if reader_consumes:
        wire.client.send_data(stream_id, b"\x00\x00\x00\x00\x01x")
    wire.client.send_data(stream_id, b"\x00\x00\x00\x00\x05abc", end_stream=True)
    events = wire.exchange()
    assert isinstance(events[-1], CallLost)
    trailers = next(event for event in wire.answers if isinstance(event, ResponseReceived))
    headers = texts(trailers)
    assert headers["grpc-status"] == "3"
    assert headers["grpc-message"] == "the stream ended inside a message: 8 of 10 bytes came; send it whole"
    assert headers["x-bc-reason"] == "invalid-frame"


def test_an_answer_cut_off_inside_a_message_is_no_answer():
    pair = Pair()
    stream_id = pair.client.open_call("/m", {})
    pair.carry()
    h2 = pair.server._h2
    h2.send_headers(stream_id, grpc_call.response_headers())
    h2.send_data(stream_id, b"\x00\x00\x00\x00\x05abc")
    h2.send_headers(stream_id, [("grpc-status", "0")], end_stream=True)
    lost = pair.client.receive(h2.data_to_send(), now_ms=0)[-1]
    assert isinstance(lost, CallLost)
    assert lost.kind is EndKind.PROTOCOL
    assert lost.text == "the answer ended inside a message: 8 of 10 bytes came"


def texts(event: ResponseReceived) -> dict[str, str]:
    """Return the headers as text, which h2's types do not know of."""
    return dict(cast("list[tuple[str, str]]", event.headers))


def test_a_refusal_leaves_the_client_no_reset_to_make():
    wire = Wire()
    stream_id = wire.open_call()
    wire.exchange()
    wire.server.finish(stream_id, Status.UNAVAILABLE, "draining", {"x-bc-reason": "draining"})
    assert wire.exchange() == [CallDone(stream_id)]
    response = next(event for event in wire.answers if isinstance(event, ResponseReceived))
    assert response.stream_ended is not None
    reset = next(event for event in wire.answers if isinstance(event, StreamReset))
    assert reset.error_code == ErrorCodes.NO_ERROR


def test_a_get_and_a_wrong_content_type_are_refused_by_http():
    wire = Wire()
    get = wire.client.get_next_available_stream_id()
    wire.client.send_headers(
        get, [(":method", "GET"), (":scheme", "https"), (":path", "/"), (":authority", "x")], end_stream=True
    )
    wire.exchange()
    post = wire.client.get_next_available_stream_id()
    wire.client.send_headers(
        post,
        [
            (":method", "POST"),
            (":scheme", "https"),
            (":path", "/"),
            (":authority", "x"),
            ("content-type", "application/json"),
        ],
    )
    assert wire.exchange() == []
    statuses = {
        event.stream_id: texts(event)[":status"] for event in wire.answers if isinstance(event, ResponseReceived)
    }
    assert statuses == {get: "405", post: "415"}
    sentences = {event.stream_id: event.data.decode() for event in wire.answers if isinstance(event, DataReceived)}
    assert "every request is a POST" in sentences[get]
    assert "takes content-type application/grpc" in sentences[post]
    assert {event.stream_id for event in wire.answers if isinstance(event, StreamEnded)} == {get, post}
    assert wire.server.call_count == 0


@pytest.mark.parametrize("why", ["a HEAD has no body", "the window has no room"])
def test_a_refusal_by_http_does_without_its_sentence(why: str):
    wire = Wire()
    if why == "the window has no room":
        wire.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 10})
        wire.exchange()
    method = "HEAD" if why == "a HEAD has no body" else "GET"
    stream_id = wire.client.get_next_available_stream_id()
    headers = [(":method", method), (":scheme", "https"), (":path", "/"), (":authority", "x")]
    wire.client.send_headers(stream_id, headers, end_stream=True)
    wire.exchange()
    [response] = [event for event in wire.answers if isinstance(event, ResponseReceived)]
    assert (texts(response)[":status"], response.stream_ended is not None) == ("405", True)


@pytest.mark.parametrize(
    ("headers", "status", "words"),
    [
        ([(":status", "503"), ("content-type", "text/html")], Status.UNAVAILABLE, "HTTP status 503"),
        ([(":status", "200"), ("content-type", "text/html")], Status.UNKNOWN, "content-type 'text/html'"),
    ],
)
def test_a_proxys_page_is_no_message_and_its_status_is_told(headers: list[tuple[str, str]], status: int, words: str):
    client = H2Client(limits=DEFAULT_LIMITS, now_ms=0, authority="gateway.test")
    page = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
    page.initiate_connection()
    stream_id = client.open_call("/service/Method", {})
    page.receive_data(client.output(1 << 16))
    page.send_headers(stream_id, headers)
    for _ in range(100):
        page.send_data(stream_id, b"<html>" + b"x" * 10_000)
        client.receive(page.data_to_send(), now_ms=0)
        page.receive_data(client.output(1 << 16))  # which gives the credit back
    page.end_stream(stream_id)
    [ended] = client.receive(page.data_to_send(), now_ms=0)
    assert isinstance(ended, PeerEnded)
    assert ended.status == status
    assert words in ended.message


@pytest.mark.parametrize("path", ["refused by HTTP", "refused by its prefix"])
def test_a_refusal_of_what_was_reset_in_the_same_read_ends_nothing_else(path: str):
    wire = Wire()
    good = wire.open_call()
    wire.exchange()
    bad = wire.client.get_next_available_stream_id()
    if path == "refused by HTTP":
        wire.client.send_headers(bad, [(":method", "GET"), (":scheme", "https"), (":path", "/"), (":authority", "x")])
    else:
        wire.open_call()
        wire.client.send_data(bad, b"\x00\xff\xff\xff\xff")
    wire.client.reset_stream(bad, ErrorCodes.CANCEL)
    wire.exchange()
    assert wire.server.ended is None
    wire.server.finish(good, 0, "", {})
    assert CallDone(good) in wire.exchange()


def test_a_call_that_crossed_a_goaway_is_refused_at_the_server_too():
    pair = Pair()
    pair.client.open_call("/m", {})
    pair.carry()
    late = pair.client.open_call("/m", {})
    pair.server.announce_goaway()
    pair._move(pair.client, pair.server, pair.server_events)
    assert not [event for event in pair.server_events if isinstance(event, CallOpened) and event.stream_id == late]
    pair.carry()
    assert {event.kind for event in pair.client_events if isinstance(event, CallLost)} == {EndKind.REFUSED_STREAM}
    assert pair.server.call_count == 1


def test_request_trailers_end_the_request():
    wire = Wire()
    stream_id = wire.open_call()
    wire.client.send_data(stream_id, b"\x00\x00\x00\x00\x01x")
    wire.client.send_headers(stream_id, [("x-trailer", "1")], end_stream=True)
    assert wire.exchange()[1:] == [MessageReceived(stream_id, b"x"), PeerEnded(stream_id)]


def test_messages_of_one_turn_share_a_frame():
    wire = Wire()
    stream_id = wire.open_call()
    wire.exchange()
    for _ in range(50):
        wire.server.send(stream_id, b"small")
    wire.server.output(0)
    data = wire.server.output(1 << 16)
    # One HEADERS, one DATA.
    assert len(data) < 50 * 10 + 9 + 9 + 120
    wire.answers += wire.client.receive_data(data)


def test_an_orderly_goaway_lets_calls_finish_at_the_client():
    pair = Pair()
    first = pair.client.open_call("/m", {})
    pair.carry()
    pair.server.announce_goaway()
    late = pair.client.open_call("/m", {})
    pair._move(pair.server, pair.client, pair.client_events)
    assert any(isinstance(event, GoingAway) for event in pair.client_events)
    lost = next(event for event in pair.client_events if isinstance(event, CallLost))
    assert (lost.stream_id, lost.kind) == (late, EndKind.REFUSED_STREAM)
    with pytest.raises(CallEnded) as end:
        pair.client.open_call("/m", {})
    assert end.value.kind is EndKind.GOING_AWAY
    pair.server.send(first, b"still")
    pair.server.finish(first, 0, "", {})
    pair.carry()
    assert MessageReceived(first, b"still") in pair.client_events


def test_a_goaway_for_cause_says_so():
    pair = Pair()
    pair.client.open_call("/m", {})
    pair.carry()
    pair.server.close(EndKind.ENHANCE_YOUR_CALM, "too many PING frames", code=ErrorCodes.ENHANCE_YOUR_CALM)
    pair.carry()
    ended = next(event for event in pair.client_events if isinstance(event, ConnectionEnded))
    assert ended.kind is EndKind.ENHANCE_YOUR_CALM
    assert "too many PING frames" in ended.text


def test_pings_are_answered():
    pair = Pair()
    pair.client.ping(b"12345678")
    pair.carry()
    assert PingAnswered() in pair.client_events


def test_a_refused_send_leaves_the_queue_as_it_was():
    pair = Pair(limits=Limits(outbound_messages_max=2))
    stream_id = pair.client.open_call("/m", {})
    pair.client.send(stream_id, b"1")
    pair.client.send(stream_id, b"2")
    with pytest.raises(Refused):
        pair.client.send(stream_id, b"3")
    pair.carry()
    assert [event.message for event in pair.server_events if isinstance(event, MessageReceived)] == [b"1", b"2"]


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n" * 4, b"\x00" * 100])
def test_what_is_not_http2_ends_the_connection(junk: bytes):
    server = H2Server(limits=DEFAULT_LIMITS, now_ms=0)
    events = server.receive(junk, now_ms=0)
    assert isinstance(events[-1], ConnectionEnded)
    assert events[-1].kind is EndKind.PROTOCOL


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=400))
def test_no_bytes_make_it_raise(junk: bytes):
    wire = Wire()
    wire.open_call()
    wire.exchange()
    wire.server.receive(junk, now_ms=0)
    wire.server.output(1 << 16)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 255), st.integers(0, 5), st.binary(max_size=30)), max_size=12)
)
def test_no_frames_make_it_raise(frames: list[tuple[int, int, int, bytes]]):
    wire = Wire()
    wire.open_call()
    wire.exchange()
    for kind, flags, stream_id, body in frames:
        header = len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream_id.to_bytes(4, "big")
        for event in wire.server.receive(header + body, now_ms=0):
            if isinstance(event, MessageReceived):
                wire.server.consumed(event.stream_id, event.message)
            if isinstance(event, CallOpened):
                wire.server.finish(event.stream_id, 0, "", {})
        wire.server.output(1 << 16)
