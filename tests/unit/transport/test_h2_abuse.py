"""Floods against the server's end, without sockets: what is billed, what is not, and no decent client is cut."""

from __future__ import annotations

import gc
import weakref

import pytest
from h2.errors import ErrorCodes
from h2.events import StreamReset
from hpack import Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from bettercompute.protocol.statuses import Status
from bettercompute.transport.calls import EndKind
from bettercompute.transport.h2_bounds import AbuseBucket, BoundedH2, EnhanceYourCalm
from bettercompute.transport.h2_events import CallLost, CallOpened, ConnectionEnded, MessageReceived
from bettercompute.transport.limits import DEFAULT_LIMITS, Limits
from tests.unit.transport.wire import GRPC_HEADERS, Wire

BURST = DEFAULT_LIMITS.abuse_burst


def ping() -> Frame:
    return PingFrame(0, opaque_data=b"12345678")


FLOODS = {
    "PING": ping,
    "SETTINGS": lambda: SettingsFrame(0, settings={3: 100}),
    "PRIORITY": lambda: PriorityFrame(1, depends_on=0, stream_weight=1),
    "empty DATA": lambda: DataFrame(1, data=b""),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_of_frames_that_carry_nothing_ends_calmly(flood: str):
    wire = Wire()
    wire.open_call()
    wire.exchange()
    events = wire.send_frames(*(FLOODS[flood]() for _ in range(BURST + 10)))
    assert isinstance(events[-1], ConnectionEnded)
    assert events[-1].kind is EndKind.ENHANCE_YOUR_CALM
    assert isinstance(events[-2], CallLost)
    assert wire.calmed()


@pytest.mark.parametrize("flood", FLOODS)
def test_the_same_frames_at_a_decent_rate_are_never_billed_into_an_end(flood: str):
    wire = Wire()
    wire.open_call()
    wire.exchange()
    for _ in range(2_000):
        wire.now_ms += 60
        wire.send_frames(FLOODS[flood]())
        wire.server.output(0)
    assert wire.server.ended is None


def test_an_idle_sessions_pings_are_free_for_a_month():
    wire = Wire()
    wire.open_call()
    wire.exchange()
    for _ in range(30 * 24 * 180 // 10):
        wire.now_ms += 20_000
        wire.send_frames(ping())
        wire.server.output(0)
    assert wire.server.ended is None


def rapid_reset(wire: Wire, count: int) -> None:
    encoder = Encoder()
    frames: list[Frame] = []
    for index in range(count):
        stream_id = 2 * index + 1
        headers = HeadersFrame(stream_id, data=encoder.encode(GRPC_HEADERS))
        headers.flags.add("END_HEADERS")
        frames += [headers, RstStreamFrame(stream_id, error_code=ErrorCodes.CANCEL)]
    wire.send_frames(*frames)


@pytest.mark.parametrize(
    ("stranger", "borne"), [(False, DEFAULT_LIMITS.abuse_burst), (True, DEFAULT_LIMITS.anonymous_abuse_burst)]
)
def test_a_stranger_is_borne_with_for_less_long(stranger: bool, borne: int):
    wire = Wire()
    if stranger:
        wire.server.count_strangers()
    left = int(wire.server._h2.bucket.tokens)
    assert borne - 2 <= left <= borne, "the preface's own SETTINGS are paid for"
    wire.send_frames(*(ping() for _ in range(left)))
    assert wire.server.ended is None
    wire.send_frames(ping())
    assert wire.calmed()


@pytest.mark.parametrize("stranger", [False, True])
def test_the_calls_of_a_stranger_are_billed_although_each_is_answered(stranger: bool):
    wire = Wire()
    if stranger:
        wire.server.count_strangers()
    for _ in range(2 * DEFAULT_LIMITS.anonymous_abuse_burst):
        stream_id = wire.open_call()
        wire.exchange()
        if wire.server.ended is not None:
            break
        wire.server.finish(stream_id, Status.UNIMPLEMENTED, "unknown method", {})
        wire.exchange()
        wire.server.handler_done()
    assert wire.calmed() is stranger


def test_rapid_reset_ends_the_connection_before_many_calls_are_opened():
    wire = Wire()
    rapid_reset(wire, 5_000)
    assert wire.calmed()
    # h2 sees no more frames than the bucket pays for, and the shell no more calls than fit.
    assert sum(isinstance(event, CallOpened) for event in wire.events) <= DEFAULT_LIMITS.streams_max


def test_calls_that_last_or_were_answered_may_be_reset_freely():
    wire = Wire()
    for _ in range(500):
        stream_id = wire.open_call()
        wire.exchange()
        wire.now_ms += DEFAULT_LIMITS.early_reset_ms
        wire.client.reset_stream(stream_id, ErrorCodes.CANCEL)
        wire.exchange()
        wire.server.handler_done()
    for _ in range(500):
        stream_id = wire.open_call()
        wire.exchange()
        wire.server.send(stream_id, b"answer")
        wire.exchange()
        wire.client.reset_stream(stream_id, ErrorCodes.CANCEL)
        wire.exchange()
        wire.server.handler_done()
    assert wire.server.ended is None


def test_resets_that_the_server_is_forced_to_are_billed():
    wire = Wire()
    for _ in range(BURST + 10):
        stream_id = wire.open_call()
        # Past any window: h2 must reset the stream by itself (MadeYouReset).
        up = wire.client.data_to_send()
        overflow = WindowUpdateFrame(stream_id, window_increment=2**31 - 1).serialize()
        wire.events += wire.server.receive(up + overflow, now_ms=wire.now_ms)
        if wire.server.ended is not None:
            break
        wire.server.handler_done()
        wire.answers += wire.client.receive_data(wire.server.output(1 << 16))
    assert wire.server.ended is not None
    assert wire.server.ended.kind is EndKind.ENHANCE_YOUR_CALM


def test_tunnels_of_a_proven_session_are_never_billed():
    wire = Wire()
    session = wire.open_call(path="/Session")
    wire.exchange()
    wire.server.never_bill("/Tunnel")
    for _ in range(1_000):
        stream_id = wire.open_call(path="/Tunnel")
        wire.exchange()
        wire.send_frames(DataFrame(stream_id, data=b""))
        wire.client.reset_stream(stream_id, ErrorCodes.CANCEL)
        wire.exchange()
        wire.server.handler_done()
        # What was on its way when the tunnel ended.
        wire.send_frames(DataFrame(stream_id, data=b"late"))
        wire.server.output(0)
    assert not wire.calmed()
    # Everything else on that connection still is.
    for _ in range(BURST - 5):
        stream_id = wire.open_call(path="/Other")
        wire.exchange()
        wire.client.reset_stream(stream_id, ErrorCodes.CANCEL)
        wire.exchange()
        wire.server.handler_done()
    assert not wire.calmed()
    wire.send_frames(*(ping() for _ in range(10)))
    assert wire.calmed()
    assert any(isinstance(event, CallLost) and event.stream_id == session for event in wire.events)


def test_a_call_over_the_limit_is_refused_alone():
    wire = Wire()
    wire.client.remote_settings.acknowledge()
    streams = [wire.open_call() for _ in range(DEFAULT_LIMITS.streams_max)]
    wire.exchange()
    encoder = wire.client.encoder
    over = HeadersFrame(streams[-1] + 2, data=encoder.encode(GRPC_HEADERS))
    over.flags.add("END_HEADERS")
    assert wire.send_frames(over) == []
    output = wire.server.output(0)
    assert RstStreamFrame(streams[-1] + 2, error_code=ErrorCodes.REFUSED_STREAM).serialize() in output
    assert wire.server.ended is None
    assert wire.server.call_count == DEFAULT_LIMITS.streams_max


def test_a_calls_place_is_free_only_when_its_handler_is_done():
    wire = Wire(limits=Limits(streams_max=2))
    first, second = wire.open_call(), wire.open_call()
    wire.exchange()
    wire.now_ms += 5_000
    wire.client.reset_stream(first, ErrorCodes.CANCEL)
    third = wire.open_call()
    wire.exchange()
    reset = next(event for event in wire.answers if isinstance(event, StreamReset))
    assert (reset.stream_id, reset.error_code) == (third, ErrorCodes.REFUSED_STREAM)
    wire.server.handler_done()
    fourth = wire.open_call()
    assert (
        CallOpened(fourth, "/service/Method", {"content-type": "application/grpc", "te": "trailers"}) in wire.exchange()
    )
    assert wire.server.call_count == 2
    assert second


def test_a_flood_of_calls_over_the_limit_ends_calmly():
    wire = Wire()
    encoder = Encoder()
    frames: list[Frame] = []
    for index in range(1_000):
        headers = HeadersFrame(2 * index + 1, data=encoder.encode(GRPC_HEADERS))
        headers.flags.add("END_HEADERS")
        frames.append(headers)
    wire.send_frames(*frames)
    assert wire.calmed()


def test_a_frame_longer_than_announced_is_refused_on_its_header():
    wire = Wire()
    header = DataFrame(1, data=b"").serialize()
    events = wire.server.receive(b"\xff\xff\xff" + header[3:], now_ms=0)
    assert isinstance(events[-1], ConnectionEnded)
    goaway = wire.goaway()
    assert goaway is not None
    assert goaway.error_code == ErrorCodes.FRAME_SIZE_ERROR
    assert goaway.additional_data == b"a frame of 16777215 bytes; this end takes 16384"


@pytest.mark.parametrize("size", [0, 1, 1_000])
def test_continuations_without_end_are_cut_off(size: int):
    wire = Wire()
    headers = HeadersFrame(1, data=b"\x82")
    frames: list[Frame] = [headers, *(ContinuationFrame(1, data=b"\x00" * size) for _ in range(2_000))]
    events = wire.send_frames(*frames)
    assert isinstance(events[-1], ConnectionEnded)
    assert len(wire.server._h2.incoming_buffer._headers_buffer) <= 65


def test_a_header_list_over_16_kib_ends_the_connection():
    wire = Wire()
    stream_id = wire.client.get_next_available_stream_id()
    wire.client.send_headers(stream_id, [*GRPC_HEADERS, ("x-long", "a" * 17_000)])
    events = wire.server.receive(wire.client.data_to_send(), now_ms=0)
    assert isinstance(events[-1], ConnectionEnded)
    assert events[-1].kind is EndKind.ENHANCE_YOUR_CALM
    goaway = wire.goaway()
    assert goaway is not None
    assert b"header" in (goaway.additional_data or b"").lower()


def test_an_hpack_bomb_ends_the_connection():
    wire = Wire()
    encoder = Encoder()
    encoder.encode([("x-bomb", "b" * 4_000)])
    # One byte each refers to the large entry in the table.
    bomb = HeadersFrame(1, data=encoder.encode([("x-bomb", "b" * 4_000)] * 2_000))
    bomb.flags.add("END_HEADERS")
    events = wire.send_frames(bomb)
    assert isinstance(events[-1], ConnectionEnded)


def test_unknown_settings_are_not_kept():
    wire = Wire()
    for start in range(0, 1 << 16, 2_000):
        wire.now_ms += 1_000
        # By hand: hyperframe itself writes no code above 255.
        codes = range(max(16, start), min(start + 2_000, 1 << 16))
        body = b"".join(code.to_bytes(2, "big") + b"\x00\x00\x00\x01" for code in codes)
        wire.server.receive(len(body).to_bytes(3, "big") + b"\x04\x00" + bytes(4) + body, now_ms=wire.now_ms)
        wire.server.output(0)
    assert wire.server.ended is None
    assert len(wire.server._h2.remote_settings) < 10


def test_a_huge_table_offered_by_the_peer_is_not_filled():
    wire = Wire()
    wire.send_frames(SettingsFrame(0, settings={SettingsFrame.HEADER_TABLE_SIZE: 2**31}))
    assert wire.server._h2.encoder.header_table_size == 4096


def test_closed_streams_are_forgotten():
    wire = Wire()
    for _ in range(BoundedH2.MAX_CLOSED_STREAMS + 200):
        stream_id = wire.open_call(end_stream=True)
        wire.exchange()
        wire.server.finish(stream_id, 0, "", {})
        wire.server.handler_done()
        wire.exchange()
    assert len(wire.server._h2._closed_streams) <= BoundedH2.MAX_CLOSED_STREAMS
    assert not wire.server._h2.unanswered
    assert wire.server.ended is None


def test_the_bucket_refills_and_ignores_a_clock_that_steps_back():
    bucket = AbuseBucket.full(DEFAULT_LIMITS, now_ms=0)
    for _ in range(BURST):
        bucket.spend("x", now_ms=0)
    with pytest.raises(EnhanceYourCalm):
        bucket.spend("x", now_ms=49)
    with pytest.raises(EnhanceYourCalm):
        bucket.spend("x", now_ms=-1_000_000)
    with pytest.raises(EnhanceYourCalm):
        bucket.spend("x", now_ms=0)
    bucket.spend("x", now_ms=50)


def test_a_lost_connection_needs_no_collector():
    gc.collect()
    gc.disable()
    try:
        wire = Wire()
        wire.open_call()
        wire.exchange()
        wire.server.lose(EndKind.CONNECTION_LOST, "gone")
        gone = weakref.ref(wire.server._h2)
        del wire
        assert gone() is None
    finally:
        gc.enable()


def test_nothing_is_read_after_the_end():
    wire = Wire()
    wire.send_frames(*(ping() for _ in range(BURST + 1)))
    stream_id = wire.open_call()
    message = b"\x00\x00\x00\x00\x01x"
    wire.client.send_data(stream_id, message)
    assert not [event for event in wire.exchange() if isinstance(event, MessageReceived | CallOpened)]
