"""A FakeDaemon as a process of a simulated host: started, killed, cloned and joined anew."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bettercompute.delivery.commands import CommandState
from bettercompute.protocol.kinds import KINDS
from bettercompute.session.resume import INTERRUPTED
from bettercompute.testing.fake_daemon import FakeDaemon
from bettercompute.testing.profiles import Answer, Levers
from bettercompute.testing.sim.fleet import Joined
from bettercompute.testing.sim.machine import SimulatedClock, make_world
from bettercompute.testing.sim.node import DURATIONS_S, EVENT_TYPE, NodeParts
from bettercompute.testing.sim.process import SimulatedProcess
from bettercompute.transport.streams import Connection
from bettercompute.world import Clock

ANSWERS: Mapping[str, Answer] = {kind: Answer(delay_ms=int(seconds * 1000)) for kind, seconds in DURATIONS_S.items()}


@dataclass(slots=True)
class FakeNode:
    """One host with a FakeDaemon."""

    joined: Joined
    parts: NodeParts
    clock: SimulatedClock
    starts: int = 0
    process: SimulatedProcess | None = None
    daemon: FakeDaemon | None = None
    untried: list[str] = field(default_factory=list)
    has_disk: bool = False

    @property
    def node_id(self) -> str:
        """Return the node."""
        return self.joined.node_id

    @property
    def serial(self) -> str:
        """Return the serial of its certificate."""
        return self.joined.serial

    @property
    def joining(self) -> bool:
        """Return whether it waits to join: it never does."""
        return False

    @property
    def live(self) -> bool:
        """Return whether it has a session."""
        return self.daemon is not None and self.daemon.live

    @property
    def idle(self) -> bool:
        """Return whether it owes nothing: every result and event is acked."""
        daemon = self.daemon
        return daemon is not None and not daemon.commands.held and not len(daemon.events)

    @property
    def owed(self) -> str:
        """Return what it waits for, in words."""
        daemon = self.daemon
        return "" if daemon is None else f"commands {list(daemon.commands.held)}, {len(daemon.events)} events"

    @property
    def why(self) -> str:
        """Return how its last stream or dial ended, in words."""
        daemon = self.daemon
        return "" if daemon is None or not daemon.endings else str(daemon.endings[-1])

    @property
    def journal(self) -> tuple[str, int]:
        """Return its journal's id and last event."""
        assert self.daemon is not None
        return self.daemon.state.journal_id, self.daemon.events.last_seq

    def start(self) -> None:
        """Start it."""
        self.starts += 1
        process = self.process = self.parts.new_process(f"{self.node_id}#{self.starts}")
        world = make_world(f"{self.parts.seed} {process.name}", clock=self.clock)

        def make() -> FakeDaemon:
            return FakeDaemon(
                self.node_id,
                dial=functools.partial(self._dial, world.clock),
                world=world,
                levers=Levers(answers=dict(ANSWERS)),
            )

        daemon = self.daemon = process.run(make)
        rules = self.parts.rules
        if rules is not None:
            who = process.name
            daemon.commands.on_begin = lambda body: rules.began(self.node_id, body.command_id, body.kind, who=who)
        process.spawn(daemon.run())

    def end(self) -> None:
        """Kill it for good."""
        assert self.process is not None
        self.process.kill()
        self.parts.network.cut(process=self.process)

    def restart(self, *, reboot: bool) -> None:
        """Kill it and start it from its journal: what had begun has been interrupted, as bcd judges it."""
        daemon, process = self.daemon, self.process
        assert daemon is not None
        assert process is not None
        boot_id = "" if reboot else daemon.state.facts.boot_id

        def begin_anew() -> None:
            for command_id, held in list(daemon.commands.held.items()):
                if held.update is None and not KINDS[held.body.kind].retry_safe:
                    daemon.commands.finish(command_id, Answer(state=CommandState.FAILED, reason=INTERRUPTED))
            daemon.reboot(boot_id)

        self.parts.network.cut(process=process)
        process.run(begin_anew)

    def lose_journal(self) -> None:
        """Come back with an empty journal."""
        assert self.daemon is not None
        assert self.process is not None
        self.parts.network.cut(process=self.process)
        self.process.run(self.daemon.lose_journal)

    def remember(self) -> None:
        """Refuse: its journal is memory."""
        raise NotImplementedError

    def roll_back(self) -> None:
        """Refuse."""
        raise NotImplementedError

    def fill_disk(self, full: bool) -> None:
        """Refuse."""
        raise NotImplementedError

    def clone(self, name: str) -> FakeNode:
        """Refuse: a twin without its journal would be no twin."""
        raise NotImplementedError

    def second_daemon(self, name: str) -> Callable[[], None]:
        """Refuse: it has no folder."""
        raise NotImplementedError

    def damage_journal(self) -> None:
        """Refuse."""
        raise NotImplementedError

    def rejoin(self, token: str) -> None:
        """Take a new identity and dial again: it is given one, because a FakeDaemon does not join."""
        del token
        row_generation = self.parts.registrar.generation(self.node_id)
        self.joined = self.parts.registrar.join(self.node_id, generation=row_generation + 1)
        self.parts.network.cut(process=self.process)

    def record_event(self, payload_json: str) -> None:
        """Let something happen."""
        daemon, process = self.daemon, self.process
        if daemon is not None and process is not None and process.alive and not process.paused:
            process.run(daemon.record_events, [(EVENT_TYPE, payload_json)])

    async def _dial(self, clock: Clock) -> Connection:
        parts, process = self.parts, self.process
        assert process is not None
        if not self.untried:
            self.untried = parts.rng.sample(parts.gateways, len(parts.gateways))
        return await parts.dial(
            self.untried.pop(),
            node_id=self.node_id,
            machine=self.node_id,
            process=process,
            clock=clock,
            chain=self.joined.chain,
        )
