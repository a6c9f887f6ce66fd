"""The API over a real database, without a network: a client per role, and two joined nodes."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from prometheus_client import CollectorRegistry

from bettercompute.api.app import create_app
from bettercompute.api.context import ApiContext, JoinEndpoint
from bettercompute.api.finished import FinishedFeed
from bettercompute.store import api_tokens, nodes
from bettercompute.store.database import Database, Transaction
from bettercompute.system import system_world

WORLD = system_world()


@dataclass(frozen=True)
class Provisioned:
    node_id: str
    chain_pem: bytes
    serving_ca_pem: bytes
    signed_trust_bundle: bytes
    identity: Mapping[str, Any]


class RecordingProvisioner:
    """Answers with what it was asked, so that tests see it."""

    async def provision(
        self, *, node_id: str, site: str, role: str, csr_der: bytes, asked_by: str, replace: bool = False
    ) -> Provisioned:
        identity = {"site": site, "role": role, "csr_bytes": len(csr_der), "asked_by": asked_by, "replace": replace}
        return Provisioned(
            node_id=node_id,
            chain_pem=b"chain",
            serving_ca_pem=b"ca",
            signed_trust_bundle=b"\x00bundle",
            identity=identity,
        )


class NoKeeper:
    """Of an installation whose keys nobody rotates."""

    async def prepare(self, **_: Any) -> Any:
        raise AssertionError("nobody prepares a key here")

    async def switch(self, **_: Any) -> Any:
        raise AssertionError("nobody switches keys here")

    async def retire(self, **_: Any) -> Any:
        raise AssertionError("nobody retires a key here")

    async def publish(self, transaction: Transaction) -> int:  # noqa: ARG002 - the name is the protocol's
        raise AssertionError("nobody publishes here")


@pytest.fixture
async def context(database: Database, dsn: str) -> AsyncIterator[ApiContext]:
    feed = FinishedFeed(dsn)
    feed.start()
    yield ApiContext(
        database=database,
        world=WORLD,
        finished=feed,
        registry=CollectorRegistry(),
        join_endpoint=JoinEndpoint(
            gateway_urls=("https://gw.test:8443",),
            serving_ca_pins=("ab" * 32,),
            join_signing_key=ec.generate_private_key(ec.SECP256R1()).public_key(),
            join_encryption_key=ec.generate_private_key(ec.SECP256R1()).public_key(),
        ),
        provisioner=RecordingProvisioner(),
        trust=NoKeeper(),
        trust_domain="bc.test",
        site="default",
    )
    await feed.stop()


@pytest.fixture
async def clients(context: ApiContext) -> AsyncIterator[Mapping[str, httpx.AsyncClient]]:
    opened = {}
    transport = httpx.ASGITransport(app=create_app(context), raise_app_exceptions=False)
    for role in ("viewer", "operator", "admin", "nobody"):
        if role != "nobody":
            await api_tokens.create(
                context.database,
                token_id=role,
                name=f"a-{role}",
                sha256=api_tokens.sha256_of(f"secret-{role}"),
                role=role,
                created_by="test",
            )
        headers = {"authorization": f"Bearer secret-{role}"}
        opened[role] = httpx.AsyncClient(transport=transport, base_url="http://api.test", headers=headers)
    yield opened
    for client in opened.values():
        await client.aclose()


@pytest.fixture
async def two_nodes(database: Database) -> tuple[str, str]:
    for node_id in ("n1", "n2"):
        async with database.transaction() as transaction:
            await nodes.insert_joined(
                transaction,
                nodes.JoinedNode(
                    node_id=node_id, site="default", role="node", tenant_controlled=False, attestor="join-token"
                ),
            )
    return "n1", "n2"
