"""A gateway of a story: it obeys the rules of sessions as the shell in src/bettercompute/gateway does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bettercompute.delivery.commands import OutgoingCommand
from bettercompute.delivery.facts import Fact
from bettercompute.delivery.lanes import DEFAULT_CREDITS
from bettercompute.errors import BetterComputeError, Refused
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Status, format_pushback, parse_pushback
from bettercompute.protocol.validation import validate_for_store
from bettercompute.protocol.versions import PROTOCOL_VERSION, ProtocolRange
from bettercompute.session import effects, gateway_side, inputs, liveness, opening
from bettercompute.session.announcements import QUARANTINE_REASON, revocation_notice
from bettercompute.session.epochs import Fence
from bettercompute.session.hello_plan import GatewayFacts, HelloPlan, HelloRefusal
from bettercompute.session.opening import GatewayCondition, GatewayState
from tests.stories import wording
from tests.stories.network import Ended, Stream

if TYPE_CHECKING:
    from tests.stories.machine import Machine
    from tests.stories.stage import Stage

LEASE_MS = 15_000
TRUST_LEASE_MS = 13_000
KEEP_FACTS_MS = 10_000


@dataclass(eq=False)
class Live:
    """A live session and its stream."""

    state: gateway_side.GatewaySession
    stream: Stream
    ending: effects.Close | None = None

    def fence(self) -> Fence:
        """Return what its fenced writes compare."""
        return Fence(self.state.node_id, self.state.epoch, self.state.session_id, self.state.gateway_id)


class Gateway:
    """One gateway process. The story may kill it, hang it, drain it and take its database away."""

    def __init__(
        self,
        name: str,
        stage: Stage,
        *,
        rate_per_s: float = opening.RATE_PER_S,
        streams_max: int = opening.STREAMS_MAX,
        credits_by_lane: Mapping[int, int] | None = None,
        protocol: ProtocolRange = PROTOCOL_VERSION,
    ) -> None:
        self.name = name
        self.stage = stage
        self.streams_max = streams_max
        self.credits_by_lane = dict(credits_by_lane or {int(lane): most for lane, most in DEFAULT_CREDITS.items()})
        self.protocol = protocol
        self.admission = opening.open_admission(now_ms=stage.now_ms, rate_per_s=rate_per_s)
        self.alive = True
        self.hung = False
        self.database = True
        self.draining = False
        self.fenced = False
        self.flushes = True
        self.clock_offset_ms = 0
        self.lease_renewed_at_ms = stage.now_ms
        self.lease_retired = False
        self.sessions: dict[str, Live] = {}
        self.streams: set[Stream] = set()
        self._facts: list[tuple[Live, tuple[Fact, ...], int]] = []
        self._put_backs: list[tuple[Live, effects.PutBack]] = []
        self._disconnects: list[tuple[Fence, str]] = []
        self._last_hello_at_ms: dict[str, int] = {}

    @property
    def works(self) -> bool:
        """Say whether the process runs."""
        return self.alive and not self.hung

    @property
    def lease_expires_at_ms(self) -> int:
        """Return when everybody else sees the lease as expired."""
        return self.lease_renewed_at_ms + LEASE_MS

    @property
    def lease_trusted_until_ms(self) -> int:
        """Return when it stops to trust the lease itself."""
        return self.lease_renewed_at_ms + TRUST_LEASE_MS

    def tell(self, sentence: str) -> None:
        """Add to the transcript."""
        self.stage.tell(sentence)

    # Opening

    def admit(self, stream: Stream, *, attempt: int) -> Ended | None:
        """Judge a stream before its first frame; return its end when it is refused."""
        self.admission, refused = opening.admit_session(
            self.admission,
            self._condition(),
            attempt=attempt,
            revocation=self._revocation(stream.machine),
            now_ms=self.stage.now_ms,
            drawn=self.stage.draw("gateway"),
        )
        if refused is None:
            self.streams.add(stream)
            return None
        return self._refusal(stream, refused)

    def _condition(self) -> GatewayCondition:
        state = GatewayState.DRAINING if self.draining else GatewayState.SERVING
        if not self._trusts_lease():
            state = GatewayState.FENCED
        elsewhere = [other for other in self.stage.gateways.values() if other is not self and other.works]
        return GatewayCondition(
            state=state,
            streams=len(self.streams),
            streams_max=self.streams_max,
            room_elsewhere=any(
                opening.has_room(streams=len(other.streams), streams_max=other.streams_max) for other in elsewhere
            ),
        )

    def _refusal(self, stream: Stream, error: BetterComputeError) -> Ended:
        told = None if error.pushback_ms is None else format_pushback(error.pushback_ms)
        wait = "" if error.pushback_ms is None else f", come back in {wording.seconds(error.pushback_ms)}"
        status = Status(error.status)
        self.tell(f"{self.name} refuses {stream.machine.name}: {status.name} {error.reason}{wait}")
        return Ended(status, str(error.reason), error.message, parse_pushback(told))

    def received(self, stream: Stream, frame: messages.AgentFrame | Ended) -> None:
        """Take the next of a stream: its Hello, a frame of its session, or its end."""
        if isinstance(frame, Ended):
            self.streams.discard(stream)
            if stream.session is not None:
                self.give(stream.session, inputs.PeerEnded(frame.message))
        elif stream.session is not None:
            self.give(stream.session, inputs.FrameReceived(frame))
        else:
            try:
                self._hello(stream, frame)
            except Refused as error:
                self._finish(stream, self._refusal(stream, error))

    def hello_waits(self, stream: Stream) -> bool:
        """Say whether a Hello must wait: one a second per node and gateway, the second one is delayed."""
        if stream.session is not None or stream.hello_at_ms > self.stage.now_ms:
            return stream.session is None
        last = self._last_hello_at_ms.get(stream.machine.node_id)
        delay_ms = opening.hello_delay_ms(last_hello_at_ms=last, now_ms=self.stage.now_ms)
        stream.hello_at_ms = self.stage.now_ms + delay_ms
        if delay_ms:
            self.tell(f"{self.name} lets the Hello wait for {wording.seconds(delay_ms)}")
        return delay_ms > 0

    def _hello(self, stream: Stream, frame: messages.AgentFrame) -> None:
        machine, control = stream.machine, self.stage.control
        said = opening.check_first_frame(frame)
        opening.check_hello(said, certificate_node_id=machine.node_id, certificate_role=messages.AGENT_ROLE_NODE)
        validate_for_store(frame)
        self._last_hello_at_ms[machine.node_id] = self.stage.now_ms
        if not self.database:
            raise opening.refuse_database(drawn=self.stage.draw("gateway"))
        self._commit_facts()
        decided = control.hello(
            said,
            serial=machine.serial,
            gateway=GatewayFacts(
                gateway_id=self.name,
                session_id=self.stage.next_name("s"),
                protocol_min=self.protocol.min,
                protocol_max=self.protocol.max,
                capabilities=("update-batch",),
                lane_credits=self.credits_by_lane,
                heartbeat_interval_ms=liveness.heartbeat_interval_ms(len(self.sessions)),
                peer_address=machine.address,
            ),
            now_ms=self.stage.server_ms,
        )
        if isinstance(decided, HelloRefusal):
            self._tell_clone(said.node_id, decided)
            raise decided.refused
        self._begin(stream, decided)

    def _begin(self, stream: Stream, plan: HelloPlan) -> None:
        state, begun = gateway_side.open_session(
            plan,
            spec=self.stage.control.nodes[plan.node_id].spec if plan.send_spec else None,
            trust=None,
            server_time_ms=self.stage.server_ms + self.clock_offset_ms,
            now_ms=self.stage.now_ms,
        )
        live = stream.session = Live(state, stream)
        older = self.sessions.get(plan.node_id)
        self.sessions[plan.node_id] = live
        if older is not None:
            self.give(older, inputs.Superseded())
        self._obey(live, begun)

    def _tell_clone(self, node_id: str, refusal: HelloRefusal) -> None:
        writes, clone = refusal.writes, self.sessions.get(node_id)
        if writes is None or writes.notice is None:
            return
        self.stage.notices[node_id] = writes.notice.SerializeToString()
        if clone is not None:
            self.give(clone, inputs.Revoked(writes.notice))

    def _revocation(self, machine: Machine) -> messages.RevocationNotice | None:
        reason = self.stage.control.revoked.get(machine.serial)
        if reason is None:
            return None
        kept = self.stage.notices.get(machine.node_id, b"") if reason == QUARANTINE_REASON else b""
        return revocation_notice(serial=machine.serial, node_id=machine.node_id, reason=reason, kept=kept)

    # A live session

    def give(self, live: Live, given: inputs.GatewayInput) -> None:
        """Step a session and obey; a gateway without its lease does nothing but end it."""
        if live.ending is not None:
            return
        if not self._trusts_lease():
            given = inputs.LeaseLost()
        live.state, done = gateway_side.step(live.state, given, self.stage.now_ms)
        self._obey(live, done)

    def _obey(self, live: Live, done: tuple[effects.GatewayEffect, ...]) -> None:
        for effect in done:
            match effect:
                case effects.SendFrame(frame):
                    self.tell(f"{self.name} -> {live.stream.machine.name}  {wording.server_frame(frame)}")
                    live.stream.send_down(frame)
                case effects.RecordFacts(facts):
                    self._facts.append((live, facts, self.stage.now_ms))
                case effects.PutBack():
                    self._put_backs.append((live, effect))
                case effects.RequestSpec():
                    spec = self.stage.control.nodes[live.state.node_id].spec
                    if spec is not None:
                        self.give(live, inputs.SpecPublished(spec, requested=True))
                case effects.Close():
                    self._close(live, effect)
                case _:
                    pass

    def _close(self, live: Live, effect: effects.Close) -> None:
        live.ending = effect
        node_id = live.state.node_id
        if self.sessions.get(node_id) is live:
            del self.sessions[node_id]
        if effect.status is not Status.OK:
            write = "" if effect.disconnect_write else ", and writes no disconnect"
            self.tell(
                f"{self.name} closes {live.state.session_id}: {effect.status.name} {effect.reason}{write}"
                f" ({effect.message})"
            )
        if effect.disconnect_write:
            self._disconnects.append((live.fence(), effect.reason))
        self._finish(live.stream, Ended(effect.status, str(effect.reason), effect.message, effect.pushback_ms))

    def _finish(self, stream: Stream, ended: Ended) -> None:
        self.streams.discard(stream)
        stream.send_down(ended)

    # The database

    def write(self) -> bool:
        """Commit what waits: facts, put-backs, disconnects, dispatch. Say whether anything was done."""
        if not self.works or not self.database or not self._trusts_lease():
            return False
        return self._commit_facts() or self._put_back() or self._disconnect() or self._dispatch()

    def _commit_facts(self) -> bool:
        if not self._facts or not self.database:
            return False
        batch, self._facts = self._facts, []
        for live, facts, _ in batch:
            stored = self.stage.control.store(live.state.node_id, facts, gateway_id=self.name)
            self.give(live, inputs.FactsCommitted(stored.command_ids, stored.journal_id, stored.acked_event_seq))
        return True

    def _put_back(self) -> bool:
        batch, self._put_backs = self._put_backs, []
        for live, effect in batch:
            self.stage.control.put_back(effect, live.fence(), now_ms=self.stage.server_ms)
            self.give(live, inputs.PutBackCommitted(effect.command_id))
        return bool(batch)

    def _disconnect(self) -> bool:
        batch, self._disconnects = self._disconnects, []
        for fence, reason in batch:
            self.stage.control.disconnect(fence, reason, now_ms=self.stage.server_ms)
        return bool(batch)

    def _dispatch(self) -> bool:
        moved = False
        for live in list(self.sessions.values()):
            demand = gateway_side.wants(live.state)
            if demand is None:
                continue
            answer = gateway_side.answered(demand, self._marked(demand))
            if answer.commands or answer.settled:
                self.give(live, answer)
                moved = True
        return moved

    def _marked(self, demand: gateway_side.DispatchDemand) -> tuple[OutgoingCommand, ...]:
        return self.stage.control.dispatch(demand, gateway_id=self.name, now_ms=self.stage.server_ms)

    # Time

    def tick(self) -> None:
        """Do what is done every 5 s: renew the lease, read the revocation feed, look for silent sessions."""
        if not self.works:
            return
        if self.database and self._trusts_lease() and not self.lease_retired:
            self.lease_renewed_at_ms = self.stage.now_ms
        for live, _, since_ms in list(self._facts):
            if self.stage.now_ms - since_ms >= KEEP_FACTS_MS:
                self._facts = [item for item in self._facts if item[0] is not live]
                self.give(live, inputs.FactsFailed("the database did not take what this node reported"))
        for live in list(self.sessions.values()):
            notice = self._revocation(live.stream.machine)
            if notice is not None:
                self.give(live, inputs.Revoked(notice))
            self.give(live, inputs.Tick())

    def flush(self) -> None:
        """Write last-seen times as ages, every 15 s; a row that is gone shows a zombie."""
        if not (self.works and self.database and self.flushes and self._trusts_lease()):
            return
        for live in list(self.sessions.values()):
            age_ms = self.stage.now_ms - live.state.last_heard_ms
            if not self.stage.control.flush(live.fence(), age_ms=age_ms, now_ms=self.stage.server_ms):
                self.tell(f"{self.name} flushes: the row of {live.state.session_id} is another session's")
                self.give(live, inputs.ZombieFound())

    def watch_lease(self) -> None:
        """End what is open as soon as the lease is not to be trusted any more."""
        if self.works and not self._trusts_lease():
            for live in list(self.sessions.values()):
                self.give(live, inputs.LeaseLost())

    def _trusts_lease(self) -> bool:
        """Say whether it may still act: 13 s from the last renewal, and never again once it may not."""
        if not self.fenced and self.stage.now_ms >= self.lease_trusted_until_ms:
            self.fenced = True
            self._facts.clear()
            self._put_backs.clear()
            self._disconnects.clear()
            self.tell(f"{self.name} trusts its lease no longer: fenced for good")
        return not self.fenced
