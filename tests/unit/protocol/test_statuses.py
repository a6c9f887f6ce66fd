import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bettercompute.protocol.limits import MAX_BIGINT, MAX_GRPC_MESSAGE_BYTES, MAX_PUSHBACK_MS
from bettercompute.protocol.statuses import (
    STATUS_OF,
    Reason,
    Status,
    decode_grpc_message,
    encode_grpc_message,
    format_pushback,
    parse_attempt,
    parse_pushback,
    parse_server_time,
    refuse,
)

QUARTER_HOUR_MS = 15 * 60 * 1000


@pytest.mark.parametrize(
    ("text", "pushback_ms"),
    [
        ("0", 0),
        ("1", 1),
        ("1500", 1500),
        ("0001500", 1500),
        ("900000", QUARTER_HOUR_MS),
        ("900001", QUARTER_HOUR_MS),
        ("9" * 10_000, QUARTER_HOUR_MS),
        (None, None),
        ("", None),
        ("-1", None),
        ("+1", None),
        (" 1", None),
        ("1 ", None),
        ("1\n", None),
        ("1.5", None),
        ("1e3", None),
        ("0x10", None),
        ("1_000", None),
        ("soon", None),
        ("٣", None),
        ("²", None),
        ("1,2", None),
    ],
)
def test_pushback_is_followed_exactly_or_ignored(text, pushback_ms):
    assert parse_pushback(text) == pushback_ms


def test_no_pushback_is_told_that_a_foreign_client_would_have_to_cut() -> None:
    assert [format_pushback(wait_ms) for wait_ms in (-1, 900_000, 900_001)] == ["0", "900000", "900000"]


@given(st.integers(-(10**9), 10**12))
def test_a_pushback_told_is_the_pushback_heard(pushback_ms):
    assert parse_pushback(format_pushback(pushback_ms)) == max(0, min(pushback_ms, MAX_PUSHBACK_MS))


@given(st.text(max_size=30))
def test_no_text_breaks_the_parsers(text):
    for parse in (parse_pushback, parse_attempt, parse_server_time):
        number = parse(text)
        assert number is None or 0 <= number <= MAX_BIGINT


def test_attempt_and_server_time_are_plain_decimals():
    assert (parse_attempt("0"), parse_attempt("3"), parse_attempt(None), parse_attempt("x")) == (0, 3, None, None)
    assert parse_server_time("1764460800000") == 1_764_460_800_000
    assert parse_server_time("9" * 25) == MAX_BIGINT


def test_every_reason_has_one_status_and_a_short_stable_code():
    assert set(STATUS_OF) == set(Reason)
    for reason in Reason:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*|INVALID_CONFIG", reason)


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (Reason.STARTING, Status.UNAVAILABLE),
        (Reason.FENCED, Status.UNAVAILABLE),
        (Reason.STREAMS, Status.RESOURCE_EXHAUSTED),
        (Reason.HELLOS, Status.RESOURCE_EXHAUSTED),
        (Reason.SLOW_CONSUMER, Status.RESOURCE_EXHAUSTED),
        (Reason.REVOKED, Status.UNAUTHENTICATED),
        (Reason.CERTIFICATE_EXPIRED, Status.UNAUTHENTICATED),
        (Reason.NODE_MISMATCH, Status.PERMISSION_DENIED),
        (Reason.NOT_JOINED, Status.PERMISSION_DENIED),
        (Reason.NOT_HELLO, Status.INVALID_ARGUMENT),
        (Reason.FRAME_TOO_LARGE, Status.INVALID_ARGUMENT),
        (Reason.SUPERSEDED, Status.ABORTED),
        (Reason.HEARTBEAT_TIMEOUT, Status.UNAVAILABLE),
        (Reason.UNKNOWN_METHOD, Status.UNIMPLEMENTED),
    ],
)
def test_published_statuses(reason, status):
    assert STATUS_OF[reason] is status


def test_statuses_are_the_numbers_of_grpc():
    grpc = pytest.importorskip("grpc")
    assert {status.name: status.value for status in Status} == {code.name: code.value[0] for code in grpc.StatusCode}


def test_a_refusal_carries_all_it_says():
    refused = refuse(Reason.STREAMS, "5,000 streams are held: try another gateway", pushback_ms=1500)
    assert (refused.status, refused.reason, refused.pushback_ms) == (Status.RESOURCE_EXHAUSTED, "streams", 1500)
    assert str(refused) == "5,000 streams are held: try another gateway"


@pytest.mark.parametrize(
    ("message", "encoded"),
    [
        ("plain words, 100", "plain words, 100"),
        ("100 %", "100 %25"),
        ("line\r\nline", "line%0D%0Aline"),
        ("käse", "k%C3%A4se"),
        ("\U0001f600", "%F0%9F%98%80"),
        ("\0\x7f~", "%00%7F~"),
        ("", ""),
    ],
)
def test_grpc_message_encoding(message, encoded):
    assert encode_grpc_message(message) == encoded
    assert decode_grpc_message(encoded) == message


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_grpc_message_round_trip(message):
    encoded = encode_grpc_message(message)
    assert re.fullmatch(r"[ -~]*", encoded)
    assert decode_grpc_message(encoded) == message


@given(st.text(max_size=2_000))
def test_grpc_message_is_cut_between_characters(message):
    encoded = encode_grpc_message(message * 10)
    assert len(encoded) <= MAX_GRPC_MESSAGE_BYTES
    assert re.fullmatch(r"(?:[ -$&-~]|%[0-9A-F]{2})*", encoded)


@pytest.mark.parametrize("value", ["%", "%4", "%zz", "100%", "%C3", "%FF%FE", "\ud800", "ä"])
def test_what_is_badly_encoded_is_kept_not_refused(value):
    assert isinstance(decode_grpc_message(value), str)


def test_bad_escapes_stay_as_they_came():
    assert decode_grpc_message("%zz 5% %41") == "%zz 5% A"
