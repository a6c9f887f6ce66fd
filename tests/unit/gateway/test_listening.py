"""A gateway that cannot have its address says which, and what to change."""

from __future__ import annotations

import socket
import ssl

import pytest

from bettercompute.errors import Refused
from bettercompute.gateway.config import GatewayConfig
from bettercompute.gateway.gateway import Gateway
from bettercompute.store.database import Database
from bettercompute.system import system_world
from tests.contract.gateway.rig import Services


def no_context() -> ssl.SSLContext:
    raise AssertionError("nobody connects")


async def test_an_address_that_cannot_be_had_is_named(database: Database):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        gateway = Gateway(
            GatewayConfig(name="gw", host="127.0.0.1", port=port),
            database=database,
            services=Services(),
            world=system_world(),
            tls=no_context,
        )
        with pytest.raises(Refused, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            await gateway.start()
        await gateway.stop()
