"""A gateway under a database role of its own: all that it does still works, and nothing that it has no business with.

The tests of standing here are those of tests/contract/gateway, with the gateway's connections under the role; those of
sessions are in test_gateway_role_sessions.py, for the long run.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import pytest

from bettercompute.gateway.config import GatewayConfig
from bettercompute.pki import certificates
from bettercompute.store import roles, statements
from bettercompute.store.database import Database, DedicatedConnection, StatementFailed
from bettercompute.system import system_world
from bettercompute.testing.postgres import TestServer
from bettercompute.transport.memory import MemoryServer
from tests.contract.gateway.conftest import config, node_ca  # noqa: F401  # fixtures
from tests.contract.gateway.rig import WAIT_S, Rig, Services, make_gateway, make_world
from tests.contract.gateway.test_standing import *  # noqa: F403  # a suite, under the role
from tests.security import gateway_grants


def under_role(dsn: str) -> str:
    return f"{dsn}&role={roles.GATEWAY}"


@pytest.fixture
async def granted(dsn: str) -> str:
    """A fresh database in which the role has its privileges."""
    await roles.grant(dsn)
    return dsn


@pytest.fixture
async def rig(
    granted: str,
    database: Database,
    node_ca: certificates.Authority,  # noqa: F811
    config: GatewayConfig,  # noqa: F811
) -> AsyncIterator[Rig]:
    """A gateway whose every connection is under the role; the test itself looks with its own."""
    world, services = make_world(), Services()
    restricted = await Database.open(under_role(granted), dice=system_world().dice, application_name="gateway")
    gateway = make_gateway(restricted, world, services, config)
    await gateway.start()
    await asyncio.wait_for(gateway.until_ready(), WAIT_S)
    server = MemoryServer(gateway.handler, world=world)
    made = Rig(database, world, services, gateway, server, node_ca)
    yield made
    await made.stop()
    await restricted.close()


# Statement by statement

WRITES = re.compile(r"\b(INSERT INTO|UPDATE [a-z_]+|DELETE FROM)\b")


@pytest.fixture
async def restricted(granted: str) -> AsyncIterator[DedicatedConnection]:
    connection = await DedicatedConnection.open(under_role(granted), application_name="gateway")
    yield connection
    await connection.close()


async def test_everything_that_a_gateway_runs_is_allowed(restricted: DedicatedConnection):
    asking = await gateway_grants.prepare(restricted, gateway_grants.asked())
    await restricted.script("BEGIN")
    refused = [name for name, sql in asking.items() if not await gateway_grants.allowed(restricted, sql)]
    assert refused == []
    assert len(asking) > 25


# Writes of others that are made of what a gateway may write: it can end sessions and commands, and withhold by that; it
# can send what approvers have signed in another step than whoever leads the run.
ALSO_ALLOWED = frozenset(
    {
        *(
            "approvers.release_step",
            "certificates.revoke_generation",
            "certificates.supersede",
            "delivery.expire",
            "inventory.forget_hashes",
        ),
        *("leases.retire", "liveness.mark_disconnected", "liveness.mark_unreachable", "standing.end_commands"),
        "waiting.abandon",
    }
)


async def test_no_other_write_is_allowed(restricted: DedicatedConnection):
    """What is new here has to be thought about: what could a gateway do by it?"""
    others = {
        name: (statement.sql, len(statement.arguments))
        for name, statement in statements.statements().items()
        if name not in gateway_grants.statements_of_gateway() and WRITES.search(statement.sql)
    }
    asking = await gateway_grants.prepare(restricted, others)
    await restricted.script("BEGIN")
    found = {name for name, sql in asking.items() if await gateway_grants.allowed(restricted, sql)}
    assert found == ALSO_ALLOWED
    assert len(others) > 3 * len(found)


FORBIDDEN = {
    "insert a command": "INSERT INTO commands (id, node_id, kind, lane, body, created_by, not_after, timeout_ms)"
    " VALUES ('c', 'n', 'node.reboot', 1, 'b', 'me', now(), 1)",
    "alter a command's bytes": "UPDATE commands SET body = 'b'",
    "alter a command's signature": "UPDATE commands SET signature = NULL",
    "alter a command's approval": "UPDATE commands SET batch_approval = NULL",
    "give a command to another node": "UPDATE commands SET node_id = 'n'",
    "let a command live longer": "UPDATE commands SET not_after = now()",
    "call a forgery verified": "UPDATE commands SET attestation = 'verified'",
    "delete a command": "DELETE FROM commands",
    "call a statement verified": "UPDATE node_status SET attestation = 'verified'",
    "publish a spec": "UPDATE nodes SET spec_body = 'b', spec_generation = 9",
    "store a spec": "INSERT INTO node_specs (node_id) VALUES ('n')",
    "unlock a node": "UPDATE nodes SET locked_until = NULL, locked_by = NULL",
    "raise an identity": "UPDATE nodes SET identity_generation = 9",
    "make a node": "INSERT INTO nodes (node_id, site, role, attestor) VALUES ('n', 's', 'node', 'a')",
    "make a certificate good": "INSERT INTO node_certs (serial, node_id) VALUES ('0a', 'n')",
    "let a certificate live longer": "UPDATE node_certs SET not_after = now()",
    "read join tokens": "SELECT * FROM join_tokens",
    "use a join token": "UPDATE join_tokens SET used_at = now()",
    "read api tokens": "SELECT * FROM api_tokens",
    "make an api token": "INSERT INTO api_tokens (token_id) VALUES ('t')",
    "read the audit log": "SELECT * FROM audit_log",
    "write the audit log": "INSERT INTO audit_log (id) VALUES ('a')",
    "publish trust": "INSERT INTO trust_bundles (version) VALUES (9)",
    "use up a proof": "INSERT INTO replay_cache (purpose, jti, expires_at) VALUES ('p', 'j', now())",
    "read answers kept for others": "SELECT * FROM idempotency_keys",
    "order the stream": "UPDATE outbox SET position = 1",
    "read the stream": "SELECT * FROM outbox",
    "draw a command's place": "SELECT nextval('commands_seq')",
    "move the clock": "CREATE OR REPLACE FUNCTION compute_now() RETURNS timestamptz LANGUAGE sql AS 'SELECT now()'",
    "make a table": "CREATE TABLE mine (a int)",
    "empty a table": "TRUNCATE node_events",
    "stop a trigger": "ALTER TABLE commands DISABLE TRIGGER ALL",
    "rewrite history": "UPDATE node_events SET payload = ''",
    "forget events": "DELETE FROM node_events",
    "pretend a migration": "INSERT INTO schema_migrations (version) VALUES (99)",
}


@pytest.mark.parametrize("what", FORBIDDEN)
async def test_what_a_gateway_must_not_do_is_refused(what: str, restricted: DedicatedConnection) -> None:
    with pytest.raises(StatementFailed) as refused:
        await restricted.script(FORBIDDEN[what])
    assert refused.value.sqlstate == "42501"


TAKEN_BACK = {
    "let a revoked certificate be good": "UPDATE node_certs SET revoked_at = NULL, revocation_reason = NULL",
    "say why otherwise": "UPDATE node_certs SET revocation_reason = 'rejoined'",
    "let an older copy be the node": "UPDATE node_certs SET superseded_at = NULL",
    "let a used certificate count as unused": "UPDATE node_certs SET first_used_at = NULL",
    "end a quarantine": "UPDATE nodes SET quarantined_at = NULL, quarantine_reason = NULL",
}


async def test_what_was_said_of_an_identity_is_not_taken_back(granted: str, restricted: DedicatedConnection) -> None:
    owner = await DedicatedConnection.open(granted, application_name="tests")
    try:
        await owner.script(
            "BEGIN; INSERT INTO nodes (node_id, site, role, attestor, quarantined_at, quarantine_reason)"
            " VALUES ('marked', 's', 'node', 'a', now(), 'duplicate');"
            "INSERT INTO node_certs (serial, node_id, identity_generation, csr_sha256, chain, not_before, not_after,"
            " issued_at, first_used_at, superseded_at, revoked_at, revocation_reason) VALUES"
            " ('0a', 'marked', 1, sha256('a'), 'c', now(), now() + interval '1 day', now(), now(), now(), now(),"
            " 'stolen');"
            "COMMIT"
        )
        try:
            for connection in (restricted, owner):
                for what, statement in TAKEN_BACK.items():
                    with pytest.raises(StatementFailed) as refused:
                        await connection.script(statement)
                    assert refused.value.sqlstate == "42501", what
            await owner.script(
                "UPDATE nodes SET quarantined_at = NULL, quarantine_reason = NULL, identity_generation = 2"
            )
        finally:
            await owner.script("DELETE FROM node_certs WHERE serial = '0a'; DELETE FROM nodes WHERE node_id = 'marked'")
    finally:
        await owner.close()


async def test_operators_labels_are_not_a_gateways_to_set(granted: str, restricted: DedicatedConnection) -> None:
    """They say whose token reaches a node, and which nodes a run chooses."""
    labels = "INSERT INTO node_labels (node_id, source, key, value) VALUES ('labelled', '{}', 'rack', '7')"
    owner = await DedicatedConnection.open(granted, application_name="tests")
    try:
        await owner.script("INSERT INTO nodes (node_id, site, role, attestor) VALUES ('labelled', 's', 'node', 'a')")
        with pytest.raises(StatementFailed, match="not a gateway's"):
            await restricted.script(labels.format("operator"))
        await restricted.script(labels.format("system"))
        await owner.script(labels.format("operator"))
        with pytest.raises(StatementFailed, match="not a gateway's"):
            await restricted.script("DELETE FROM node_labels WHERE node_id = 'labelled' AND source = 'operator'")
        await restricted.script("DELETE FROM node_labels WHERE node_id = 'labelled' AND source = 'system'")
        [row] = await owner.query("SELECT count(*) AS kept FROM node_labels WHERE node_id = 'labelled'")
        assert row["kept"] == 1
        await owner.script("DELETE FROM nodes WHERE node_id = 'labelled'")
    finally:
        await owner.close()


async def test_tables_of_a_later_release_are_closed(dsn: str, granted: str, restricted: DedicatedConnection):
    owner = await DedicatedConnection.open(dsn, application_name="tests")
    try:
        await owner.script("CREATE TABLE sealed_secrets (name text, sealed bytea)")
    finally:
        await owner.close()
    await roles.grant(dsn)
    with pytest.raises(StatementFailed) as refused:
        await restricted.query("SELECT * FROM sealed_secrets")
    assert refused.value.sqlstate == "42501"


async def test_the_printed_script_makes_the_same_role(postgres_server: TestServer, granted: str):
    """Run by an administrator, who may make roles, where this program's user may not."""
    assert roles.script().startswith(f"CREATE ROLE {roles.GATEWAY} NOLOGIN;")
    owner = await DedicatedConnection.open(granted, application_name="tests")
    rows = "SELECT table_name, column_name, privilege_type FROM information_schema.column_privileges"
    rows += " WHERE grantee = $1 ORDER BY 1, 2, 3"
    try:
        before = [dict(row) for row in await owner.query(rows, roles.GATEWAY)]
        await owner.script(roles.script().partition("\n")[2])
        after = [dict(row) for row in await owner.query(rows, roles.GATEWAY)]
    finally:
        await owner.close()
    assert before == after != []


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_no_privilege_is_needless(granted: str):
    connection = await DedicatedConnection.open(granted, application_name="tests")
    try:
        assert roles.GRANTS.read_text() == gateway_grants.written(await gateway_grants.minimal(connection))
    finally:
        await connection.close()
