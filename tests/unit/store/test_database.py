from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator

import pytest
import uvloop

from bettercompute.errors import Bug, Refused, Unavailable
from bettercompute.store import database as store
from bettercompute.store.database import Conflict, Database, DedicatedConnection, Locked, StatementFailed, Transaction
from bettercompute.store.limits import GATEWAY_LIMITS, LEASE_LIMITS, NO_LIMITS, Limits
from bettercompute.store.sessions import HELLO_STATEMENTS
from bettercompute.store.statements import statements
from bettercompute.system import system_world
from bettercompute.testing.postgres import freeze_clock, move_clock
from bettercompute.testing.thread_connection import ThreadConnection


async def open_database(dsn, **options) -> Database:
    return await Database.open(dsn, dice=system_world().dice, application_name="tests", **options)


@contextlib.asynccontextmanager
async def dedicated(dsn, **options) -> AsyncIterator[DedicatedConnection]:
    connection = await DedicatedConnection.open(dsn, application_name="tests", **options)
    try:
        yield connection
    finally:
        await connection.close()


async def backends(database) -> list[int]:
    return [row["pid"] for row in await database.query("SELECT pg_backend_pid() AS pid")]


async def test_a_transaction_commits_at_its_end_and_rolls_back_on_any_exception(database):
    await database.query("CREATE TABLE t (x int)")
    async with database.transaction() as transaction:
        await transaction.query("INSERT INTO t VALUES (1)")

    async def failing():
        async with database.transaction() as transaction:
            await transaction.query("INSERT INTO t VALUES (2)")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await failing()
    assert [row["x"] for row in await database.query("SELECT x FROM t")] == [1]


async def test_a_cancelled_transaction_is_rolled_back_and_its_connection_used_again(dsn):
    database = await open_database(dsn, pool_size=1)
    await database.query("CREATE TABLE t (x int)")
    begun = asyncio.Event()

    async def work():
        async with database.transaction() as transaction:
            await transaction.query("INSERT INTO t VALUES (2)")
            begun.set()
            await transaction.query("SELECT pg_sleep(60)")

    task = asyncio.create_task(work())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await database.query("SELECT x FROM t") == []
    await database.close()


async def test_unknown_statements_and_second_rows_are_bugs(database):
    with pytest.raises(Bug, match=r"no statement nodes\.nonsense"):
        await database.fetch("nodes.nonsense")
    with pytest.raises(Bug, match="missing arguments"):
        await database.fetch("nodes.existing")


async def test_a_connection_used_wrongly_is_a_bug_and_a_closed_one_unavailable(dsn):
    async with dedicated(dsn) as connection:
        results = await asyncio.gather(
            connection.query("SELECT pg_sleep(0.01)"), connection.query("SELECT 1"), return_exceptions=True
        )
        assert isinstance(results[1], Bug)
        with pytest.raises(Bug):
            await connection.query("SELECT $1::int")
        await connection.close()
        with pytest.raises(Unavailable):
            await connection.query("SELECT 1")


async def test_a_transaction_whose_connection_ends_is_unavailable(database, dsn):
    async def work():
        async with database.transaction() as transaction:
            [row] = await transaction.query("SELECT pg_backend_pid() AS pid")
            async with dedicated(dsn) as other:
                await other.query("SELECT pg_terminate_backend($1, 5000)", row["pid"])
            await transaction.query("SELECT 1")

    with pytest.raises(Unavailable) as error:
        await work()
    assert error.value.reason == "database"


async def test_a_pool_heals_after_its_connections_were_ended(database, dsn):
    [before] = await backends(database)
    async with dedicated(dsn) as other:
        await other.query("SELECT pg_terminate_backend($1, 5000)", before)
    try:
        [after] = await backends(database)
    except Unavailable:
        [after] = await backends(database)
    assert after != before


@pytest.mark.parametrize("value", ["nul \x00", "surrogate \ud800"])
async def test_text_that_postgres_cannot_take_fails_without_being_passing(database, value):
    with pytest.raises(StatementFailed):
        await database.query("SELECT $1::text", value)


async def test_a_number_past_bigint_and_a_broken_constraint_are_named(database):
    with pytest.raises(StatementFailed):
        await database.query("SELECT $1::bigint", 2**63)
    with pytest.raises(StatementFailed) as error:
        await database.query("INSERT INTO node_sessions (node_id) VALUES ('nobody')")
    assert error.value.constraint == "node_sessions_node_id_fkey"
    assert error.value.sqlstate == "23503"


async def test_nobody_waits_for_ever_for_a_connection(dsn, monkeypatch):
    monkeypatch.setattr(store, "ACQUIRE_TIMEOUT_MS", 20)
    database = await open_database(dsn, pool_size=1)
    async with database.transaction():
        with pytest.raises(Unavailable, match="in use for 20 ms"):
            await database.query("SELECT 1")
    await database.close()


async def test_connections_go_to_whoever_has_waited_longest(dsn):
    database = await open_database(dsn, pool_size=1)
    served: list[int] = []

    async def ask(number: int) -> None:
        await database.query("SELECT 1")
        served.append(number)

    async with asyncio.TaskGroup() as group:
        for number in range(500):
            # One comes at each turn of the loop, also between a release and the turn of those whom it wakes.
            group.create_task(ask(number))
            await asyncio.sleep(0)
    assert served == sorted(served)
    await database.close()


async def test_a_server_that_is_not_there_is_unavailable(tmp_path):
    with pytest.raises(Unavailable):
        await open_database(f"postgresql://x@/x?host={tmp_path}")


async def test_too_many_connections_is_unavailable(dsn, database):
    await database.query("CREATE ROLE narrow LOGIN CONNECTION LIMIT 0")
    try:
        with pytest.raises(Unavailable, match="too many connections"):
            await open_database(dsn.replace("bettercompute@", "narrow@"))
    finally:
        await database.query("DROP ROLE narrow")


async def test_an_old_server_is_refused(dsn, monkeypatch):
    monkeypatch.setattr(store, "SERVER_VERSION_MIN", 99)
    with pytest.raises(Refused, match="at least 99 is needed"):
        await DedicatedConnection.open(dsn, application_name="tests")


async def test_the_server_bounds_statements_and_idle_transactions(dsn):
    limits = Limits(statement_timeout_ms=50, idle_in_transaction_timeout_ms=50)
    async with dedicated(dsn, limits=limits) as connection:
        with pytest.raises(Unavailable, match="statement timeout"):
            await connection.query("SELECT pg_sleep(60)")

        async def idle():
            async with connection.transaction() as transaction:
                await asyncio.wait_for(connection.lost.wait(), 30)
                await transaction.query("SELECT 1")

        with pytest.raises(Unavailable):
            await idle()


async def test_the_server_ends_a_transaction_whose_client_stopped_behind_a_preparation(dsn, database):
    """The driver prepares without a Sync: the server then waits for the rest of the client's message, and only that."""
    await database.query("CREATE TABLE t (x int)")
    short = Limits(statement_timeout_ms=50, idle_in_transaction_timeout_ms=50)

    async def stop_there(connection: DedicatedConnection) -> None:
        await connection._connection.execute("BEGIN")
        await connection._connection.prepare("UPDATE t SET x = x + 1 WHERE x = $1")
        await database.query("SELECT pg_sleep(0.2)")

    held = "SELECT FROM pg_locks WHERE relation = 't'::regclass AND mode = 'RowExclusiveLock'"
    async with dedicated(dsn, limits=short) as connection:
        await stop_there(connection)
        assert not connection.lost.is_set(), "neither of the other two counts here"
        assert await database.query(held)
        connection._connection.terminate()
    async with dedicated(dsn, limits=dataclasses.replace(short, transaction_timeout_ms=100)) as connection:
        await stop_there(connection)
        await asyncio.wait_for(connection.lost.wait(), 30)
        await asyncio.wait_for(database.query("CREATE INDEX ON t (x)"), 30)


def test_an_older_server_is_not_asked_for_what_it_does_not_know():
    assert GATEWAY_LIMITS.settings_of_version(16) == {}
    assert GATEWAY_LIMITS.settings_of_version(17) == {"transaction_timeout": "15000"}
    assert NO_LIMITS.settings_of_version(17) == {}


async def test_a_repeatable_transaction_is_run_again_after_a_deadlock(database):
    await database.query("CREATE TABLE t (id int PRIMARY KEY, x int)")
    await database.query("INSERT INTO t VALUES (1, 0), (2, 0)")
    await database.query("SET deadlock_timeout = '20ms'")
    both = asyncio.Barrier(2)
    runs = []

    async def work(first, second):
        alone: list[bool] = []

        async def transfer(transaction: Transaction):
            runs.append(first)
            await transaction.query("UPDATE t SET x = x + 1 WHERE id = $1", first)
            if not alone:
                alone.append(True)
                await both.wait()
            await transaction.query("UPDATE t SET x = x + 1 WHERE id = $1", second)

        await database.retrying(transfer)

    await asyncio.gather(work(1, 2), work(2, 1))
    assert [row["x"] for row in await database.query("SELECT x FROM t ORDER BY id")] == [2, 2]
    assert len(runs) == 3


async def test_retrying_is_bounded_and_only_for_conflicts(database):
    runs = []

    async def always(transaction: Transaction):
        runs.append(1)
        await transaction.query("DO $$ BEGIN RAISE SQLSTATE '40001'; END $$")

    with pytest.raises(Conflict):
        await database.retrying(always, attempts=3)
    assert len(runs) == 3

    async def never(transaction: Transaction):
        runs.append(1)
        raise Unavailable("something else")

    with pytest.raises(Unavailable, match="something else"):
        await database.retrying(never)
    assert len(runs) == 4


async def test_a_listener_hears_and_a_lost_connection_shows(dsn, database):
    heard: asyncio.Queue[str] = asyncio.Queue()
    async with dedicated(dsn) as connection:
        await connection.listen("bc_test", heard.put_nowait)
        await database.query("SELECT pg_notify('bc_test', 'one')")
        assert await asyncio.wait_for(heard.get(), 30) == "one"
        [row] = await connection.query("SELECT pg_backend_pid() AS pid")
        await database.query("SELECT pg_terminate_backend($1)", row["pid"])
        await asyncio.wait_for(connection.lost.wait(), 30)


async def test_a_thread_has_a_connection_of_its_own_beside_a_busy_loop(dsn):
    answers: list[object] = []

    def work():
        with ThreadConnection(dsn, application_name="tests", limits=LEASE_LIMITS) as connection:
            answers.append(connection.fetch_one("leases.list", with_retired=False, name=None))
            [row] = connection.query("SHOW statement_timeout")
            answers.append(row["statement_timeout"])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert answers == [None, "3s"]


def test_it_works_on_uvloop(dsn):
    async def work():
        database = await open_database(dsn)
        async with database.transaction() as transaction:
            [row] = await transaction.query("SELECT 1 AS one")
        await database.close()
        return row["one"]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(work()) == 1


async def test_the_clock_of_record_can_be_moved_for_all_sessions_at_once(database, dsn):
    async with dedicated(dsn) as other:
        [before] = await other.query("SELECT to_ms(compute_now()) AS now_ms")
        await move_clock(database, offset_ms=-86_400_000)
        [after] = await other.query("SELECT to_ms(compute_now()) AS now_ms")
        assert -86_400_000 <= after["now_ms"] - before["now_ms"] < -86_340_000
        await freeze_clock(database, now_ms=1_234_567_890_123)
        [frozen] = await other.query(
            "SELECT to_ms(compute_now()) AS now_ms, at_ms(1234567890123) = compute_now() AS same"
        )
        assert (frozen["now_ms"], frozen["same"]) == (1_234_567_890_123, True)


async def test_reading_the_clock_costs_nothing_to_the_planner(database):
    plan = await database.query("EXPLAIN (VERBOSE) SELECT compute_now()")
    assert any("statement_timestamp" in line["QUERY PLAN"] for line in plan)


async def test_a_prepared_statement_survives_an_expanding_schema(database):
    await database.query("CREATE TABLE t (x int)")
    await database.query("SELECT * FROM t")
    await database.query("ALTER TABLE t ADD COLUMN y int")

    async def work(transaction: Transaction):
        return await transaction.query("SELECT * FROM t")

    assert await database.retrying(work) == []
    assert await database.query("SELECT * FROM t") == []


async def test_a_nowait_that_finds_a_lock_says_so(database):
    async with database.transaction() as holder:
        await holder.query("SELECT 1 FROM outbox_publisher FOR UPDATE")
        with pytest.raises(Locked):
            await database.query("SELECT 1 FROM outbox_publisher FOR UPDATE NOWAIT")


async def test_connections_that_rehearse_have_planned_their_statements_and_written_nothing(dsn):
    database = await open_database(dsn, pool_size=2, limits=GATEWAY_LIMITS, rehearsed=HELLO_STATEMENTS)
    try:
        # Both connections at once, so that each is seen.
        async with database.transaction() as one, database.transaction() as other:
            for connection in (one, other):
                rows = await connection.query("SELECT statement, generic_plans FROM pg_prepared_statements")
                planned = {row["statement"]: row["generic_plans"] for row in rows}
                assert {statements()[name].sql: 1 for name in HELLO_STATEMENTS}.items() <= planned.items()
                assert await connection.query("SELECT 1 FROM nodes") == []
    finally:
        await database.close()
