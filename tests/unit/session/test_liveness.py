"""Heartbeats, silence, the flush, and the transitions nobody reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bettercompute.session import liveness
from bettercompute.session.closing import Cause
from bettercompute.session.liveness import Connectivity, FlushRow, NodeLiveness, Watch


@pytest.mark.parametrize(
    ("sessions", "interval"), [(0, 10_000), (5_000, 10_000), (5_001, 10_002), (7_500, 15_000), (50_000, 100_000)]
)
def test_the_interval_grows_with_the_fleet(sessions: int, interval: int) -> None:
    assert liveness.heartbeat_interval_ms(sessions) == interval


@given(st.integers(0, 10**6))
def test_a_gateway_sees_at_most_five_hundred_heartbeats_a_second(sessions: int) -> None:
    assert sessions * 1_000 / liveness.heartbeat_interval_ms(sessions) <= 500


def test_the_check_runs_every_half_interval_up_to_the_flush_period() -> None:
    assert liveness.check_period_ms(10_000) == 5_000
    assert liveness.check_period_ms(100_000) == 15_000


def cause(*, silent_ms: int, left_ms: int = 1_000_000) -> Cause | None:
    return liveness.closing_cause(
        last_heard_ms=0, heartbeat_interval_ms=10_000, certificate_ends_at_ms=silent_ms + left_ms, now_ms=silent_ms
    )


def test_three_intervals_of_silence_end_a_session() -> None:
    assert cause(silent_ms=30_000) is None
    assert cause(silent_ms=30_001) is Cause.HEARTBEAT_TIMEOUT


def test_an_expired_certificate_ends_a_session() -> None:
    assert cause(silent_ms=0, left_ms=1) is None
    assert cause(silent_ms=0, left_ms=0) is Cause.CERTIFICATE_EXPIRED


@given(st.sets(st.integers(0, 5_000), max_size=1_300))
def test_the_flush_goes_in_sorted_chunks(numbers: set[int]) -> None:
    rows = [FlushRow(node_id=f"n{number}", epoch=1, session_id="s", age_ms=5) for number in numbers]
    chunks = liveness.flush_chunks(rows)
    assert all(0 < len(chunk) <= 500 for chunk in chunks)
    flat = [row.node_id for chunk in chunks for row in chunk]
    assert flat == sorted(row.node_id for row in rows)


def test_every_tenth_heartbeat_carries_hashes_and_the_first_after_a_change() -> None:
    carried = [
        number
        for number in range(1, 41)
        if liveness.carries_hashes(heartbeats_sent=number - 1, inventory_changed=number == 17)
    ]
    assert carried == [10, 17, 20, 30, 40]


def test_a_silent_server_is_given_up_after_a_minute() -> None:
    assert not liveness.server_silent(last_heard_ms=0, now_ms=59_999)
    assert liveness.server_silent(last_heard_ms=0, now_ms=60_000)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (NodeLiveness(connectivity=Connectivity.CONNECTED), None),
        (NodeLiveness(connectivity=Connectivity.CONNECTED, gateway_lease_expired_ms=120_000), None),
        (NodeLiveness(connectivity=Connectivity.CONNECTED, gateway_lease_expired_ms=120_001), liveness.GATEWAY_LOST),
        (
            NodeLiveness(connectivity=Connectivity.CONNECTED, gateway_lease_expired_ms=1, last_seen_age_ms=10_000_000),
            None,
        ),
        (NodeLiveness(connectivity=Connectivity.CONNECTED, last_seen_age_ms=75_000), None),
        (NodeLiveness(connectivity=Connectivity.CONNECTED, last_seen_age_ms=75_001), liveness.STALE),
        (
            NodeLiveness(connectivity=Connectivity.CONNECTED, last_seen_age_ms=100_000, heartbeat_interval_ms=20_000),
            None,
        ),
        (NodeLiveness(connectivity=Connectivity.DISCONNECTED, disconnected_age_ms=300_000), None),
        (NodeLiveness(connectivity=Connectivity.DISCONNECTED, disconnected_age_ms=300_001), liveness.UNREACHABLE),
        (NodeLiveness(connectivity=Connectivity.UNREACHABLE, disconnected_age_ms=10**9), None),
    ],
)
def test_every_transition(node: NodeLiveness, expected: liveness.Transition | None) -> None:
    assert liveness.transition(node) == expected


def test_what_the_transitions_write() -> None:
    assert liveness.GATEWAY_LOST.retire_lease
    assert liveness.STALE.clear_gateway, "a hung gateway then finds its zombie"
    assert not liveness.STALE.retire_lease


def passes(*readings: tuple[int, int], before: int | None = None) -> Watch:
    watch = Watch(database_ms=before)
    for database_ms, monotonic_ms in readings:
        watch = liveness.watched(watch, database_ms=database_ms, monotonic_ms=monotonic_ms)
    return watch


@pytest.mark.parametrize(
    ("watch", "quiet"),
    [
        (passes((1_000_000, 0), (1_005_000, 5_000)), False),
        (passes((1_000_000, 0), (1_021_000, 21_000)), True),
        (passes((1_000_000, 0), (1_086_400, 5_000)), True),
        (passes((1_000_000, 0), (913_600, 5_000)), True),
        (passes((1_000_000, 0)), False),
        (passes((1_000_000, 0), before=990_000), False),
        (passes((1_000_000, 0), before=970_000), True),
        (passes((1_000_000, 0), before=1_100_000), True),
    ],
)
def test_an_outage_or_a_jump_begins_a_grace(watch: Watch, *, quiet: bool) -> None:
    assert watch.monotonic_ms is not None
    assert liveness.in_grace(watch, monotonic_ms=watch.monotonic_ms) is quiet
    assert not liveness.in_grace(watch, monotonic_ms=watch.monotonic_ms + 300_000)


def test_no_transition_during_a_grace() -> None:
    dead = NodeLiveness(connectivity=Connectivity.CONNECTED, gateway_lease_expired_ms=10**9)
    watch = passes((1_000_000, 0), (1_021_000, 21_000))
    assert liveness.transitions([dead, dead], watch, monotonic_ms=21_000) == (None, None)
    assert liveness.transitions([dead], watch, monotonic_ms=321_000) == (liveness.GATEWAY_LOST,)
