"""Cost grows with work, never with the fleet: no recurring statement reads a large table from end to end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bettercompute.store.database import DedicatedConnection
from bettercompute.store.statements import Statement, statements

pytestmark = pytest.mark.long

NODES = 100_000
COMMANDS = 1_000_000
LARGE = {
    "nodes",
    "node_sessions",
    "node_certs",
    "node_labels",
    "commands",
    "outbox",
    "node_events",
    "inventory_sections",
}
# Read whole because somebody asks for the whole, with the reason.
WHOLE = {
    "nodes.state_counts": "an operator's overview, counted over all nodes",
    "trust.holders": "an operator's overview, counted over all nodes",
    "trust.connected_behind": "once, where an operator asks for a step of a rotation",
    "trust.returning_behind": "the same",
    "trust.signed_under": "the same",
    "trust.highest_held": "once, where a trust bundle is published",
    "approvers.highest_epoch": "once, where an approver set is proposed",
}
FLEET = f"""
INSERT INTO nodes (node_id, site, role, attestor, state)
  SELECT 'n' || i, 'site' || i % 10, 'node', 'join-token', 'connected' FROM generate_series(1, {NODES}) i;
INSERT INTO node_sessions (node_id, gateway_id, session_id, session_epoch, last_seen, connected_at, journal_id)
  SELECT 'n' || i, 'g' || i % 20, 's' || i, 1, compute_now(), compute_now(), 'j' FROM generate_series(1, {NODES}) i;
INSERT INTO node_certs (serial, node_id, identity_generation, csr_sha256, chain, not_before, not_after)
  SELECT to_hex(i), 'n' || i, 1, sha256(i::text::bytea), 'c', compute_now(), compute_now() + interval '1 day'
  FROM generate_series(1, {NODES}) i;
INSERT INTO node_labels (node_id, source, key, value)
  SELECT 'n' || i, 'system', 'bc.dev/cap.nvml', '1' FROM generate_series(1, {NODES}) i;
INSERT INTO inventory_sections (node_id, section, sha256, body)
  SELECT 'n' || i, 'cpu', sha256('x'), 'x' FROM generate_series(1, {NODES}) i;
INSERT INTO commands (id, node_id, kind, lane, body, created_by, not_after, timeout_ms, state, finished_at)
  SELECT 'c' || i, 'n' || i % {NODES}, 'inventory.refresh', 1, 'b', 'ops', compute_now() + interval '1 day', 1,
         CASE WHEN i % 100 = 0 THEN 1 ELSE 5 END, CASE WHEN i % 100 = 0 THEN NULL ELSE compute_now() END
  FROM generate_series(1, {COMMANDS}) i;
INSERT INTO outbox (id, type, payload, position)
  SELECT 'e' || i, 'node.joined', '{{}}', i FROM generate_series(1, {NODES}) i;
INSERT INTO node_events (node_id, journal_id, seq, event_id, type, occurred_at, payload)
  SELECT 'n' || i, 'j', 1, 'e' || i, 'started', compute_now(), '' FROM generate_series(1, {NODES}) i;
"""


@pytest.fixture(scope="module")
def fleet_dsn(postgres_server):
    """A database with a large fleet, filled once."""
    address = postgres_server.create_database()
    yield address
    postgres_server.drop_database(address)


@pytest.fixture
async def fleet(fleet_dsn):
    connection = await DedicatedConnection.open(fleet_dsn, application_name="tests")
    [filled] = await connection.query("SELECT EXISTS (SELECT FROM nodes) AS filled")
    if not filled["filled"]:
        await connection.script(FLEET)
        await connection.script("ANALYZE")
    yield connection
    await connection.close()


def whole_reads(plan: dict[str, Any]) -> set[str]:
    """The large tables that a plan reads from end to end."""
    found = {plan["Relation Name"]} if plan["Node Type"] == "Seq Scan" else set()
    return (found & LARGE).union(*(whole_reads(child) for child in plan.get("Plans", ())))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("statement", statements().values(), ids=lambda statement: statement.name)
async def test_no_large_table_is_read_whole(statement: Statement, fleet: DedicatedConnection) -> None:
    if statement.sql.partition("*/")[2].strip().startswith("LOCK"):
        return
    # As the server plans for any values, which is what a prepared statement gets in the long run.
    await fleet.script(f"SET plan_cache_mode = force_generic_plan; PREPARE explained AS {statement.sql}")
    values = ", ".join("NULL" for _ in statement.arguments)
    [row] = await fleet.query(f"EXPLAIN (FORMAT JSON) EXECUTE explained{f'({values})' if values else ''}")
    [explained] = json.loads(row["QUERY PLAN"])
    read = whole_reads(explained["Plan"])
    assert (read != set()) == (statement.name in WHOLE), f"{read}\n{json.dumps(explained['Plan'], indent=1)[:4000]}"
