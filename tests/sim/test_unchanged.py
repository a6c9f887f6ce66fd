"""Answers that are kept: none outlives a write to a table that it is of, and the clock's are never kept."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from bettercompute.store.database import Row
from bettercompute.store.statements import statements
from bettercompute.testing import postgres
from bettercompute.testing.sim import unchanged
from bettercompute.testing.sim.machine import SimulatedClock
from bettercompute.testing.sim.postgres import Link, SimulatedServer
from bettercompute.testing.sim.unchanged import Unchanged
from bettercompute.testing.sim.virtual_loop import VirtualLoop

NODES = "SELECT node_id FROM nodes WHERE site = $1"
ROWS = [cast("Row", {"node_id": "n1"})]


def make() -> Unchanged:
    return Unchanged(frozenset({"nodes", "commands"}), frozenset({"compute_now", "nextval"}))


def test_an_answer_is_good_until_its_table_is_written():
    kept = make()
    assert kept.answer(NODES, ["a"]) is None
    kept.keep(NODES, ["a"], ROWS)
    assert kept.answer(NODES, ["a"]) == ROWS
    assert kept.answer(NODES, ["b"]) is None
    kept.written("commands")
    assert kept.answer(NODES, ["a"]) == ROWS
    kept.written("nodes")
    assert kept.answer(NODES, ["a"]) is None


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1 FROM nodes WHERE created_at < compute_now()",
        "SELECT NEXTVAL('commands_seq')",
        "SELECT current_timestamp",
    ],
    ids=["clock", "sequence", "keyword"],
)
def test_what_changes_by_itself_is_never_kept(sql: str):
    kept = make()
    kept.keep(sql, [], ROWS)
    assert kept.answer(sql, []) is None


def test_arrays_are_arguments_too_and_what_is_kept_is_bounded():
    kept = make()
    kept.keep(NODES, [["a", "b"]], ROWS)
    assert kept.answer(NODES, [["a", "b"]]) == ROWS
    assert kept.answer(NODES, [["a"]]) is None
    for number in range(unchanged.KEPT_MAX):
        kept.keep(NODES, [number], [])
    assert kept.answer(NODES, [["a", "b"]]) is None
    assert kept.answer(NODES, [0]) == []


def test_whoever_changes_an_answer_changes_only_his_copy():
    kept = make()
    kept.keep(NODES, [], ROWS)
    answer = kept.answer(NODES, [])
    assert answer is not None
    answer.clear()
    assert kept.answer(NODES, []) == ROWS


class Client:
    """A connection, as far as the server asks."""

    client = "client"
    process = None


async def _tour(dsn: str, notes: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    server = SimulatedServer(dsn, clock=SimulatedClock(loop), channels=())
    try:
        asked: list[str] = []
        real = server._connection.call
        server._connection.call = lambda work: (asked.append(""), real(work))[1]  # type: ignore[method-assign,func-returns-value]
        link = cast("Link", Client())

        def run(sql: str, *arguments: Any) -> list[Row]:
            return server.run(link, sql, arguments)

        read, write = "SELECT last_position FROM outbox_publisher", "UPDATE outbox_publisher SET last_position = $1"
        idle = "UPDATE outbox_publisher SET last_position = $1 WHERE last_position < $1"
        run(read)
        asked.clear()
        notes["again"] = run(read)[0]["last_position"], len(asked)
        server.begin(link)
        run(read)
        server.end(link, commit=True)
        notes["a transaction of it"] = len(asked)
        run(write, 7)
        notes["written"] = run(read)[0]["last_position"]
        run(idle, 7)
        asked.clear()
        run(idle, 7)
        run(read)
        notes["a write of nothing"] = len(asked)
        server.begin(link)
        run(write, 9)
        notes["inside"] = run(read)[0]["last_position"]
        server.end(link, commit=False)
        notes["rolled back"] = run(read)[0]["last_position"]
        server.begin(link)
        run(write, 11)
        server.end(link, commit=True)
        notes["committed"] = run(read)[0]["last_position"]
        server.weather.read_only = True
        asked.clear()
        run(read)
        notes["a standby is asked"] = len(asked) > 0
        notes["fickle"] = server._unchanged.fickle
        notes["tables"] = server._unchanged.tables
    finally:
        server.close()


def test_on_the_real_server(postgres_server: postgres.TestServer):
    dsn = postgres_server.create_database()
    notes: dict[str, Any] = {}
    loop = VirtualLoop()
    try:
        loop.run_until_complete(_tour(dsn, notes))
    finally:
        loop.close()
        postgres_server.drop_database(dsn)
    assert notes.pop("fickle") >= {"compute_now", "holds_lease", "nextval", "pg_notify", "now", "random"}
    tables = notes.pop("tables")
    assert tables >= {"nodes", "commands", "leases", "outbox", "outbox_publisher"}
    assert notes == {
        "again": (0, 0),
        "a transaction of it": 0,
        "written": 7,
        "a write of nothing": 0,
        "inside": 9,
        "rolled back": 7,
        "committed": 11,
        "a standby is asked": True,
    }
    # What a poll asks in vain most often is among what is kept.
    known = Unchanged(tables, frozenset({"compute_now", "holds_lease"}))
    assert known._names(statements()["outbox.assign"].sql) == ("outbox",)
