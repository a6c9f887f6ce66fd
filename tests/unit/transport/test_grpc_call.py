from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bettercompute.errors import Refused
from bettercompute.protocol.statuses import Reason, Status
from bettercompute.transport import grpc_call
from bettercompute.transport.grpc_call import LIFECYCLE, CallInput, CallState, MessageReader

LIMIT = 64
messages = st.lists(st.binary(max_size=LIMIT), max_size=8)


@st.composite
def cuts(draw: st.DrawFn, data: bytes) -> list[bytes]:
    points = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    edges = [0, *points, len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


@given(st.data(), messages)
def test_messages_come_whole_whatever_the_pieces(data: st.DataObject, sent: list[bytes]):
    wire = b"".join(grpc_call.prefix(message) + message for message in sent)
    reader = MessageReader(limit=LIMIT)
    received = [message for piece in data.draw(cuts(wire)) for message in reader.feed(piece)]
    assert received == sent
    assert reader.pending_bytes == 0
    reader.finish()


@given(messages, st.integers(1, LIMIT + 4), st.data())
def test_an_end_inside_a_message_is_refused(sent: list[bytes], missing: int, data: st.DataObject):
    wire = b"".join(grpc_call.prefix(message) + message for message in [*sent, b"x" * LIMIT])[:-missing]
    reader = MessageReader(limit=LIMIT)
    for piece in data.draw(cuts(wire)):
        reader.feed(piece)
    with pytest.raises(Refused, match=f"{LIMIT + 5 - missing} of") as refusal:
        reader.finish()
    assert (refusal.value.status, refusal.value.reason) == (Status.INVALID_ARGUMENT, Reason.INVALID_FRAME)


@pytest.mark.parametrize("pieces", [1, 5])
def test_too_large_a_message_is_refused_on_its_prefix(pieces: int):
    reader = MessageReader(limit=5 * 1024 * 1024)
    wire = grpc_call.prefix(bytes(6 * 1024 * 1024))
    size = len(wire) // pieces
    *first, last = [wire[start : start + size] for start in range(0, len(wire), size)]
    assert [reader.feed(piece) for piece in first] == [[]] * len(first)
    with pytest.raises(Refused, match="6291456 bytes; the limit is 5242880") as refusal:
        reader.feed(last)
    assert (refusal.value.status, refusal.value.reason) == (Status.INVALID_ARGUMENT, Reason.FRAME_TOO_LARGE)
    assert reader.pending_bytes <= 5


def test_a_message_at_the_limit_passes_and_one_above_does_not():
    reader = MessageReader(limit=LIMIT)
    assert reader.feed(grpc_call.prefix(bytes(LIMIT)) + bytes(LIMIT)) == [bytes(LIMIT)]
    with pytest.raises(Refused):
        reader.feed(grpc_call.prefix(bytes(LIMIT + 1)) + bytes(LIMIT + 1))


def test_a_compressed_message_is_refused():
    with pytest.raises(Refused, match="compressed flag 1") as refusal:
        MessageReader(limit=LIMIT).feed(b"\x01\x00\x00\x00\x01x")
    assert (refusal.value.status, refusal.value.reason) == (Status.UNIMPLEMENTED, Reason.COMPRESSED)


@pytest.mark.parametrize(
    ("method", "content_type", "refusal"),
    [
        ("POST", "application/grpc", None),
        ("POST", "application/grpc+proto", None),
        ("POST", "Application/gRPC; charset=utf-8", None),
        ("GET", "application/grpc", 405),
        ("PUT", None, 405),
        ("POST", "application/grpc+json", 415),
        ("POST", "application/json", 415),
        ("POST", "application/grpc-web", 415),
        ("POST", None, 415),
    ],
)
def test_what_is_not_grpc_is_refused_by_http(method: str, content_type: str | None, refusal: int | None):
    headers = {":method": method, "grpc-timeout": "1n"}
    if content_type is not None:
        headers["content-type"] = content_type
    assert grpc_call.http_refusal(headers) == refusal


@pytest.mark.parametrize(
    ("http_status", "fields", "status"),
    [
        ("200", {"grpc-status": "0"}, 0),
        ("200", {"grpc-status": "14"}, 14),
        ("200", {"grpc-status": "x"}, 2),
        ("200", {"grpc-status": "-1"}, 2),
        ("200", {}, 2),
        ("200", {"content-type": "text/html"}, 2),
        ("503", {}, 14),
        ("503", {"grpc-status": "8"}, 8),
        ("404", {}, 12),
        ("401", {}, 16),
        ("302", {}, 2),
        ("", {}, 2),
    ],
)
def test_every_ending_has_a_status(http_status: str, fields: dict[str, str], status: int):
    assert grpc_call.response_status(http_status=http_status, fields=fields)[0] == status


def test_status_message_survives_the_wire():
    headers = dict(grpc_call.trailers(status=3, message="50 % → ö\n", extra={"x-bc-reason": "bad"}))
    assert headers["grpc-message"] == "50 %25 %E2%86%92 %C3%B6%0A"
    assert grpc_call.response_status(http_status="200", fields=headers) == (3, "50 % → ö\n")


@pytest.mark.parametrize(
    "bad", [{"X-Upper": "a"}, {"grpc-status": "0"}, {"x": "ä"}, {"x": "a\r\nb: c"}, {":path": "/"}]
)
def test_metadata_that_would_break_headers_is_our_own_mistake(bad: dict[str, str]):
    with pytest.raises(AssertionError):
        grpc_call.trailers(status=0, message="", extra=bad)


def test_fields_that_come_twice_are_joined():
    assert grpc_call.metadata_of([(":path", "/"), ("a", "1"), ("a", "2")]) == {"a": "1,2"}


def test_the_lifecycle_names_every_pair_and_closed_is_for_good():
    assert set(LIFECYCLE) == set(itertools.product(CallState, CallInput))
    for happened in CallInput:
        assert LIFECYCLE[CallState.CLOSED, happened] is CallState.CLOSED
    for state in CallState:
        assert LIFECYCLE[state, CallInput.RESET] is CallState.CLOSED


@given(st.lists(st.sampled_from(CallInput)))
def test_a_call_is_closed_when_both_have_ended_or_one_reset(inputs: list[CallInput]):
    state = CallState.OPEN
    for happened in inputs:
        state = LIFECYCLE[state, happened]
    ended = {CallInput.PEER_ENDS, CallInput.WE_END} <= set(inputs) or CallInput.RESET in inputs
    assert (state is CallState.CLOSED) == ended
