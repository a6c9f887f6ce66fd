"""The network of a simulation: who reaches whom, how late, and what a partition does to what is open and to dials.

Connections are `transport.memory`'s: in order, nothing lost while they last, so loss shows as lateness or as a cut, as
over TCP. Two connections know nothing of each other's order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from bettercompute.testing.sim.process import SimulatedProcess
from bettercompute.transport.calls import DialFailed, DialKind
from bettercompute.transport.memory import MemoryConnection, MemoryServer
from bettercompute.world import Clock

DIAL_TIMEOUT_S = 20.0
HANDSHAKE_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Way:
    """One direction between a host and a gateway."""

    host: str
    gateway: str
    up: bool
    """Towards the gateway."""


@dataclass(slots=True)
class Open:
    """One open connection and the processes at its ends."""

    host: str
    gateway: str
    connection: MemoryConnection
    ends: tuple[SimulatedProcess, SimulatedProcess]


@dataclass(slots=True)
class Listening:
    """A gateway as the network sees it."""

    process: SimulatedProcess
    server: MemoryServer


@dataclass(slots=True)
class Network:
    """All connections."""

    latency_s: Callable[[], float]
    """Drawn for each message."""
    listening: dict[str, Listening] = field(default_factory=dict)
    blocked: dict[Way, int] = field(default_factory=dict)
    """How many partitions lie over a way."""
    dials: int = 0
    _open: dict[MemoryConnection, Open] = field(default_factory=dict)

    async def dial(
        self, gateway: str, *, host: str, process: SimulatedProcess, clock: Clock, chain: tuple[bytes, ...]
    ) -> MemoryConnection:
        """Connect, or fail as a dial fails: at once where nobody listens, late where nothing comes through.

        `clock` is the one that the process reads: its host's may leap, and it keeps its own from stepping back.
        """
        self.dials += 1
        await asyncio.sleep(self.latency_s())
        if any(self.blocked.get(Way(host, gateway, up)) for up in (True, False)):
            await asyncio.sleep(DIAL_TIMEOUT_S)
            raise DialFailed(DialKind.TIMEOUT, f"{gateway} did not answer within {DIAL_TIMEOUT_S:g} s")
        found = self.listening.get(gateway)
        if found is None or not found.server.accepting:
            raise DialFailed(DialKind.CONNECT, f"nobody listens at {gateway}")
        await _shakes_hands(found.process, gateway)
        connection = found.server.connect(certificate_chain=chain, address=host, latency_s=self.latency_s, clock=clock)
        self._open[connection] = Open(host, gateway, connection, (process, found.process))
        self._carry(connection)
        await asyncio.sleep(self.latency_s())
        return connection

    def block(self, ways: Iterable[Way]) -> None:
        """Lay a partition over these ways."""
        for way in ways:
            self.blocked[way] = self.blocked.get(way, 0) + 1
        self.refresh()

    def unblock(self, ways: Iterable[Way]) -> None:
        """Take it away."""
        for way in ways:
            self.blocked[way] -= 1
        self.refresh()

    def cut(
        self, *, host: str | None = None, gateway: str | None = None, process: SimulatedProcess | None = None
    ) -> None:
        """Lose the connections of a host, of a gateway, between the two, or of one process."""
        for found in list(self._open.values()):
            meant = host in (None, found.host) and gateway in (None, found.gateway)
            if meant and (process is None or process in found.ends):
                found.connection.cut()
        self.refresh()

    def refresh(self) -> None:
        """Hold or release every line as partitions and paused processes say."""
        for connection in list(self._open):
            self._carry(connection)

    def _carry(self, connection: MemoryConnection) -> None:
        found = self._open[connection]
        if connection.end is not None:
            del self._open[connection]
            return
        still = any(process.paused for process in found.ends)
        for line, up in ((connection.to_server, True), (connection.to_client, False)):
            held = still or bool(self.blocked.get(Way(found.host, found.gateway, up)))
            if held and not line.held:
                line.hold()
            elif line.held and not held:
                line.release()


async def _shakes_hands(process: SimulatedProcess, gateway: str) -> None:
    """Wait for a process that stands still, whose kernel has taken the connection: TLS needs an answer of its own."""
    waited_s = 0.0
    while process.paused:
        if waited_s >= DIAL_TIMEOUT_S:
            raise DialFailed(DialKind.TIMEOUT, f"{gateway} did not answer within {DIAL_TIMEOUT_S:g} s")
        await asyncio.sleep(HANDSHAKE_LOOK_S)
        waited_s += HANDSHAKE_LOOK_S
