"""A gateway on a real database with calls in memory, and a daemon that says exactly what a test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cryptography.hazmat.primitives.serialization import Encoding

from bettercompute.errors import Unavailable
from bettercompute.gateway.config import GatewayConfig
from bettercompute.gateway.gateway import Gateway
from bettercompute.pki import certificates
from bettercompute.pki.identity import NodeIdentity
from bettercompute.protocol import messages, service
from bettercompute.protocol.frames import decode_message, encode_message
from bettercompute.store import leases
from bettercompute.store.database import Database
from bettercompute.system import system_world
from bettercompute.transport.calls import ClientCall
from bettercompute.transport.memory import MemoryConnection, MemoryServer
from bettercompute.world import World
from tests.contract.gateway import seed

WAIT_S = 30.0


class Services:
    """The services behind the gateway, with answers that a test sets."""

    def __init__(self) -> None:
        self.bundle: tuple[int, bytes] | None = None
        self.joins: list[tuple[messages.JoinRequest, str]] = []
        self.renewals: list[tuple[messages.RenewRequest, Sequence[bytes]]] = []
        self.failure: Exception | None = None

    async def join(self, request: messages.JoinRequest, *, source: str) -> messages.JoinResponse:
        if self.failure is not None:
            raise self.failure
        self.joins.append((request, source))
        return messages.JoinResponse(body=b"identity")

    async def renew(self, request: messages.RenewRequest, *, peer_chain: Sequence[bytes]) -> messages.RenewResponse:
        self.renewals.append((request, peer_chain))
        return messages.RenewResponse(body=b"renewed")

    async def trust_bundle(self) -> tuple[int, bytes] | None:
        if self.failure is not None:
            raise Unavailable("the services are away")
        return self.bundle


@dataclass(frozen=True)
class Node:
    node_id: str
    serial: str
    chain: tuple[bytes, ...]


@dataclass
class Rig:
    database: Database
    world: World
    services: Services
    gateway: Gateway
    server: MemoryServer
    node_ca: certificates.Authority
    extra: list[tuple[Gateway, MemoryServer]] = field(default_factory=list)

    async def add_node(self, node_id: str, *, role: str | None = "node", recorded: bool = True) -> Node:
        """Join a node: its rows, and a certificate under the node CA."""
        node = self.make_node(node_id, role=role)
        await seed.add_node(self.database, node_id, serial=node.serial if recorded else None, role=role or "node")
        return node

    def make_node(
        self,
        node_id: str,
        *,
        role: str | None = "node",
        trust_domain: str = "bc.local",
        lifetime_ms: int = certificates.NODE_LIFETIME_MS,
    ) -> Node:
        leaf = certificates.make_node_leaf(
            self.node_ca,
            public_key=certificates.generate_key().public_key(),
            identity=NodeIdentity(trust_domain=trust_domain, site="default", node_id=node_id, role=role),
            serial=self.world.ids.random_bytes(16),
            now_ms=self.world.clock.now_ms(),
            lifetime_ms=lifetime_ms,
        )
        return Node(node_id, certificates.serial_text(leaf), (leaf.public_bytes(Encoding.DER),))

    async def dial(
        self,
        node: Node | None,
        *,
        metadata: Mapping[str, str] | None = None,
        server: MemoryServer | None = None,
        address: str = "127.0.0.1",
    ) -> Daemon:
        """Open a Session stream without saying anything."""
        connection = (server or self.server).connect(
            certificate_chain=() if node is None else node.chain, address=address
        )
        call = await connection.call(service.SESSION, metadata or {})
        return Daemon(call, connection, "" if node is None else node.node_id)

    async def connect(self, node: Node, *, server: MemoryServer | None = None, **hello: object) -> Daemon:
        """Say Hello and return the daemon once it is welcomed."""
        daemon = await self.dial(node, server=server)
        daemon.say_hello(**hello)
        daemon.welcome = (await daemon.receive("welcome")).welcome
        return daemon

    async def start_another(self, config: GatewayConfig | None = None) -> tuple[Gateway, MemoryServer]:
        """Start a second gateway on the same database."""
        gateway = make_gateway(self.database, self.world, self.services, config or GatewayConfig(name="other"))
        await gateway.start()
        await asyncio.wait_for(gateway.until_ready(), WAIT_S)
        server = MemoryServer(gateway.handler, world=self.world)
        self.extra.append((gateway, server))
        return gateway, server

    async def stop(self) -> None:
        """Stop every gateway, the second ones first."""
        for gateway, server in (*self.extra, (self.gateway, self.server)):
            await gateway.stop()
            await server.close(drain_ms=0)

    async def drain(self, gateway: Gateway | None = None) -> None:
        """Ask a gateway to drain, as an operator does, and wait until it does."""
        asked = gateway or self.gateway
        assert await leases.request_drain(self.database, name=asked.gateway_id, requested_by="op")
        await self.until(lambda: asked.life is not None and asked.life.draining)

    async def row(self, node_id: str) -> dict[str, object]:
        """Return what the tables say of a node's session."""
        [row] = await self.database.query(
            "SELECT s.gateway_id, s.session_id, s.session_epoch, s.disconnected_at, s.acked_event_seq, n.state,"
            " n.state_reason FROM node_sessions s JOIN nodes n USING (node_id) WHERE node_id = $1",
            node_id,
        )
        return {name: row[name] for name in row.keys()}  # noqa: SIM118 - iterating a record gives its values

    async def until(self, holds: Callable[[], bool]) -> None:
        """Let the loop run until something holds."""
        async with asyncio.timeout(WAIT_S):
            while not holds():  # noqa: ASYNC110 - what is looked at has no event of its own
                await asyncio.sleep(0.005)

    async def until_row(self, node_id: str, **columns: object) -> None:
        """Wait until the node's row says this."""
        async with asyncio.timeout(WAIT_S):
            while True:
                row = await self.row(node_id)
                if all(row[name] == value for name, value in columns.items()):
                    return

    async def until_state(self, command_id: str, state: int) -> None:
        """Wait until a command has reached a state."""
        async with asyncio.timeout(WAIT_S):
            while True:
                if await seed.state_of(self.database, command_id) == state:
                    return

    async def until_query(self, sql: str) -> None:
        """Wait until a query returns something."""
        async with asyncio.timeout(WAIT_S):
            while True:
                if await self.database.query(sql):
                    return


class Daemon:
    """The daemon's end of one stream."""

    def __init__(self, call: ClientCall, connection: MemoryConnection, node_id: str) -> None:
        self.call = call
        self.connection = connection
        self.node_id = node_id
        self.welcome = messages.Welcome()
        self.frames: list[messages.ServerFrame] = []

    def hello(self, **fields: object) -> messages.Hello:
        defaults: dict[str, object] = {
            "node_id": self.node_id,
            "role": messages.AGENT_ROLE_NODE,
            "boot_id": "boot-1",
            "journal_id": "journal-1",
            "process_id": "process-1",
            "proto_min": 1,
            "proto_max": 1,
            "daemon_version": "0.1.0",
        }
        return messages.Hello(**{**defaults, **fields})  # type: ignore[arg-type] # a test names what it means

    def say_hello(self, **fields: object) -> None:
        self.send(messages.AgentFrame(hello=self.hello(**fields)))

    def send(self, frame: messages.AgentFrame) -> None:
        self.call.send(encode_message(frame))

    def update(self, command_id: str, state: messages.CommandState.ValueType, **fields: object) -> None:
        update = messages.CommandUpdate(command_id=command_id, state=state, **fields)  # type: ignore[arg-type] # as above
        self.send(messages.AgentFrame(update=update))

    async def receive(self, case: str) -> messages.ServerFrame:
        """Return the next frame of a kind, passing over others."""
        async with asyncio.timeout(WAIT_S):
            while True:
                data = await self.call.receive()
                if data is None:
                    raise AssertionError(
                        f"the stream ended {self.call.status} {self.call.status_message!r} instead of {case}"
                    )
                frame = decode_message(messages.ServerFrame, data)
                if frame.WhichOneof("frame") == case:
                    return frame
                self.frames.append(frame)

    async def command(self) -> messages.CommandBody:
        """Return the next command's body."""
        frame = await self.receive("command")
        return decode_message(messages.CommandBody, frame.command.body)

    async def end(self) -> tuple[int, str, str]:
        """Read to the end of the stream; return status, reason and message."""
        async with asyncio.timeout(WAIT_S):
            while (data := await self.call.receive()) is not None:
                self.frames.append(decode_message(messages.ServerFrame, data))
        assert self.call.status is not None
        return self.call.status, self.call.trailers.get("x-bc-reason", ""), self.call.status_message


def make_gateway(database: Database, world: World, services: Services, config: GatewayConfig) -> Gateway:
    return Gateway(config, database=database, services=services, world=world, tls=None)


def make_world() -> World:
    return system_world()


def with_clock(world: World, **parts: object) -> World:
    return replace(world, **parts)  # type: ignore[arg-type] # a test brings its own clock or dice
