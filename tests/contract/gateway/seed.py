"""Rows that a gateway's tests begin with: a lease, joined nodes with a certificate, commands."""

from __future__ import annotations

from bettercompute.protocol import messages
from bettercompute.store.database import Database
from bettercompute.store.sessions import Lease, SessionKey

LEASE = Lease(gateway_id="gw-00000001", token="token-1")
OTHER_LEASE = Lease(gateway_id="gw-00000002", token="token-2")


async def add_lease(database: Database, lease: Lease = LEASE, *, left_s: float = 15) -> None:
    """Insert a living lease."""
    await database.query(
        "INSERT INTO leases (name, token, expires_at, advertise_url, internal_url, version, stream_limit)"
        " VALUES ($1, $2, compute_now() + make_interval(secs => $3::float8), 'https://gw', 'https://gw', '0', 5000)",
        lease.gateway_id,
        lease.token,
        float(left_s),
    )


async def add_node(database: Database, node_id: str, *, serial: str | None = None, role: str = "node") -> None:
    """Insert a joined node with its session row and a certificate."""
    await database.query(
        "INSERT INTO nodes (node_id, site, role, attestor) VALUES ($1, 'default', $2, 'join-token')", node_id, role
    )
    await database.query("INSERT INTO node_sessions (node_id) VALUES ($1)", node_id)
    if serial is not None:
        await add_certificate(database, node_id, serial=serial)


async def add_certificate(database: Database, node_id: str, *, serial: str, generation: int = 1) -> None:
    """Insert a certificate that is valid for a day."""
    await database.query(
        "INSERT INTO node_certs (serial, node_id, identity_generation, csr_sha256, chain, not_before, not_after)"
        " VALUES ($1, $2, $3, sha256($1::text::bytea), '', compute_now() - interval '1 hour',"
        " compute_now() + interval '1 day')",
        serial,
        node_id,
        generation,
    )


async def connect_node(
    database: Database, key: SessionKey, lease: Lease = LEASE, *, journal_id: str = "journal"
) -> None:
    """Make a node's row belong to a live session."""
    await database.query(
        "UPDATE node_sessions SET gateway_id = $1, session_id = $2, session_epoch = $3, boot_id = 'boot',"
        " journal_id = $4, connected_at = compute_now(), last_seen = compute_now(), disconnected_at = NULL"
        " WHERE node_id = $5",
        lease.gateway_id,
        key.session_id,
        key.epoch,
        journal_id,
        key.node_id,
    )
    await database.query("UPDATE nodes SET state = 'connected' WHERE node_id = $1", key.node_id)


async def add_command(
    database: Database,
    node_id: str,
    command_id: str,
    *,
    kind: str = "inventory.refresh",
    lane: messages.Lane.ValueType = messages.LANE_CONTROL,
    state: int = 1,
    key: SessionKey | None = None,
    not_after_s: float = 3600,
    not_before_s: float | None = None,
    attempt: int = 0,
) -> None:
    """Insert a command; with a state in flight it belongs to `key`."""
    body = messages.CommandBody(
        command_id=command_id, node_id=node_id, kind=kind, lane=lane, timeout_ms=60_000
    ).SerializeToString()
    await database.query(
        "INSERT INTO commands (id, node_id, kind, lane, body, state, created_by, not_before, not_after, timeout_ms,"
        " session_id, session_epoch, attempt, dispatched_at, finished_at, reason)"
        " VALUES ($1, $2, $3, $4, $5, $6, 'test', compute_now() + make_interval(secs => $7),"
        " compute_now() + make_interval(secs => $8), 60000, $9, $10, $11,"
        " CASE WHEN $6::smallint > 1 THEN compute_now() END, CASE WHEN $6::smallint >= 5 THEN compute_now() END,"
        " CASE WHEN $6::smallint >= 5 THEN 'seeded' ELSE '' END)",
        command_id,
        node_id,
        kind,
        lane,
        body,
        state,
        None if not_before_s is None else float(not_before_s),
        float(not_after_s),
        None if key is None else key.session_id,
        None if key is None else key.epoch,
        max(attempt, 1 if state > 1 else 0),
    )


async def state_of(database: Database, command_id: str) -> int:
    """Return a command's state."""
    rows = await database.query("SELECT state FROM commands WHERE id = $1", command_id)
    return int(rows[0]["state"])
