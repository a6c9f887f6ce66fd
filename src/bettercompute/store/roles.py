"""Decide what a gateway may do in the database: a role of its own, with the privileges that its statements ask for.

A gateway stands where everybody may knock. Under this role it cannot insert a command, alter the bytes or the signature
of one, read a token, a spec's history or the audit log, nor any table that a later release adds: what is not granted
here is refused by PostgreSQL. See docs/security.md, "The database of a gateway"; decisions 0141.
"""

from __future__ import annotations

from pathlib import Path

from bettercompute.errors import Refused
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store.database import DedicatedConnection, StatementFailed

GATEWAY = "better_compute_gateway"
GRANTS = Path(__file__).parent / "grants" / "gateway.sql"

_EXISTS = "SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1) AS found"
# The name is taken, or was by somebody else at the same moment.
_DUPLICATE = frozenset({"42710", "23505"})
_NOT_ALLOWED = "42501"


async def grant(dsn: str, *, grants: str | None = None) -> None:
    """Make the gateways' role where it is missing, and give it in this database what this release needs, no more."""
    connection = await DedicatedConnection.open(dsn, application_name="better-compute db roles")
    try:
        if not await _exists(connection):
            await _create(connection)
        await _grant(connection, grants)
    finally:
        await connection.close()


async def refresh(connection: DedicatedConnection) -> None:
    """Give the role what this release needs, where somebody has made it: after a migration, whose tables are new."""
    if await _exists(connection):
        await _grant(connection, None)


def script() -> str:
    """Return the statements for somebody else to run: who may run migrations may not make roles everywhere."""
    return f"CREATE ROLE {GATEWAY} NOLOGIN;\n{_statements(None)}"


async def _exists(connection: DedicatedConnection) -> bool:
    [row] = await connection.query(_EXISTS, GATEWAY)
    return bool(row["found"])


async def _create(connection: DedicatedConnection) -> None:
    try:
        await connection.script(f"CREATE ROLE {GATEWAY} NOLOGIN")
    except StatementFailed as failure:
        if failure.sqlstate == _NOT_ALLOWED:
            raise _may_not(failure) from failure
        if failure.sqlstate not in _DUPLICATE:  # somebody made it meanwhile
            raise


async def _grant(connection: DedicatedConnection, grants: str | None) -> None:
    try:
        async with connection.transaction() as transaction:
            await transaction.script(_statements(grants))
    except StatementFailed as failure:
        if failure.sqlstate == _NOT_ALLOWED:
            raise _may_not(failure) from failure
        raise


def _statements(grants: str | None) -> str:
    return (
        f"REVOKE ALL ON ALL TABLES IN SCHEMA public FROM {GATEWAY};\n"
        f"REVOKE ALL ON ALL SEQUENCES IN SCHEMA public FROM {GATEWAY};\n"
        f"GRANT USAGE ON SCHEMA public TO {GATEWAY};\n"
        + (GRANTS.read_text(encoding="utf-8") if grants is None else grants)
    )


def _may_not(failure: StatementFailed) -> Refused:
    return refuse(
        Reason.ACCESS_DENIED,
        f"this database user may not manage the role {GATEWAY} ({failure.message}): have an administrator of the "
        "database run what `better-compute db roles --print` prints",
    )
