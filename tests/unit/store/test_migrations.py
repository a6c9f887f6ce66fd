from __future__ import annotations

import asyncio

import pytest

from bettercompute.errors import Bug, Refused
from bettercompute.store import migrations, roles
from bettercompute.store.database import DedicatedConnection, StatementFailed
from bettercompute.store.migrations import Phase


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Three small migrations: an expansion, one that cannot run in a transaction, and a contraction at the end.

    Roles are the server's, and another test may have made the gateways' one, whose privileges name no table of these.
    """

    async def refresh(_: object) -> None:
        pass

    monkeypatch.setattr(roles, "refresh", refresh)
    write(tmp_path, "0001_first.expand.sql", "CREATE TABLE first (x int, old int); CREATE TABLE beside (x int);")
    concurrently = "CREATE INDEX CONCURRENTLY IF NOT EXISTS first_x ON first (x)"
    write(tmp_path, "0002_index.expand.sql", f"-- no-transaction\n{concurrently}")
    write(tmp_path, "0003_drop.contract.sql", "ALTER TABLE first DROP COLUMN old")
    return tmp_path


def write(folder, name, sql):
    (folder / name).write_text(sql)


async def query(dsn, sql):
    connection = await DedicatedConnection.open(dsn, application_name="tests")
    try:
        return await connection.query(sql)
    finally:
        await connection.close()


async def test_a_fresh_database_gets_everything_and_the_second_run_nothing(empty_dsn):
    done = await migrations.migrate(empty_dsn)
    assert [migration.version for migration in done] == [migration.version for migration in migrations.read()]
    assert await migrations.migrate(empty_dsn) == []
    found = await migrations.status(empty_dsn)
    assert len(found.applied) == len(done)
    assert (found.pending, found.changed, found.newer) == ((), (), ())
    await migrations.require_current(empty_dsn)


async def test_an_empty_database_is_not_current(empty_dsn):
    assert len((await migrations.status(empty_dsn)).pending) == len(migrations.read())
    with pytest.raises(Refused, match=r"lacks migration 0001_main_job\.expand: run `better-compute db migrate`"):
        await migrations.require_current(empty_dsn)


async def test_a_statement_outside_of_a_transaction(empty_dsn, folder):
    await migrations.migrate(empty_dsn, folder=folder)
    [row] = await query(empty_dsn, "SELECT indisvalid FROM pg_index WHERE indexrelid = 'first_x'::regclass")
    assert row["indisvalid"]


async def test_two_runners_take_turns(empty_dsn, folder):
    done = await asyncio.gather(*(migrations.migrate(empty_dsn, folder=folder) for _ in range(4)))
    assert sorted(map(len, done)) == [0, 0, 0, 3]


@pytest.mark.parametrize(("sqlstate", "passes"), [("23505", True), ("42P07", True), ("42710", True), ("42601", False)])
async def test_tables_that_another_runner_made_at_the_same_moment_are_there(
    empty_dsn, folder, monkeypatch, sqlstate, passes
):
    # As PostgreSQL says it of the same CREATE TABLE IF NOT EXISTS, depending on how far the other one is.
    real, failures = DedicatedConnection.script, [StatementFailed("raced", sqlstate=sqlstate, constraint=None)]

    async def script(self, sql):
        if sql == migrations._OWN_TABLES and failures:
            raise failures.pop()
        await real(self, sql)

    monkeypatch.setattr(DedicatedConnection, "script", script)
    if passes:
        assert len(await migrations.migrate(empty_dsn, folder=folder)) == 3
    else:
        with pytest.raises(StatementFailed, match="raced"):
            await migrations.migrate(empty_dsn, folder=folder)


async def test_a_newer_schema_is_refused_by_name(empty_dsn, folder):
    await migrations.migrate(empty_dsn, folder=folder)
    (folder / "0003_drop.contract.sql").unlink()
    with pytest.raises(Refused, match=r"has migration 0003_drop\.contract, which this program does not know"):
        await migrations.migrate(empty_dsn, folder=folder)
    with pytest.raises(Refused, match="a newer better-compute has moved it"):
        await migrations.require_current(empty_dsn, folder=folder)


async def test_the_previous_release_runs_on_an_expanded_schema_but_does_not_migrate_it(empty_dsn, folder):
    write(folder, "0004_more.expand.sql", "CREATE TABLE more ()")
    await migrations.migrate(empty_dsn, folder=folder, contract=True)
    (folder / "0004_more.expand.sql").unlink()
    await migrations.require_current(empty_dsn, folder=folder)
    with pytest.raises(Refused, match=r"0004_more\.expand"):
        await migrations.migrate(empty_dsn, folder=folder)


async def test_a_changed_file_is_refused(empty_dsn, folder):
    await migrations.migrate(empty_dsn, folder=folder)
    write(folder, "0001_first.expand.sql", "CREATE TABLE first (x bigint)")
    for call in (migrations.migrate, migrations.require_current):
        with pytest.raises(Refused, match=r"0001_first\.expand was changed after it was applied"):
            await call(empty_dsn, folder=folder)
    assert [row.name for row in (await migrations.status(empty_dsn, folder=folder)).changed] == ["first"]


async def test_contracting_waits_until_asked_for(empty_dsn, folder):
    contraction = folder / "0003_drop.contract.sql"
    sql = contraction.read_text()
    contraction.unlink()
    await migrations.migrate(empty_dsn, folder=folder)
    contraction.write_text(sql)
    assert await migrations.migrate(empty_dsn, folder=folder) == []
    await migrations.require_current(empty_dsn, folder=folder)
    [done] = await migrations.migrate(empty_dsn, folder=folder, contract=True)
    assert done.phase is Phase.CONTRACT


async def test_a_contraction_that_a_later_expansion_stands_on_does_not_wait(empty_dsn, folder):
    write(folder, "0004_more.expand.sql", "CREATE TABLE more ()")
    contraction = folder / "0003_drop.contract.sql"
    kept = {path: path.read_text() for path in (contraction, folder / "0004_more.expand.sql")}
    for path in kept:
        path.unlink()
    await migrations.migrate(empty_dsn, folder=folder)
    for path, sql in kept.items():
        path.write_text(sql)
    assert [migration.version for migration in await migrations.migrate(empty_dsn, folder=folder)] == [3, 4]


async def test_a_migration_that_fails_leaves_nothing_behind(empty_dsn, folder):
    write(folder, "0003_drop.contract.sql", "CREATE TABLE half (); SELECT nonsense")
    with pytest.raises(StatementFailed, match="nonsense"):
        await migrations.migrate(empty_dsn, folder=folder)
    [row] = await query(
        empty_dsn, "SELECT to_regclass('half') IS NULL AS absent, to_regclass('first') IS NOT NULL AS kept"
    )
    assert (row["absent"], row["kept"]) == (True, True)
    assert [row.version for row in (await migrations.status(empty_dsn, folder=folder)).applied] == [1, 2]


@pytest.mark.parametrize(
    "name", ["1_short.expand.sql", "0005_gap.expand.sql", "0004_what.sql", "0004_Upper.expand.sql"]
)
def test_a_misnamed_file_is_a_bug(folder, name):
    write(folder, name, "SELECT 1")
    with pytest.raises(Bug):
        migrations.read(folder)
