"""Random histories of one command, of a lane and of a node's desired state, each against a model of a few lines."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bettercompute.delivery import desired_state, lanes
from bettercompute.delivery.commands import (
    IN_FLIGHT,
    REPORTABLE,
    TERMINAL,
    CommandState,
    Merge,
    Move,
    highest,
    merge,
    moved,
)
from bettercompute.delivery.desired_state import ASK_FOR_FULL, HeldSpec, NodeGenerations, StoredSpec, Verdict

STEPS = settings(max_examples=40, stateful_step_count=40)


class OneCommand(RuleBasedStateMachine):
    """Our moves and a daemon's reports, in any order: it ends once, and goes back to pending only by a put-back."""

    def __init__(self) -> None:
        super().__init__()
        self.state = CommandState.PENDING
        self.ended_as: CommandState | None = None
        self.accepted = False
        """Whether the node has ever said that it has it."""

    def _become(self, state: CommandState, *, put_back: bool = False) -> None:
        if self.state in TERMINAL:
            assert state is self.state, "a command ends once"
        elif not put_back:
            assert state >= self.state, "commands go forward"
        self.state = state
        if state in TERMINAL and self.ended_as is None:
            self.ended_as = state

    @precondition(lambda self: self.state is CommandState.PENDING)
    @rule(move=st.sampled_from([Move.DISPATCH, Move.CANCEL_PENDING, Move.EXPIRE]))
    def while_pending(self, move: Move) -> None:
        self._become(moved(self.state, move))

    @precondition(lambda self: self.state in IN_FLIGHT)
    @rule(move=st.sampled_from([Move.SUCCEED, Move.FAIL, Move.CANCEL, Move.PUT_BACK_CANCELLED]))
    def end_in_flight(self, move: Move) -> None:
        before = self.state
        self._become(moved(before, move))
        assert self.state in TERMINAL

    @precondition(lambda self: self.state in IN_FLIGHT)
    @rule()
    def put_back(self) -> None:
        before = self.state
        self._become(moved(before, Move.PUT_BACK), put_back=True)
        accepted = before is not CommandState.DISPATCHED
        assert self.state is (before if accepted else CommandState.PENDING), "what was accepted goes no step back"

    @rule(reports=st.lists(st.sampled_from(REPORTABLE), min_size=1, max_size=4))
    def report(self, reports: list[CommandState]) -> None:
        """A batch is merged in memory first, then with the row: the same as one after the other, but for the ends."""
        won = highest(reports)
        stored = merge(self.state, won)
        before = self.state
        if stored is Merge.STORE:
            self._become(won)
        one_by_one = before
        for reported in reports:
            if merge(one_by_one, reported) is Merge.STORE:
                one_by_one = reported
        assert self.state is one_by_one, (before, reports)

    @invariant()
    def ended_once(self) -> None:
        assert self.ended_as is None or self.state is self.ended_as


class OneLane(RuleBasedStateMachine):
    """Both counts of a lane over two ordered queues: what is sent never exceeds what the daemon can take."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.running: frozenset[str] = frozenset()
        self.open(granted=2)

    @initialize(granted=st.integers(0, 8))
    def begin(self, granted: int) -> None:
        self.open(granted=granted)

    def open(self, *, granted: int) -> None:
        running = self.running
        self.granted = granted
        self.most = max(granted, len(running))
        self.down: list[str] = []
        self.up: list[tuple[str, str]] = []
        self.gateway = lanes.open_gateway_lane(granted=granted, running=running)
        self.daemon = lanes.open_daemon_lane(granted=granted, holders=running)

    @rule(granted=st.integers(0, 8))
    def reconnect(self, granted: int) -> None:
        """A new stream: what was on its way is lost, what runs is named."""
        self.open(granted=granted)

    @rule(count=st.integers(1, 4))
    def send(self, count: int) -> None:
        for _ in range(min(count, self.gateway.available)):
            self.number += 1
            self.gateway = lanes.sent(self.gateway, f"c{self.number:06}")
            self.down.append(f"c{self.number:06}")

    @precondition(lambda self: self.down)
    @rule()
    def arrive(self) -> None:
        command_id = self.down.pop(0)
        self.daemon = lanes.received(self.daemon)
        assert self.daemon.free > 0, "what is sent fits into what the daemon can take"
        self.daemon = lanes.held(self.daemon, command_id)
        self.running |= {command_id}

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        command_id = data.draw(st.sampled_from(sorted(self.running)))
        self.running -= {command_id}
        self.daemon = lanes.let_go(self.daemon, command_id)
        self.up.append(("ended", command_id))

    @rule()
    def beat(self) -> None:
        self.up.append(("beat", f"{self.daemon.free} {self.daemon.received}"))

    @precondition(lambda self: self.up)
    @rule()
    def hear(self) -> None:
        what, said = self.up.pop(0)
        if what == "ended":
            self.gateway = lanes.freed(self.gateway, said)
        else:
            free, received = (int(number) for number in said.split())
            self.gateway = lanes.resynchronized(self.gateway, free=free, received=received)

    @invariant()
    def never_more_than_granted(self) -> None:
        assert len(self.running) + len(self.down) <= self.most
        assert 0 <= self.gateway.available <= self.granted

    @invariant()
    def exact_when_all_is_heard(self) -> None:
        if not self.down and not self.up:
            assert self.gateway.available == self.daemon.free


class OneSpec(RuleBasedStateMachine):
    """A store, a daemon and what is on its way between them: generations only rise, and the newest comes through."""

    def __init__(self) -> None:
        super().__init__()
        self.generation = 0
        self.base: int | None = None
        self.offered = 0
        self.observed = self.applied = self.floor = 0
        self.holds = False
        self.asked = False
        self.on_its_way: list[tuple[int, int | None]] = []
        """Generation, and the base where it is a patch."""

    @rule(one_section=st.booleans())
    def publish(self, one_section: bool) -> None:
        known = NodeGenerations(
            generation=self.generation, observed_generation=self.observed, applied_generation=self.applied
        )
        new = desired_state.next_generation(known)
        assert new > max(self.generation, self.applied)
        self.base = self.generation if one_section and self.generation else None
        self.generation = new

    @precondition(lambda self: self.generation > 0)
    @rule()
    def offer(self) -> None:
        spec = StoredSpec(
            generation=self.generation,
            body=b"full",
            patch_base_generation=self.base,
            patch_body=b"" if self.base is None else b"patch",
        )
        found = desired_state.offer(
            spec,
            offered_generation=self.offered,
            applied_generation=self.applied,
            requested=self.asked,
            full_only=False,
            signed_only=False,
        )
        assert (found is None) == (self.offered >= self.generation and not self.asked), "once a session, or when asked"
        if found is not None:
            assert not (self.asked and found.body == b"patch"), "a patch is never the answer to a request"
            self.offered, self.asked = self.generation, False
            self.on_its_way.append((self.generation, self.base if found.body == b"patch" else None))

    @precondition(lambda self: self.on_its_way)
    @rule(converges=st.booleans())
    def arrive(self, converges: bool) -> None:
        generation, base = self.on_its_way.pop(0)
        held = HeldSpec(
            node_id="n",
            trust_domain="t",
            observed_generation=self.observed,
            applied_generation=self.applied,
            floor_generation=self.floor,
            holds_spec=self.holds,
        )
        verdict = desired_state.judge(
            held, node_id="n", trust_domain="t", generation=generation, full=base is None, patch_base_generation=base
        )
        self.asked |= verdict in ASK_FOR_FULL
        if verdict is not Verdict.TAKE:
            return
        assert generation > self.observed or not self.holds, "what was read is not taken twice"
        assert generation >= self.floor, "nothing below what was ever applied"
        self.observed, self.holds = generation, True
        if converges:
            self.applied = self.floor = generation

    @rule()
    def lose_what_is_held(self) -> None:
        """A lost journal: only the floor outlives it. The next Hello says that no spec is held."""
        self.observed = self.applied = 0
        self.holds = False
        self._reconnect()

    @rule()
    def reconnect(self) -> None:
        self._reconnect()

    def _reconnect(self) -> None:
        self.on_its_way.clear()
        self.offered, self.asked = 0, False
        due = desired_state.due_at_welcome(
            generation=self.generation,
            has_spec=self.generation > 0,
            applied_generation=self.applied,
            spec_sha256=b"held" if self.holds else b"",
        )
        if due:
            self.offered = self.generation
            self.on_its_way.append((self.generation, None))

    @invariant()
    def a_reconnect_heals_everything(self) -> None:
        """Whatever was lost: one Welcome and what follows it lead to the newest generation."""
        if self.generation == 0:
            return
        verdict = desired_state.judge(
            HeldSpec(
                node_id="n",
                trust_domain="t",
                observed_generation=self.observed,
                applied_generation=self.applied,
                floor_generation=self.floor,
                holds_spec=self.holds,
            ),
            node_id="n",
            trust_domain="t",
            generation=self.generation,
            full=True,
            patch_base_generation=None,
        )
        read = self.holds and self.observed == self.generation
        assert verdict is (Verdict.HELD if read else Verdict.TAKE)


OneCommand.TestCase.settings = OneLane.TestCase.settings = OneSpec.TestCase.settings = STEPS
TestOneCommand, TestOneLane, TestOneSpec = OneCommand.TestCase, OneLane.TestCase, OneSpec.TestCase
