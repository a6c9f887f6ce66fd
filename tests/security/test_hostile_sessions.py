"""A gateway that lies about the session itself: its time, epochs, acks, the order of frames. No lie outlives it.

The judge is the honest gateway that takes over: its production rules must take the node's next Hello, and the node its
Welcome, at once or, after a lie about the time, once the mark that the lie could move has passed.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from itertools import count, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bettercompute.delivery.commands import CommandState
from bettercompute.protocol import messages
from bettercompute.protocol.limits import MAX_PUSHBACK_MS
from bettercompute.protocol.statuses import Status, parse_pushback
from bettercompute.session import inputs
from bettercompute.session.clock import AGREEMENT_MS, AHEAD_ALLOWED_MS, BACKWARDS_ALLOWED_MS
from bettercompute.session.liveness import OBEYED_INTERVAL_MAX_MS, OBEYED_INTERVAL_MIN_MS
from tests.security.hostile import HOUR_MS, Site, body_of, signed
from tests.unit.session.world_in_memory import START_MS

DAY_MS = 24 * HOUR_MS
SEARCH_S = 120.0
LOCKED_OUT_AT_MOST_MS = AGREEMENT_MS + AHEAD_ALLOWED_MS
"""The host's clock agrees within an hour and moves the anchor, the mark passes that by an hour: no lie does more."""


def works(site: Site, *, within_ms: int = 0) -> None:
    """See an honest gateway take over and a command run once."""
    site.honest_again(within_ms=within_ms)
    real = site.enqueue("gpu.reset")
    site.settle()
    assert site.started.count(site.rows[real].body) == 1
    site.finish(real)
    site.settle()
    assert site.rows[real].state is CommandState.SUCCEEDED


# Welcome

LIES: dict[str, dict[str, object]] = {
    "epoch 0": {"epoch": 0},
    "an epoch of long ago": {"epoch": 1},
    "an epoch far ahead": {"epoch": 2_000_000},
    "the highest epoch that a database holds": {"epoch": 2**63 - 1},
    "an epoch that no database holds": {"epoch": 2**64 - 1},
    "a heartbeat without pause": {"heartbeat_interval_ms": 0},
    "a heartbeat in 49 days": {"heartbeat_interval_ms": 2**32 - 1},
    "credits without end": {
        "lane_credits": [
            messages.LaneCredits(lane=lane, credits=2**32 - 1) for lane in (*messages.Lane.values(), messages.LANE_BULK)
        ]
    },
    "no credits": {"lane_credits": []},
    "all events acked": {"acked_event_seq": 2**64 - 1},
    "a section a thousand times": {"request_sections": ["cpu"] * 1_000 + ["nothing"]},
    "an upgrade": {"upgrade_required": True},
    "a new journal": {"new_journal": True},
    "a protocol of the future": {"protocol_version": 2**32 - 1},
    "a session without a name": {"session_id": ""},
    "a session with a long name": {"session_id": "s" * 100_000},
}


@pytest.mark.parametrize("name", LIES)
@pytest.mark.parametrize("times", [1, 3])
def test_a_lie_of_welcome_ends_with_its_session(name: str, times: int) -> None:
    site = Site()
    site.honest_again()
    site.add_event()
    for _ in range(times):
        site.hostile_stream(**LIES[name])
        site.tick()
    epoch = site.row.session_epoch
    works(site)
    assert site.row.session_epoch == site.daemon.last_epoch == epoch + 1 or site.row.session_epoch <= epoch + 2_000_002


@pytest.mark.parametrize("epoch", [1, 5, 900_000, 2**62])
def test_no_lie_about_epochs_stays(epoch: int) -> None:
    """However often it is told, one honest Welcome puts it right: the epochs of the table are the node's again."""
    site = Site()
    site.honest_again()
    for step in range(5):
        site.hostile_stream(epoch=min(2**64 - 1, epoch * (step + 1)))
    for _ in range(2):
        site.honest_again()
    assert site.daemon.last_epoch == site.row.session_epoch
    assert site.last_plan is not None
    assert not any(event.attributes.get("epochBehind") for event in site.last_plan.events)


def test_impossible_epochs_are_counted_and_the_beat_stays_in_its_bounds():
    site = Site()
    for epoch, interval_ms in ((0, 0), (2**64 - 1, 2**32 - 1)):
        site.hostile_stream(epoch=epoch, heartbeat_interval_ms=interval_ms)
        assert OBEYED_INTERVAL_MIN_MS <= site.daemon.heartbeat_interval_ms <= OBEYED_INTERVAL_MAX_MS
    assert site.refused("welcome") == {"epoch-out-of-range": 2}


def test_refusals_are_reported_with_the_next_heartbeat_and_not_faster():
    site = Site()
    site.hostile_stream()
    site.up.clear()
    for _ in range(100):
        site.relay(command=signed(body_of("c-9"), None))
    assert not [frame for frame in site.up if frame.WhichOneof("frame") == "status"]
    site.tick()
    reports = [frame.status for frame in site.up if frame.WhichOneof("frame") == "status"]
    assert [(item.what, item.reason, item.count) for item in reports[-1].refusals] == [
        ("command", "bad-signature", 100)
    ]
    site.tick()
    assert len([frame for frame in site.up if frame.WhichOneof("frame") == "status"]) == len(reports) == 1


# Order

FRAMES: dict[str, dict[str, object]] = {
    "a command": {"command": signed(body_of("c-9"))},
    "a cancel": {"cancel": messages.Cancel(command_id="c-9")},
    "a desired state": {"desired": messages.DesiredState(body=b"x")},
    "an ack": {"ack": messages.Ack(journal_id="j-1", acked_event_seq=1, command_ids=["c-9"])},
    "a tunnel": {"open_tunnel": messages.OpenTunnel(tunnel_id="t", ticket="x")},
    "a drain": {"drain": messages.Drain(reconnect_after_ms=0)},
    "a secret": {"secret": messages.SecretResponse(request_id="r", jwe="x")},
    "nothing": {},
}


@pytest.mark.parametrize("name", FRAMES)
def test_nothing_is_obeyed_before_welcome(name: str) -> None:
    site = Site()
    site.dial()
    site.up.clear()
    site.relay(**FRAMES[name])
    assert not site.live
    assert site.started == []
    assert site.refused("welcome") == {"not-welcome": 1}
    works(site)


def test_a_second_welcome_changes_nothing():
    site = Site()
    site.hostile_stream()
    before = site.daemon
    site.relay(welcome=messages.Welcome(session_id="other", epoch=99, server_time_ms=START_MS + 30 * DAY_MS))
    assert site.refused("welcome") == {"second-welcome": 1}
    for name in ("clock", "epoch", "last_epoch", "session_id", "lanes"):
        assert getattr(site.daemon, name) == getattr(before, name), name
    works(site)


# Acks

ACKS = {
    "of what never was": messages.Ack(journal_id="j-1", acked_event_seq=2**64 - 1, command_ids=["nobody", ""] * 100),
    "of another journal": messages.Ack(journal_id="j-9", acked_event_seq=3),
    "of a running command": messages.Ack(command_ids=["c-1"]),
}


@pytest.mark.parametrize("name", ACKS)
def test_a_false_ack_forgets_no_running_command(name: str) -> None:
    site = Site()
    real = site.enqueue("gpu.reset")
    frame = site.command_of(real)
    site.hostile_stream()
    site.relay(command=frame)
    site.relay(ack=ACKS[name])
    site.relay(command=frame)
    assert site.started == [frame.body]
    site.finish(real)
    site.honest_again()
    assert site.rows[real].state is CommandState.SUCCEEDED


def test_a_swallowed_result_is_told_again_when_the_command_is():
    """An ack that no commit stands behind loses the control plane nothing but time."""
    site = Site()
    real = site.enqueue("gpu.reset")
    site.honest_again()
    site.up.clear()
    site.finish(real)
    site.hostile_stream()
    site.relay(ack=messages.Ack(command_ids=[real]))
    site.honest_again()
    assert site.rows[real].state is CommandState.SUCCEEDED
    assert len(site.started) == 1


# Endings


REASONS = ("", "revoked", "superseded", "not-joined", "streams", "made-up")
PUSHBACKS = (None, "0", "86400000", "9" * 40, "-1", "x")


@pytest.mark.parametrize("status", [*Status, None])
def test_no_ending_keeps_a_node_away(status: Status | None) -> None:
    """A node dials again after anything that a gateway may say, within a quarter of an hour at most."""
    site = Site()
    for reason, pushback in product(REASONS, PUSHBACKS):
        site.hostile_stream()
        site.stream_open = False
        ended = inputs.StreamEnded(drawn=0.99, status=status, reason=reason, pushback_ms=parse_pushback(pushback))
        for _ in range(20):
            site.tell_daemon(ended)
            assert site.waiting is not None
            assert 0 <= site.waiting.delay_ms <= MAX_PUSHBACK_MS
    works(site)


def test_a_drain_and_a_revocation_are_only_words():
    site = Site()
    site.hostile_stream()
    site.relay(revoked=messages.RevocationNotice(reason="revoked", message="m" * 100_000, serials=["aa"] * 1_000))
    site.relay(drain=messages.Drain(reconnect_after_ms=2**32 - 1))
    assert all(len(warning) <= 4_096 for warning in site.warnings)
    works(site)


# Time

OFFSETS_MS = [
    *(-365 * DAY_MS, -DAY_MS, -HOUR_MS, -BACKWARDS_ALLOWED_MS, -1_000, 0, 1_000),
    *(BACKWARDS_ALLOWED_MS, HOUR_MS - 1, HOUR_MS + 1, 2 * HOUR_MS, DAY_MS, 80 * DAY_MS, 10_000 * DAY_MS),
]


HOSTS_MS = {"right": 0, "slow": -50 * 60_000, "fast": 50 * 60_000, "without-a-clock": -50 * 365 * DAY_MS}


@pytest.mark.parametrize("offset_ms", OFFSETS_MS)
@pytest.mark.parametrize("host", HOSTS_MS)
def test_a_lie_about_the_time_locks_nobody_out(offset_ms: int, host: str) -> None:
    for times, restarts in product((1, 10), (False, True)):
        lied_to(offset_ms, host=host, times=times, restarts=restarts)


def lied_to(offset_ms: int, *, host: str, times: int, restarts: bool) -> None:
    """Lie so many times, the node restarted before each of them or not; then see it work under an honest gateway."""
    site = Site()
    site.wall_skew_ms = HOSTS_MS[host]
    bound_ms = LOCKED_OUT_AT_MOST_MS + max(0, site.wall_skew_ms)
    site.honest_again()
    for step in range(times):
        if restarts:
            site.restart_daemon()
        site.hostile_stream(server_time_ms=START_MS + site.now_ms + offset_ms * (step + 1))
        site.tick()
    assert site.daemon.clock.mark_ms <= START_MS + site.now_ms + bound_ms
    works(site, within_ms=bound_ms)


@pytest.mark.parametrize("offset_ms", OFFSETS_MS)
@pytest.mark.parametrize("restarts", [False, True], ids=["running", "restarted"])
def test_a_lie_about_the_time_brings_no_expired_command_back(offset_ms: int, restarts: bool) -> None:
    site = Site()
    frame = signed(body_of("c-1", not_after_ms=START_MS + HOUR_MS))
    site.honest_again()
    for _ in range(20):
        site.hostile_stream(server_time_ms=START_MS + site.now_ms + min(0, offset_ms))
        site.tick(passed_ms=6 * 60_000)
        if restarts:
            site.restart_daemon()
    assert site.now_ms > HOUR_MS
    site.hostile_stream(server_time_ms=START_MS + site.now_ms + offset_ms)
    if site.live:
        site.relay(command=frame)
        assert site.refused("command").keys() <= {"expired", "bad-signature"}  # so far ahead, the worker's time is over
    assert site.started == []


# Everything at once

STORED = ("gpu.reset", "node.reboot", "inventory.refresh", "logs.collect")


def acts(site: Site, names: list[str]) -> dict[str, Callable[[int], object]]:
    """Return what may happen, each with a number that says how."""
    foreign = [
        signed(body_of("c-7", node_id="node-2")),
        signed(body_of("c-8", not_after_ms=START_MS)),
        signed(body_of("c-9"), None),
    ]
    times_ms = [0, -DAY_MS, -HOUR_MS // 2, HOUR_MS // 2, HOUR_MS, 90 * HOUR_MS, 80 * DAY_MS]

    def deliver(number: int) -> None:
        frame = site.command_of(names[number % len(names)])
        frame.attempt, frame.seen = number, messages.CommandState.ValueType(number % 5)
        site.relay(command=frame)

    def finish(number: int) -> None:
        if site.handlers:
            site.finish(sorted(site.handlers)[number % len(site.handlers)])

    return {
        "welcome": lambda number: site.hostile_stream(
            server_time_ms=START_MS + site.now_ms + times_ms[number % len(times_ms)],
            epoch=(1, 5, 10**6, 2**62, 2**64 - 1)[number % 5],
            new_journal=number % 11 == 0,
            acked_event_seq=number,
        ),
        "deliver": deliver,
        "forge": lambda number: site.relay(command=foreign[number % len(foreign)]),
        "ack": lambda number: site.relay(
            ack=messages.Ack(journal_id="j-1", acked_event_seq=number, command_ids=[names[number % len(names)]])
        ),
        "finish": finish,
        "tick": lambda number: site.tick(passed_ms=(1, 10_000, 60_000, HOUR_MS)[number % 4]),
        "restart": lambda number: site.restart_daemon(reboot=number % 3 == 0),
        "event": lambda _: site.add_event(),
        "honest": lambda _: site.honest_again(within_ms=LOCKED_OUT_AT_MOST_MS),
    }


ACT_NAMES = ["welcome", "deliver", "forge", "ack", "finish", "tick", "restart", "event", "honest"]


def told(script: list[tuple[str, int]]) -> None:
    site = Site()
    names = [site.enqueue(kind, not_after_ms=3 * HOUR_MS) for kind in STORED]
    possible = acts(site, names)
    restarts = 0
    for name, number in script:
        restarts += name == "restart"
        possible[name](number)
        assert set(site.started) <= site.signed_bodies
    site.honest_again(within_ms=LOCKED_OUT_AT_MOST_MS)
    assert site.live
    for command_id, kind in zip(names, STORED, strict=True):
        body = site.rows[command_id].body
        runs = site.started.count(body)
        # What is safe to run twice may run again in another process that finds it unfinished; nothing else may.
        assert runs <= (1 + restarts if kind in ("inventory.refresh", "logs.collect") else 1), (command_id, kind)
        ends_ms = messages.CommandBody.FromString(body).not_after_ms
        late_ms = [
            at_ms - ends_ms for at_ms, done in zip(site.started_at_ms, site.started, strict=True) if done == body
        ]
        late_at_most_ms = site.lost_ms + BACKWARDS_ALLOWED_MS
        assert all(late <= late_at_most_ms for late in late_ms), (late_ms, late_at_most_ms)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(ACT_NAMES), st.integers(0, 10_000)), max_size=25))
def test_no_sequence_of_lies_runs_what_it_must_not_or_locks_the_node_out(script: list[tuple[str, int]]) -> None:
    told(script)


@pytest.mark.long
def test_no_long_sequence_of_lies_does_either(capsys: pytest.CaptureFixture[str]) -> None:
    """As many as two minutes of computing allow; each is drawn from its number, which a failure tells."""
    begun_s, lies = time.process_time(), 0
    for attempt in count(1):
        dice = random.Random(attempt)
        script = [(dice.choice(ACT_NAMES), dice.randrange(10_001)) for _ in range(dice.randrange(61))]
        try:
            told(script)
        except AssertionError as error:
            raise AssertionError(f"attempt {attempt}: {script}") from error
        lies += len(script)
        if time.process_time() - begun_s > SEARCH_S:
            break
    with capsys.disabled():
        sys.stdout.write(
            f"\n{attempt} sequences of {lies} acts in all, in {time.process_time() - begun_s:.0f} s of computing\n"
        )
    assert attempt > 100, "so few say nothing"
