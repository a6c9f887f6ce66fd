"""A control plane and a node in memory: both steps, a table, a journal and two queues, obeyed as the shells must
obey.

No sockets, no clock, no database: the test moves every frame, commit and tick itself, so that any order that the
contract allows can be tried.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from bettercompute.delivery import commands as table
from bettercompute.delivery.commands import CommandState, Merge, OutgoingCommand
from bettercompute.delivery.facts import CommandFact, EventsFact, Fact
from bettercompute.delivery.journal_rules import JournalEntry
from bettercompute.delivery.lanes import DEFAULT_CREDITS
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import KINDS, CommandKind, pack_payload
from bettercompute.protocol.statuses import Status
from bettercompute.session import clock, daemon_side, effects, gateway_side, hello, inputs, opening
from bettercompute.session.hello_plan import (
    CertificateFacts,
    CommandInFlight,
    GatewayFacts,
    HeldCommand,
    HelloFacts,
    HelloPlan,
    HelloRefusal,
    NodeFacts,
    SessionRow,
)

NODE_ID = "node-1"
START_MS = 1_800_000_000_000
"""Server time at monotonic 0."""
DAY_MS = 24 * 3_600_000


def empty_row() -> SessionRow:
    """A node that has joined and never said Hello."""
    return SessionRow(
        gateway_id="",
        session_id="",
        session_epoch=0,
        boot_id="",
        recent_boots=(),
        journal_id="",
        hello_nonce=b"",
        role=0,
        daemon_version="",
        trust_version=0,
        acked_event_seq=0,
        heartbeat_interval_ms=10_000,
        duplicate_hellos=0,
        duplicate_since_ms=None,
        last_seen_ms=None,
        disconnected_at_ms=None,
    )


def certificate_facts(**changes: object) -> CertificateFacts:
    """A recorded certificate of the node, used before, valid for a day."""
    return replace(
        CertificateFacts(
            serial="0a",
            node_id=NODE_ID,
            role=messages.AGENT_ROLE_NODE,
            tenant_controlled=False,
            not_after_ms=START_MS + DAY_MS,
            recorded=True,
            generation=1,
            used=True,
        ),
        **changes,  # type: ignore[arg-type]  # names and types are checked by the dataclass's users
    )


def gateway_facts(**changes: object) -> GatewayFacts:
    """A gateway that speaks version 1 and gives the default credits."""
    return replace(
        GatewayFacts(
            gateway_id="gw-1",
            session_id="s-1",
            protocol_min=1,
            protocol_max=1,
            capabilities=("update-batch",),
            lane_credits={int(lane): granted for lane, granted in DEFAULT_CREDITS.items()},
            heartbeat_interval_ms=10_000,
            peer_address="192.0.2.1",
        ),
        **changes,  # type: ignore[arg-type]  # as above
    )


@dataclass
class Row:
    """One command of the table."""

    command_id: str
    kind: str
    lane: int
    seq: int
    body: bytes
    state: CommandState = CommandState.PENDING
    attempt: int = 0
    epoch: int | None = None
    sent_boot_id: str = ""
    cancel_requested: bool = False
    reason: str = ""
    not_before_ms: int = 0


@dataclass
class Journal:
    """What survives the daemon's process."""

    journal_id: str
    entries: dict[str, JournalEntry] = field(default_factory=dict)
    cancelled: dict[str, int] = field(default_factory=dict)
    events: dict[int, messages.Event] = field(default_factory=dict)
    last_epoch: int = 0
    acked_event_seq: int = 0
    last_event_seq: int = 0
    hello_nonce: bytes = b""
    previous_hello_nonce: bytes = b""
    mark_ms: int = 0
    confirmed_ms: int | None = None
    full: bool = False


class World:
    """One node, one gateway, one table. Every method is one thing that a shell or a person does."""

    def __init__(self, *, credits_by_lane: dict[int, int] | None = None, kinds: tuple[str, ...] = ()) -> None:
        self.now_ms = 0
        self.kinds = kinds
        self.credits_by_lane = credits_by_lane or {int(lane): most for lane, most in DEFAULT_CREDITS.items()}
        self.row = empty_row()
        self.rows: dict[str, Row] = {}
        self.stored_events: dict[str, messages.Event] = {}
        self.journal = Journal(journal_id="j-1", confirmed_ms=START_MS)
        self.boot_id = "boot-1"
        self.processes = 0
        self.nonces = 0
        self.journals = 1
        self.sessions = 0
        self.runs: dict[str, int] = {}
        """How often each command's effect began."""
        self.handlers: set[str] = set()
        self.up: deque[messages.AgentFrame] = deque()
        self.down: deque[messages.ServerFrame] = deque()
        self.uncommitted: list[Fact] = []
        self.put_backs: list[effects.PutBack] = []
        self.gateway: gateway_side.GatewaySession | None = None
        self.closed: list[effects.Close] = []
        self.warnings: list[str] = []
        self.waiting: effects.WaitThenDial | None = None
        self.stream_open = False
        self.last_plan: HelloPlan | None = None
        self.trace: list[str] = []
        self.daemon = self._boot_daemon()

    # People and the machine

    def enqueue(self, kind: str = "inventory.refresh", *, not_after_ms: int = DAY_MS) -> str:
        """Insert a pending command."""
        command_id = f"c-{len(self.rows) + 1}"
        known: CommandKind = KINDS[kind]
        seq = len(self.rows) + 1
        body = messages.CommandBody(
            command_id=command_id,
            node_id=NODE_ID,
            kind=kind,
            lane=known.lane,
            payload=pack_payload(known.payload()),
            not_after_ms=START_MS + self.now_ms + not_after_ms,
            timeout_ms=known.timeout_ms,
            seq=seq,
        ).SerializeToString()
        self.rows[command_id] = Row(command_id, kind, known.lane, seq, body)
        return command_id

    def cancel(self, command_id: str) -> None:
        """Ask for a cancel, as the API does."""
        row = self.rows[command_id]
        if row.state is CommandState.PENDING:
            row.state = table.moved(row.state, table.Move.CANCEL_PENDING)
        elif row.state in table.IN_FLIGHT:
            row.cancel_requested = True
            if self.gateway is not None:
                self.tell_gateway(inputs.CancelRequested(command_id))

    def add_event(self) -> None:
        """Journal one event."""
        self.journal.last_event_seq += 1
        seq = self.journal.last_event_seq
        self.journal.events[seq] = messages.Event(
            seq=seq, event_id=f"00000000-0000-7000-8000-{len(self.trace):06d}{seq:06d}", type="test.event", at_ms=1
        )
        self.trace.append("event")
        self.tell_daemon(inputs.EventsJournaled(seq))

    def restart_daemon(self, *, reboot: bool = False, lose_journal: bool = False) -> None:
        """kill -9 the daemon, or reboot the machine, or lose the disk; then start it again."""
        if reboot:
            self.boot_id = f"boot-{int(self.boot_id.split('-')[1]) + 1}"
        if lose_journal:
            self.journals += 1
            self.journal = Journal(journal_id=f"j-{self.journals}", confirmed_ms=START_MS)
        self.handlers.clear()
        self.cut()
        self.daemon = self._boot_daemon()

    def _boot_daemon(self) -> daemon_side.DaemonSession:
        self.processes += 1
        journal = self.journal
        state, start_effects = daemon_side.start(
            daemon_side.DaemonFacts(
                node_id=NODE_ID,
                role=messages.AGENT_ROLE_NODE,
                boot_id=self.boot_id,
                process_id=f"p-{self.processes}",
                daemon_version="0.1.0",
                proto_min=1,
                proto_max=1,
            ),
            daemon_side.Advertised(),
            daemon_side.JournalFacts(
                journal_id=journal.journal_id,
                entries=dict(journal.entries),
                cancelled=dict(journal.cancelled),
                last_epoch=journal.last_epoch,
                last_event_seq=journal.last_event_seq,
                acked_event_seq=journal.acked_event_seq,
                hello_nonce=journal.hello_nonce,
                previous_hello_nonce=journal.previous_hello_nonce,
                mark_ms=journal.mark_ms,
                confirmed_ms=journal.confirmed_ms,
                full=journal.full,
            ),
            now_ms=self.now_ms,
        )
        self.daemon = state
        self._obey_daemon(start_effects)
        return self.daemon

    # The stream

    def dial(self) -> None:
        """Open a stream and say Hello; the Hello is not delivered yet."""
        self.nonces += 1
        self.up.clear()
        self.down.clear()
        self.stream_open = True
        self.tell_daemon(inputs.Dialed(fresh_nonce=self.nonces.to_bytes(16, "big")))

    def connect(self) -> None:
        """Dial and go on until the session is live and both queues are empty."""
        self.dial()
        self.settle()

    def cut(self) -> None:
        """The connection is lost: what is queued either way is gone."""
        self.up.clear()
        self.down.clear()
        if self.gateway is not None:
            self.tell_gateway(inputs.PeerEnded())
        if self.stream_open:
            self.stream_open = False
            self.tell_daemon(inputs.StreamEnded(drawn=0.0))

    def move_up(self) -> None:
        """Deliver the oldest frame of the daemon."""
        frame = self.up.popleft()
        if self.gateway is None:
            self._hello_received(opening.check_first_frame(frame))
        else:
            self.tell_gateway(inputs.FrameReceived(frame))

    def move_down(self) -> None:
        """Deliver the oldest frame of the gateway."""
        frame = self.down.popleft()
        self.tell_daemon(inputs.ServerFrameReceived(frame, wall_ms=START_MS + self.now_ms))

    def settle(self) -> None:
        """Move everything until nothing moves: frames, commits, put-backs, dispatch."""
        for _ in range(2_000):
            if self.up:
                self.move_up()
            elif self.down:
                self.move_down()
            elif self.uncommitted:
                self.commit()
            elif self.put_backs:
                self.put_back()
            elif not self.dispatch():
                return
        raise AssertionError("the world does not come to rest")

    def tick(self, *, passed_ms: int = 10_000, heard: bool = True) -> None:
        """Let time pass at both ends."""
        self.now_ms += passed_ms
        self.tell_daemon(
            inputs.DaemonTick(
                wall_ms=START_MS + self.now_ms,
                load=messages.NodeLoad(),
                last_heard_ms=self.now_ms if heard else 0,
            )
        )
        if self.gateway is not None:
            self.tell_gateway(inputs.Tick())

    def wait(self, passed_ms: int) -> None:
        """Let a long time pass for a daemon that looks at its clock all along."""
        for left_ms in range(passed_ms, 0, -clock.UNSEEN_MAX_MS):
            self.tick(passed_ms=min(left_ms, clock.UNSEEN_MAX_MS))

    def finish(self, command_id: str, state: CommandState = CommandState.SUCCEEDED) -> None:
        """A handler ends."""
        self.handlers.discard(command_id)
        self.tell_daemon(inputs.HandlerFinished(command_id=command_id, state=state))

    # The control plane's table

    def _hello_received(self, said: messages.Hello) -> None:
        opening.check_hello(said, certificate_node_id=NODE_ID, certificate_role=messages.AGENT_ROLE_NODE)
        self.sessions += 1
        facts = HelloFacts(
            now_ms=START_MS + self.now_ms,
            certificate=certificate_facts(),
            gateway=gateway_facts(session_id=f"s-{self.sessions}", lane_credits=self.credits_by_lane),
            row=self.row,
            node=NodeFacts(identity_generation=1, spec_generation=0),
            commands=tuple(self._in_flight(row) for row in self.rows.values() if row.state in table.IN_FLIGHT),
        )
        plan = hello.decide(facts, said)
        assert not isinstance(plan, HelloRefusal), plan
        self._write_plan(plan)
        self.gateway, begun = gateway_side.open_session(
            plan, spec=None, trust=None, server_time_ms=START_MS + self.now_ms, now_ms=self.now_ms
        )
        self._obey_gateway(begun)

    def _in_flight(self, row: Row) -> CommandInFlight:
        return CommandInFlight(
            command_id=row.command_id,
            kind=row.kind,
            lane=row.lane,
            seq=row.seq,
            state=row.state,
            attempt=row.attempt,
            sent_boot_id=row.sent_boot_id,
            cancel_requested=row.cancel_requested,
            body=row.body,
        )

    def _write_plan(self, plan: HelloPlan) -> None:
        self.last_plan = plan
        values = plan.row
        assert values.session_epoch > self.row.session_epoch, "epochs rise"
        self.row = SessionRow(
            gateway_id=values.gateway_id,
            session_id=values.session_id,
            session_epoch=values.session_epoch,
            boot_id=values.boot_id,
            recent_boots=values.recent_boots,
            journal_id=values.journal_id,
            hello_nonce=values.hello_nonce,
            role=values.role,
            daemon_version=values.daemon_version,
            trust_version=values.trust_version,
            acked_event_seq=values.acked_event_seq,
            heartbeat_interval_ms=values.heartbeat_interval_ms,
            duplicate_hellos=values.duplicate_hellos,
            duplicate_since_ms=values.duplicate_since_ms,
            last_seen_ms=START_MS + self.now_ms,
            disconnected_at_ms=None,
            peer_address=values.peer_address,
        )
        for fact in plan.results:
            self._merge(fact)
        for end in plan.ends:
            row = self.rows[end.command_id]
            assert row.state in table.IN_FLIGHT
            row.state, row.reason = end.state, end.reason
        for command_id in plan.in_flight:
            assert self.rows[command_id].state in table.IN_FLIGHT
            self.rows[command_id].epoch = values.session_epoch
        for command in plan.resent:
            row = self.rows[command.command_id]
            row.attempt, row.sent_boot_id = command.attempt, values.boot_id

    def _merge(self, fact: CommandFact) -> None:
        row = self.rows.get(fact.command_id)
        if table.merge(None if row is None else row.state, fact.state) is Merge.STORE and row is not None:
            row.state, row.reason = fact.state, fact.reason

    def dispatch(self) -> bool:
        """Run one dispatch transaction; say whether it marked anything."""
        demand = gateway_side.wants(self.gateway) if self.gateway is not None else None
        if demand is None:
            return False
        marked: list[OutgoingCommand] = []
        for lane in demand.lanes:
            waiting = [
                row
                for row in sorted(self.rows.values(), key=lambda row: row.seq)
                if row.lane == lane.lane and row.state is CommandState.PENDING and row.not_before_ms <= self.now_ms
            ]
            for command_id in lane.held:
                row = self.rows[command_id]
                if row.state in table.IN_FLIGHT:
                    marked.append(self._mark(row, demand))
            for row in waiting[: lane.pending]:
                row.state = table.moved(row.state, table.Move.DISPATCH)
                marked.append(self._mark(row, demand))
        answer = gateway_side.answered(demand, marked)
        self.tell_gateway(answer)
        return bool(answer.commands or answer.settled)

    def _mark(self, row: Row, demand: gateway_side.DispatchDemand) -> OutgoingCommand:
        row.attempt += 1
        row.epoch = demand.epoch
        row.sent_boot_id = demand.boot_id
        seen = row.state if row.state in (CommandState.ACKED, CommandState.RUNNING) else None
        return OutgoingCommand(
            command_id=row.command_id,
            kind=row.kind,
            lane=row.lane,
            seq=row.seq,
            attempt=row.attempt,
            seen=seen,
            body=row.body,
        )

    def commit(self) -> None:
        """Commit all facts of the gateway, then tell the session."""
        batch, self.uncommitted = self.uncommitted, []
        ended: list[str] = []
        acked_seq = 0
        for fact in batch:
            if isinstance(fact, CommandFact):
                self._merge(fact)
                if fact.state in table.TERMINAL:
                    ended.append(fact.command_id)
            elif isinstance(fact, EventsFact):
                acked_seq = self._store_events(fact)
        if self.gateway is not None:
            self.tell_gateway(inputs.FactsCommitted(tuple(ended), self.gateway.journal_id, acked_seq))

    def _store_events(self, fact: EventsFact) -> int:
        for event in fact.events:
            self.stored_events.setdefault(
                event.event_id, messages.Event(seq=event.seq, event_id=event.event_id, type=event.type)
            )
        if fact.journal_id == self.row.journal_id:
            acked = max(self.row.acked_event_seq, fact.last_seq)
            self.row = replace(self.row, acked_event_seq=acked)
        return self.row.acked_event_seq

    def put_back(self) -> None:
        """Run the put-back transaction of one BUSY command."""
        back = self.put_backs.pop(0)
        row = self.rows[back.command_id]
        session = self.gateway
        if (
            session is not None
            and row.state in table.IN_FLIGHT
            and row.epoch == session.epoch
            and row.attempt == back.attempt
        ):
            if row.cancel_requested:
                row.state = CommandState.CANCELLED
                row.epoch = None
            elif row.state is CommandState.DISPATCHED:
                row.state = CommandState.PENDING
                row.epoch = None
                row.not_before_ms = self.now_ms + back.back_off_ms
            else:
                command = HeldCommand(
                    command_id=back.command_id, kind=row.kind, lane=row.lane, seq=row.seq, signed=False
                )
                self.tell_gateway(inputs.BackOffOver(command))
        if self.gateway is not None:
            self.tell_gateway(inputs.PutBackCommitted(back.command_id))

    # Obeying

    def tell_gateway(self, given: inputs.GatewayInput) -> None:
        """Step the gateway and obey."""
        assert self.gateway is not None
        self.gateway, done = gateway_side.step(self.gateway, given, self.now_ms)
        self._obey_gateway(done)

    def _obey_gateway(self, done: tuple[effects.GatewayEffect, ...]) -> None:
        for effect in done:
            match effect:
                case effects.SendFrame(frame):
                    self.down.append(frame)
                case effects.RecordFacts(facts):
                    self.uncommitted += facts
                case effects.PutBack():
                    self.put_backs.append(effect)
                case effects.Close():
                    self._close(effect)
                case _:
                    self.trace.append(type(effect).__name__)

    def _close(self, effect: effects.Close) -> None:
        self.closed.append(effect)
        while self.uncommitted:
            batch, self.uncommitted = self.uncommitted, []
            for fact in batch:
                if isinstance(fact, CommandFact):
                    self._merge(fact)
                elif isinstance(fact, EventsFact):
                    self._store_events(fact)
        self.put_backs.clear()
        self.gateway = None
        if effect.disconnect_write:
            self.row = replace(self.row, gateway_id="", disconnected_at_ms=START_MS + self.now_ms)
        if self.stream_open and effect.status is not Status.OK:
            self.stream_open = False
            self.down.clear()
            self.tell_daemon(
                inputs.StreamEnded(drawn=0.5, status=effect.status, reason=effect.reason, message=effect.message)
            )

    def tell_daemon(self, given: inputs.DaemonInput) -> None:
        """Step the daemon and obey."""
        self.daemon, done = daemon_side.step(self.daemon, given, self.now_ms)
        self._obey_daemon(done)

    def _obey_daemon(self, done: tuple[effects.DaemonEffect, ...]) -> None:
        writes_over = False
        for effect in done:
            if isinstance(effect, effects.AcceptCommand) and self.journal.full:
                self.tell_daemon(inputs.JournalRefused(effect.entry.command_id))
                return
            is_write = self._write(effect)
            assert not (is_write and writes_over), f"journal writes come first: {done}"
            writes_over = writes_over or not is_write
        for effect in done:
            self._do(effect)

    def _write(self, effect: effects.DaemonEffect) -> bool:
        journal = self.journal
        match effect:
            case effects.AcceptCommand(entry, _):
                journal.entries.setdefault(entry.command_id, entry)
            case effects.TakeUpCommand(command_id, attempt, process_id, _):
                journal.entries[command_id] = replace(
                    journal.entries[command_id], attempt=attempt, process_id=process_id
                )
            case effects.StartCommand(command_id, boot_id, role, version):
                journal.entries[command_id] = replace(
                    journal.entries[command_id],
                    state=CommandState.RUNNING,
                    started=True,
                    start_boot_id=boot_id,
                    start_role=role,
                    start_version=version,
                )
            case effects.FinishCommand(command_id, state, update, done_mark_ms):
                journal.entries[command_id] = replace(
                    journal.entries[command_id], state=state, update=update, done_mark_ms=done_mark_ms
                )
            case effects.AckCommands(command_ids):
                for command_id in command_ids:
                    journal.entries[command_id] = replace(journal.entries[command_id], acked=True)
            case effects.ForgetCommands(command_ids):
                for command_id in command_ids:
                    journal.entries.pop(command_id, None)
                    journal.cancelled.pop(command_id, None)
            case effects.RememberCancelled(command_id, mark_ms):
                journal.cancelled[command_id] = mark_ms
            case effects.AckEvents(seq):
                journal.acked_event_seq = seq
                journal.events = {at: event for at, event in journal.events.items() if at > seq}
            case effects.StoreNonces(hello_nonce, previous):
                journal.hello_nonce, journal.previous_hello_nonce = hello_nonce, previous
            case effects.StoreEpoch(last_epoch):
                journal.last_epoch = last_epoch
            case effects.StoreTime(mark_ms, confirmed_ms):
                journal.mark_ms, journal.confirmed_ms = mark_ms, confirmed_ms
            case effects.TakeNewJournalId():
                self._renew_journal()
            case _:
                return False
        return True

    def _renew_journal(self) -> None:
        self.journals += 1
        journal = self.journal
        kept = [journal.events[seq] for seq in sorted(journal.events)]
        journal.journal_id = f"j-{self.journals}"
        journal.events = {}
        for seq, event in enumerate(kept, 1):
            event.seq, event.recovered = seq, True
            journal.events[seq] = event
        journal.last_event_seq, journal.acked_event_seq = len(kept), 0

    def _do(self, effect: effects.DaemonEffect) -> None:
        match effect:
            case effects.SendAgentFrame(frame):
                if self.stream_open:
                    self.up.append(frame)
            case effects.TakeNewJournalId():
                self.tell_daemon(inputs.JournalRenewed(self.journal.journal_id, self.journal.last_event_seq))
            case effects.SendEvents(session_id, journal_id, after_seq, through_seq):
                batch = [self.journal.events[seq] for seq in range(after_seq + 1, through_seq + 1)]
                events = messages.EventBatch(journal_id=journal_id, events=batch)
                if self.stream_open:
                    self.up.append(messages.AgentFrame(events=events))
                self.tell_daemon(inputs.EventsSent(session_id, through_seq))
            case effects.ResendResult(command_id):
                update = messages.CommandUpdate.FromString(self.journal.entries[command_id].update)
                if self.stream_open:
                    self.up.append(messages.AgentFrame(update=update))
            case effects.StartHandler(command_id):
                assert command_id not in self.handlers, "one run at a time"
                assert self.journal.entries[command_id].started, "started is durable before the effect"
                self.handlers.add(command_id)
                self.runs[command_id] = self.runs.get(command_id, 0) + 1
            case effects.StopHandler(command_id):
                if command_id in self.handlers:
                    self.finish(command_id, CommandState.CANCELLED)
            case effects.EndSession():
                self.trace.append(effect.reason)
                self.cut()
            case effects.WaitThenDial():
                self.waiting = effect
            case effects.Warn():
                self.warnings.append(effect.message)
            case _:
                pass
