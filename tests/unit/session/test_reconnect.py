"""When a daemon dials again: full jitter, exact pushbacks, attempts told, connections kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bettercompute.protocol.limits import MAX_PUSHBACK_MS
from bettercompute.protocol.statuses import Reason, Status
from bettercompute.session.effects import Redial
from bettercompute.session.reconnect import Backoff, Ending, next_wait, window_ms

DRAWN = st.floats(0, 1, exclude_max=True)
LOST = Ending()


@pytest.mark.parametrize(
    ("attempt", "window"), [(0, 1_000), (1, 2_000), (2, 4_000), (5, 32_000), (6, 60_000), (7, 60_000), (10**6, 60_000)]
)
def test_the_window_doubles_to_a_minute(attempt: int, window: int) -> None:
    assert window_ms(attempt) == window


@given(st.integers(0, 10**6), DRAWN)
def test_a_delay_is_drawn_from_the_whole_window(attempt: int, drawn: float) -> None:
    after, wait = next_wait(Backoff(attempt=attempt), LOST, drawn=drawn)
    assert 0 <= wait.delay_ms < window_ms(attempt)
    assert wait.delay_ms == int(drawn * window_ms(attempt))
    assert after.attempt == min(attempt + 1, 10**6)


@given(st.integers(0, 20), st.integers(0, MAX_PUSHBACK_MS), DRAWN)
def test_a_pushback_is_waited_exactly_and_the_doubling_starts_over(attempt: int, pushback: int, drawn: float) -> None:
    ending = Ending(status=Status.RESOURCE_EXHAUSTED, reason=Reason.STREAMS, pushback_ms=pushback)
    after, wait = next_wait(Backoff(attempt=attempt), ending, drawn=drawn)
    assert wait.delay_ms == pushback
    assert after.attempt == 0


def test_only_the_bucket_counts_as_an_attempt() -> None:
    backoff = Backoff()
    for reason, refusals in (
        (Reason.HANDSHAKES, 1),
        (Reason.HELLOS, 1),
        (Reason.STREAMS, 1),
        (Reason.HANDSHAKES, 2),
        (Reason.RATE_LIMITED, 2),
    ):
        ending = Ending(status=Status.RESOURCE_EXHAUSTED, reason=reason, pushback_ms=10)
        backoff, _ = next_wait(backoff, ending, drawn=0.0)
        assert backoff.bucket_refusals == refusals
    backoff, _ = next_wait(backoff, LOST, drawn=0.0)
    assert backoff.bucket_refusals == 2, "a lost connection forgets no appointment"


@given(DRAWN, st.integers(0, 10))
def test_a_superseded_daemon_waits_at_least_five_seconds(drawn: float, attempt: int) -> None:
    ending = Ending(status=Status.ABORTED, reason=Reason.SUPERSEDED)
    _, wait = next_wait(Backoff(attempt=attempt), ending, drawn=drawn)
    assert 5_000 <= wait.delay_ms < 5_000 + window_ms(attempt)


@pytest.mark.parametrize(
    ("reason", "pushback", "redial"),
    [
        (Reason.HANDSHAKES, 30_000, Redial.SAME_CONNECTION),
        (Reason.HANDSHAKES, 30_001, Redial.NEW_CONNECTION),
        (Reason.HELLOS, 500, Redial.SAME_CONNECTION),
        (Reason.STREAMS, 1_000, Redial.NEW_CONNECTION),
        (Reason.DRAINING, 1_000, Redial.NEW_CONNECTION),
        (Reason.DATABASE, 1_000, Redial.NEW_CONNECTION),
        (Reason.HANDSHAKES, None, Redial.NEW_CONNECTION),
        ("", None, Redial.NEW_CONNECTION),
    ],
)
def test_which_refusals_keep_the_connection(reason: str, pushback: int | None, redial: Redial) -> None:
    ending = Ending(status=Status.RESOURCE_EXHAUSTED, reason=reason, pushback_ms=pushback)
    assert next_wait(Backoff(), ending, drawn=0.0)[1].redial is redial
