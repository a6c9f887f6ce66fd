"""The gateway behind its real listener: mutual TLS, two gateways on one database, one of them stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from bettercompute.delivery.commands import CommandState
from bettercompute.gateway.config import GatewayConfig
from bettercompute.gateway.gateway import Gateway
from bettercompute.pki import certificates
from bettercompute.pki.identity import NodeIdentity
from bettercompute.protocol import messages, service
from bettercompute.protocol.frames import decode_message, encode_message
from bettercompute.protocol.statuses import Status
from bettercompute.store.database import Database
from bettercompute.store.limits import GATEWAY_LIMITS
from bettercompute.system import system_world
from bettercompute.transport.streams import (
    ClientCall,
    Connection,
    DialTarget,
    Identity,
    ServerSecrets,
    dial,
    server_context,
)
from tests.contract.gateway import seed
from tests.contract.gateway.rig import Services

WAIT_S = 30.0
WORLD = system_world()


def pem(authority: certificates.Authority) -> bytes:
    return authority.certificate.public_bytes(Encoding.PEM)


@dataclass
class Site:
    database: Database
    serving_ca: certificates.Authority
    node_ca: certificates.Authority
    gateways: list[Gateway]

    async def start(self, name: str) -> Gateway:
        key = certificates.generate_key()
        leaf = certificates.make_serving_leaf(
            self.serving_ca,
            public_key=key.public_key(),
            names=["127.0.0.1", "localhost"],
            serial=WORLD.ids.random_bytes(16),
            now_ms=WORLD.clock.now_ms(),
        )
        context = server_context(
            ServerSecrets(
                certificate_chain_pem=leaf.public_bytes(Encoding.PEM) + pem(self.serving_ca),
                private_key_pem=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
                client_ca_pem=pem(self.node_ca),
            )
        )
        gateway = Gateway(
            GatewayConfig(name=name),
            database=self.database,
            services=Services(),
            world=WORLD,
            tls=lambda: context,
        )
        self.gateways.append(gateway)
        await gateway.start()
        async with asyncio.timeout(WAIT_S):
            await gateway.until_ready()
        return gateway

    async def join(self, node_id: str) -> Identity:
        key = certificates.generate_key()
        leaf = certificates.make_node_leaf(
            self.node_ca,
            public_key=key.public_key(),
            identity=NodeIdentity(trust_domain="bc.local", site="default", node_id=node_id, role="node"),
            serial=WORLD.ids.random_bytes(16),
            now_ms=WORLD.clock.now_ms(),
        )
        await seed.add_node(self.database, node_id, serial=certificates.serial_text(leaf))
        return Identity(
            leaf.public_bytes(Encoding.PEM),
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        )

    async def dial(self, gateway: Gateway, identity: Identity | None) -> Connection:
        target = DialTarget(
            url=f"https://127.0.0.1:{gateway.port}",
            serving_ca_spki_sha256=bytes.fromhex(certificates.spki_sha256(self.serving_ca.certificate)),
            identity=identity,
        )
        return await dial(target, world=WORLD)


@pytest.fixture
async def site(dsn: str) -> AsyncIterator[Site]:
    database = await Database.open(
        dsn, dice=WORLD.dice, application_name="gateway", limits=GATEWAY_LIMITS, pool_size=10
    )
    now_ms = WORLD.clock.now_ms()
    site = Site(
        database,
        certificates.make_serving_ca(serial=WORLD.ids.random_bytes(16), now_ms=now_ms),
        certificates.make_node_ca(serial=WORLD.ids.random_bytes(16), now_ms=now_ms),
        [],
    )
    yield site
    for gateway in site.gateways:
        await gateway.stop()
    await database.close()


async def say_hello(connection: Connection, node_id: str, **fields: object) -> tuple[ClientCall, messages.Welcome]:
    call = await connection.call(service.SESSION)
    hello = messages.Hello(
        node_id=node_id,
        role=messages.AGENT_ROLE_NODE,
        boot_id="boot",
        journal_id="journal",
        proto_min=1,
        proto_max=1,
        **fields,  # type: ignore[arg-type] # a test names what it means
    )
    call.send(encode_message(messages.AgentFrame(hello=hello)))
    return call, (await receive(call, lambda frame: frame.HasField("welcome"))).welcome


async def receive(call: ClientCall, wanted: Callable[[messages.ServerFrame], bool]) -> messages.ServerFrame:
    async with asyncio.timeout(WAIT_S):
        while True:
            data = await call.receive()
            assert data is not None, f"ended {call.status} {call.status_message}"
            frame = decode_message(messages.ServerFrame, data)
            if wanted(frame):
                return frame


async def ended(call: ClientCall) -> tuple[int | None, str]:
    async with asyncio.timeout(WAIT_S):
        while await call.receive() is not None:
            pass
    return call.status, call.trailers.get("x-bc-reason", "")


async def test_a_session_and_a_command_over_mutual_tls(site):
    gateway = await site.start("one")
    connection = await site.dial(gateway, await site.join("node-a"))
    call, welcome = await say_hello(connection, "node-a")
    assert welcome.gateway_id == gateway.gateway_id
    await seed.add_command(site.database, "node-a", "c1")
    await site.database.query("SELECT pg_notify('bc_dispatch', 'node-a')")
    await receive(call, lambda frame: frame.HasField("command"))
    update = messages.CommandUpdate(command_id="c1", state=messages.COMMAND_STATE_SUCCEEDED, attempt=1)
    call.send(encode_message(messages.AgentFrame(update=update)))
    await receive(call, lambda frame: "c1" in frame.ack.command_ids)
    assert await seed.state_of(site.database, "c1") == CommandState.SUCCEEDED
    connection.close()


async def test_without_a_certificate_the_stream_is_refused_in_words(site):
    gateway = await site.start("one")
    connection = await site.dial(gateway, None)
    call = await connection.call(service.SESSION)
    assert await ended(call) == (Status.UNAUTHENTICATED, "no-certificate")
    assert "join the machine" in call.status_message
    connection.close()


async def test_a_node_moves_to_the_other_gateway_and_takes_its_work_along(site):
    first, second = await site.start("one"), await site.start("two")
    identity = await site.join("node-a")
    await seed.add_command(site.database, "node-a", "c1")
    connection = await site.dial(first, identity)
    call, _ = await say_hello(connection, "node-a")
    await receive(call, lambda frame: frame.HasField("command"))
    await first.stop()
    assert await ended(call) == (Status.UNAVAILABLE, "stopping")
    connection = await site.dial(second, identity)
    call, welcome = await say_hello(connection, "node-a", running_command_ids=["c1"], last_epoch=1)
    assert (welcome.gateway_id, welcome.epoch) == (second.gateway_id, 2)
    update = messages.CommandUpdate(command_id="c1", state=messages.COMMAND_STATE_SUCCEEDED, attempt=1)
    call.send(encode_message(messages.AgentFrame(update=update)))
    await receive(call, lambda frame: "c1" in frame.ack.command_ids)
    [row] = await site.database.query("SELECT state, attempt FROM commands")
    assert (row["state"], row["attempt"]) == (CommandState.SUCCEEDED, 1), "it ran once and was not sent again"
    connection.close()
