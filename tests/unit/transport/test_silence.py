"""h2's own logging is silent, and its frames cost nothing to format."""

from __future__ import annotations

import logging

from hyperframe.frame import DataFrame, Frame

from bettercompute.protocol.limits import MAX_FRAME_BYTES
from bettercompute.transport import link, tls_errors
from bettercompute.transport.calls import DialKind, EndKind
from bettercompute.transport.limits import DEFAULT_LIMITS, Limits


def test_frames_are_not_formatted_and_headers_not_logged(caplog):
    class Costly(DataFrame):
        def serialize_body(self) -> bytes:
            raise AssertionError("formatted")

    assert repr(Costly(1)) == "Costly"
    assert Frame.__repr__ is not object.__repr__
    with caplog.at_level(logging.DEBUG, logger="hpack.hpack"):
        logging.getLogger("hpack.hpack").debug("Decoded %s", "x")
    assert caplog.records == []


def test_limits_hold_together():
    assert DEFAULT_LIMITS.message_bytes_max == MAX_FRAME_BYTES
    # A daemon keeps its connection for 30 s after a refusal.
    assert DEFAULT_LIMITS.idle_ms > 30_000
    assert Limits().connection_window_bytes >= 2 * DEFAULT_LIMITS.streams_max * 128 * 1024


def test_every_refusal_of_a_certificate_is_an_ending_too():
    kinds = {kind for kind, _ in tls_errors.ALERTS.values()}
    assert {kind.value for kind in kinds - {DialKind.SERVER_NAME}} <= {kind.value for kind in EndKind}
    assert set(EndKind) >= link.ABUSE_KINDS
