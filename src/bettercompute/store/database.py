"""Decide how the product talks to PostgreSQL: pools, transactions, dedicated connections, and what an error means.

The only importer of asyncpg. What may pass by itself becomes `Unavailable`; a conflict with another transaction is run
again only where the caller says by `retrying` that its work may be repeated; anything else is a `StatementFailed`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import asyncpg

from bettercompute.errors import Bug, Unavailable
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store.limits import NO_LIMITS, Limits
from bettercompute.store.statements import Statement, statements
from bettercompute.world import Dice

SERVER_VERSION_MIN = 15
CONNECT_TIMEOUT_MS = 10_000
ACQUIRE_TIMEOUT_MS = 5_000
# The client gives up this much later than the server would, so that the server's reason is the one we see.
CLIENT_GRACE_MS = 2_000
POOL_SIZE = 10
IDLE_CONNECTION_MS = 300_000
# Enough for every named statement on each connection.
PREPARED_STATEMENTS_MAX = 512
# Without end. asyncpg's own bound gives a connection up after 50,000 statements, which is minutes of load; the next one
# prepares and plans everything anew while others wait for it, and the server bounds what a connection holds anyway.
QUERIES_MAX = 2**62
# A conflict is with one other transaction; five in a row mean that something else is wrong.
RETRY_ATTEMPTS = 5
RETRY_DELAY_MS = 20

T = TypeVar("T")
Listener = Callable[[str], None]


class Row(Protocol):
    """One row of a result: values by column name."""

    def __getitem__(self, column: str, /) -> Any: ...

    def keys(self) -> Iterator[str]:
        """Return the column names."""
        ...


class Conflict(Unavailable):
    """Another transaction got in the way (SQLSTATE 40001, 40P01): the whole transaction may be run again."""


class Locked(Unavailable):
    """Another transaction holds what a NOWAIT asked for (SQLSTATE 55P03)."""


class StatementFailed(Bug):
    """PostgreSQL refused a statement for what it says: a broken constraint, a value it cannot take, wrong SQL."""

    def __init__(self, message: str, *, sqlstate: str, constraint: str | None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.constraint = constraint


# Conditions that end by themselves. Class 08: connection; 53: resources; 57: operator, shutdown, cancelled by timeout.
_PASSING_CLASSES = ("08", "53", "57")
_PASSING_STATES = frozenset({"25006", "25P03", "25P04"})  # read-only (a standby), idle timeout, transaction timeout
_CLOSED = ("closed", "closing", "released back to the pool")
_CONFLICTS = frozenset({"40001", "40P01"})


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Turn asyncpg's errors into ours."""
    try:
        yield
    except asyncpg.PostgresError as error:
        raise _translate(error) from error
    except asyncpg.TargetServerAttributeNotMatched as error:
        raise Unavailable("the database is a standby: it takes no writes", reason=Reason.DATABASE) from error
    except asyncpg.InterfaceError as error:
        # asyncpg says by this one class both that a connection or pool is closed and that it was used wrongly.
        if not any(phrase in str(error) for phrase in _CLOSED):
            raise Bug(f"a database connection was used wrongly: {error}") from error
        raise Unavailable(f"the database connection is lost: {error}", reason=Reason.DATABASE) from error
    except (OSError, TimeoutError, asyncpg.InternalClientError) as error:
        text = str(error) or type(error).__name__
        raise Unavailable(f"the database cannot be reached: {text}", reason=Reason.DATABASE) from error


def _translate(error: asyncpg.PostgresError) -> Unavailable | StatementFailed:
    sqlstate = error.sqlstate or ""
    if isinstance(error, asyncpg.InvalidCachedStatementError):
        return Conflict(f"the schema moved under a prepared statement: {error}", reason=Reason.DATABASE)
    if sqlstate in _CONFLICTS:
        return Conflict(f"the database asks to run this again: {error}", reason=Reason.DATABASE)
    if sqlstate == "55P03":
        return Locked(f"another transaction holds a lock: {error}", reason=Reason.DATABASE)
    if sqlstate.startswith(_PASSING_CLASSES) or sqlstate in _PASSING_STATES:
        return Unavailable(f"the database cannot serve this now: {error}", reason=Reason.DATABASE)
    constraint = getattr(error, "constraint_name", None)
    return StatementFailed(f"PostgreSQL {sqlstate}: {error}", sqlstate=sqlstate, constraint=constraint)


class Queries:
    """Named statements on whatever connection the subclass brings."""

    async def _run(self, sql: str, arguments: Sequence[Any]) -> list[Row]:
        raise NotImplementedError

    async def fetch(self, name: str, /, **arguments: Any) -> list[Row]:
        """Run the named statement and return its rows. Raises Bug when the arguments are not exactly its own."""
        statement = _statement(name)
        return await self._run(statement.sql, statement.bind(arguments))

    async def fetch_one(self, name: str, /, **arguments: Any) -> Row | None:
        """Run the named statement and return its only row, or None. Raises Bug for more than one."""
        rows = await self.fetch(name, **arguments)
        if len(rows) > 1:
            raise Bug(f"statement {name} returned {len(rows)} rows where one was expected")
        return rows[0] if rows else None

    async def execute(self, name: str, /, **arguments: Any) -> None:
        """Run the named statement for its effect."""
        await self.fetch(name, **arguments)

    async def query(self, sql: str, *arguments: Any) -> list[Row]:
        """Run SQL that has no name: for migrations, doctor and tests; the product's own has names."""
        return await self._run(sql, arguments)


class Transaction(Queries):
    """An open transaction. Nothing but its connection is awaited inside one."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._after_commit: list[tuple[str, Mapping[str, Any]]] = []

    async def _run(self, sql: str, arguments: Sequence[Any]) -> list[Row]:
        with _translated():
            return cast("list[Row]", await self._connection.fetch(sql, *arguments))

    def after_commit(self, name: str, /, **arguments: Any) -> None:
        """Run the named statement on the same connection once this is committed, if that can be done then."""
        self._after_commit.append((name, arguments))

    async def committed(self) -> None:
        """Run what was to follow the commit. What fails for a passing reason is let be: it was never promised."""
        for name, arguments in self._after_commit:
            with contextlib.suppress(Unavailable):
                await self.execute(name, **arguments)

    async def script(self, sql: str) -> None:
        """Run several statements without arguments: migrations."""
        with _translated():
            await self._connection.execute(sql)


# The stubs make these generic; at run time they are not.
_Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record] | asyncpg.pool.PoolConnectionProxy[asyncpg.Record]"


@contextlib.asynccontextmanager
async def _transaction(connection: _Connection) -> AsyncIterator[Transaction]:
    """Commit at the end of the block; roll back on any exception, a cancellation included."""
    with _translated():
        opened = connection.transaction()
        await opened.start()
    transaction = Transaction(connection)
    try:
        yield transaction
    except BaseException:
        # Where the rollback fails the connection is gone, and the server rolls back by itself.
        with contextlib.suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            await opened.rollback()
        raise
    with _translated():
        await opened.commit()
    await transaction.committed()


class Database(Queries):
    """A pool of connections to one primary."""

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record], *, dsn: str, dice: Dice, pool_size: int) -> None:
        self._pool = pool
        # First come, first served. The pool alone hands a free connection to whoever asks first once it is free, so
        # that under load one who waits is overtaken again and again until its time is over.
        self._turns = asyncio.Semaphore(pool_size)
        self._dice = dice
        self.dsn = dsn

    @classmethod
    async def open(
        cls,
        dsn: str,
        *,
        dice: Dice,
        application_name: str,
        pool_size: int = POOL_SIZE,
        pool_size_min: int = 1,
        limits: Limits = NO_LIMITS,
        rehearsed: Sequence[str] = (),
    ) -> Database:
        """Connect. Raises Unavailable when the server cannot be reached or is a standby, Refused when it is too old.

        `rehearsed` names statements that each connection prepares and plans before its first use, by running them with
        NULL for every argument and rolling back; such a pool keeps all its connections. Preparing and planning cost
        more than a hundred runs: a herd that meets ten cold connections waits seconds for its first Hellos. See
        decisions 0038.
        """

        async def prepare(connection: _Connection) -> None:
            await _check_version(connection)
            await _set(connection, limits)
            await _rehearse(connection, rehearsed)

        with _translated():
            pool = await asyncpg.create_pool(
                dsn,
                min_size=pool_size if rehearsed else min(pool_size_min, pool_size),
                max_size=pool_size,
                max_inactive_connection_lifetime=0 if rehearsed else IDLE_CONNECTION_MS / 1000,
                max_queries=QUERIES_MAX,
                init=prepare,
                reset=_keep_as_is,
                **_connect_options(application_name=application_name, limits=limits),
            )
        return cls(pool, dsn=dsn, dice=dice, pool_size=pool_size)

    async def close(self) -> None:
        """Close the pool; whoever still holds a connection loses it after a moment."""
        try:
            await asyncio.wait_for(self._pool.close(), CLIENT_GRACE_MS / 1000)
        except (TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            self._pool.terminate()

    async def dedicated(self, *, application_name: str, limits: Limits = NO_LIMITS) -> DedicatedConnection:
        """Connect to the same server outside the pool. Raises like `open`."""
        return await DedicatedConnection.open(self.dsn, application_name=application_name, limits=limits)

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """Open a READ COMMITTED transaction: committed at the end of the block, rolled back by any exception."""
        async with self._acquired() as connection, _transaction(connection) as transaction:
            yield transaction

    async def retrying(self, work: Callable[[Transaction], Awaitable[T]], *, attempts: int = RETRY_ATTEMPTS) -> T:
        """Run `work` in a transaction, anew from its beginning after a conflict: only for work that may be repeated."""
        for attempt in range(1, attempts + 1):
            try:
                async with self.transaction() as transaction:
                    return await work(transaction)
            except Conflict:
                if attempt == attempts:
                    raise
                await asyncio.sleep(self._dice.uniform(0, RETRY_DELAY_MS * 2**attempt) / 1000)
        raise Bug(f"retrying with {attempts} attempts")

    @contextlib.asynccontextmanager
    async def _acquired(self) -> AsyncIterator[asyncpg.pool.PoolConnectionProxy[asyncpg.Record]]:
        try:
            async with asyncio.timeout(ACQUIRE_TIMEOUT_MS / 1000):
                await self._turns.acquire()
        except TimeoutError:
            waited = f"all connections to the database have been in use for {ACQUIRE_TIMEOUT_MS} ms"
            raise Unavailable(waited, reason=Reason.DATABASE) from None
        try:
            with _translated():
                # Bounded here: given a timeout, the pool makes a task for it.
                async with asyncio.timeout(ACQUIRE_TIMEOUT_MS / 1000):
                    connection = await self._pool.acquire()
            try:
                yield connection
            finally:
                with _translated():
                    await self._pool.release(connection, timeout=ACQUIRE_TIMEOUT_MS / 1000)
        finally:
            self._turns.release()

    async def _run(self, sql: str, arguments: Sequence[Any]) -> list[Row]:
        async with self._acquired() as connection:
            with _translated():
                return cast("list[Row]", await connection.fetch(sql, *arguments))


class DedicatedConnection(Queries):
    """One connection of one's own, straight to the server: LISTEN, the lease, migrations."""

    def __init__(self, connection: asyncpg.Connection[asyncpg.Record]) -> None:
        self._connection = connection
        self.lost = asyncio.Event()
        connection.add_termination_listener(lambda _: self.lost.set())

    @classmethod
    async def open(cls, dsn: str, *, application_name: str, limits: Limits = NO_LIMITS) -> DedicatedConnection:
        """Connect. Raises like `Database.open`."""
        with _translated():
            options = _connect_options(application_name=application_name, limits=limits)
            connection = await asyncpg.connect(dsn, **options)
        try:
            await _check_version(connection)
            with _translated():
                await _set(connection, limits)
        except BaseException:
            connection.terminate()
            raise
        return cls(connection)

    async def listen(self, channel: str, listener: Listener) -> None:
        """Call `listener` with the payload of each notification, on the event loop, until the connection is lost."""
        with _translated():
            await self._connection.add_listener(channel, lambda _c, _p, _n, payload: listener(str(payload)))

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """Open a transaction on this connection."""
        async with _transaction(self._connection) as transaction:
            yield transaction

    async def script(self, sql: str) -> None:
        """Run statements without arguments; several of them run in one implicit transaction."""
        with _translated():
            await self._connection.execute(sql)

    async def close(self) -> None:
        """Close the connection, at once if the server does not answer."""
        try:
            await self._connection.close(timeout=CLIENT_GRACE_MS / 1000)
        except (TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            self._connection.terminate()

    async def _run(self, sql: str, arguments: Sequence[Any]) -> list[Row]:
        with _translated():
            return cast("list[Row]", await self._connection.fetch(sql, *arguments))


def _statement(name: str) -> Statement:
    try:
        return statements()[name]
    except KeyError:
        raise Bug(f"there is no statement {name} in store/queries") from None


def _connect_options(*, application_name: str, limits: Limits) -> dict[str, Any]:
    server_settings = {"application_name": application_name, "timezone": "UTC", **limits.startup_settings()}
    command_timeout = None
    if limits.statement_timeout_ms is not None:
        command_timeout = (limits.statement_timeout_ms + CLIENT_GRACE_MS) / 1000
    return {
        "timeout": CONNECT_TIMEOUT_MS / 1000,
        "command_timeout": command_timeout,
        "statement_cache_size": PREPARED_STATEMENTS_MAX,
        # A prepared statement lives as long as its connection: preparing is a round trip.
        "max_cached_statement_lifetime": 0,
        "server_settings": server_settings,
        "target_session_attrs": "primary",
    }


async def _check_version(connection: _Connection) -> None:
    version = connection.get_server_version()
    if version.major < SERVER_VERSION_MIN:
        raise refuse(
            Reason.CONFLICT,
            f"the database is PostgreSQL {version.major}, at least {SERVER_VERSION_MIN} is needed: upgrade the server",
        )


async def _set(connection: _Connection, limits: Limits) -> None:
    for name, value in limits.settings_of_version(connection.get_server_version().major).items():
        await connection.execute(f"SET {name} = {value}")


async def _rehearse(connection: _Connection, names: Sequence[str]) -> None:
    if not names:
        return
    transaction = connection.transaction()
    await transaction.start()
    try:
        for name in names:
            statement = _statement(name)
            await connection.fetch(statement.sql, *[None] * len(statement.arguments))
    finally:
        await transaction.rollback()


async def _keep_as_is(_connection: _Connection) -> None:
    """Spare the RESET ALL round trip at each release: nothing here changes a pooled connection's settings."""
