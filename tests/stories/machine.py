"""A machine of a story: a disk, a boot, and a daemon that obeys as the shell in src/bettercompute/daemon does."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING

from bettercompute.delivery.commands import CommandState
from bettercompute.protocol import messages
from bettercompute.protocol.versions import PROTOCOL_VERSION, ProtocolRange
from bettercompute.session import clock, daemon_side, effects, inputs
from bettercompute.session.daemon_state import Advertised, DaemonFacts, DaemonSession
from bettercompute.session.effects import DaemonEffect, Redial
from tests.stories import wording
from tests.stories.disk import WRITES, Disk
from tests.stories.network import Ended, Stream

if TYPE_CHECKING:
    from tests.stories.gateway import Gateway
    from tests.stories.stage import Stage


class Machine:
    """One host. Two machines may be copies of each other and speak for one node."""

    def __init__(self, name: str, node_id: str, stage: Stage, *, serial: str, disk: Disk) -> None:
        self.name = name
        self.node_id = node_id
        self.stage = stage
        self.serial = serial
        self.disk = disk
        self.snapshots: dict[str, Disk] = {}
        self.address = f"192.0.2.{len(stage.machines) + 1}"
        self.boot_id = ""
        self.version = wording.VERSION
        self.protocol: ProtocolRange = PROTOCOL_VERSION
        self.capabilities: tuple[str, ...] = ()
        self.sections: tuple[str, ...] = ()
        self.wall_offset_ms = 0
        self.daemon: DaemonSession | None = None
        self.stream: Stream | None = None
        self.held_hellos = 0
        """On so many streams to come the daemon hears its Welcome and nothing after it."""
        self.last_gateway: Gateway | None = None
        self.next_gateway: Gateway | None = None
        self.wait: effects.WaitThenDial | None = None
        self.dials_at_ms: int | None = None
        self.ticks_at_ms: int | None = None
        self.running: set[str] = set()
        self.runs: list[str] = []
        """Every beginning of a command's effect."""
        self.parks = False
        """A section of every spec that comes fails."""
        self._conditions: set[str] = set()

    def tell(self, sentence: str) -> None:
        """Add to the transcript."""
        self.stage.tell(sentence)

    @property
    def wall_ms(self) -> int:
        """Return the host's own clock."""
        return self.stage.server_ms + self.wall_offset_ms

    def time_shown(self) -> str:
        """Return what the daemon believes of the time."""
        assert self.daemon is not None, f"{self.name} has no daemon"
        known, now_ms = self.daemon.clock, self.stage.now_ms
        confirmed = clock.confirmed_time(known, now_ms=now_ms)
        return (
            f"{self.name} believes that it is {wording.clock(clock.session_time(known, now_ms=now_ms))}; confirmed "
            f"{'none' if confirmed is None else wording.clock(confirmed)}, mark {wording.clock(known.mark_ms)}; "
            f"in truth it is {wording.clock(self.stage.server_ms)}"
        )

    # The process

    def start(self) -> None:
        """Begin a new daemon process on what the disk holds."""
        assert self.daemon is None, f"{self.name} has a daemon already"
        process_id = self.stage.next_name("p")
        self.tell(f"{self.name} starts its daemon: boot {self.boot_id}, process {process_id}")
        hashes = {name: sha256(name.encode()).digest() for name in self.sections}
        self.daemon, done = daemon_side.start(
            DaemonFacts(
                node_id=self.node_id,
                role=messages.AGENT_ROLE_NODE,
                boot_id=self.boot_id,
                process_id=process_id,
                daemon_version=self.version,
                proto_min=self.protocol.min,
                proto_max=self.protocol.max,
            ),
            Advertised(capabilities=self.capabilities, inventory_hashes=hashes),
            self.disk.facts(),
            now_ms=self.stage.now_ms,
        )
        self._obey(done)

    def stop(self, *, silently: bool) -> None:
        """End the process, by force. `silently`: the machine loses power, so nobody at the other end is told."""
        stream, self.stream = self.stream, None
        if stream is not None and silently:
            stream.silent = True
        elif stream is not None:
            stream.down.clear()
            stream.send_up(Ended(message="the connection was lost"))
        self.daemon = None
        self.wait = self.dials_at_ms = self.ticks_at_ms = None
        self.running.clear()
        self._conditions.clear()

    def give(self, given: inputs.DaemonInput) -> None:
        """Step the daemon and obey."""
        if self.daemon is None:
            return
        self.daemon, done = daemon_side.step(self.daemon, given, self.stage.now_ms)
        self._obey(done)
        if self.daemon is not None:
            self.ticks_at_ms = self.stage.now_ms + max(
                1, daemon_side.next_tick_ms(self.daemon, now_ms=self.stage.now_ms)
            )

    def tick(self) -> None:
        """Let the daemon see the time. It has heard answers to PINGs while its stream works."""
        stream = self.stream
        heard = stream is not None and not stream.silent and stream.gateway.works
        last_heard_ms = self.stage.now_ms if heard else 0
        self.give(inputs.DaemonTick(self.wall_ms, messages.NodeLoad(), last_heard_ms))

    def finish(self, command_id: str, state: CommandState, *, reason: str = "") -> None:
        """End a running command."""
        assert command_id in self.running, f"{command_id} does not run on {self.name}"
        self.running.discard(command_id)
        self.tell(f"{self.name}: the handler of {command_id} has ended")
        self.give(inputs.HandlerFinished(command_id=command_id, state=state, reason=reason))

    def add_event(self) -> None:
        """Let something happen that the control plane is to know."""
        name = self.stage.next_name("e")
        self.disk.add_event(wording.event_id(int(name.removeprefix("e-"))), at_ms=self.wall_ms)
        self.tell(f"{self.name} fsyncs: event {name} as {self.disk.last_event_seq} of {self.disk.journal_id}")
        self.give(inputs.EventsJournaled(self.disk.last_event_seq))

    # The stream

    def dial(self) -> None:
        """Open a Session stream, to the gateway before or to the next one."""
        wait, self.wait, self.dials_at_ms = self.wait, None, None
        assert wait is not None
        gateway = self._choose(wait.redial)
        attempt = f", its attempt {wait.attempt}" if wait.attempt else ""
        answered = "" if gateway.works else ": nobody answers"
        self.tell(f"{self.name} dials {gateway.name}{attempt}{answered}")
        self.last_gateway, self.next_gateway = gateway, None
        if answered:
            self._ended(Ended())
            return
        stream = Stream(self, gateway)
        refusal = gateway.admit(stream, attempt=wait.attempt)
        if refusal is not None:
            self._ended(refusal)
            return
        self.stream = stream
        self.give(inputs.Dialed(fresh_nonce=wording.nonce(self.stage.next_name("n"))))

    def _choose(self, redial: Redial) -> Gateway:
        if self.next_gateway is not None:
            return self.next_gateway
        gateways = list(self.stage.gateways.values())
        if self.last_gateway is None:
            return gateways[0]
        if redial is Redial.SAME_CONNECTION:
            return self.last_gateway
        return gateways[(gateways.index(self.last_gateway) + 1) % len(gateways)]

    def received(self, frame: messages.ServerFrame | Ended) -> None:
        """Take the next of the gateway, or the stream's end."""
        if isinstance(frame, Ended):
            self.stream = None
            self._ended(frame)
        else:
            if self.held_hellos and self.stream is not None and frame.HasField("welcome"):
                self.held_hellos -= 1
                self.stream.down_held = True
            self.give(inputs.ServerFrameReceived(frame, wall_ms=self.wall_ms))

    def lose_connection(self) -> None:
        """Lose the connection: both ends are told, and what is on its way is gone."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.lose()
            stream.send_up(Ended(message="the connection was lost"))
        self._ended(Ended(message="the connection was lost"))

    def _ended(self, ended: Ended) -> None:
        self.give(
            inputs.StreamEnded(
                drawn=self.stage.draw("daemon"),
                status=ended.status,
                reason=ended.reason,
                pushback_ms=ended.pushback_ms,
                message=ended.message,
            )
        )

    # Obeying

    def _obey(self, done: tuple[DaemonEffect, ...]) -> None:
        writes = [effect for effect in done if isinstance(effect, WRITES)]
        assert list(done[: len(writes)]) == writes, f"journal writes come first: {done}"
        if self.disk.full and any(isinstance(effect, effects.AcceptCommand) for effect in writes):
            [accept] = [effect for effect in writes if isinstance(effect, effects.AcceptCommand)]
            self.tell(f"{self.name} has no room to accept {accept.entry.command_id}")
            self.give(inputs.JournalRefused(accept.entry.command_id))
            return
        for write in writes:
            self.disk.write(write)
        if any(not isinstance(write, effects.StoreTime) for write in writes):
            self.tell(f"{self.name} fsyncs: {', '.join(wording.write(write) for write in writes)}")
        for effect in done:
            self._do(effect)

    def _do(self, effect: DaemonEffect) -> None:
        match effect:
            case effects.SendAgentFrame(frame):
                self._send(frame)
            case effects.SendEvents(session_id, journal_id, after_seq, through_seq):
                batch = [self.disk.events[seq] for seq in range(after_seq + 1, through_seq + 1)]
                self._send(messages.AgentFrame(events=messages.EventBatch(journal_id=journal_id, events=batch)))
                self.give(inputs.EventsSent(session_id, through_seq))
            case effects.SendInventory(sections):
                for name in sections:
                    digest = sha256(name.encode()).digest()
                    section = messages.InventorySection(name=name, sha256=digest, body=name.encode())
                    self._send(messages.AgentFrame(inventory=section))
            case effects.ResendResult(command_id):
                update = messages.CommandUpdate.FromString(self.disk.entries[command_id].update)
                self._send(messages.AgentFrame(update=update))
            case effects.StartHandler(command_id, _, body):
                assert command_id not in self.running, "one run at a time"
                assert self.disk.entries[command_id].started, "started is durable before the effect"
                self.running.add(command_id)
                self.runs.append(command_id)
                self.tell(f"{self.name} runs {command_id} {body.kind}")
            case effects.StopHandler(command_id):
                self.tell(f"{self.name} stops {command_id} after the action at hand")
            case effects.TakeNewJournalId():
                self.disk.renew(self.stage.next_name("j"))
                self.tell(
                    f"{self.name}: the journal is {self.disk.journal_id} now, with {len(self.disk.events)} events"
                )
                self.give(inputs.JournalRenewed(self.disk.journal_id, self.disk.last_event_seq))
            case effects.ApplyDesired(desired):
                spec = messages.DesiredStateBody.FromString(desired.body)
                self._converge(spec)
            case _:
                self._mind(effect)

    def _converge(self, spec: messages.DesiredStateBody) -> None:
        assert self.daemon is not None, f"{self.name} has no daemon"
        applied = self.daemon.advertised.applied_generation
        if self.parks:
            self.tell(f"{self.name} reads generation {spec.generation} and cannot converge it")
        else:
            applied = spec.generation
            self.tell(f"{self.name} converges generation {spec.generation}")
        self.give(inputs.SpecHeld(spec.generation, applied, spec.spec_sha256))

    def _mind(self, effect: DaemonEffect) -> None:
        """Obey what is for people, and what ends and begins streams."""
        match effect:
            case effects.SetCondition(name, holds, reason, _):
                if holds != (name in self._conditions):
                    self._conditions ^= {name}
                    self.tell(f"{self.name}: condition {name} {f'holds ({reason})' if holds else 'is over'}")
            case effects.Warn(reason, message):
                self.tell(f"{self.name} warns {reason}: {message}")
            case effects.EndSession(reason, _):
                self.tell(f"{self.name} ends the session: {reason}")
                stream, self.stream = self.stream, None
                if stream is not None:
                    stream.down.clear()
                    stream.send_up(Ended(message="the daemon ended the stream"))
                self._ended(Ended())
            case effects.WaitThenDial():
                self.wait = effect
                self.dials_at_ms = self.stage.now_ms + effect.delay_ms
                if effect.delay_ms:
                    kept = ", keeping the connection" if effect.redial is Redial.SAME_CONNECTION else ""
                    self.tell(f"{self.name} waits {wording.seconds(effect.delay_ms)}{kept}")
            case _:
                pass

    def _send(self, frame: messages.AgentFrame) -> None:
        stream = self.stream
        if stream is None:
            return
        said = wording.agent_frame(frame)
        if said == "heartbeat":
            self.stage.transcript.beat(self.name)
        else:
            self.tell(f"{self.name} -> {stream.gateway.name}  {said}")
        stream.send_up(frame)

    # Copies

    def copied(self, name: str, *, live: bool) -> Machine:
        """Return a copy: of the disk alone, or of a running machine with all that is in its memory."""
        copy = Machine(name, self.node_id, self.stage, serial=self.serial, disk=self.disk.copied())
        copy.version, copy.protocol = self.version, self.protocol
        copy.capabilities, copy.sections = self.capabilities, self.sections
        copy.last_gateway = self.last_gateway
        if live:
            assert self.daemon is not None, "only a running machine has a memory to copy"
            copy.boot_id = self.boot_id
            copy.daemon = replace(self.daemon)
            copy.running = set(self.running)
            copy.ticks_at_ms = self.ticks_at_ms
        return copy
