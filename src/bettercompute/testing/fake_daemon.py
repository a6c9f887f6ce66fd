"""A daemon without a host: it speaks the protocol as bcd does, does what its levers say, and thousands fit a process.

Its session follows the production rules (`session.daemon_side`): Hello and its nonces, Welcome as a barrier, server
time, heartbeats, events and their window, silence, drain, back-off and pushback. Over sockets or in memory: `dial` says
which. It differs from bcd where this table says so and nowhere else.

| matter | bcd | FakeDaemon |
| --- | --- | --- |
| journal | SQLite, fsynced before anything is sent | memory; gone with the object |
| commands | handlers; kind, lane, deadline, signature judged | `Levers.answers` by kind; only lanes and profile count |
| after `reboot` | the resume rules judge what was unfinished | it is forgotten, and runs anew when it is sent again |
| RUNNING and the end | two frames, a handler runs in between | one, without a `delay_ms`, if the gateway reads such |
| remembered ids | until acked, 24 h and `not_after` + 5 min | the last 10,000 |
| desired state | verified, converged, kept | read; sections that the profile knows count as converged |
| trust bundle | verified under the pinned key | its version is believed |
| certificate | renewed | used as given |
| inventory | collected | `sections` as given |
| tunnels, secrets, tokens | asked for and answered | ignored |
| load, conditions, pressure | measured and reported | none |
| a frame that does not decode | ends the session | raises: a test has found a bug |
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from bettercompute.errors import BetterComputeError
from bettercompute.protocol import messages, service
from bettercompute.protocol.frames import encode_message
from bettercompute.protocol.limits import HELLO_NONCE_BYTES
from bettercompute.protocol.statuses import (
    ATTEMPT_METADATA,
    PUSHBACK_TRAILER,
    REASON_TRAILER,
    Status,
    parse_pushback,
)
from bettercompute.session import clock, daemon_side, effects
from bettercompute.session.authority import ANYBODY
from bettercompute.session.changes import changed
from bettercompute.session.daemon_state import Advertised, DaemonFacts, DaemonSession, Phase
from bettercompute.session.effects import DaemonEffect, Redial, WaitThenDial
from bettercompute.session.inputs import (
    DaemonInput,
    DaemonTick,
    Dialed,
    EventsJournaled,
    EventsSent,
    JournalRenewed,
    ServerFrameReceived,
    StatusChanged,
    StreamEnded,
    TrustHeld,
)
from bettercompute.testing.fake_commands import FakeCommands
from bettercompute.testing.fake_dial import Dial
from bettercompute.testing.fake_holdings import FakeEvents, empty_journal, hashes_of, read_desired, section_of
from bettercompute.testing.fake_outgoing import FakeOutgoing
from bettercompute.testing.profiles import CURRENT, Levers, Profile
from bettercompute.transport.streams import ClientCall, Connection
from bettercompute.world import World

ENDINGS_KEPT = 100
WARNINGS_KEPT = 100
NO_LOAD = messages.NodeLoad()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a stream or a dial ended."""

    status: Status | None
    reason: str
    message: str
    pushback_ms: int | None
    welcomed: bool


class FakeDaemon:
    """One node. `run` is its life; everything else may be called while it runs."""

    def __init__(
        self,
        node_id: str,
        *,
        dial: Dial,
        world: World,
        profile: Profile = CURRENT,
        levers: Levers | None = None,
        role: messages.AgentRole.ValueType = messages.AGENT_ROLE_NODE,
        sections: Mapping[str, bytes] | None = None,
        boot_id: str = "",
        journal_id: str = "",
    ) -> None:
        self.node_id = node_id
        self.dial = dial
        self.profile = profile
        self.levers = levers or Levers()
        self.sections = dict(sections or {})
        self.endings: deque[Ended] = deque(maxlen=ENDINGS_KEPT)
        self.warnings: deque[effects.Warn] = deque(maxlen=WARNINGS_KEPT)
        self.conditions: dict[str, effects.SetCondition] = {}
        self.received: Counter[str] = Counter()
        """Frames of the gateway by their kind."""
        self.welcomes, self.protocol_version = 0, 0
        self.refusals = 0
        """Streams that ended with a status before their Welcome, since the last Welcome."""
        self.on_ack: Callable[[messages.Ack], None] = lambda _: None
        self._world = world
        self._role = role
        self._outgoing = FakeOutgoing(profile=profile, levers=self.levers)
        self._connection: Connection | None = None
        self._left: effects.EndSession | None = None
        self._welcomed = False
        self._reading = asyncio.Event()
        self._reading.set()
        self._timer: asyncio.TimerHandle | None = None
        self.events = FakeEvents()
        self._watchers: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self.commands = FakeCommands(
            profile=profile, levers=self.levers, tell=self._tell, time_ms=self._session_time_ms
        )
        self.state = self._born(boot_id or world.ids.uuid7(), journal_id or world.ids.uuid7())

    # What tests look at and wait for

    @property
    def live(self) -> bool:
        """Return whether it has been welcomed on the stream that is open."""
        return self.state.phase is Phase.LIVE

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something about this daemon holds. The caller bounds the wait."""
        if not holds():
            waiter = asyncio.get_running_loop().create_future()
            self._watchers.append((holds, waiter))
            await waiter

    async def connected(self) -> None:
        """Wait until it is welcomed."""
        await self.until(lambda: self.live)

    # What tests do to it

    def send(self, frame: messages.AgentFrame) -> None:
        """Send a frame, past the levers; without a stream it is dropped."""
        self.send_bytes(encode_message(frame))

    def send_bytes(self, message: bytes) -> None:
        """Send a message that may be no frame at all."""
        self._outgoing.send_bytes(message)

    def stop_reading(self) -> None:
        """Take no further message from the stream: what the gateway sends piles up at the gateway."""
        self._reading.clear()

    def read_on(self) -> None:
        """Read again."""
        self._reading.set()

    def hang_up(self) -> None:
        """Lose the connection."""
        if self._connection is not None:
            self._connection.close()

    def reboot(self, boot_id: str = "") -> None:
        """Come back under another boot id, with nothing running. What has ended is still owed."""
        boot_id = boot_id or self._world.ids.uuid7()
        facts = replace(self.state.facts, boot_id=boot_id, process_id=self._world.ids.uuid7())
        self.state = changed(self.state, facts=facts)
        self.commands.process_id = facts.process_id
        self.commands.forget(unfinished_only=True)
        self.hang_up()

    def lose_journal(self, journal_id: str = "") -> None:
        """Come back with an empty journal."""
        self.commands.forget(unfinished_only=False)
        self.events = FakeEvents()
        self.state = self._born(self.state.facts.boot_id, journal_id or self._world.ids.uuid7())
        self.hang_up()

    def record_events(self, happened: Iterable[tuple[str, str]]) -> None:
        """Journal events, as type and JSON payload, and send them as their window allows."""
        for kind, payload_json in happened:
            event_id = self._world.ids.uuid7()
            self.events.append(event_id, kind, payload_json=payload_json, at_ms=self._session_time_ms())
        self._step(EventsJournaled(self.events.last_seq))

    # Its life

    async def run(self) -> None:
        """Dial, obey and redial until cancelled, or until the first end when `levers.redials` is off."""
        wait: WaitThenDial | None = WaitThenDial(0, Redial.NEW_CONNECTION, 0)
        try:
            while wait is not None:
                if wait.delay_ms and self.levers.obeys_waits:
                    await asyncio.sleep(wait.delay_ms / 1000)
                wait = self._ended(await self._stream(wait))
        finally:
            self.hang_up()

    async def _stream(self, wait: WaitThenDial) -> Ended:
        """Hold one stream from dial to end."""
        self._left, self._welcomed = None, False
        try:
            call = await self._open(wait)
            while (message := await call.receive()) is not None:
                self._take(message)
                if not self._reading.is_set():
                    await self._reading.wait()
            return Ended(
                status=Status(call.status or Status.OK),
                reason=call.trailers.get(REASON_TRAILER, ""),
                message=call.status_message,
                pushback_ms=parse_pushback(call.trailers.get(PUSHBACK_TRAILER)),
                welcomed=self._welcomed,
            )
        except BetterComputeError as error:
            return self._cut(error)
        finally:
            self._stop_timer()
            self._outgoing.end()

    def _cut(self, error: BetterComputeError) -> Ended:
        reason, message = error.reason, error.message
        if self._left is not None:
            reason, message = self._left.reason, self._left.message
        return Ended(status=None, reason=reason, message=message, pushback_ms=None, welcomed=self._welcomed)

    async def _open(self, wait: WaitThenDial) -> ClientCall:
        kept = self._connection
        if kept is None or kept.closed.is_set() or wait.redial is Redial.NEW_CONNECTION:
            self.hang_up()
            kept = self._connection = await self.dial()
        metadata = {ATTEMPT_METADATA: str(wait.attempt)} if self.levers.says_attempt else {}
        self._outgoing.call = call = await kept.call(service.SESSION, metadata)
        leaf = kept.server_certificate
        self.state = changed(
            self.state, entries=self.commands.entries(), advertised=self._advertised(self.state.advertised)
        )
        self._step(
            Dialed(
                fresh_nonce=self._world.ids.random_bytes(HELLO_NONCE_BYTES),
                serving_not_before_ms=None if leaf is None else leaf.not_before_ms,
                serving_not_after_ms=None if leaf is None else leaf.not_after_ms,
            )
        )
        self._schedule()
        return call

    def _ended(self, ended: Ended) -> WaitThenDial | None:
        self.endings.append(ended)
        if ended.status is not None and not ended.welcomed:
            self.refusals += 1
        outcome = self._step(
            StreamEnded(
                drawn=min(self._world.dice.uniform(0, 1), 1 - 1e-9),
                status=ended.status,
                reason=ended.reason,
                pushback_ms=ended.pushback_ms,
                message=ended.message,
            )
        )
        [wait] = [effect for effect in outcome if isinstance(effect, WaitThenDial)]
        return wait if self.levers.redials else None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self) -> None:
        self._stop_timer()
        delay_s = daemon_side.next_tick_ms(self.state, now_ms=self._world.clock.monotonic_ms()) / 1000
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        heard_ms = 0 if self._connection is None else self._connection.last_heard_ms
        self.state = changed(self.state, lanes=self.commands.lanes or self.state.lanes)
        self._step(DaemonTick(wall_ms=self._world.clock.now_ms(), load=NO_LOAD, last_heard_ms=heard_ms))
        self._schedule()

    # What comes in

    def _take(self, message: bytes) -> None:
        frame = messages.ServerFrame.FromString(message)
        case = frame.WhichOneof("frame") or "unknown"
        self.received[case] += 1
        if self.live and case == "command":
            self.commands.deliver(frame.command)
        elif self.live and case == "cancel":
            self.commands.cancel(frame.cancel)
        else:
            if case == "welcome":  # what has ended since Hello is owed as well
                self.protocol_version = frame.welcome.protocol_version
                self.state = changed(self.state, entries=self.commands.entries())
            if case == "ack":
                self.commands.acked(frame.ack.command_ids)
                self.on_ack(frame.ack)
            self._step(ServerFrameReceived(frame, self._world.clock.now_ms()))
        if case == "drain":
            self._schedule()  # it leaves when it was told to, not at the tick that was due anyway
        self._look()

    def _step(self, given: DaemonInput) -> tuple[DaemonEffect, ...]:
        was_live = self.live
        self.state, outcome = daemon_side.step(self.state, given, self._world.clock.monotonic_ms())
        if self.live and not was_live:
            self._welcomed = True
            self.welcomes += 1
            self.refusals = 0
            self.commands.lanes = dict(self.state.lanes)
            self.commands.upgrade_only = self.state.upgrade_only
            self._outgoing.update_batches = self.state.update_batches
        for effect in outcome:
            self._obey(effect)
        self._look()
        if self.live and not was_live and self._timer is not None:
            self._schedule()
        return outcome

    def _obey(self, effect: DaemonEffect) -> None:
        match effect:
            case effects.SendAgentFrame(frame):
                self._outgoing.send(frame)
            case effects.SendEvents():
                self._send_events(effect)
            case effects.SendInventory(sections):
                for name in sections:
                    if name in self.sections:
                        self._outgoing.send(messages.AgentFrame(inventory=section_of(name, self.sections[name])))
            case effects.AckEvents(seq):
                self.events.acked(seq)
            case effects.TakeNewJournalId():
                self.events.renumber()
                self._step(JournalRenewed(self._world.ids.uuid7(), self.events.last_seq))
            case effects.ApplyTrust(bundle):
                self._step(TrustHeld(messages.TrustBundle.FromString(bundle.body).version, ANYBODY))
            case effects.ApplyDesired(desired):
                held, report = read_desired(desired, self.profile, before=self.state.advertised.applied_generation)
                self._step(held)
                self._step(StatusChanged(report))
            case effects.SetCondition():
                self.conditions[effect.type] = effect
            case effects.Warn():
                self.warnings.append(effect)
            case effects.EndSession():
                self._left = effect
                self._outgoing.end()
            case _:
                pass  # what the journal would keep; tunnels and answers that nobody waits for

    def _tell(self, updates: Iterable[messages.CommandUpdate]) -> None:
        if self.live:
            self._outgoing.tell(updates)

    def _send_events(self, asked: effects.SendEvents) -> None:
        batch, last_seq = self.events.batch(asked)
        if batch.events:
            self._outgoing.send(messages.AgentFrame(events=batch))
        self._step(EventsSent(session_id=asked.session_id, last_seq=last_seq))

    # What it holds

    def _born(self, boot_id: str, journal_id: str) -> DaemonSession:
        facts = DaemonFacts(
            node_id=self.node_id,
            role=self._role,
            boot_id=boot_id,
            process_id=self._world.ids.uuid7(),
            daemon_version=self.profile.daemon_version,
            proto_min=self.profile.proto_min,
            proto_max=self.profile.proto_max,
        )
        advertised, held = self._advertised(Advertised()), empty_journal(journal_id)
        state, _ = daemon_side.start(facts, advertised, held, now_ms=self._world.clock.monotonic_ms())
        self.commands.process_id = facts.process_id
        return state

    def _advertised(self, before: Advertised) -> Advertised:
        return replace(before, capabilities=self.profile.capabilities, inventory_hashes=hashes_of(self.sections))

    def _session_time_ms(self) -> int:
        return clock.session_time(self.state.clock, now_ms=self._world.clock.monotonic_ms())

    def _look(self) -> None:
        """Wake whoever waits for what holds now."""
        if not self._watchers:
            return
        waiting, self._watchers = self._watchers, []
        for holds, waiter in waiting:
            if not waiter.done() and not holds():
                self._watchers.append((holds, waiter))
            elif not waiter.done():
                waiter.set_result(None)
