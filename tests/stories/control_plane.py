"""The database of a story: every transaction that gateways and controllers make, on rows in memory.

What is decided comes from the rules under test; what is here is what SQL does with it: locks are not needed, fences are
compared, and states move by the tables only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

from bettercompute import telemetry
from bettercompute.delivery import commands as table
from bettercompute.delivery import facts
from bettercompute.delivery.cancel import CONTROL_PLANE, ControlPlaneCancel
from bettercompute.delivery.commands import CommandState, Merge, OutgoingCommand
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import KINDS, pack_payload
from bettercompute.session import hello
from bettercompute.session.closing import STREAM_ENDED
from bettercompute.session.effects import PutBack
from bettercompute.session.epochs import Fence, holds
from bettercompute.session.gateway_state import DispatchDemand
from bettercompute.session.hello_plan import (
    CertificateFacts,
    ConditionChange,
    GatewayFacts,
    HelloFacts,
    HelloPlan,
    HelloRefusal,
    NodeFacts,
    PublishedEvent,
    RefusalWrites,
)
from bettercompute.session.liveness import Connectivity, Transition
from tests.stories import wording
from tests.stories.rows import CommandRow, NodeRow

DAY_MS = 24 * 3_600_000


@dataclass(frozen=True, slots=True)
class Stored:
    """What a batch of facts of one node may let its daemon forget."""

    command_ids: tuple[str, ...] = ()
    journal_id: str = ""
    acked_event_seq: int = 0


class ControlPlane:
    """The tables. `tell` takes sentences; times are server time."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self.nodes: dict[str, NodeRow] = {}
        self.commands: dict[str, CommandRow] = {}
        self.revoked: dict[str, str] = {}
        """Reasons by serial: what every gateway's feed reads."""
        self._backup: tuple[dict[str, NodeRow], dict[str, CommandRow]] = ({}, {})

    # People

    def join(self, node_id: str) -> NodeRow:
        """Insert the rows of a node; again: a new identity generation under a new serial."""
        serial = f"0a{sum(node.generation for node in self.nodes.values()) + 1:02}"
        known = self.nodes.get(node_id)
        if known is None:
            self.nodes[node_id] = NodeRow(node_id, serial)
        else:
            known.serial, known.used, known.generation = serial, False, known.generation + 1
        return self.nodes[node_id]

    def enqueue(self, node_id: str, kind: str, *, now_ms: int, not_after_ms: int = DAY_MS, version: str = "") -> str:
        """Insert a pending command."""
        known = KINDS[kind]
        seq = len(self.commands) + 1
        payload = known.payload()
        if version:
            assert isinstance(payload, messages.DaemonUpgradePayload)
            payload.target_version = version
        row = CommandRow(f"c-{seq}", node_id, kind, known.lane, seq, b"", now_ms + not_after_ms)
        row.body = messages.CommandBody(
            command_id=row.command_id,
            node_id=node_id,
            kind=kind,
            lane=known.lane,
            payload=pack_payload(payload),
            not_after_ms=row.not_after_ms,
            timeout_ms=known.timeout_ms,
            seq=seq,
        ).SerializeToString()
        self.commands[row.command_id] = row
        return row.command_id

    def cancel(self, command_id: str) -> CommandRow | None:
        """Note a cancel; return the row when the node must be told."""
        row = self.commands[command_id]
        match CONTROL_PLANE[row.state]:
            case ControlPlaneCancel.AT_ONCE:
                row.moved(table.Move.CANCEL_PENDING, reason="cancelled")
                self._tell(f"the control plane cancels {command_id} at once: nobody has it")
            case ControlPlaneCancel.SEND_FRAME:
                row.cancel_requested = True
                self._tell(
                    f"the control plane notes on {command_id}, {wording.state_name(row.state)}: cancel requested"
                )
                return row
            case ControlPlaneCancel.TOO_LATE:
                self._tell(f"the control plane: too late, {command_id} is {wording.state_name(row.state)}")
        return None

    def expire(self, *, now_ms: int) -> None:
        """End what is pending past its deadline, as a controller does every 10 s."""
        for row in self.commands.values():
            if row.state is CommandState.PENDING and now_ms >= row.not_after_ms:
                row.moved(table.Move.EXPIRE, reason="expired")
                self._tell(f"the expiry controller ends {row.command_id}: expired")

    def back_up(self) -> None:
        """Keep a copy of nodes and commands."""
        self._backup = deepcopy((self.nodes, self.commands))

    def restore(self) -> None:
        """Be as at the last backup."""
        self.nodes, self.commands = deepcopy(self._backup)

    # Hello

    def hello(
        self, said: messages.Hello, *, serial: str, gateway: GatewayFacts, now_ms: int
    ) -> HelloPlan | HelloRefusal:
        """Run the Hello transaction."""
        node = self.nodes[said.node_id]
        facts_read = HelloFacts(
            now_ms=now_ms,
            certificate=CertificateFacts(
                serial=serial,
                node_id=node.node_id,
                role=messages.AGENT_ROLE_NODE,
                tenant_controlled=False,
                not_after_ms=now_ms + DAY_MS,
                recorded=True,
                revocation_reason=self.revoked.get(serial),
                generation=node.generation if serial == node.serial else node.generation - 1,
                used=node.used,
            ),
            gateway=gateway,
            row=node.session,
            node=NodeFacts(
                identity_generation=node.generation,
                spec_generation=0 if node.spec is None else node.spec.generation,
                conditions=frozenset(node.conditions),
            ),
            commands=tuple(
                row.as_fact() for row in self.commands.values() if row.in_flight and row.node_id == node.node_id
            ),
            inventory_hashes=node.sections,
        )
        decided = hello.decide(facts_read, said)
        if isinstance(decided, HelloPlan):
            self._write_plan(node, decided, now_ms=now_ms)
        elif decided.writes is not None:
            self._write_refusal(node, decided.writes, gateway_id=gateway.gateway_id)
        return decided

    def _write_plan(self, node: NodeRow, plan: HelloPlan, *, now_ms: int) -> None:
        before, values = node.session, plan.row
        assert values.session_epoch > before.session_epoch, "epochs rise"
        node.session = replace(
            before,
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
            last_seen_ms=now_ms,
            disconnected_at_ms=None,
            peer_address=values.peer_address,
        )
        node.used = True
        node.connectivity = Connectivity.CONNECTED
        node.labels = dict(plan.capability_labels)
        self._tell(
            f"{values.gateway_id} commits the Hello: epoch {before.session_epoch} -> {values.session_epoch}, "
            f"session {values.session_id}"
        )
        if plan.new_journal:
            self._tell(f"  the row keeps journal {values.journal_id}")
        if plan.event_gap is not None:
            gap = plan.event_gap
            node.gaps.append((values.journal_id, gap.first_seq, gap.last_seq))
            self._tell(f"  a gap is stored: {wording.events(gap.first_seq, gap.last_seq)} never came")
        self._write_commands(plan)
        self._publish(values.gateway_id, plan.events)
        self._change_conditions(node, plan.conditions)

    def _write_commands(self, plan: HelloPlan) -> None:
        for fact in plan.results:
            self._tell(f"  {wording.fact(fact)} by its result{self._merge(plan.node_id, fact)}")
        for end in plan.ends:
            row = self.commands[end.command_id]
            assert row.in_flight
            row.state, row.reason = end.state, end.reason
            reason = f" ({end.reason})" if end.reason else ""
            self._tell(f"  {end.command_id} {wording.state_name(end.state)}{reason} by the resume rules")
        for command_id in plan.in_flight:
            assert self.commands[command_id].in_flight
            self.commands[command_id].epoch = plan.row.session_epoch
        for command_id in plan.running:
            self._tell(f"  {command_id} goes on and keeps its credit")
        for command in plan.resent:
            sent = self.commands[command.command_id].sent(epoch=plan.row.session_epoch, boot_id=plan.row.boot_id)
            assert sent.attempt == command.attempt
            self._tell(f"  {command.command_id} is to be sent again")
        for held in plan.held:
            self._tell(f"  {held.command_id} stays in flight, held back")

    def _write_refusal(self, node: NodeRow, writes: RefusalWrites, *, gateway_id: str) -> None:
        self._tell(f"{gateway_id} commits the refusal: epoch stays {node.session.session_epoch}")
        if writes.revoke is not None:
            assert writes.revoke.generation == node.generation
            self.revoked[node.serial] = writes.revoke.reason
            self._tell(f"  serial {node.serial} is revoked ({writes.revoke.reason})")
        if writes.reset_duplicates:
            node.session = replace(node.session, duplicate_hellos=0, duplicate_since_ms=None)
        self._publish(gateway_id, writes.events)
        self._change_conditions(node, writes.conditions)

    def _publish(self, who: str, events: Sequence[PublishedEvent]) -> None:
        for event in events:
            said = wording.attributes(event.attributes)
            self._tell(f"{who} publishes {event.name}" + (f": {said}" if said else ""))

    def _change_conditions(self, node: NodeRow, changes: Sequence[ConditionChange]) -> None:
        for change in changes:
            if change.holds:
                node.conditions[change.type] = change.message
                self._tell(f"  condition {change.type}: {change.message}")
            elif node.conditions.pop(change.type, None) is not None:
                self._tell(f"  condition {change.type} is over")

    # Dispatch

    def dispatch(self, demand: DispatchDemand, *, gateway_id: str, now_ms: int) -> tuple[OutgoingCommand, ...]:
        """Mark what a session can take, fenced; the lines of one lane in seq order."""
        if not self.holds(Fence(demand.node_id, demand.epoch, demand.session_id, gateway_id)):
            return ()
        marked: list[OutgoingCommand] = []
        of_node = sorted((row for row in self.commands.values() if row.node_id == demand.node_id), key=lambda r: r.seq)
        for lane in demand.lanes:
            taken = [row for row in of_node if row.command_id in lane.held and row.in_flight]
            pending = [
                row
                for row in of_node
                if row.lane == lane.lane
                and row.state is CommandState.PENDING
                and row.not_before_ms <= now_ms < row.not_after_ms
                and (demand.kinds is None or row.kind in demand.kinds)
            ][: lane.pending]
            for row in pending:
                row.moved(table.Move.DISPATCH)
            marked += [row.sent(epoch=demand.epoch, boot_id=demand.boot_id) for row in (*taken, *pending)]
        if marked:
            names = wording.listed(command.command_id for command in marked)
            self._tell(f"{gateway_id} commits: {names} dispatched")
        return tuple(marked)

    def put_back(self, effect: PutBack, fence: Fence, *, now_ms: int) -> None:
        """Put a command that was refused BUSY back to pending, when the row is still as it was sent."""
        row = self.commands[effect.command_id]
        same_sending = row.epoch == fence.session_epoch and row.attempt == effect.attempt
        if not self.holds(fence) or row.state not in table.IN_FLIGHT or not same_sending:
            self._tell(f"{fence.gateway_id} puts nothing back: {row.shown()}")
            return
        if row.cancel_requested:
            row.moved(table.Move.PUT_BACK_CANCELLED, reason="cancelled")
            row.epoch = None
        else:
            row.moved(table.Move.PUT_BACK)
            if row.state is CommandState.PENDING:
                row.not_before_ms = now_ms + effect.back_off_ms
                row.epoch = None
        self._tell(f"{fence.gateway_id} commits: {row.shown()}")

    # Facts

    def store(self, node_id: str, reported: Sequence[facts.Fact], *, gateway_id: str) -> Stored:
        """Store facts of one node, whichever session brought them."""
        ended: list[str] = []
        journal_id, acked = "", 0
        said = []
        for fact in reported:
            became = ""
            match fact:
                case facts.CommandFact():
                    became = self._merge(node_id, fact)
                    ended += [fact.command_id] if fact.state in table.TERMINAL else []
                case facts.EventsFact():
                    became, acked = self._store_events(self.nodes[node_id], fact)
                    journal_id = fact.journal_id
                case facts.InventoryFact():
                    self.nodes[node_id].sections[fact.section] = fact.sha256
                case _:
                    pass
            said.append(wording.fact(fact) + became)
        self._tell(f"{gateway_id} commits: {'; '.join(said)}")
        return Stored(tuple(dict.fromkeys(ended)), journal_id, acked)

    def _merge(self, node_id: str, fact: facts.CommandFact) -> str:
        row = self.commands.get(fact.command_id)
        if row is None or row.node_id != node_id:
            return " (of no use to anybody)"
        merged = table.merge(row.state, fact.state)
        if merged is not Merge.STORE:
            return f" ({merged.value}: {wording.state_name(row.state)} stands)"
        row.state, row.reason = fact.state, fact.reason
        return ""

    def _store_events(self, node: NodeRow, fact: facts.EventsFact) -> tuple[str, int]:
        known_ids = set(node.events.values())
        dropped = []
        for event in fact.events:
            key = (fact.journal_id, event.seq)
            if key in node.events or (event.recovered and event.event_id in known_ids):
                dropped.append(wording.event_name(event.event_id))
            else:
                node.events[key] = event.event_id
        row = node.session
        if fact.journal_id == row.journal_id and fact.events[0].seq <= row.acked_event_seq + 1:
            node.session = replace(row, acked_event_seq=max(row.acked_event_seq, fact.last_seq))
        return f" ({wording.listed(dropped)} known already)" if dropped else "", node.session.acked_event_seq

    # Liveness

    def holds(self, fence: Fence) -> bool:
        """Say whether the node's row still belongs to this session."""
        row = self.nodes[fence.node_id].session
        return holds(fence, row_epoch=row.session_epoch, row_session_id=row.session_id, row_gateway_id=row.gateway_id)

    def flush(self, fence: Fence, *, age_ms: int, now_ms: int) -> bool:
        """Write a last-seen time; False: the row belongs to somebody else."""
        if not self.holds(fence):
            return False
        node = self.nodes[fence.node_id]
        node.session = replace(node.session, last_seen_ms=now_ms - age_ms)
        return True

    def disconnect(self, fence: Fence, reason: str, *, now_ms: int) -> None:
        """Write a session's end, fenced."""
        if not self.holds(fence):
            self._tell(f"{fence.gateway_id} writes no disconnect: the row of {fence.node_id} is another session's")
            return
        self._disconnected(fence.node_id, fence.gateway_id, reason, now_ms=now_ms)

    def apply(self, node_id: str, transition: Transition, *, now_ms: int) -> None:
        """Write a transition that nobody reported."""
        if transition.to is Connectivity.UNREACHABLE:
            self.nodes[node_id].connectivity = Connectivity.UNREACHABLE
            self._tell(f"the Liveness controller: {node_id} is unreachable")
            self._tell(f"the Liveness controller publishes {telemetry.EVENT_NODE_UNREACHABLE}")
            return
        self._disconnected(node_id, "the Liveness controller", transition.reason, now_ms=now_ms)

    def _disconnected(self, node_id: str, who: str, reason: str, *, now_ms: int) -> None:
        node = self.nodes[node_id]
        node.session = replace(node.session, gateway_id="", disconnected_at_ms=now_ms)
        node.connectivity = Connectivity.DISCONNECTED
        self._tell(f"{who} publishes {telemetry.EVENT_NODE_DISCONNECTED} of {node_id}: {reason or STREAM_ENDED}")
