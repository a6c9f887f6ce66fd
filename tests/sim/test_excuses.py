"""What the checker excuses, and nothing more than that."""

from __future__ import annotations

import pytest

from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason
from bettercompute.testing.sim.invariants import Verdict
from bettercompute.testing.sim.ledger import Ledger
from bettercompute.testing.sim.taps import FrameRules

START_MS = 1_000_000


@pytest.mark.parametrize(
    ("stepped_by_ms", "heard_after_ms", "reason", "excused"),
    [
        pytest.param(177_000, 0, Reason.CERTIFICATE_EXPIRED, 1, id="a clock that was ahead and was put back"),
        pytest.param(0, 0, Reason.CERTIFICATE_EXPIRED, 0, id="a clock that was right"),
        pytest.param(0, 2_000, Reason.CERTIFICATE_EXPIRED, 0, id="a Welcome that was heard late"),
        pytest.param(-177_000, 0, Reason.CERTIFICATE_EXPIRED, 0, id="a clock that was behind"),
        pytest.param(177_000, 0, Reason.HEARTBEAT_TIMEOUT, 0, id="another reason"),
    ],
)
def test_a_certificate_may_end_by_the_clock_that_its_session_began_with(
    stepped_by_ms: int, heard_after_ms: int, reason: str, excused: int
) -> None:
    monotonic_ms = 0
    ledger = Ledger()
    ledger.rows["node_sessions"]["n",] = {"session_epoch": 1}
    rules = FrameRules(ledger, Verdict(lambda: START_MS + monotonic_ms), monotonic_ms=lambda: monotonic_ms)
    welcome = messages.Welcome(epoch=1, server_time_ms=START_MS + stepped_by_ms)
    monotonic_ms = heard_after_ms
    rules.received("n", messages.ServerFrame(welcome=welcome), stream=1, machine="n")
    monotonic_ms += 50_000
    rules.ended("n", reason=reason, stream=1)
    assert rules.ends_with_a_reason["n"] == excused
