"""Listens to every frame at the node's end of its stream, and judges what the gateway says by what is committed.

The tap sees a frame when the node does: an ack that was overtaken by nothing must already be true.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from bettercompute.gateway import trust_refresh
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import KINDS
from bettercompute.protocol.statuses import REASON_TRAILER, Reason
from bettercompute.testing.sim.invariants import PENDING, TERMINAL_FROM, Verdict
from bettercompute.testing.sim.ledger import Ledger
from bettercompute.testing.sim.said import End, SaidRules
from bettercompute.transport.calls import NO_METADATA, CallEnded, ClientCall, Signal
from bettercompute.transport.client import unary_on
from bettercompute.transport.memory import MemoryConnection

# Beyond what a Welcome needs for its way: the database's clock was stepped.
CLOCK_MOVED_MS = 1_000


class FrameRules:
    """Judges the frames of all nodes."""

    def __init__(self, ledger: Ledger, verdict: Verdict, *, monotonic_ms: Callable[[], int]) -> None:
        self.frames = 0
        self.streams = 0
        self.said = SaidRules(ledger, verdict, monotonic_ms=monotonic_ms)
        self._monotonic_ms = monotonic_ms
        self._ledger = ledger
        self._verdict = verdict
        self.busy_expected: set[str] = set()
        """Nodes whose journal may be full: they refuse what they have credits for."""
        self.copied: dict[str, int] = {}
        """When a node last ran from a copy of its disk, by node."""
        self.forged: set[str] = set()
        """Commands that no worker key has signed, where intent is signed."""
        self.checks_signatures: set[str] = set()
        """Nodes with a daemon that judges them: the FakeDaemon believes anybody."""
        self.met: Counter[str] = Counter()
        """What faults have led to, by name: that a rule was put to the test at all."""
        self._running: dict[int, set[str]] = {}
        """What was named as running in the Hello of each stream."""
        self._overdrawn: set[int] = set()
        """Streams of daemons that run what has ended for the control plane: it holds a credit unknown there."""
        self._settled: dict[int, set[str]] = {}
        """What each stream has accounted for: said in its Hello, or delivered since."""
        self._runs: dict[str, list[tuple[str, int]]] = {}
        self._unseen: dict[str, bool] = {}
        """Of each command as it was last delivered: whether nothing of it was stored then."""
        self._back_ms = -1
        """When the database became an earlier one last."""
        self._forgotten: dict[str, int] = {}
        """When a node was forgotten last."""
        self._stale_streams = 0
        """Those up to this number were opened before that: what they say may have been true then."""
        self._dispatch_lost: set[str] = set()
        """Commands that were sent once, of which the database became an earlier one."""
        self._journal_gone: dict[str, int] = {}
        """When a node's journal was lost, damaged or replaced last."""
        self._epochs: dict[str, tuple[int, int]] = {}
        """At which epoch each machine was welcomed last, and when."""
        self._told_epoch: dict[int, int] = {}
        """The last epoch by the Hello of each stream: less than that of the last Welcome, where that was refused."""
        self._welcomed_before_ms: dict[str, int] = {}
        """When each machine had been welcomed the time before that."""
        self.ends_with_a_reason: Counter[str] = Counter()
        """How often a session of each node had to end after what was the cause had passed: it was asked to come anew
        for a trust bundle, or its certificate had expired by the wrong clock of the database that it began with.
        """
        self._server_ahead_ms: dict[int, int] = {}
        """How far the server's time was ahead of ours at the Welcome of each stream."""
        self.told_events: dict[tuple[str, str], dict[int, str]] = {}
        """Ids of the events that were said, by seq, of each node's journals."""

    def received(self, node_id: str, frame: messages.ServerFrame, *, stream: int, machine: str) -> None:
        """Judge what a node was told; `machine` is the node's, or a clone's."""
        self.frames += 1
        match frame.WhichOneof("frame"):
            case "welcome":
                self._welcome(node_id, frame.welcome, machine=machine, stream=stream)
            case "command":
                self._command(node_id, frame.command, stream=stream)
            case "drain":
                self.ends_with_a_reason[node_id] += frame.drain.reason == trust_refresh.REASON
            case "ack" if stream > self._stale_streams:
                self._ack(node_id, frame.ack)

    def sent(self, node_id: str, frame: messages.AgentFrame, *, stream: int, machine: str) -> None:
        """Judge what a node says."""
        self.frames += 1
        self.said.sent(node_id, frame, machine=machine)
        match frame.WhichOneof("frame"):
            case "hello":
                hello = frame.hello
                done = (*hello.done_ids, *(update.command_id for update in hello.done_results))
                self._told_epoch[stream] = hello.last_epoch
                self._running[stream] = set(hello.running_command_ids)
                self._settled[stream] = {*hello.running_command_ids, *done}
            case "update":
                self._update(node_id, frame.update, stream=stream)
            case "events":
                told = self.told_events.setdefault((node_id, frame.events.journal_id), {})
                told.update((event.seq, event.event_id) for event in frame.events.events)
            case "updates":
                for update in frame.updates.updates:
                    self._update(node_id, update, stream=stream)

    def ended(self, node_id: str, *, reason: str, stream: int) -> None:
        """Note why the server has ended a stream."""
        ahead_ms = self._server_ahead_ms.pop(stream, None)
        if ahead_ms is None or reason != Reason.CERTIFICATE_EXPIRED:
            return
        now_ahead_ms = self._verdict.now_ms() - self._monotonic_ms()
        # Only a clock that has been put back since: a Welcome that is heard late looks as if it had gone on.
        self.ends_with_a_reason[node_id] += ahead_ms - now_ahead_ms > CLOCK_MOVED_MS

    def opened_twice(self, node_id: str) -> None:
        """Note that two daemons have opened one state folder."""
        self._verdict.broken("one daemon a state folder", f"two daemons run on the folder of {node_id}")

    def copied_disk(self, node_id: str) -> None:
        """Note that a node runs from a copy of its disk from now on."""
        self.copied[node_id] = self._monotonic_ms()
        self.journal_gone(node_id)

    def journal_gone(self, node_id: str) -> None:
        """Note that a node does not remember what it did: where the database does not either, nobody does."""
        self._journal_gone[node_id] = self._monotonic_ms()
        self.said.memory_gone(node_id)

    def forgotten(self, node_id: str) -> None:
        """Note that the database knows nothing of a node any more."""
        self._forgotten[node_id] = self._monotonic_ms()
        self.said.memory_gone(node_id)

    def went_back(self) -> None:
        """Note that the database is an earlier one from now on."""
        self._back_ms = self._monotonic_ms()
        self._stale_streams = self.streams
        waiting = {key for (key,), row in self._ledger.rows["commands"].items() if row["state"] == PENDING}
        self._dispatch_lost = waiting & self._unseen.keys()

    def lost_end(self, command_id: str, node_id: str, *, state: int) -> End | None:
        """Return the end that a node has said of a command which is stored with another one, if somebody remembers.

        What a database that became an earlier one takes for unsent may expire before the node's word gets through.
        """
        if command_id in self._dispatch_lost:
            return None
        back_ms = max(self._back_ms, self._forgotten.get(node_id, -1))
        return self.said.lost_end(command_id, node_id, state=state, since_ms=back_ms)

    def _nobody_remembers(self, node_id: str, *, since_ms: int) -> bool:
        """Return whether both the database and the node's journal have lost what was at this time."""
        back_ms = max(self._back_ms, self._forgotten.get(node_id, -1))
        return min(back_ms, self._journal_gone.get(node_id, -1)) >= since_ms

    def _waited_beside_its_copy(self, node_id: str, runs: list[tuple[str, int]]) -> bool:
        """Return whether the last run is of a machine that had heard no Welcome since a copy of its disk ran first.

        It is what a sound node would be whose Welcome to the copy was lost.
        """
        (first, first_ms), (second, _) = ((who.rpartition("#")[0], at_ms) for who, at_ms in runs[-2:])
        return first != second and self._welcomed_before_ms.get(second, 0) <= self.copied.get(node_id, -1) <= first_ms

    def began(self, node_id: str, command_id: str, kind: str, *, who: str) -> None:
        """Note that a command's effect began at a node; `who` names the process."""
        if command_id in self.forged and node_id in self.checks_signatures:
            self._verdict.broken("only signed intent runs", f"{command_id} ({kind}) began at {node_id}, by {who}")
        runs = self._runs.setdefault(command_id, [])
        runs.append((who, self._monotonic_ms()))
        if len(runs) == 1 or KINDS[kind].retry_safe:
            return
        # A copy of a disk from between a Hello and its Welcome is a state that a sound node can be in: where nothing
        # that was said since has become durable, nobody can tell that it is old.
        unseen = self._unseen.get(command_id)
        if unseen and self.copied.get(node_id, -1) >= runs[-2][1]:
            self.met["second-run-excused"] += 1
            return
        if unseen and self._nobody_remembers(node_id, since_ms=runs[-2][1]):
            self.met["second-run-excused"] += 1
            return
        if unseen and self._waited_beside_its_copy(node_id, runs):
            self.met["second-run-excused"] += 1
            return
        text = f"{command_id} ({kind}) began {len(runs)} times at {node_id}: {runs}"
        self._verdict.broken("a command runs at most once unless retry-safe", text)

    def _welcome(self, node_id: str, welcome: messages.Welcome, *, machine: str, stream: int) -> None:
        # Of two machines with one identity, one may hear its Welcome after the other's later one.
        self._server_ahead_ms[stream] = welcome.server_time_ms - self._monotonic_ms()
        last, last_ms = self._epochs.get(machine, (0, 0))
        refused = self._told_epoch.pop(stream, last) < last and self._back_ms >= last_ms
        if welcome.epoch <= last and not refused and not self._nobody_remembers(node_id, since_ms=last_ms):
            self._verdict.broken("epochs rise", f"{machine} was welcomed at {welcome.epoch} after {last}")
        self._epochs[machine] = (welcome.epoch, self._monotonic_ms())
        self._welcomed_before_ms[machine] = last_ms
        for command_id in self._running.pop(stream, ()):
            row = self._ledger.row("commands", command_id)
            if row is None or row["state"] >= TERMINAL_FROM or command_id in self._dispatch_lost:
                self._overdrawn.add(stream)
        session = self._ledger.row("node_sessions", node_id)
        if stream > self._stale_streams and (session is None or session["session_epoch"] < welcome.epoch):
            text = f"{node_id} was welcomed at {welcome.epoch}, the row says {session}"
            self._verdict.broken("no welcome before it is durable", text)

    def _command(self, node_id: str, command: messages.Command, *, stream: int) -> None:
        command_id = messages.CommandBody.FromString(command.body).command_id
        self._unseen[command_id] = not command.seen
        settled = self._settled.setdefault(stream, set())
        if stream <= self._stale_streams:
            row = self._ledger.row("commands", command_id)
            if row is not None and row["state"] == PENDING:
                self._dispatch_lost.add(command_id)
        elif command_id in self._dispatch_lost:
            # The database does not know that it was sent, and the node answers from its journal.
            self._dispatch_lost.discard(command_id)
            self.met["sent-again-after-lost-commits"] += command_id in settled
        elif command_id in settled:
            text = f"{command_id} was sent to {node_id}, which had said on this stream that it has it"
            self._verdict.broken("a command is sent once a stream", text)
        settled.add(command_id)

    def _ack(self, node_id: str, ack: messages.Ack) -> None:
        if ack.acked_event_seq:
            self._acked(node_id, ack.journal_id, ack.acked_event_seq)
        for command_id in ack.command_ids:
            row = self._ledger.row("commands", command_id)
            if row is not None and row["state"] < TERMINAL_FROM:
                self._verdict.broken("no ack before it is durable", f"{command_id} was acked to {node_id}: {row}")

    def _acked(self, node_id: str, journal_id: str, seq: int) -> None:
        session = self._ledger.row("node_sessions", node_id)
        if session is None or journal_id != session["journal_id"]:
            return
        if session["acked_event_seq"] < seq:
            text = f"event {seq} was acked to {node_id}, {session['acked_event_seq']} is stored"
            self._verdict.broken("no ack before it is durable", text)

    def _update(self, node_id: str, update: messages.CommandUpdate, *, stream: int) -> None:
        busy = update.reject_reason == messages.COMMAND_REJECT_REASON_BUSY
        if update.state == messages.COMMAND_STATE_REJECTED and update.command_id in self.forged and not busy:
            self.met["unsigned-intent-refused"] += 1
        if busy:
            self._settled.setdefault(stream, set()).discard(update.command_id)
        if (
            update.state == messages.COMMAND_STATE_REJECTED
            and busy
            and node_id not in self.busy_expected
            and stream not in self._overdrawn
            and stream > self._stale_streams
        ):
            self._verdict.broken("credits are never exceeded", f"{node_id} had no credit left for {update.command_id}")


class TappedCall:
    """A `ClientCall` whose frames are looked at."""

    def __init__(self, call: ClientCall, *, node_id: str, machine: str, rules: FrameRules) -> None:
        self.status: int | None = None
        self.status_message = ""
        self.trailers = NO_METADATA
        self._call = call
        self._node_id = node_id
        self._machine = machine
        self._rules = rules
        rules.streams += 1
        self._stream = rules.streams

    @property
    def queued_bytes(self) -> int:
        """Return what has not left."""
        return self._call.queued_bytes

    def send(self, message: bytes) -> None:
        """Send."""
        self._call.send(message)
        frame = messages.AgentFrame.FromString(message)
        self._rules.sent(self._node_id, frame, stream=self._stream, machine=self._machine)

    async def receive(self) -> bytes | None:
        """Receive."""
        message = await self._call.receive()
        if message is None:
            self.status, self.trailers = self._call.status, self._call.trailers
            self.status_message = self._call.status_message
            self._rules.ended(self._node_id, reason=self.trailers.get(REASON_TRAILER, ""), stream=self._stream)
        else:
            frame = messages.ServerFrame.FromString(message)
            self._rules.received(self._node_id, frame, stream=self._stream, machine=self._machine)
        return message

    async def drained(self) -> None:
        """Wait until everything has left."""
        await self._call.drained()

    def half_close(self) -> None:
        """End sending."""
        self._call.half_close()

    def cancel(self) -> None:
        """End it."""
        self._call.cancel()


class TappedConnection:
    """A `Connection` whose calls are tapped."""

    def __init__(self, connection: MemoryConnection, *, node_id: str, machine: str, rules: FrameRules) -> None:
        self.server_certificate = connection.server_certificate
        self.serving_ca_pem = connection.serving_ca_pem
        self._connection = connection
        self._node_id = node_id
        self._machine = machine
        self._rules = rules

    @property
    def closed(self) -> Signal:
        """Return what is set at its end."""
        return self._connection.closed

    @property
    def end(self) -> CallEnded | None:
        """Return why it ended."""
        return self._connection.end

    @property
    def last_heard_ms(self) -> int:
        """Return when the peer was last heard."""
        return self._connection.last_heard_ms

    async def call(self, path: str, metadata: Mapping[str, str] = NO_METADATA) -> TappedCall:
        """Open a call."""
        call = await self._connection.call(path, metadata)
        return TappedCall(call, node_id=self._node_id, machine=self._machine, rules=self._rules)

    async def unary(
        self, path: str, request: bytes, *, metadata: Mapping[str, str] = NO_METADATA, timeout_s: float
    ) -> bytes:
        """Send one message and return the one answer."""
        return await unary_on(await self._connection.call(path, metadata), request, timeout_s=timeout_s)

    def close(self) -> None:
        """Close."""
        self._connection.close()

    async def wait_closed(self) -> None:
        """Wait for the end."""
        await self._connection.wait_closed()
