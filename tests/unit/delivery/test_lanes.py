"""Credits: both counts over a pair of queues, with drops of the session in between."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from bettercompute.delivery import lanes
from bettercompute.delivery.lanes import DEFAULT_CREDITS, DaemonLane, GatewayLane, Lane
from bettercompute.protocol import messages


def test_lanes_are_those_of_the_wire() -> None:
    assert {lane.name: int(lane) for lane in Lane} == {
        name.removeprefix("LANE_"): number for name, number in messages.Lane.items() if number
    }
    assert DEFAULT_CREDITS == {Lane.CONTROL: 8, Lane.BULK: 2}


@dataclass
class Pair:
    """One lane at both ends; commands finish in any order."""

    granted: int
    most: int = 0
    """The most that may run at once: this session's credits, or what ran at its begin."""
    number: int = 0
    busy: int = 0
    gateway: GatewayLane = field(init=False)
    daemon: DaemonLane = field(init=False)
    down: deque[str] = field(default_factory=deque)
    up: deque[tuple[str, str, int, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.open(self.granted, running=frozenset())

    def open(self, granted: int, *, running: frozenset[str]) -> None:
        self.granted = granted
        self.most = max(granted, len(running))
        self.down.clear()
        self.up.clear()
        self.gateway = lanes.open_gateway_lane(granted=granted, running=running)
        self.daemon = lanes.open_daemon_lane(granted=granted, holders=running)

    def send(self) -> None:
        if self.gateway.available:
            self.number += 1
            self.down.append(f"c{self.number}")
            self.gateway = lanes.sent(self.gateway, f"c{self.number}")

    def deliver_down(self) -> None:
        if self.down:
            command_id = self.down.popleft()
            self.daemon = lanes.received(self.daemon)
            if self.daemon.free == 0:
                self.busy += 1
                self.up.append(("busy", command_id, 0, 0))
            else:
                self.daemon = lanes.held(self.daemon, command_id)

    def finish(self, which: int) -> None:
        holders = sorted(self.daemon.holders)
        if holders:
            command_id = holders[which % len(holders)]
            self.daemon = lanes.let_go(self.daemon, command_id)
            self.up.append(("ended", command_id, 0, 0))

    def heartbeat(self) -> None:
        self.up.append(("beat", "", self.daemon.free, self.daemon.received))

    def deliver_up(self) -> None:
        if self.up:
            what, command_id, free, received = self.up.popleft()
            if what == "beat":
                self.gateway = lanes.resynchronized(self.gateway, free=free, received=received)
            else:
                self.gateway = lanes.freed(self.gateway, command_id)

    def check(self) -> None:
        assert self.busy == 0, "a credit that the gateway counted was not there"
        assert len(self.daemon.holders) <= self.most, "credits are never exceeded"
        if not self.down and not self.up:
            assert self.gateway.available == self.daemon.free, "nothing leaks"


OPERATIONS = st.one_of(
    st.sampled_from(["send", "send", "send", "deliver_down", "deliver_down", "heartbeat", "deliver_up", "deliver_up"]),
    st.tuples(st.just("finish"), st.integers(0, 9)),
    st.tuples(st.just("open"), st.integers(0, 2)),
)


@given(st.integers(2, 5), st.lists(OPERATIONS, min_size=20, max_size=120))
def test_credits_are_never_exceeded_and_never_leak(granted: int, operations: list[str | tuple[str, int]]) -> None:
    pair = Pair(granted)
    for operation in operations:
        match operation:
            case ("finish", int(which)):
                pair.finish(which)
            case ("open", int(credits_now)):
                pair.open(credits_now, running=pair.daemon.holders)
            case str(name):
                getattr(pair, name)()
        pair.check()
    while pair.down or pair.up:
        pair.deliver_down()
        pair.deliver_up()
        pair.check()


def test_a_daemon_that_holds_what_the_gateway_does_not_know_is_believed() -> None:
    lane = lanes.open_gateway_lane(granted=8, running=())
    lane = lanes.resynchronized(lane, free=5, received=0)
    assert lane.available == 5


def test_received_beyond_sent_adds_nothing() -> None:
    lane = lanes.sent(lanes.open_gateway_lane(granted=2, running=()), "a")
    assert lanes.resynchronized(lane, free=2, received=99).available == 2


def test_a_terminal_update_of_what_holds_no_credit_frees_none() -> None:
    lane = lanes.open_gateway_lane(granted=2, running=("a", "b", "c"))
    assert lane.available == 0
    assert lanes.freed(lane, "x") == lane
    lane = lanes.freed(lane, "a")
    assert lane.available == 0
    assert lanes.freed(lane, "b").available == 1


def test_more_in_flight_than_credits_stays_so_over_a_heartbeat() -> None:
    pair = Pair(3)
    for _ in range(3):
        pair.send()
        pair.deliver_down()
    pair.open(1, running=pair.daemon.holders)
    pair.heartbeat()
    pair.deliver_up()
    pair.finish(0)
    pair.deliver_up()
    pair.send()
    assert not pair.down, "two still run, one credit is given"
    pair.finish(0)
    pair.finish(0)
    pair.deliver_up()
    pair.deliver_up()
    pair.send()
    pair.deliver_down()
    pair.check()
    assert len(pair.daemon.holders) == 1
