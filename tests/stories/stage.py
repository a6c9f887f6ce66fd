"""The stage of a story: a scripted clock and dice, machines, gateways, a network and one control plane.

Nothing here decides: it moves frames, commits and timers in a fixed order, so that the same directives always make the
same transcript. Frames and transactions take no time; only timers do.
"""

from __future__ import annotations

from collections import Counter, deque

from bettercompute.delivery.commands import TERMINAL, CommandState
from bettercompute.protocol.kinds import KINDS
from bettercompute.session import liveness
from bettercompute.session.liveness import Connectivity, NodeLiveness, Watch
from tests.stories import wording
from tests.stories.control_plane import ControlPlane
from tests.stories.gateway import Gateway
from tests.stories.machine import Machine
from tests.stories.network import Stream
from tests.stories.transcript import Transcript

GRID_MS = 5_000
EXPIRY_MS = 10_000
TURNS_MAX = 10_000
DRAW = 0.5
"""What the dice show when the story says nothing."""


class Stage:
    """Everything there is."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.transcript = Transcript()
        self.control = ControlPlane(self.tell)
        self.gateways: dict[str, Gateway] = {}
        self.machines: dict[str, Machine] = {}
        self.notices: dict[str, bytes] = {}
        """What each quarantined node's clones are told; it is kept with the revocation."""
        self.streams: list[Stream] = []
        self.dice: dict[str, deque[float]] = {"daemon": deque(), "gateway": deque()}
        self.watch: Watch | None = None
        """The Liveness controller; None while it does not run."""
        self.last_watch = Watch()
        self._grid_at_ms = 0
        self._names: Counter[str] = Counter()
        self.ended: dict[str, CommandState] = {}
        """How each command has ended: none ends twice."""

    @property
    def server_ms(self) -> int:
        """Return the control plane's time."""
        return wording.START_MS + self.now_ms

    def tell(self, sentence: str) -> None:
        """Add a sentence to the transcript."""
        self.transcript.tell(sentence, now_ms=self.now_ms)

    def draw(self, whose: str) -> float:
        """Return what the dice of the daemons, or of the gateways, show next."""
        dice = self.dice[whose]
        return dice.popleft() if dice else DRAW

    def next_name(self, letter: str) -> str:
        """Return the next free name of a kind: s-1, s-2 and so on."""
        self._names[letter] += 1
        return f"{letter}-{self._names[letter]}"

    def check(self) -> None:
        """Raise when the story has come to something that must never be, whatever it was about."""
        for row in self.control.commands.values():
            if row.state in TERMINAL:
                ended = self.ended.setdefault(row.command_id, row.state)
                assert row.state is ended, f"{row.command_id} has ended twice: {ended.name}, {row.state.name}"
        for machine in self.machines.values():
            for command_id, runs in Counter(machine.runs).items():
                known = self.control.commands.get(command_id)
                safe = known is not None and KINDS[known.kind].retry_safe
                assert runs == 1 or safe, f"{command_id} ran {runs} times on {machine.name}"
        for gateway in self.gateways.values():
            for live in gateway.sessions.values():
                for lane in live.state.lanes.values():
                    assert lane.free <= lane.credits, "more credits than were given"

    # Moving

    def settle(self) -> None:
        """Move frames and commits until nothing moves."""
        for _ in range(TURNS_MAX):
            if not (self._move_frame() or any(gateway.write() for gateway in self.gateways.values())):
                return
        raise AssertionError("the story does not come to rest")

    def _move_frame(self) -> bool:
        for machine in self.machines.values():
            stream = machine.stream
            if stream is not None and stream not in self.streams:
                self.streams.append(stream)
        self.streams = [stream for stream in self.streams if stream.open() or (stream.up and stream.gateway.alive)]
        for stream in self.streams:
            if stream.up and not stream.up_held and stream.gateway.works and not self._hello_waits(stream):
                stream.gateway.received(stream, stream.up.popleft())
                return True
            if stream.open() and stream.down and not stream.down_held:
                stream.machine.received(stream.down.popleft())
                return True
        return False

    def _hello_waits(self, stream: Stream) -> bool:
        return stream.session is None and stream.open() and stream.gateway.hello_waits(stream)

    def run(self, duration_ms: int) -> None:
        """Let time pass."""
        until_ms = self.now_ms + duration_ms
        self.settle()
        turns = 0
        while (due_ms := self._next_due()) <= until_ms:
            turns = 0 if due_ms > self.now_ms else turns + 1
            assert turns < TURNS_MAX, "time stands still"
            self.now_ms = due_ms
            self._fire()
            self.settle()
        self.now_ms = until_ms

    def _next_due(self) -> int:
        due = [(self.now_ms // GRID_MS + 1) * GRID_MS]
        for machine in self.machines.values():
            due += [at for at in (machine.dials_at_ms, machine.ticks_at_ms) if at is not None]
        due += [stream.hello_at_ms for stream in self.streams if stream.hello_at_ms > self.now_ms]
        due += [
            row.not_before_ms - wording.START_MS
            for row in self.control.commands.values()
            if row.not_before_ms > self.server_ms
        ]
        leases = [gateway.lease_trusted_until_ms for gateway in self.gateways.values() if gateway.works]
        due += [at for at in leases if at > self.now_ms]
        return max(self.now_ms, min(due))

    def _fire(self) -> None:
        for gateway in self.gateways.values():
            gateway.watch_lease()
        for machine in list(self.machines.values()):
            if machine.dials_at_ms is not None and machine.dials_at_ms <= self.now_ms:
                machine.dial()
            if machine.ticks_at_ms is not None and machine.ticks_at_ms <= self.now_ms:
                machine.tick()
        if self.now_ms % GRID_MS or self.now_ms == self._grid_at_ms:
            return
        self._grid_at_ms = self.now_ms
        self.settle()
        for gateway in self.gateways.values():
            gateway.tick()
        if self.now_ms % liveness.FLUSH_PERIOD_MS == 0:
            self.settle()
            for gateway in self.gateways.values():
                gateway.flush()
        self.settle()
        if self.now_ms % EXPIRY_MS == 0:
            self.control.expire(now_ms=self.server_ms)
        if self.watch is not None:
            self._controller_pass(self.watch)

    # The Liveness controller

    def _controller_pass(self, watch: Watch) -> None:
        """Judge what nobody reports, as src/bettercompute/controllers/liveness.py does, every 5 s."""
        in_grace = liveness.in_grace(watch, monotonic_ms=self.now_ms)
        self.watch = liveness.watched(watch, database_ms=self.server_ms, monotonic_ms=self.now_ms)
        if self.watch.quiet_until_ms != watch.quiet_until_ms and self.watch.quiet_until_ms is not None:
            left_ms = self.watch.quiet_until_ms - self.now_ms
            self.tell(f"the Liveness controller was away: it judges nothing for {wording.seconds(left_ms)}")
        elif in_grace and not liveness.in_grace(self.watch, monotonic_ms=self.now_ms):
            self.tell("the Liveness controller judges again")
        names = sorted(self.control.nodes)
        found = liveness.transitions([self._liveness(name) for name in names], self.watch, monotonic_ms=self.now_ms)
        for name, transition in zip(names, found, strict=True):
            if transition is None:
                continue
            if transition.retire_lease:
                self.gateways[self.control.nodes[name].session.gateway_id].lease_retired = True
            self.control.apply(name, transition, now_ms=self.server_ms)

    def _liveness(self, node_id: str) -> NodeLiveness:
        node = self.control.nodes[node_id]
        row = node.session
        if node.connectivity is not Connectivity.CONNECTED:
            away_ms = 0 if row.disconnected_at_ms is None else self.server_ms - row.disconnected_at_ms
            return NodeLiveness(connectivity=node.connectivity, disconnected_age_ms=away_ms)
        expired_ms = self.now_ms - self.gateways[row.gateway_id].lease_expires_at_ms
        return NodeLiveness(
            connectivity=node.connectivity,
            gateway_lease_expired_ms=expired_ms if expired_ms > 0 else None,
            last_seen_age_ms=0 if row.last_seen_ms is None else self.server_ms - row.last_seen_ms,
            heartbeat_interval_ms=row.heartbeat_interval_ms,
        )
