"""A started gateway for each test that asks for one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from bettercompute.gateway.config import GatewayConfig
from bettercompute.pki import certificates
from bettercompute.session import opening
from bettercompute.store.database import Database
from bettercompute.transport.memory import MemoryServer
from tests.contract.gateway.rig import WAIT_S, Rig, Services, make_gateway, make_world


@pytest.fixture(scope="session")
def node_ca() -> certificates.Authority:
    """The CA of every test's node certificates."""
    world = make_world()
    return certificates.make_node_ca(serial=world.ids.random_bytes(16), now_ms=world.clock.now_ms())


@pytest.fixture
def config() -> GatewayConfig:
    """The gateway's configuration; a test module may override it."""
    return GatewayConfig(name="gw")


@pytest.fixture
async def rig(
    database: Database, node_ca: certificates.Authority, config: GatewayConfig, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Rig]:
    """A gateway that admits sessions, also on a machine that stands still for a while."""
    monkeypatch.setattr(opening, "LOOP_LAG_MAX_MS", 600_000)
    world = make_world()
    services = Services()
    gateway = make_gateway(database, world, services, config)
    await gateway.start()
    await asyncio.wait_for(gateway.until_ready(), WAIT_S)
    server = MemoryServer(gateway.handler, world=world)
    rig = Rig(database, world, services, gateway, server, node_ca)
    yield rig
    await rig.stop()
