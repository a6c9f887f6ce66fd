"""Admission: the order of the checks, the bucket's appointments, Joins, pending Hellos, the first frame."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bettercompute.errors import Refused
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason, Status
from bettercompute.session import opening
from bettercompute.session.opening import AdmissionState, GatewayCondition, GatewayState

SERVING = GatewayCondition(state=GatewayState.SERVING)


def admit(
    state: AdmissionState,
    condition: GatewayCondition = SERVING,
    *,
    attempt: int | None = 0,
    revoked: bool = False,
    now_ms: int = 0,
    drawn: float = 0.5,
) -> tuple[AdmissionState, Refused | None]:
    revocation = messages.RevocationNotice(message="it is revoked", cure="re-join it") if revoked else None
    return opening.admit_session(state, condition, attempt=attempt, revocation=revocation, now_ms=now_ms, drawn=drawn)


def drained(rate_per_s: float = 200) -> AdmissionState:
    return replace(opening.open_admission(now_ms=0, rate_per_s=rate_per_s), tokens=0.0)


@pytest.mark.parametrize(
    ("condition", "status", "reason", "pushback"),
    [
        (GatewayCondition(state=GatewayState.STARTING), Status.UNAVAILABLE, Reason.STARTING, None),
        (GatewayCondition(state=GatewayState.NO_LEASE), Status.UNAVAILABLE, Reason.NO_LEASE, None),
        (GatewayCondition(state=GatewayState.FENCED), Status.UNAVAILABLE, Reason.FENCED, None),
        (GatewayCondition(state=GatewayState.DRAINING), Status.UNAVAILABLE, Reason.DRAINING, (1_000, 5_000)),
        (replace(SERVING, loop_lag_ms=2_001), Status.UNAVAILABLE, Reason.OVERLOADED, None),
        (
            replace(SERVING, streams=5_000, room_elsewhere=True),
            Status.RESOURCE_EXHAUSTED,
            Reason.STREAMS,
            (1_000, 5_000),
        ),
        (replace(SERVING, streams=5_000), Status.RESOURCE_EXHAUSTED, Reason.STREAMS, (30_000, 60_000)),
    ],
)
@pytest.mark.parametrize("drawn", [0.0, 0.5, 0.999])
def test_a_gateway_that_cannot_serve_refuses_and_spends_no_token(
    condition: GatewayCondition, status: Status, reason: Reason, pushback: tuple[int, int] | None, drawn: float
) -> None:
    before = opening.open_admission(now_ms=0)
    after, refused = admit(before, condition, drawn=drawn, revoked=True)
    assert after == before
    assert refused is not None
    assert (refused.status, refused.reason) == (status, reason)
    if pushback is None:
        assert refused.pushback_ms is None
    else:
        assert refused.pushback_ms is not None
        assert pushback[0] <= refused.pushback_ms <= pushback[1]
    assert len(refused.message.split()) > 4, "said in words"


def test_a_lag_and_a_stream_at_the_limit_are_allowed() -> None:
    _, refused = admit(opening.open_admission(now_ms=0), replace(SERVING, loop_lag_ms=2_000, streams=4_999))
    assert refused is None


def test_a_revoked_serial_is_refused_before_a_token_is_spent() -> None:
    before = opening.open_admission(now_ms=0)
    after, refused = admit(before, revoked=True)
    assert after == before
    assert refused is not None
    assert (refused.status, refused.reason) == (Status.UNAUTHENTICATED, Reason.REVOKED)
    assert refused.message == "it is revoked; cure: re-join it"


def test_one_second_of_tokens_at_most() -> None:
    state = opening.open_admission(now_ms=0, rate_per_s=10)
    admitted = 0
    for _ in range(30):
        state, refused = admit(state, now_ms=3_600_000, attempt=1)
        admitted += refused is None
    assert admitted == 10


def test_the_kth_refused_comes_back_k_over_rate_from_now() -> None:
    state = drained(rate_per_s=100)
    for k in range(1, 50):
        state, refused = admit(state)
        assert refused is not None
        assert refused.pushback_ms is not None
        assert refused.pushback_ms == pytest.approx(k * 10, abs=1)


def test_no_token_is_spent_on_a_stream_whose_hello_would_be_refused() -> None:
    full = replace(SERVING, hellos_pending=64)
    before = opening.open_admission(now_ms=0, rate_per_s=100)
    for attempt in (0, 1, 2, None):
        state, refused = admit(before, full, attempt=attempt)
        assert refused is not None
        assert refused.reason == Reason.HANDSHAKES
        assert refused.pushback_ms == pytest.approx(10, abs=1)
        assert state.tokens == before.tokens
    assert admit(before, replace(SERVING, hellos_pending=47))[1] is None


def test_who_was_refused_twice_comes_before_the_others() -> None:
    nearly_full = replace(SERVING, hellos_pending=63)
    open_state = opening.open_admission(now_ms=0, rate_per_s=100)
    assert [admit(open_state, nearly_full, attempt=attempt)[1] is None for attempt in (0, 1, None, 2, 3)] == [
        *(False, False, False),
        *(True, True),
    ]
    state, lent = drained(rate_per_s=100), 0
    while (outcome := admit(state, attempt=2))[1] is None:
        state, lent = outcome[0], lent + 1
    assert lent == 25
    _, refused = admit(state, attempt=1, now_ms=250)
    assert refused is not None, "what was lent is earned first"
    assert admit(state, attempt=1, now_ms=270)[1] is None


@pytest.mark.parametrize("drawn", [0.0, 0.999_999])
def test_an_appointment_is_jittered_by_a_tenth(drawn: float) -> None:
    state = replace(drained(rate_per_s=100), next_at_ms=10_000)
    _, refused = admit(state, drawn=drawn)
    assert refused is not None
    assert refused.pushback_ms is not None
    assert refused.pushback_ms == pytest.approx(10_010 * (0.9 + 0.2 * drawn), abs=2)


def test_a_newcomer_does_not_overtake_those_who_wait() -> None:
    state = replace(opening.open_admission(now_ms=0, rate_per_s=100), next_at_ms=500.0)
    after, refused = admit(state, attempt=0)
    assert refused is not None
    assert after.next_at_ms > state.next_at_ms
    for waiting in (1, 7, None):
        _, refused = admit(state, attempt=waiting)
        assert refused is None


def test_beyond_the_horizon_nothing_is_booked() -> None:
    state = replace(drained(), next_at_ms=59_999.0)
    after, refused = admit(state)
    assert refused is not None
    assert after.next_at_ms == state.next_at_ms
    assert refused.pushback_ms is not None
    assert 30_000 <= refused.pushback_ms <= 60_000


@given(
    st.lists(
        st.tuples(st.integers(0, 3_000), st.sampled_from([0, 1, 3, None]), st.floats(0, 1, exclude_max=True)),
        max_size=200,
    )
)
def test_never_more_than_the_rate_and_one_burst(arrivals: list[tuple[int, int | None, float]]) -> None:
    state = opening.open_admission(now_ms=0, rate_per_s=20)
    now_ms = admitted = 0
    for wait_ms, attempt, drawn in arrivals:
        now_ms += wait_ms
        state, refused = admit(state, attempt=attempt, now_ms=now_ms, drawn=drawn)
        admitted += refused is None
        assert admitted <= 20 + now_ms * 20 / 1000 + 1
        assert 0 <= state.tokens <= 20
        if refused is not None:
            assert refused.reason == Reason.HANDSHAKES
            assert refused.pushback_ms is not None
            assert 0 < refused.pushback_ms <= 66_000


# Joins


def join(
    state: AdmissionState, *, source: str = "2001:db8::/64", now_ms: int = 0, drawn: float = 0.0
) -> tuple[AdmissionState, Refused | None]:
    return opening.admit_join(state, SERVING, source=source, now_ms=now_ms, drawn=drawn)


def test_a_refused_join_is_told_the_queue_and_does_not_advance_it() -> None:
    state = replace(drained(rate_per_s=100), next_at_ms=8_000.0)
    for drawn in (0.0, 0.5, 0.999):
        after, refused = join(state, drawn=drawn)
        assert refused is not None
        assert after.next_at_ms == state.next_at_ms
        assert refused.pushback_ms is not None
        assert refused.pushback_ms == int(8_000 * (1 + drawn)) + 1, "from once to twice the queue, not in step"


def test_joins_get_a_quarter_while_sessions_queue() -> None:
    state = opening.open_admission(now_ms=0, rate_per_s=100)
    admitted = 0
    for number in range(1_000):
        state = replace(state, next_at_ms=number * 10 + 60_000.0)
        state, refused = join(state, source=f"s{number}", now_ms=number * 10)
        admitted += refused is None
    assert admitted == pytest.approx(25 + 10 * 25, abs=3), "a burst of a quarter, then a quarter of the rate"


def test_joins_may_use_all_while_nobody_queues() -> None:
    state = opening.open_admission(now_ms=0, rate_per_s=100)
    admitted = 0
    for number in range(100):
        state, refused = join(state, source=f"s{number}")
        admitted += refused is None
    assert admitted == 100


def test_a_source_joins_twenty_times_a_second() -> None:
    state = opening.open_admission(now_ms=0)
    refusals = []
    for _ in range(25):
        state, refused = join(state)
        refusals.append(refused)
    assert [refused is None for refused in refusals] == [True] * 20 + [False] * 5
    last = refusals[-1]
    assert last is not None
    assert (last.status, last.reason) == (Status.RESOURCE_EXHAUSTED, Reason.RATE_LIMITED)
    assert join(state, source="other")[1] is None
    assert join(state, now_ms=100)[1] is None


def test_sources_are_bounded() -> None:
    state = opening.open_admission(now_ms=0, rate_per_s=100_000)
    for number in range(opening.SOURCES_MAX + 100):
        state, _ = join(state, source=f"s{number}", now_ms=number)
    assert len(state.sources) <= opening.SOURCES_MAX


def test_a_join_is_refused_by_a_gateway_that_cannot_serve() -> None:
    state = opening.open_admission(now_ms=0)
    condition = GatewayCondition(state=GatewayState.STARTING)
    after, refused = opening.admit_join(state, condition, source="s", now_ms=0, drawn=0.0)
    assert after == state
    assert refused is not None
    assert refused.reason == Reason.STARTING
    full = replace(SERVING, streams=5_000)
    assert opening.admit_join(state, full, source="s", now_ms=0, drawn=0.0)[1] is None, "a Join holds no stream"


# Hellos


def test_the_sixty_fifth_hello_waits_for_the_queue() -> None:
    opening.admit_hello(pending=63, recent_hello_ms=100, drawn=0.0)
    for recent_ms, drawn, expected in ((100, 0.0, 6_400), (100, 0.5, 9_600), (1, 0.0, 500), (5_000, 0.0, 60_000)):
        with pytest.raises(Refused) as refused:
            opening.admit_hello(pending=64, recent_hello_ms=recent_ms, drawn=drawn)
        assert (refused.value.status, refused.value.reason) == (Status.RESOURCE_EXHAUSTED, Reason.HELLOS)
        assert refused.value.pushback_ms == expected


def test_a_queue_that_drains_in_3_s_is_told_as_such() -> None:
    # 64 at once over ten connections, 3 s each: the last is done after 3 s, not after 64 times that.
    shares = [opening.hello_time_ms(took_ms=3_000, pending=left) for left in range(64, 0, -1)]
    median_ms = sorted(shares)[len(shares) // 2]
    with pytest.raises(Refused) as refused:
        opening.admit_hello(pending=64, recent_hello_ms=median_ms, drawn=0.0)
    assert refused.value.pushback_ms is not None
    assert 3_000 <= refused.value.pushback_ms <= 6_000


def test_the_ninth_stream_of_a_node_without_a_session_waits_for_the_others() -> None:
    opening.admit_opening(node_id="n", opening=7, drawn=0.5)
    with pytest.raises(Refused) as caught:
        opening.admit_opening(node_id="n", opening=8, drawn=0.5)
    assert (caught.value.status, caught.value.reason) == (Status.RESOURCE_EXHAUSTED, Reason.HELLOS)
    assert caught.value.pushback_ms == 12_000, "one a second, and not all of them in step"


def test_a_failed_transaction_closes_with_a_pushback() -> None:
    refused = opening.refuse_database(drawn=0.5)
    assert (refused.status, refused.reason, refused.pushback_ms) == (Status.UNAVAILABLE, Reason.DATABASE, 3_000)


@pytest.mark.parametrize(("last", "now", "delay"), [(None, 0, 0), (0, 400, 600), (0, 1_000, 0), (5_000, 0, 1_000)])
def test_one_hello_a_second(last: int | None, now: int, delay: int) -> None:
    assert opening.hello_delay_ms(last_hello_at_ms=last, now_ms=now) == delay


def test_room_elsewhere_is_more_than_a_twentieth() -> None:
    assert opening.has_room(streams=4_749, streams_max=5_000)
    assert not opening.has_room(streams=4_750, streams_max=5_000)


# The first frame

HELLO = messages.Hello(node_id="n", role=messages.AGENT_ROLE_NODE, boot_id="b", journal_id="j")


def test_the_first_frame_is_hello() -> None:
    assert opening.check_first_frame(messages.AgentFrame(hello=HELLO)) == HELLO
    for frame in (messages.AgentFrame(heartbeat=messages.Heartbeat()), messages.AgentFrame()):
        with pytest.raises(Refused) as refused:
            opening.check_first_frame(frame)
        assert (refused.value.status, refused.value.reason) == (Status.INVALID_ARGUMENT, Reason.NOT_HELLO)


@pytest.mark.parametrize(
    ("changes", "certificate_role", "status", "reason"),
    [
        ({"node_id": "m"}, 0, Status.PERMISSION_DENIED, Reason.NODE_MISMATCH),
        ({"role": 0}, 0, Status.INVALID_ARGUMENT, Reason.BAD_HELLO),
        ({"role": 99}, 0, Status.INVALID_ARGUMENT, Reason.BAD_HELLO),
        ({"role": messages.AGENT_ROLE_SITE}, 1, Status.PERMISSION_DENIED, Reason.ROLE_MISMATCH),
        ({"boot_id": ""}, 1, Status.INVALID_ARGUMENT, Reason.BAD_HELLO),
        ({"journal_id": ""}, 1, Status.INVALID_ARGUMENT, Reason.BAD_HELLO),
        ({"proto_min": 2, "proto_max": 1}, 1, Status.INVALID_ARGUMENT, Reason.BAD_HELLO),
        ({"proto_min": 1, "proto_max": 0}, 1, Status.INVALID_ARGUMENT, Reason.BAD_HELLO),
    ],
)
def test_a_hello_that_is_not_its_certificates(
    changes: dict[str, object], certificate_role: int, status: Status, reason: Reason
) -> None:
    hello = messages.Hello()
    hello.CopyFrom(HELLO)
    for name, value in changes.items():
        setattr(hello, name, value)
    with pytest.raises(Refused) as refused:
        opening.check_hello(hello, certificate_node_id="n", certificate_role=certificate_role)
    assert (refused.value.status, refused.value.reason) == (status, reason)


@pytest.mark.parametrize("certificate_role", [0, messages.AGENT_ROLE_NODE])
def test_a_good_hello(certificate_role: int) -> None:
    opening.check_hello(HELLO, certificate_node_id="n", certificate_role=certificate_role)


@pytest.mark.parametrize(("proto_min", "proto_max"), [(0, 0), (1, 1), (7, 9)])
def test_a_range_out_of_reach_is_no_error(proto_min: int, proto_max: int) -> None:
    hello = messages.Hello()
    hello.CopyFrom(HELLO)
    hello.proto_min, hello.proto_max = proto_min, proto_max
    opening.check_hello(hello, certificate_node_id="n", certificate_role=messages.AGENT_ROLE_NODE)


# The herd


def herd(
    *,
    nodes: int,
    rate: float,
    spread_ms: int,
    lost: float = 0.0,
    others_per_s: float = 0.0,
    seed: int = 1,
) -> tuple[float, int]:
    """Power on `nodes` and let each follow its refusals; return when the last one is in, and the most attempts."""
    dice = random.Random(seed)
    state = opening.open_admission(now_ms=0, rate_per_s=rate)
    queue = [(dice.uniform(0, spread_ms), number, 0, True) for number in range(nodes)]
    horizon_ms = int(nodes / rate * 3_000)
    queue += [
        (at_ms, nodes + number, 0, False)
        for number, at_ms in enumerate(
            dice.uniform(0, horizon_ms) for _ in range(int(others_per_s * horizon_ms / 1000))
        )
    ]
    heapq.heapify(queue)
    last_ms, attempts_max, left = 0.0, 0, nodes
    while queue and left:
        at_ms, number, attempt, counts = heapq.heappop(queue)
        state, refused = admit(state, attempt=attempt, now_ms=int(at_ms), drawn=dice.random())
        if refused is None:
            if counts:
                left -= 1
                last_ms, attempts_max = at_ms, max(attempts_max, attempt + 1)
        elif counts and dice.random() < lost:
            left -= 1
        else:
            assert refused.pushback_ms is not None
            heapq.heappush(queue, (at_ms + refused.pushback_ms + dice.uniform(5, 50), number, attempt + 1, counts))
    return last_ms, attempts_max


@pytest.mark.parametrize("spread_ms", [0, 5_000])
@pytest.mark.parametrize("lost", [0.0, 0.3])
def test_a_herd_of_ten_thousand_drains_at_the_rate(spread_ms: int, lost: float) -> None:
    last_ms, attempts_max = herd(nodes=10_000, rate=200, spread_ms=spread_ms, lost=lost)
    assert last_ms <= 1.15 * 10_000 / 200 * 1000
    assert attempts_max <= 3


def test_a_herd_beside_a_steady_stream_of_others() -> None:
    last_ms, attempts_max = herd(nodes=5_000, rate=200, spread_ms=1_000, others_per_s=100)
    assert attempts_max <= 4
    assert last_ms <= 2.3 * 5_000 / 200 * 1000


def test_two_gateways_worth_of_a_herd() -> None:
    last_ms, attempts_max = herd(nodes=2_000, rate=100, spread_ms=5_000)
    assert last_ms <= 2_000 / 100 * 1000 + 5_000
    assert attempts_max <= 3


# Held streams


def test_who_was_refused_twice_is_held_in_place_of_being_refused() -> None:
    state = opening.open_admission(now_ms=0, rate_per_s=100)
    held = [opening.may_be_held(state, SERVING, attempt=attempt) for attempt in (0, 1, None, 2, 3)]
    assert held == [False, False, False, True, True]
    assert opening.may_be_held(state, replace(SERVING, held=499), attempt=2)
    assert not opening.may_be_held(state, replace(SERVING, held=500), attempt=2), "five seconds' worth"


def test_a_held_stream_looks_again_when_there_is_a_token_a_place_or_an_end() -> None:
    rich, poor = opening.open_admission(now_ms=0, rate_per_s=100), replace(drained(rate_per_s=100), tokens=-24.5)
    full = replace(SERVING, hellos_pending=64)
    assert opening.hold_ms(rich, SERVING, now_ms=0) == 0
    assert opening.hold_ms(poor, SERVING, now_ms=0) == 5, "half a token is lacking"
    assert opening.hold_ms(poor, SERVING, now_ms=5) == 0
    assert opening.hold_ms(rich, full, now_ms=0) == opening.HELD_LOOK_MS
    assert opening.hold_ms(rich, replace(full, state=GatewayState.DRAINING), now_ms=0) == 0, "it is told at once"
    assert admit(poor, attempt=2, now_ms=5)[1] is None


def test_nobody_is_admitted_before_those_who_are_held() -> None:
    state = opening.open_admission(now_ms=0, rate_per_s=100)
    somebody_held = replace(SERVING, held=1)
    assert [admit(state, somebody_held, attempt=attempt)[1] is None for attempt in (0, 1, None, 2)] == [
        *(False, False, False),
        True,
    ]


@pytest.mark.parametrize(("hello_ms", "spread_ms"), [(1, 0), (1, 5_000), (12, 5_000), (16, 0), (16, 5_000), (25, 0)])
def test_nobody_is_refused_a_third_time_by_a_gateway_that_cannot_keep_its_rate(hello_ms: int, spread_ms: int) -> None:
    """One server that takes `hello_ms` for each Hello, and a herd of 1,000 at a rate of 100 a second."""
    dice, herd, rate_per_s = random.Random(17), 1_000, 100
    state = opening.open_admission(now_ms=0, rate_per_s=rate_per_s)
    # When it arrives, and how often it was refused. Beside them: a Hello's end, and a look of those that are held.
    ended, look = -1, -2
    arrivals = [(dice.uniform(0, spread_ms), number, 0) for number in range(herd)]
    heapq.heapify(arrivals)
    held: list[int] = []
    free_at_ms, pending, connected, worst, now_ms = 0.0, 0, 0, 0, 0.0

    def serve() -> None:
        nonlocal free_at_ms, pending
        pending += 1
        free_at_ms = max(free_at_ms, now_ms) + hello_ms
        heapq.heappush(arrivals, (free_at_ms, ended, ended))

    while connected < herd:
        now_ms, number, attempt = heapq.heappop(arrivals)
        condition = replace(SERVING, hellos_pending=pending, held=len(held))
        if attempt == ended:
            pending, connected = pending - 1, connected + 1
        elif attempt == look:
            pass
        elif attempt >= 2 and opening.may_be_held(state, condition, attempt=attempt):
            held.append(attempt)
        else:
            state, refused = admit(state, condition, attempt=attempt, now_ms=int(now_ms), drawn=dice.random())
            if refused is None:
                serve()
            else:
                worst = max(worst, attempt + 1)
                assert refused.pushback_ms is not None
                heapq.heappush(arrivals, (now_ms + refused.pushback_ms, number, attempt + 1))
        while held:
            condition = replace(SERVING, hellos_pending=pending, held=len(held))
            if opening.hold_ms(state, condition, now_ms=int(now_ms)):
                break
            state, refused = admit(state, condition, attempt=held.pop(0), now_ms=int(now_ms))
            assert refused is None
            serve()
        if held and (not arrivals or arrivals[0][1] != look):
            heapq.heappush(arrivals, (now_ms + opening.HELD_LOOK_MS, look, look))
    assert worst <= 2
    assert now_ms < herd * max(hello_ms, 1_000 / rate_per_s) * 1.1 + spread_ms
