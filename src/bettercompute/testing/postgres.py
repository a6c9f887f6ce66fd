"""Decide how tests get a PostgreSQL of their own: one real server a process, and a fresh migrated database a test."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Coroutine, Iterator
from pathlib import Path

from bettercompute.store import embedded, migrations
from bettercompute.store.database import Database, DedicatedConnection, ThreadConnection

# Cheap, but the same program: a test kills processes, never the operating system under them.
CHEAP_SETTINGS = {
    "fsync": "off",
    "shared_buffers": "32MB",
    "max_wal_size": "256MB",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "autovacuum": "off",
}
TEMPLATE = "bc_template"


class TestServer:
    """An embedded server that hands out databases."""

    __test__ = False

    def __init__(self, server: embedded.EmbeddedPostgres) -> None:
        self._server = server
        self._numbers = itertools.count(1)
        with self._admin() as connection:
            connection.script(f"CREATE DATABASE {TEMPLATE}")
        _run(migrations.migrate(self.dsn_of(TEMPLATE)))

    @property
    def server(self) -> embedded.EmbeddedPostgres:
        """Return the process behind it, for tests that stop and start one. Do that to a server of the test's own."""
        return self._server

    def dsn_of(self, name: str) -> str:
        """Return the address of one of the server's databases."""
        return self._server.dsn.replace(f"/{embedded.DATABASE_NAME}?", f"/{name}?")

    def create_database(self, *, migrated: bool = True) -> str:
        """Make a fresh database, by cloning the migrated template (47 ms) or empty, and return its address."""
        name = f"test_{next(self._numbers)}"
        with self._admin() as connection:
            connection.script(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE if migrated else 'template0'}")
        return self.dsn_of(name)

    def drop_database(self, dsn: str) -> None:
        """Remove a database and end whoever is still connected to it."""
        name = dsn.rpartition("?")[0].rpartition("/")[2]
        with self._admin() as connection:
            connection.script(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    @contextlib.contextmanager
    def _admin(self) -> Iterator[ThreadConnection]:
        with ThreadConnection(self.dsn_of("postgres"), application_name="tests") as connection:
            yield connection


@contextlib.contextmanager
def serve(data_dir: Path) -> Iterator[TestServer]:
    """Run a server with cheap settings for the time of the block. Main thread only."""
    server = embedded.start(data_dir, settings=CHEAP_SETTINGS, initdb_options=("--no-sync",))
    try:
        yield TestServer(server)
    finally:
        server.stop()


async def move_clock(database: Database | DedicatedConnection, *, offset_ms: int) -> None:
    """Move `compute_now()` by an offset from the server's clock, for every session of this database at once."""
    await database.query(
        "CREATE OR REPLACE FUNCTION compute_now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE "
        f"AS $$ SELECT statement_timestamp() + {offset_ms:d} * interval '1 millisecond' $$"
    )


def _run(coroutine: Coroutine[object, object, object]) -> None:
    loop = asyncio.SelectorEventLoop()
    try:
        loop.run_until_complete(coroutine)
    finally:
        loop.close()
