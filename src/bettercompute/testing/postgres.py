"""Decide how tests get a PostgreSQL of their own: one real server a process, and a fresh migrated database a test."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path

from bettercompute.store import embedded, migrations
from bettercompute.store.database import Queries
from bettercompute.testing.thread_connection import ThreadConnection

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
MEMORY = Path("/dev/shm")  # noqa: S108 - only the parent of a folder made by mkdtemp
MEMORY_PREFIX = "bc-tests-"
# A server with its databases and log takes 300 MB; several test processes share the memory.
MEMORY_BYTES_MIN = 3 * 1024**3


class TestServer:
    """An embedded server that hands out databases."""

    __test__ = False

    def __init__(self, server: embedded.EmbeddedPostgres) -> None:
        self._server = server
        self._numbers = itertools.count(1)
        self._admin = ThreadConnection(self.dsn_of("postgres"), application_name="tests")
        self._admin.script(f"CREATE DATABASE {TEMPLATE}")
        _run(migrations.migrate(self.dsn_of(TEMPLATE)))

    @property
    def server(self) -> embedded.EmbeddedPostgres:
        """Return the process behind it. A test that stops or kills one starts its own by `embedded.start`."""
        return self._server

    def dsn_of(self, name: str) -> str:
        """Return the address of one of the server's databases."""
        return self._server.dsn.replace(f"/{embedded.DATABASE_NAME}?", f"/{name}?")

    def create_database(self, *, migrated: bool = True) -> str:
        """Make a fresh database, by cloning the migrated template (40 ms) or empty, and return its address."""
        name = f"test_{next(self._numbers)}"
        template = TEMPLATE if migrated else "template0"
        # Copying files costs half of what the default, copying through the log, does.
        self._admin.script(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
        return self.dsn_of(name)

    def drop_database(self, dsn: str) -> None:
        """Remove a database and end whoever is still connected to it."""
        name = dsn.rpartition("?")[0].rpartition("/")[2]
        self._admin.script(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def close(self) -> None:
        """Let go of the server."""
        self._admin.close()


@contextlib.contextmanager
def scratch(fallback: Path) -> Iterator[Path]:
    """Give a folder for a test server's data: in memory where there is room for it (20 times faster), else `fallback`.

    Memory must not leak, so folders whose process was killed are removed by the next one that comes here.
    """
    if not MEMORY.is_dir() or not os.access(MEMORY, os.W_OK) or shutil.disk_usage(MEMORY).free < MEMORY_BYTES_MIN:
        yield fallback
        return
    for left in MEMORY.glob(f"{MEMORY_PREFIX}*"):
        if (left / "lock").exists() and embedded.is_free(left):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=MEMORY_PREFIX, dir=MEMORY))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def serve(data_dir: Path) -> Iterator[TestServer]:
    """Run a server with cheap settings for the time of the block. Main thread only."""
    server = embedded.start(data_dir, settings=CHEAP_SETTINGS, initdb_options=("--no-sync",))
    try:
        handed_out = TestServer(server)
        try:
            yield handed_out
        finally:
            handed_out.close()
    finally:
        server.stop()


async def move_clock(queries: Queries, *, offset_ms: int) -> None:
    """Move `compute_now()` by an offset from the server's clock, for every session of this database at once."""
    await _replace_clock(queries, f"statement_timestamp() + {offset_ms:d} * interval '1 millisecond'")


async def freeze_clock(queries: Queries, *, now_ms: int) -> None:
    """Hold `compute_now()` at a moment, for every session of this database at once."""
    await _replace_clock(queries, f"timestamptz 'epoch' + {now_ms:d} * interval '1 millisecond'")


async def _replace_clock(queries: Queries, expression: str) -> None:
    await queries.query(
        "CREATE OR REPLACE FUNCTION compute_now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE "
        f"AS $$ SELECT {expression} $$"
    )


def _run(coroutine: Coroutine[object, object, object]) -> None:
    loop = asyncio.SelectorEventLoop()
    try:
        loop.run_until_complete(coroutine)
    finally:
        loop.close()
