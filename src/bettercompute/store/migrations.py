"""Decide how the schema moves: files NNNN_name.{expand,contract}.sql, applied in order, once, by one runner at a time.

Expanding is safe beside the previous release and comes first at an upgrade; contracting removes what only the previous
release needs and is held back until asked for. A file that was applied and then changed is refused, and so is a
database that a newer release has already moved on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from bettercompute.errors import Bug, Refused, Unavailable
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import roles
from bettercompute.store.database import DedicatedConnection, Locked, StatementFailed

FOLDER = Path(__file__).parent / "migrations"
# First line of a file that cannot run in a transaction (CREATE INDEX CONCURRENTLY). It holds one statement, repeatable.
NO_TRANSACTION = "-- no-transaction"
# An index on a large table takes its time.
TURN_WAIT_MS = 3_600_000
TURN_POLL_MS = 100

# Two runners made the tables at the same moment, of which IF NOT EXISTS sees nothing before the commit: a key of the
# catalogue is taken, there is such a table by now, or, between those two looks, a row type of its name.
_MADE_MEANWHILE = frozenset({"23505", "42P07", "42710"})

_FILE_NAME = re.compile(r"(?P<version>\d{4})_(?P<name>[a-z0-9_]+)\.(?P<phase>expand|contract)\.sql")
_OWN_TABLES = """
CREATE TABLE IF NOT EXISTS schema_migrations (
  version integer PRIMARY KEY, name text NOT NULL, phase text NOT NULL, checksum text NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT statement_timestamp());
CREATE TABLE IF NOT EXISTS schema_migrations_lock ();
"""


class Phase(StrEnum):
    """When a migration may run relative to the deploy of its release."""

    EXPAND = "expand"
    CONTRACT = "contract"


@dataclass(frozen=True, slots=True)
class Migration:
    """One file."""

    version: int
    name: str
    phase: Phase
    sql: str

    @property
    def checksum(self) -> str:
        """Return the SHA-256 of the file's text."""
        return hashlib.sha256(self.sql.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Applied:
    """What the database says about a migration it has."""

    version: int
    name: str
    phase: Phase
    checksum: str


@dataclass(frozen=True, slots=True)
class Status:
    """The schema of a database beside the migrations that this program knows."""

    applied: tuple[Applied, ...]
    pending: tuple[Migration, ...]
    changed: tuple[Applied, ...]
    newer: tuple[Applied, ...]


def read(folder: Path = FOLDER) -> list[Migration]:
    """Return the migrations in order. Raises Bug for a misnamed file or a gap in the numbers."""
    found = []
    for path in sorted(folder.glob("*.sql")):
        match = _FILE_NAME.fullmatch(path.name)
        if match is None:
            raise Bug(f"migration {path.name}: not named NNNN_name.expand.sql or NNNN_name.contract.sql")
        found.append(
            Migration(int(match["version"]), match["name"], Phase(match["phase"]), path.read_text(encoding="utf-8"))
        )
    if [migration.version for migration in found] != list(range(1, len(found) + 1)):
        raise Bug(f"migrations in {folder} are not numbered from 1 without a gap")
    return found


async def status(dsn: str, *, folder: Path = FOLDER) -> Status:
    """Compare the database with the files, changing nothing."""
    connection = await DedicatedConnection.open(dsn, application_name="better-compute db status")
    try:
        return _compare(await _applied(connection), read(folder))
    finally:
        await connection.close()


async def require_current(dsn: str, *, folder: Path = FOLDER) -> None:
    """Refuse to run on a schema that lacks what this program needs, or that a later release has contracted."""
    found = await status(dsn, folder=folder)
    _refuse_changed(found)
    missing = [migration for migration in found.pending if migration.phase is Phase.EXPAND]
    if missing:
        raise _refusal(f"the database lacks migration {_title(missing[0])}: run `better-compute db migrate` first")
    contracted = [migration for migration in found.newer if migration.phase is Phase.CONTRACT]
    if contracted:
        raise _refuse_newer(contracted[-1])


async def migrate(dsn: str, *, folder: Path = FOLDER, contract: bool = False) -> list[Migration]:
    """Apply what is pending and return it. Contract migrations at the end wait unless asked for or the base is new."""
    guard = await DedicatedConnection.open(dsn, application_name="better-compute db migrate (lock)")
    runner = await DedicatedConnection.open(dsn, application_name="better-compute db migrate")
    try:
        await _create_own_tables(guard)
        async with _only_runner(guard):
            found = _compare(await _applied(runner), read(folder))
            _refuse_changed(found)
            if found.newer:
                raise _refuse_newer(found.newer[-1])
            pending = list(found.pending)
            while pending and found.applied and not contract and pending[-1].phase is Phase.CONTRACT:
                pending.pop()
            for migration in pending:
                await _apply(runner, migration)
            if pending:
                await roles.refresh(runner)
            return pending
    finally:
        await runner.close()
        await guard.close()


@contextlib.asynccontextmanager
async def _only_runner(guard: DedicatedConnection) -> AsyncIterator[None]:
    """Hold the lock that makes runners take turns. It is a table of its own: schema_migrations is written meanwhile.

    Waiting runners ask again and again instead of queueing for the lock: a transaction that waits holds a snapshot, and
    CREATE INDEX CONCURRENTLY of the runner that works would wait for it, for ever.
    """
    for _ in range(TURN_WAIT_MS // TURN_POLL_MS):
        held = False
        try:
            async with guard.transaction() as transaction:
                await transaction.script("LOCK TABLE schema_migrations_lock IN ACCESS EXCLUSIVE MODE NOWAIT")
                held = True
                yield
        except Locked:
            if held:
                raise
        else:
            return
        await asyncio.sleep(TURN_POLL_MS / 1000)
    raise Unavailable(
        "another `better-compute db migrate` is still at work: run it again later", reason=Reason.DATABASE
    )


async def _apply(connection: DedicatedConnection, migration: Migration) -> None:
    record = "INSERT INTO schema_migrations (version, name, phase, checksum) VALUES ($1, $2, $3, $4)"
    row = (migration.version, migration.name, migration.phase.value, migration.checksum)
    if migration.sql.startswith(NO_TRANSACTION):
        await connection.script(migration.sql)
        await connection.query(record, *row)
        return
    async with connection.transaction() as transaction:
        await transaction.script(migration.sql)
        await transaction.query(record, *row)


async def _create_own_tables(connection: DedicatedConnection) -> None:
    for last in (False, True):
        try:
            await connection.script(_OWN_TABLES)
        except StatementFailed as failure:
            if last or failure.sqlstate not in _MADE_MEANWHILE:
                raise
        else:
            return


async def _applied(connection: DedicatedConnection) -> list[Applied]:
    [exists] = await connection.query("SELECT to_regclass('schema_migrations') IS NOT NULL AS found")
    if not exists["found"]:
        return []
    rows = await connection.query("SELECT version, name, phase, checksum FROM schema_migrations ORDER BY version")
    return [Applied(row["version"], row["name"], Phase(row["phase"]), row["checksum"]) for row in rows]


def _compare(applied: list[Applied], known: list[Migration]) -> Status:
    by_version = {migration.version: migration for migration in known}
    done = {row.version for row in applied}
    return Status(
        applied=tuple(applied),
        pending=tuple(migration for migration in known if migration.version not in done),
        changed=tuple(
            row for row in applied if row.version in by_version and row.checksum != by_version[row.version].checksum
        ),
        newer=tuple(row for row in applied if row.version not in by_version),
    )


def _title(migration: Migration | Applied) -> str:
    return f"{migration.version:04d}_{migration.name}.{migration.phase.value}"


def _refuse_changed(found: Status) -> None:
    if found.changed:
        raise _refusal(
            f"migration {_title(found.changed[0])} was changed after it was applied to this database: "
            "restore the file as released; a change of the schema is a new file"
        )


def _refuse_newer(newest: Applied) -> Refused:
    return _refusal(
        f"the database has migration {_title(newest)}, which this program does not know: "
        "a newer better-compute has moved it; run that one, or restore a backup made before"
    )


def _refusal(message: str) -> Refused:
    return refuse(Reason.CONFLICT, message)
