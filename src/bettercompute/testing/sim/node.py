"""A node of a simulation, whichever daemon plays it: what the faults may do to it, and what the checks ask of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bettercompute.testing.sim.fleet import Registrar
from bettercompute.testing.sim.machine import SimulatedClock
from bettercompute.testing.sim.network import Network
from bettercompute.testing.sim.process import SimulatedProcess
from bettercompute.testing.sim.taps import FrameRules, TappedConnection
from bettercompute.transport.calls import Connection
from bettercompute.world import Clock

# How long the effect of each kind takes.
DURATIONS_S: Mapping[str, float] = {
    "diag.nvml": 0.8,
    "inventory.refresh": 4,
    "logs.collect": 25,
    "gpu.reset": 9,
}
EVENT_TYPE = "sim.happened"


@dataclass(slots=True)
class NodeParts:
    """What every simulated node is given."""

    network: Network
    gateways: tuple[str, ...]
    registrar: Registrar
    rng: random.Random
    new_process: Callable[[str], SimulatedProcess]
    rules: FrameRules | None
    """None: nobody looks at its frames."""
    seed: str
    folder: Path
    """Where those with a disk have it."""

    async def dial(
        self,
        gateway: str,
        *,
        node_id: str,
        machine: str,
        process: SimulatedProcess,
        clock: Clock,
        chain: tuple[bytes, ...],
    ) -> Connection:
        """Connect as this node, on this machine, from this process with its clock; whoever judges frames listens."""
        connection = await self.network.dial(gateway, host=node_id, process=process, clock=clock, chain=chain)
        if self.rules is None:
            return connection
        return TappedConnection(connection, node_id=node_id, machine=machine, rules=self.rules)


class Node(Protocol):
    """One host, its disk and its daemon."""

    clock: SimulatedClock
    process: SimulatedProcess | None

    has_disk: bool
    """Whether its journal outlives its process: only such a one can be copied, rolled back and filled."""

    @property
    def node_id(self) -> str:
        """Return its id."""
        ...

    @property
    def serial(self) -> str:
        """Return the serial of the certificate that it shows."""
        ...

    @property
    def joining(self) -> bool:
        """Return whether it waits to join anew by a token."""
        ...

    @property
    def live(self) -> bool:
        """Return whether it has a session."""
        ...

    @property
    def idle(self) -> bool:
        """Return whether every result and event of it is acked."""
        ...

    @property
    def owed(self) -> str:
        """Return what is not, in words."""
        ...

    @property
    def why(self) -> str:
        """Return why it has no session, in words."""
        ...

    @property
    def journal(self) -> tuple[str, int]:
        """Return its journal's id and last event."""
        ...

    def start(self) -> None:
        """Start its daemon."""
        ...

    def end(self) -> None:
        """Kill its daemon for good."""
        ...

    def restart(self, *, reboot: bool) -> None:
        """Kill its daemon and start it again, after a boot of the machine if asked."""
        ...

    def lose_journal(self) -> None:
        """Kill it, and start it with an empty journal."""
        ...

    def remember(self) -> None:
        """Take a copy of its disk."""
        ...

    def roll_back(self) -> None:
        """Kill it, put the copy of its disk in place, start it."""
        ...

    def fill_disk(self, full: bool) -> None:
        """Fill its disk, or make room."""
        ...

    def clone(self, name: str) -> Node:
        """Start another machine with a copy of its disk."""
        ...

    def second_daemon(self, name: str) -> Callable[[], None]:
        """Start another daemon on the same state folder, and again whenever it ends; return what ends it."""
        ...

    def damage_journal(self) -> None:
        """Kill it, flip bits of its journal, start it."""
        ...

    def rejoin(self, token: str) -> None:
        """Take a new identity, for this join token."""
        ...

    def record_event(self, payload_json: str) -> None:
        """Let something happen at it."""
        ...
