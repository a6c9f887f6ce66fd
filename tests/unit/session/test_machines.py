"""Random histories of a node's epochs, of BUSY, of one command over reconnects, and of who claims an identity."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bettercompute.delivery.commands import TERMINAL, CommandState, Merge, Move, merge, moved
from bettercompute.delivery.journal_rules import JournalEntry
from bettercompute.delivery.lanes import DaemonLane
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import KINDS
from bettercompute.session import busy, duplicate_identity, epochs, resume
from bettercompute.session.busy import WhyBusy
from bettercompute.session.duplicate_identity import Claim
from bettercompute.session.epochs import Fence
from bettercompute.session.hello_plan import BootSeen, CommandInFlight, GatewayFacts, SessionRow
from bettercompute.session.resume import AtDelivery, AtStart, Reconnect, Rule

STEPS = settings(max_examples=40, stateful_step_count=40)


class Epochs(RuleBasedStateMachine):
    """One row, gateways that write by their fences, restored backups: for the daemon, epochs rise all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.row = Fence("n", 0, "", "")
        self.last_epoch = 0
        self.given: list[int] = []
        self.backups = [self.row]
        self.fences: list[Fence] = []

    @rule(gateway=st.sampled_from("abc"))
    def hello(self, gateway: str) -> None:
        following = epochs.next_epoch(row_epoch=self.row.session_epoch, last_epoch=self.last_epoch)
        assert following.behind == (self.last_epoch > self.row.session_epoch)
        assert following.epoch > max(self.row.session_epoch, self.last_epoch)
        self.given.append(following.epoch)
        self.row = Fence("n", following.epoch, f"s{len(self.given)}", gateway)
        self.fences.append(self.row)

    @precondition(lambda self: self.given)
    @rule()
    def welcome(self) -> None:
        kept = epochs.remembered(self.last_epoch, told=self.given[-1])
        assert kept == self.given[-1]
        self.last_epoch = kept

    @rule(told=st.sampled_from([0, -1, 2**63]))
    def nonsense(self, told: int) -> None:
        assert epochs.remembered(self.last_epoch, told=told) == self.last_epoch

    @rule()
    def back_up(self) -> None:
        self.backups.append(self.row)

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        self.row = data.draw(st.sampled_from(self.backups))

    @precondition(lambda self: self.fences)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """Only the fence of the session that the row names matches it."""
        fence = data.draw(st.sampled_from(self.fences))
        row = self.row
        matches = epochs.holds(
            fence, row_epoch=row.session_epoch, row_session_id=row.session_id, row_gateway_id=row.gateway_id
        )
        assert matches == (fence == row)
        assert epochs.zombies(["n"], matched={"n"} if matches else set()) == (() if matches else ("n",))

    @invariant()
    def no_session_is_named_twice(self) -> None:
        assert len({(fence.session_epoch, fence.session_id) for fence in self.fences}) == len(self.fences)


class Busy(RuleBasedStateMachine):
    """Commands that a daemon refuses for now: each waits for itself, longer and longer, and starts over when taken."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = dict[str, int]()
        self.expected = dict[str, int]()

    @rule(command_id=st.sampled_from("abc"))
    def refuse(self, command_id: str) -> None:
        others = {name: count for name, count in self.counts.items() if name != command_id}
        counts, wait_ms = busy.refused(self.counts, command_id)
        self.expected[command_id] = self.expected.get(command_id, 0) + 1
        assert wait_ms == min(30_000, 1_000 * 2 ** (self.expected[command_id] - 1))
        assert {name: count for name, count in counts.items() if name != command_id} == others
        self.counts = dict(counts)

    @rule(command_id=st.sampled_from("abcd"))
    def settle(self, command_id: str) -> None:
        self.counts = dict(busy.settled(self.counts, command_id))
        self.expected.pop(command_id, None)

    @rule(granted=st.integers(0, 3), holders=st.integers(0, 4), full=st.booleans(), kept=st.booleans())
    def ask(self, granted: int, holders: int, full: bool, kept: bool) -> None:
        lane = DaemonLane(credits=granted, holders=frozenset(str(number) for number in range(holders)))
        why = busy.why_busy(lane, done_unacked=0, ids=0, journal_full=full, kept=kept)
        if holders >= granted:
            assert why is WhyBusy.NO_CREDIT
        else:
            assert why is (WhyBusy.JOURNAL_FULL if full and not kept else None)

    @invariant()
    def counts_are_those_since_the_last_settling(self) -> None:
        assert self.counts == self.expected


KINDS_TRIED = ("inventory.refresh", "gpu.reset", "node.reboot")


@dataclass
class Machine:
    """What a node is, besides its journal."""

    boot: int = 1
    process: int = 1
    journal: int = 1


class CommandOverReconnects(RuleBasedStateMachine):
    """One command, a control plane's row and a daemon's journal, through cuts, crashes, boots and lost journals.

    It begins at most once unless its kind is retry-safe, and after one undisturbed reconnect nothing is stuck.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind = KINDS["gpu.reset"]
        self.stored = CommandState.PENDING
        self.attempt = 0
        self.sent_boot = ""
        self.machine = Machine()
        self.row = Machine()
        self.entry: JournalEntry | None = None
        self.on_its_way = False
        self.seen = 0
        self.connected = False
        self.begun: list[tuple[int, int]] = []

    @precondition(lambda self: self.stored is CommandState.PENDING and not self.begun and self.attempt == 0)
    @rule(kind=st.sampled_from(KINDS_TRIED))
    def be(self, kind: str) -> None:
        self.kind = KINDS[kind]

    @precondition(lambda self: self.connected and self.stored is CommandState.PENDING)
    @rule()
    def dispatch(self) -> None:
        self.stored = moved(self.stored, Move.DISPATCH)
        self._send()

    def _send(self) -> None:
        self.attempt += 1
        self.sent_boot = f"boot-{self.machine.boot}"
        self.seen = 0 if self.stored is CommandState.DISPATCHED else int(self.stored)
        self.on_its_way = True

    @precondition(lambda self: self.connected and self.on_its_way)
    @rule()
    def deliver(self) -> None:
        self.on_its_way = False
        met = resume.at_delivery(
            self.entry, cancelled=False, seen=self.seen, process_id=f"p{self.machine.process}", kind=self.kind
        )
        match met:
            case AtDelivery.NEW | AtDelivery.FORGOTTEN_RUNS:
                self.entry = self._entry(CommandState.ACKED)
            case AtDelivery.TAKE_UP:
                assert self.entry is not None
                self.entry = replace(self.entry, process_id=f"p{self.machine.process}")
            case AtDelivery.FORGOTTEN_FAILS:
                self.entry = self._entry(CommandState.FAILED)
            case _:
                pass

    def _entry(self, state: CommandState) -> JournalEntry:
        return JournalEntry(
            command_id="c",
            kind=self.kind.name,
            lane=1,
            attempt=self.attempt,
            state=state,
            not_after_ms=1,
            process_id=f"p{self.machine.process}",
            started=False,
            start_boot_id="",
            start_role=0,
            start_version="",
            command=messages.Command(body=b"").SerializeToString(),
        )

    @property
    def _mine(self) -> bool:
        entry = self.entry
        return entry is not None and not entry.done and entry.process_id == f"p{self.machine.process}"

    @precondition(lambda self: self._mine and not self.entry.started)
    @rule()
    def begin(self) -> None:
        assert self.entry is not None
        boot = f"boot-{self.machine.boot}"
        self.entry = replace(
            self.entry, started=True, state=CommandState.RUNNING, start_boot_id=boot, start_role=1, start_version="1"
        )
        self.begun.append((self.machine.boot, self.machine.process))
        assert self.kind.retry_safe or len(self.begun) == 1, "not retry-safe, and begun twice"

    @precondition(lambda self: self._mine and self.entry.started and not self.kind.self_terminating)
    @rule()
    def finish(self) -> None:
        assert self.entry is not None
        self.entry = replace(self.entry, state=CommandState.SUCCEEDED)

    @precondition(lambda self: self.connected and self.entry is not None)
    @rule()
    def report(self) -> None:
        assert self.entry is not None
        if merge(self.stored, self.entry.state) is Merge.STORE:
            self.stored = self.entry.state

    @rule()
    def cut(self) -> None:
        self.connected = self.on_its_way = False

    @rule(boot=st.booleans())
    def restart(self, boot: bool) -> None:
        self.cut()
        self.machine = replace(
            self.machine, process=self.machine.process + 1, boot=self.machine.boot + (1 if boot else 0)
        )
        entry = self.entry
        if entry is None or entry.done:
            return
        verdict = resume.at_start(entry, boot_id=f"boot-{self.machine.boot}", role=1, daemon_version="1")
        if verdict is AtStart.SUCCEEDED:
            self.entry = replace(entry, state=CommandState.SUCCEEDED)
        elif verdict in (AtStart.NO_EFFECT, AtStart.INTERRUPTED):
            self.entry = replace(entry, state=CommandState.FAILED)
        elif verdict is AtStart.MAY_RUN_AGAIN:
            self.entry = replace(entry, started=False)

    @rule()
    def lose_journal(self) -> None:
        self.entry = None
        self.machine = replace(self.machine, journal=self.machine.journal + 1)
        self.restart(boot=False)

    @precondition(lambda self: not self.connected)
    @rule()
    def reconnect(self) -> None:
        self._reconnect()

    def _reconnect(self) -> None:
        self.connected = True
        row, self.row = self.row, replace(self.machine)
        if self.stored not in (CommandState.DISPATCHED, CommandState.ACKED, CommandState.RUNNING):
            return
        entry = self.entry
        settled = resume.settle(
            CommandInFlight(
                command_id="c",
                kind=self.kind.name,
                lane=1,
                seq=1,
                state=self.stored,
                attempt=self.attempt,
                sent_boot_id=self.sent_boot,
                cancel_requested=False,
                body=b"",
            ),
            Reconnect(
                boot_id=f"boot-{self.machine.boot}",
                role=1,
                previous_role=1,
                daemon_version="1",
                journal_changed=row.journal != self.machine.journal,
                boot_changed=row.boot != self.machine.boot,
                doubtful=False,
                proven=True,
                running=frozenset({"c"} if self._mine else ()),
                results=frozenset({"c"} if entry is not None and entry.done else ()),
                allowed_kinds=None,
            ),
        )
        if settled.rule is Rule.RESULT:
            assert entry is not None
            self.stored = entry.state
        elif settled.end is not None:
            self.stored = settled.end.state
        elif settled.resend:
            self._send()

    @invariant()
    def nothing_is_stuck(self) -> None:
        """What is in flight on a live session is on its way, in the journal of this process, or about to be told."""
        in_flight = self.stored not in TERMINAL and self.stored is not CommandState.PENDING
        if self.connected and in_flight:
            told = self.entry is not None and self.entry.done
            assert self.on_its_way or self._mine or told


LIMIT = 3
WINDOW_MS = 600_000
EMPTY_ROW = SessionRow(
    gateway_id="",
    session_id="",
    session_epoch=0,
    boot_id="",
    recent_boots=(),
    journal_id="",
    hello_nonce=b"",
    role=1,
    daemon_version="",
    trust_version=0,
    acked_event_seq=0,
    heartbeat_interval_ms=10_000,
    duplicate_hellos=0,
    duplicate_since_ms=None,
    last_seen_ms=None,
    disconnected_at_ms=None,
)
GATEWAY = GatewayFacts(
    gateway_id="g",
    session_id="s",
    protocol_min=1,
    protocol_max=1,
    capabilities=(),
    heartbeat_interval_ms=10_000,
    lane_credits={},
    peer_address="",
    duplicate_hellos_max=LIMIT,
    duplicate_window_ms=WINDOW_MS,
)


class Identity(RuleBasedStateMachine):
    """Machines that claim one identity: only proof of two of them is ever a reason to quarantine it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 10_000_000
        self.row = EMPTY_ROW
        self.honest_boots = 1
        self.copies = False

    def _hello(self, boot_id: str, *, nonces: tuple[bytes, bytes] = (b"", b"")) -> duplicate_identity.Judgement:
        claim = Claim(boot_id=boot_id, hello_nonce=nonces[0], previous_hello_nonce=nonces[1])
        live = duplicate_identity.was_live(self.row, now_ms=self.now_ms)
        judged = duplicate_identity.judge(self.row, claim, GATEWAY, now_ms=self.now_ms)
        assert judged.duplicate == (live and (judged.boot_changed or judged.forked))
        assert not (judged.quarantine and judged.reboot_loop)
        assert judged.duplicate or not (judged.quarantine or judged.reboot_loop)
        assert len(judged.recent_boots) <= duplicate_identity.BOOTS_KEPT
        self.row = replace(
            self.row,
            gateway_id="g",
            session_id="s",
            boot_id=boot_id,
            hello_nonce=nonces[0],
            recent_boots=judged.recent_boots,
            duplicate_hellos=judged.alternations,
            duplicate_since_ms=judged.since_ms,
            last_seen_ms=self.now_ms,
            disconnected_at_ms=None,
        )
        return judged

    @rule(passed_ms=st.sampled_from([100, 20_000, 400_000]))
    def wait(self, passed_ms: int) -> None:
        self.now_ms += passed_ms

    @rule()
    def crash_and_boot(self) -> None:
        self.honest_boots += 1
        judged = self._hello(f"boot-{self.honest_boots}")
        assert self.copies or not judged.quarantine, "a machine in a crash loop is honest"

    @rule()
    def dial_again(self) -> None:
        judged = self._hello(f"boot-{self.honest_boots}")
        assert self.copies or not judged.quarantine

    @rule()
    def another_machine(self) -> None:
        self.copies = True
        self._hello("boot-other")

    @rule()
    def fork(self) -> None:
        self.copies = True
        self.row = replace(self.row, hello_nonce=b"a" * 16)
        judged = self._hello(self.row.boot_id or "boot-1", nonces=(b"b" * 16, b"c" * 16))
        assert judged.forked

    @rule()
    def close_in_order(self) -> None:
        self.row = replace(self.row, disconnected_at_ms=self.now_ms, gateway_id="")

    @rule()
    def two_that_alternate_are_found(self) -> None:
        """Whatever came before: two live machines that supersede each other are told apart within a few Hellos."""
        self.copies = True
        found = False
        for _ in range(LIMIT + 2):
            found |= self._hello("boot-other").quarantine
            found |= self._hello(f"boot-{self.honest_boots}").quarantine
        assert found

    @invariant()
    def boots_are_kept_in_order(self) -> None:
        times = [seen.seen_at_ms for seen in self.row.recent_boots]
        assert times == sorted(times)
        assert all(isinstance(seen, BootSeen) for seen in self.row.recent_boots)


for machine in (Epochs, Busy, CommandOverReconnects, Identity):
    machine.TestCase.settings = STEPS
TestEpochs, TestBusy = Epochs.TestCase, Busy.TestCase
TestCommandOverReconnects, TestIdentity = CommandOverReconnects.TestCase, Identity.TestCase
