"""A FakeDaemon as a process of a simulated host: started, killed, cloned and joined anew."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bettercompute.delivery.commands import CommandState
from bettercompute.protocol.kinds import KINDS
from bettercompute.session.resume import INTERRUPTED
from bettercompute.testing.fake_daemon import FakeDaemon
from bettercompute.testing.profiles import Answer, Levers
from bettercompute.testing.sim.fleet import Joined
from bettercompute.testing.sim.machine import SimulatedClock, make_world
from bettercompute.testing.sim.network import Network
from bettercompute.testing.sim.process import SimulatedProcess
from bettercompute.testing.sim.taps import FrameRules, TappedConnection
from bettercompute.transport.streams import Connection

ANSWERS: Mapping[str, Answer] = {
    "diag.nvml": Answer(delay_ms=800),
    "inventory.refresh": Answer(delay_ms=4_000),
    "logs.collect": Answer(delay_ms=25_000),
    "gpu.reset": Answer(delay_ms=9_000),
}


@dataclass(slots=True)
class NodeParts:
    """What every simulated node is given."""

    network: Network
    gateways: tuple[str, ...]
    rng: random.Random
    new_process: Callable[[str], SimulatedProcess]
    rules: FrameRules | None
    """None: nobody looks at its frames."""
    seed: str


@dataclass(slots=True)
class FakeNode:
    """One host with a FakeDaemon."""

    joined: Joined
    parts: NodeParts
    clock: SimulatedClock
    generation: int = 1
    starts: int = 0
    process: SimulatedProcess | None = None
    daemon: FakeDaemon | None = None
    untried: list[str] = field(default_factory=list)

    @property
    def node_id(self) -> str:
        """Return the node."""
        return self.joined.node_id

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

    def start(self, *, like: FakeDaemon | None = None) -> None:
        """Start it, as a clone of another where one is given: same machine, same boot, same journal."""
        self.starts += 1
        process = self.process = self.parts.new_process(f"{self.node_id}#{self.starts}")
        world = make_world(f"{self.parts.seed} {process.name}", clock=self.clock)
        boot_id = "" if like is None else like.state.facts.boot_id
        journal_id = "" if like is None else like.state.journal_id

        def make() -> FakeDaemon:
            return FakeDaemon(
                self.node_id,
                dial=self._dial,
                world=world,
                levers=Levers(answers=dict(ANSWERS)),
                boot_id=boot_id,
                journal_id=journal_id,
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
        self.parts.network.cut(host=self.node_id)

    def restart(self) -> None:
        """Kill it and start it from its journal: what had begun has been interrupted, as bcd judges it."""
        daemon, process = self.daemon, self.process
        assert daemon is not None
        assert process is not None

        def reboot() -> None:
            for command_id, held in list(daemon.commands.held.items()):
                if held.update is None and not KINDS[held.body.kind].retry_safe:
                    daemon.commands.finish(command_id, Answer(state=CommandState.FAILED, reason=INTERRUPTED))
            daemon.reboot()

        self.parts.network.cut(host=self.node_id)
        process.run(reboot)

    def lose_journal(self) -> None:
        """Come back with an empty journal."""
        assert self.daemon is not None
        assert self.process is not None
        self.parts.network.cut(host=self.node_id)
        self.process.run(self.daemon.lose_journal)

    def rejoin(self, joined: Joined) -> None:
        """Take a new identity and dial again."""
        self.joined = joined
        self.generation += 1
        self.parts.network.cut(host=self.node_id)

    def record_event(self, payload_json: str) -> None:
        """Let something happen."""
        daemon, process = self.daemon, self.process
        if daemon is not None and process is not None and process.alive and not process.paused:
            process.run(daemon.record_events, [("sim.happened", payload_json)])

    async def _dial(self) -> Connection:
        parts, process = self.parts, self.process
        assert process is not None
        if not self.untried:
            self.untried = parts.rng.sample(parts.gateways, len(parts.gateways))
        connection = await parts.network.dial(
            self.untried.pop(), host=self.node_id, process=process, chain=self.joined.chain
        )
        if parts.rules is None:
            return connection
        return TappedConnection(connection, node_id=self.node_id, rules=parts.rules)
