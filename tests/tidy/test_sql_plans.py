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
# Tables that grow neither with the fleet nor with work nor with time, with what they grow with. All others are large.
SMALL = {
    "leases": "gateways",
    "controller_runs": "controllers",
    "outbox_publisher": "nothing: one row",
    "trust_bundles": "changes of trust",
    "trust_keys": "keys that were rotated",
    "approver_sets": "changes of the set",
    "api_tokens": "operators and their programs",
    "schema_migrations": "releases",
    "schema_migrations_lock": "nothing: no row",
}
# Read whole because somebody asks for the whole, with the reason.
WHOLE = {
    "nodes.state_counts": "an operator's overview, counted over all nodes",
    "trust.holders": "an operator's overview, counted over all nodes",
    "trust.connected_behind": "once, where an operator asks for a step of a rotation",
    "trust.returning_behind": "the same",
    "trust.signed_under": "the same",
    "trust.issued_before": "the same",
    "doctor.behind": "an operator's doctor, which looks for a node that usually there is not",
    "doctor.other_set": "the same",
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
INSERT INTO node_event_gaps (node_id, journal_id, first_seq, last_seq)
  SELECT 'n' || i, 'j', 2, 3 FROM generate_series(1, {NODES}) i;
INSERT INTO node_conditions (node_id, type, source, status)
  SELECT 'n' || i, 'HostClockOff', 'daemon', CASE WHEN i % 100 = 0 THEN 'true' ELSE 'false' END
  FROM generate_series(1, {NODES}) i;
INSERT INTO node_status (node_id, report, judged_at)
  SELECT 'n' || i, 'x', compute_now() FROM generate_series(1, {NODES}) i;
INSERT INTO node_specs (node_id, generation, body, spec_sha256, changed, issued_by)
  SELECT 'n' || i, 1, 'x', sha256('x'), '{{}}', 'ops' FROM generate_series(1, {NODES}) i;
INSERT INTO inventory_hashes (node_id, section, sha256)
  SELECT 'n' || i, 'cpu', sha256('x') FROM generate_series(1, {NODES}) i;
INSERT INTO command_output (command_id, output_offset, node_id, data)
  SELECT 'c' || i, 0, 'n' || i, 'x' FROM generate_series(1, {NODES}) i;
INSERT INTO join_tokens (token_id, secret_sha256, site, role, expires_at, created_by)
  SELECT 't' || i, sha256(i::text::bytea), 'site', 'node', compute_now(), 'ops' FROM generate_series(1, {NODES}) i;
INSERT INTO approval_batches (batch_id, kind, scope_root, scope_size, not_after, trust_domain, asked_by, state,
                              decided_at)
  SELECT 'b' || i, 'node.reboot', sha256('x'), 1, compute_now(), 'bc', 'ops', 'approved', compute_now()
  FROM generate_series(1, {NODES}) i;
INSERT INTO audit_log (id, actor, action, target, outcome)
  SELECT 'a' || i, 'ops', 'command.run', 'batch/b' || i, 'done' FROM generate_series(1, {NODES}) i;
INSERT INTO idempotency_keys (principal, key, request_sha256, response)
  SELECT 'ops', 'k' || i, sha256('x'), '{{}}' FROM generate_series(1, {NODES}) i;
INSERT INTO replay_cache (purpose, jti, expires_at)
  SELECT 'renew-pop', 'r' || i, compute_now() FROM generate_series(1, {NODES}) i;
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


@pytest.fixture
async def partial(fleet: DedicatedConnection) -> set[str]:
    """The indexes that hold only some of their table: reading all of one is what they are for."""
    rows = await fleet.query("SELECT indexrelid::regclass::text AS name FROM pg_index WHERE indpred IS NOT NULL")
    return {row["name"] for row in rows}


def whole_reads(plan: dict[str, Any], *, partial: set[str]) -> set[str]:
    """The large tables that a plan reads from end to end, or may, in the order of an index while it looks for a row."""
    found = {plan["Relation Name"]} if plan["Node Type"] == "Seq Scan" else set()
    if (
        plan["Node Type"] in {"Index Scan", "Index Only Scan"}
        and plan["Index Name"] not in partial
        and "Index Cond" not in plan
        and "Filter" in plan
    ):
        found = {plan["Relation Name"]}
    found -= SMALL.keys()
    return found.union(*(whole_reads(child, partial=partial) for child in plan.get("Plans", ())))


async def test_every_large_table_is_filled(fleet: DedicatedConnection) -> None:
    rows = await fleet.query(
        "SELECT c.relname AS name, c.reltuples AS rows FROM pg_class c"
        " WHERE c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace"
    )
    assert {row["name"] for row in rows if row["rows"] < NODES} == SMALL.keys()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("statement", statements().values(), ids=lambda statement: statement.name)
async def test_no_large_table_is_read_whole(
    statement: Statement, fleet: DedicatedConnection, partial: set[str]
) -> None:
    if statement.sql.partition("*/")[2].strip().startswith("LOCK"):
        return
    # As the server plans for any values, which is what a prepared statement gets in the long run.
    await fleet.script(f"SET plan_cache_mode = force_generic_plan; PREPARE explained AS {statement.sql}")
    values = ", ".join("NULL" for _ in statement.arguments)
    [row] = await fleet.query(f"EXPLAIN (FORMAT JSON) EXECUTE explained{f'({values})' if values else ''}")
    [explained] = json.loads(row["QUERY PLAN"])
    read = whole_reads(explained["Plan"], partial=partial)
    assert (read != set()) == (statement.name in WHOLE), f"{read}\n{json.dumps(explained['Plan'], indent=1)[:4000]}"
