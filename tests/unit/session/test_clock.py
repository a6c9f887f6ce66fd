"""A daemon's times: what a Welcome may move, and what no sequence of lies can."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bettercompute.session import clock
from bettercompute.session.clock import AHEAD_ALLOWED_MS, BACKWARDS_ALLOWED_MS, Clock, TimeRefused

T = 1_800_000_000_000
HOUR_MS = 3_600_000
MINUTE_MS = 60_000
NO_CLOCK = 0
"""A host without a battery: its clock says 1970."""


def joined_at(server_ms: int = T) -> Clock:
    return clock.joined(Clock(), server_time_ms=server_ms, now_ms=0)


def welcome(
    state: Clock, server_ms: int, *, wall_ms: int = NO_CLOCK, now_ms: int = 0, leaf: tuple[int, int] | None = None
) -> Clock | TimeRefused:
    return clock.welcomed(
        state,
        server_time_ms=server_ms,
        wall_ms=wall_ms,
        now_ms=now_ms,
        leaf_not_before_ms=leaf[0] if leaf else None,
        leaf_not_after_ms=leaf[1] if leaf else None,
    )


def accepted(state: Clock, server_ms: int, *, wall_ms: int = NO_CLOCK, now_ms: int = 0) -> Clock:
    judged = welcome(state, server_ms, wall_ms=wall_ms, now_ms=now_ms)
    assert isinstance(judged, Clock)
    return judged


def test_a_welcome_in_time_moves_session_and_mark() -> None:
    state = accepted(joined_at(), T + MINUTE_MS, now_ms=MINUTE_MS)
    assert clock.session_time(state, now_ms=MINUTE_MS + 500) == T + MINUTE_MS + 500
    assert state.mark_ms == T + MINUTE_MS
    assert not state.unconfirmed


def test_five_minutes_back_are_allowed_and_move_nothing_back() -> None:
    state = accepted(joined_at(), T + HOUR_MS, now_ms=HOUR_MS)
    back = accepted(state, T + HOUR_MS - BACKWARDS_ALLOWED_MS, now_ms=HOUR_MS)
    assert clock.session_time(back, now_ms=HOUR_MS) == T + HOUR_MS
    assert back.mark_ms == state.mark_ms
    refused = welcome(state, T + HOUR_MS - BACKWARDS_ALLOWED_MS - 1, now_ms=HOUR_MS)
    assert isinstance(refused, TimeRefused)
    assert "server time went backwards" in refused.message
    assert "bcd clock reset" in refused.message


def test_a_believed_clock_does_not_step_back_to_a_mark_of_seconds_ago() -> None:
    # The host's clock confirms nothing, so session time is ahead of confirmed time; the mark is of the last heartbeat.
    state = accepted(joined_at(), T + 30 * MINUTE_MS)
    later = accepted(state, T + 26 * MINUTE_MS, now_ms=9_000)
    assert clock.session_time(later, now_ms=9_000) == T + 30 * MINUTE_MS + 9_000


def test_the_running_clock_counts_when_the_mark_is_old() -> None:
    state = accepted(joined_at(), T, now_ms=0)
    later = accepted(state, T + MINUTE_MS, now_ms=10 * MINUTE_MS)
    assert clock.session_time(later, now_ms=10 * MINUTE_MS) == T + 10 * MINUTE_MS


def test_a_far_future_is_obeyed_for_this_session_only() -> None:
    state = accepted(joined_at(), T + 100 * HOUR_MS)
    assert state.unconfirmed
    assert clock.session_time(state, now_ms=0) == T + 100 * HOUR_MS
    assert state.mark_ms == T
    assert clock.ticked(state, wall_ms=NO_CLOCK, now_ms=MINUTE_MS).mark_ms == T
    honest = accepted(state, T + MINUTE_MS, now_ms=MINUTE_MS)
    assert not honest.unconfirmed
    assert clock.session_time(honest, now_ms=MINUTE_MS) == T + MINUTE_MS


def test_the_host_clock_confirms_a_long_absence() -> None:
    state = clock.restored(mark_ms=T, confirmed_ms=T, now_ms=0)
    now = T + 700 * HOUR_MS
    judged = accepted(state, now, wall_ms=now + 20 * MINUTE_MS)
    assert not judged.unconfirmed
    assert judged.mark_ms == now
    assert clock.confirmed_time(judged, now_ms=0) == now


def test_a_host_clock_set_right_later_ends_the_doubt() -> None:
    state = accepted(joined_at(), T + 100 * HOUR_MS)
    ticked = clock.ticked(state, wall_ms=T + 100 * HOUR_MS, now_ms=MINUTE_MS)
    assert not ticked.unconfirmed
    assert ticked.mark_ms == T + 100 * HOUR_MS + MINUTE_MS


def test_a_host_that_disagrees_confirms_nothing() -> None:
    state = accepted(joined_at(), T + 100 * HOUR_MS, wall_ms=T + 98 * HOUR_MS)
    assert state.unconfirmed


def test_before_any_confirmation_nothing_enters_the_mark() -> None:
    state = accepted(clock.restored(mark_ms=0, confirmed_ms=None, now_ms=0), T)
    assert state.unconfirmed
    assert state.mark_ms == 0


def test_server_time_must_lie_in_the_serving_leaf() -> None:
    leaf = (T - HOUR_MS, T + HOUR_MS)
    slack = clock.LEAF_SLACK_MS
    assert isinstance(welcome(joined_at(T - 2 * HOUR_MS), leaf[0] - slack, leaf=leaf), Clock)
    assert isinstance(welcome(joined_at(), leaf[1] + slack, leaf=leaf), Clock)
    for outside in (leaf[0] - slack - 1, leaf[1] + slack + 1):
        refused = welcome(joined_at(T - 2 * HOUR_MS), outside, leaf=leaf)
        assert isinstance(refused, TimeRefused)
        assert refused.reason == "server-time-outside-certificate"


def test_a_reset_believes_the_operator() -> None:
    state = accepted(joined_at(T + 100 * HOUR_MS), T + 100 * HOUR_MS)
    assert isinstance(welcome(state, T), TimeRefused)
    assert isinstance(welcome(clock.joined(state, server_time_ms=T, now_ms=0), T), Clock)


def test_the_mark_is_written_once_a_minute() -> None:
    state = accepted(joined_at(), T)
    assert clock.store_due(state, now_ms=0)
    state = clock.stored(state, now_ms=0)
    assert not clock.store_due(state, now_ms=MINUTE_MS - 1)
    assert clock.store_due(state, now_ms=MINUTE_MS)


def test_a_refusals_time_dates_a_proof_but_never_below_the_mark() -> None:
    state = accepted(joined_at(), T)
    assert clock.proof_time(state, refusal_server_time_ms=None, now_ms=7) == T + 7
    assert clock.proof_time(state, refusal_server_time_ms=T + HOUR_MS, now_ms=7) == T + HOUR_MS
    assert clock.proof_time(state, refusal_server_time_ms=0, now_ms=7) == T - BACKWARDS_ALLOWED_MS


def test_a_tick_before_any_welcome_changes_nothing() -> None:
    assert clock.ticked(joined_at(), wall_ms=T, now_ms=5) == joined_at()
    assert clock.session_time(joined_at(), now_ms=5) == T + 5
    assert clock.session_time(Clock(), now_ms=5) == 0


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["welcome", "tick", "restart"]),
        st.integers(-2 * HOUR_MS, 300 * HOUR_MS),
        st.integers(0, 3 * HOUR_MS),
    ),
    max_size=40,
)


@given(MOVES)
def test_no_lie_moves_the_mark_past_confirmed_time_and_an_hour(moves: list[tuple[str, int, int]]) -> None:
    """The host's clock is dead, so only the time that really passed confirms anything."""
    state, now, passed_before_restart = joined_at(), 0, 0
    for what, ahead, passed in moves:
        now += passed
        before = state.mark_ms
        if what == "restart":
            confirmed = clock.confirmed_time(state, now_ms=now)
            state = clock.restored(mark_ms=state.mark_ms, confirmed_ms=confirmed, now_ms=now)
            passed_before_restart = now
        elif what == "tick":
            state = clock.ticked(state, wall_ms=NO_CLOCK, now_ms=now)
        else:
            judged = welcome(state, T + ahead, now_ms=now)
            if isinstance(judged, Clock):
                state = judged
                assert clock.session_time(state, now_ms=now) >= max(before, T + now)
        assert state.mark_ms >= before, "the mark never steps back"
        assert state.mark_ms <= T + now + AHEAD_ALLOWED_MS
        honest = welcome(state, T + now + AHEAD_ALLOWED_MS, now_ms=now)
        assert isinstance(honest, Clock), "a lie locks out nobody for longer than the hour it may gain"
    assert passed_before_restart <= now


@given(MOVES)
def test_time_a_daemon_lives_by_never_steps_back_within_what_is_confirmed(moves: list[tuple[str, int, int]]) -> None:
    state, now, last = joined_at(), 0, T
    for _, ahead, passed in moves:
        now += passed
        judged = welcome(state, T + ahead, now_ms=now)
        if isinstance(judged, TimeRefused):
            continue
        state = judged
        if not state.unconfirmed:
            assert clock.session_time(state, now_ms=now) >= last
            last = state.mark_ms


def test_a_host_clock_that_agrees_never_moves_confirmed_time_back() -> None:
    state = accepted(joined_at(), T + MINUTE_MS, wall_ms=T, now_ms=2 * MINUTE_MS)
    assert clock.confirmed_time(state, now_ms=2 * MINUTE_MS) == T + 2 * MINUTE_MS


def looked(state: Clock, now_ms: int) -> Clock:
    return clock.looked(state, now_ms=now_ms)[0]


def leapt_in_session(*, leap_ms: int, wall_ms: int, looks_ms: int = 10_000) -> Clock:
    """A session whose monotonic clock leaps between two heartbeats, and what is believed after it."""
    state = accepted(looked(joined_at(), 0), T)
    state = looked(state, looks_ms + leap_ms)
    return clock.ticked(state, wall_ms=wall_ms, now_ms=looks_ms + leap_ms)


@given(
    st.integers(clock.UNSEEN_MAX_MS + 1, 1000 * HOUR_MS),
    st.sampled_from(["stands", "leaps along", "leaps elsewhere"]),
)
def test_a_leap_moves_no_time_whatever_the_walls_clock_says(leap_ms: int, wall: str) -> None:
    wall_ms = {"stands": T, "leaps along": T + leap_ms, "leaps elsewhere": T + 20 * HOUR_MS}[wall]
    state = leapt_in_session(leap_ms=leap_ms, wall_ms=wall_ms)
    now_ms = 10_000 + leap_ms
    assert state.mark_ms == T
    assert clock.session_time(state, now_ms=now_ms) == T
    assert clock.confirmed_time(state, now_ms=now_ms) == T
    honest = accepted(state, T + 11_000, wall_ms=wall_ms, now_ms=now_ms + 1_000)
    assert clock.session_time(honest, now_ms=now_ms + 1_000) == T + 11_000
    assert not honest.unconfirmed


def test_an_adjustment_is_no_leap() -> None:
    state = leapt_in_session(leap_ms=clock.UNSEEN_MAX_MS - 10_000, wall_ms=T)
    assert clock.session_time(state, now_ms=clock.UNSEEN_MAX_MS) == T + clock.UNSEEN_MAX_MS


def test_five_adjustments_do_not_shut_an_honest_gateway_out() -> None:
    state, now_ms = accepted(looked(joined_at(), 0), T), 0
    for _ in range(5):
        now_ms += clock.UNSEEN_MAX_MS
        state, unseen_ms = clock.looked(state, now_ms=now_ms)
        assert not unseen_ms
        state = clock.ticked(state, wall_ms=NO_CLOCK, now_ms=now_ms)
    assert state.mark_ms == T + 5 * clock.UNSEEN_MAX_MS
    assert isinstance(welcome(state, T, now_ms=now_ms), Clock)


def test_time_that_was_looked_at_counts_however_long_it_was() -> None:
    state, now_ms = looked(joined_at(), 0), 0
    while now_ms < 100 * HOUR_MS:
        now_ms += clock.UNSEEN_MAX_MS
        state = looked(state, now_ms)
    assert clock.confirmed_time(state, now_ms=now_ms) == T + 100 * HOUR_MS


def test_after_a_suspend_the_next_welcome_tells_the_time_and_the_host_confirms_it() -> None:
    slept_ms = 9 * HOUR_MS
    state, unseen_ms = clock.looked(accepted(looked(joined_at(), 0), T), now_ms=slept_ms)
    assert unseen_ms == slept_ms
    without_battery = accepted(state, T + slept_ms, now_ms=slept_ms)
    assert without_battery.unconfirmed
    assert without_battery.mark_ms == T
    awake = accepted(state, T + slept_ms, wall_ms=T + slept_ms, now_ms=slept_ms)
    assert not awake.unconfirmed
    assert awake.mark_ms == T + slept_ms


def test_a_look_within_a_second_of_the_last_is_none() -> None:
    state = looked(joined_at(), 0)
    assert looked(state, clock.LOOK_EVERY_MS - 1) is state
    assert looked(state, clock.LOOK_EVERY_MS) is not state


def test_a_leap_before_the_first_welcome_is_seen() -> None:
    state = clock.restored(mark_ms=T, confirmed_ms=T, now_ms=0)
    state = accepted(looked(state, HOUR_MS), T + 5_000, now_ms=HOUR_MS)
    assert state.mark_ms == T + 5_000
    assert clock.session_time(state, now_ms=HOUR_MS) == T + 5_000
