"""The control plane of a simulation: production gateways and workers, each a process that can be killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bettercompute.controllers.worker import Worker
from bettercompute.errors import Refused
from bettercompute.gateway.config import GatewayConfig
from bettercompute.gateway.gateway import Gateway
from bettercompute.gateway.services import GatewayServices
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store.limits import GATEWAY_LIMITS, SERVER_LIMITS
from bettercompute.store.signing import Signing
from bettercompute.testing.sim.fleet import Registrar
from bettercompute.testing.sim.links import SimulatedDatabase
from bettercompute.testing.sim.machine import SimulatedClock, make_world
from bettercompute.testing.sim.network import Listening, Network
from bettercompute.testing.sim.postgres import SimulatedServer
from bettercompute.testing.sim.process import SimulatedProcess
from bettercompute.transport.memory import MemoryServer
from bettercompute.world import World

# As systemd does.
RESTART_S = 10.0


class ServicesThatMayBeAway:
    """The production services behind a gateway, while they can be reached."""

    def __init__(self, services: GatewayServices, *, away: Callable[[], bool]) -> None:
        self._services = services
        self._away = away

    async def join(self, request: messages.JoinRequest, *, source: str) -> messages.JoinResponse:
        """Join, or refuse while they are away."""
        self._reach()
        return await self._services.join(request, source=source)

    async def renew(self, request: messages.RenewRequest, *, peer_chain: Sequence[bytes]) -> messages.RenewResponse:
        """Renew, or refuse while they are away."""
        self._reach()
        return await self._services.renew(request, peer_chain=peer_chain)

    async def trust_bundle(self) -> tuple[int, bytes] | None:
        """Return the bundle published last."""
        self._reach()
        return await self._services.trust_bundle()

    def _reach(self) -> None:
        if self._away():
            raise refuse(Reason.UNAVAILABLE, "the services behind the gateway cannot be reached")


@dataclass(slots=True)
class GatewayHost:
    """One gateway, through all its processes."""

    name: str
    config: GatewayConfig
    clock: SimulatedClock
    process: SimulatedProcess | None = None
    gateway: Gateway | None = None
    starts: int = 0
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def up(self) -> bool:
        """Return whether its process lives."""
        return self.process is not None and self.process.alive


@dataclass(slots=True)
class WorkerHost:
    """One worker, through all its processes."""

    name: str
    clock: SimulatedClock
    process: SimulatedProcess | None = None
    starts: int = 0


class Cluster:
    """Starts, stops, kills and pauses the control plane's processes."""

    def __init__(self, server: SimulatedServer, network: Network, *, registrar: Registrar, seed: str) -> None:
        self.gateways: dict[str, GatewayHost] = {}
        self.workers: dict[str, WorkerHost] = {}
        self.processes: list[SimulatedProcess] = []
        self._server = server
        self._network = network
        self._registrar = registrar
        self._seed = seed
        self._loop = asyncio.get_running_loop()

    def add_gateway(self, config: GatewayConfig) -> GatewayHost:
        """Make room for a gateway; `start_gateway` starts it."""
        host = self.gateways[config.name] = GatewayHost(config.name, config, SimulatedClock(self._loop))
        return host

    def add_worker(self, name: str) -> WorkerHost:
        """Make room for a worker."""
        host = self.workers[name] = WorkerHost(name, SimulatedClock(self._loop))
        return host

    def start_gateway(self, host: GatewayHost) -> None:
        """Start a gateway's process."""
        host.starts += 1
        host.stopping = asyncio.Event()
        process = host.process = self.new_process(f"{host.name}#{host.starts}")
        process.spawn(self._gateway(host, process))

    async def _gateway(self, host: GatewayHost, process: SimulatedProcess) -> None:
        world = make_world(f"{self._seed} {process.name}", clock=host.clock)
        database = SimulatedDatabase(self._server, dice=world.dice, client=process.name, limits=GATEWAY_LIMITS)
        behind = SimulatedDatabase(self._server, dice=world.dice, client=process.name, limits=SERVER_LIMITS)
        services = ServicesThatMayBeAway(
            self._registrar.services(behind, world=world), away=lambda: self._registrar.away
        )
        gateway = Gateway(host.config, database=database, services=services, world=world, tls=None)
        server = MemoryServer(gateway.handler, world=world)
        await gateway.start()
        host.gateway = gateway
        self._network.listening[host.name] = Listening(process, server)
        await host.stopping.wait()
        server.announce_close()
        await gateway.stop()
        await server.close()
        await database.close()
        await behind.close()
        self._end(host)

    async def stop_gateway(self, host: GatewayHost) -> None:
        """Stop a gateway in order, as its service manager does."""
        host.stopping.set()
        process = host.process
        while process is not None and process.alive and host.process is process:  # noqa: ASYNC110 - another process's end
            await asyncio.sleep(0.1)

    def kill_gateway(self, host: GatewayHost) -> None:
        """Kill -9."""
        if host.process is not None:
            self.kill(host.process)
            self._end(host)
            self._network.cut(gateway=host.name)

    def _end(self, host: GatewayHost) -> None:
        if host.process is not None:
            host.process.kill()
        host.process, host.gateway = None, None
        self._network.listening.pop(host.name, None)

    def start_worker(self, host: WorkerHost) -> None:
        """Start a worker's process."""
        host.starts += 1
        process = host.process = self.new_process(f"{host.name}#{host.starts}")
        process.spawn(self._worker(host, process))

    async def _worker(self, host: WorkerHost, process: SimulatedProcess) -> None:
        world = make_world(f"{self._seed} {process.name}", clock=host.clock)
        database = SimulatedDatabase(self._server, dice=world.dice, client=process.name, limits=SERVER_LIMITS)
        signing = await self._signing(world)
        worker = Worker(database, world=world, holder=process.name, signing=signing)
        worker.start()
        await asyncio.Event().wait()

    async def _signing(self, world: World) -> Signing | None:
        """Read the worker key; where this host's clock is wrong the process ends, and is started again."""
        while True:
            try:
                return self._registrar.signing(world)
            except Refused:
                await asyncio.sleep(RESTART_S)

    def kill_worker(self, host: WorkerHost) -> None:
        """Kill -9."""
        if host.process is not None:
            self.kill(host.process)
            host.process = None

    def new_process(self, name: str) -> SimulatedProcess:
        """Return a process that is put away at the end."""
        process = SimulatedProcess(name)
        self.processes.append(process)
        return process

    def kill(self, process: SimulatedProcess) -> None:
        """Kill -9, with what the kernel closes then."""
        process.kill()
        self._server.drop(process)
