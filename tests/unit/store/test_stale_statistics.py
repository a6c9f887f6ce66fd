"""Dispatch stays linear when the planner's statistics are of a moment at which nothing was pending: the usual state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from bettercompute.delivery.commands import CommandState
from bettercompute.session.gateway_state import DispatchDemand, LaneDemand
from bettercompute.store import delivery, statements
from bettercompute.store.database import Database
from bettercompute.store.limits import GATEWAY_LIMITS
from bettercompute.store.sessions import Lease, SessionKey
from bettercompute.system import system_world
from tests.contract.gateway import seed

NODES, EACH = 100, 8
INSERT = (
    "INSERT INTO commands (id, node_id, kind, lane, seq, body, created_by, not_after, timeout_ms, state, finished_at)"
    " SELECT $2 || n || '-' || g, n, 'inventory.refresh', 1, g, '', 'test', compute_now() + interval '1 hour', 60000,"
    " $3::smallint, CASE WHEN $3::smallint = 5 THEN compute_now() END"
    " FROM unnest($1::text[]) AS n, generate_series(1, $4::int) AS g"
)


class Recorder:
    """Takes the statement that dispatch would run."""

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}

    async def fetch(self, _: str, /, **arguments: Any) -> list[Any]:
        self.arguments = arguments
        return []


async def test_dispatch_reads_no_more_than_it_marks(database: Database) -> None:
    await seed.add_lease(database)
    node_ids = [f"n{number:03}" for number in range(NODES)]
    for node_id in node_ids:
        await seed.add_node(database, node_id)
    lease: Lease = seed.LEASE
    await database.query(
        "UPDATE node_sessions SET gateway_id = $1, session_id = 's', session_epoch = 1, last_seen = compute_now()",
        lease.gateway_id,
    )
    await database.query(INSERT, node_ids, "done-", 5, 40)
    await database.query("ANALYZE commands")
    # What waits for its time comes first by seq, and is not even looked at.
    await database.query(INSERT, node_ids, "later-", 1, 40)
    await database.query("UPDATE commands SET not_before = compute_now() + interval '1 minute' WHERE state = 1")
    await database.query("UPDATE commands SET not_before = compute_now() - interval '1 s' WHERE id LIKE 'later-%-40'")
    await database.query(INSERT, node_ids, "new-", 1, EACH)
    lanes = (LaneDemand(lane=1, free=EACH, held=(), pending=EACH),)
    demands = [
        DispatchDemand(
            node_id=node_id, session_id="s", epoch=1, boot_id="b", lanes=lanes, kinds=None, signed_only=False
        )
        for node_id in node_ids
    ]
    recorder = Recorder()
    await delivery.dispatch(recorder, demands, lease=lease)  # type: ignore[arg-type]
    statement = statements.statements()["delivery.dispatch"]
    marked, thrown_away, read = await explained(database, statement, recorder.arguments)
    assert marked == NODES * EACH
    assert thrown_away <= 10 * NODES * EACH
    poll = statements.statements()["delivery.nodes_with_work"]
    named, thrown_away, read = await explained(database, poll, {"gateway_id": lease.gateway_id, "ahead_ms": 10_000})
    assert named == NODES
    assert thrown_away <= NODES
    assert read <= 3 * NODES * EACH, "the 4,000 that wait are not among them"


async def explained(database: Database, statement: statements.Statement, arguments: dict[str, Any]) -> tuple[int, ...]:
    """Run a statement; return how many rows it gave, threw away, and read of commands."""
    rows = await database.query(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement.sql}", *statement.bind(arguments))
    [plan] = json.loads(rows[0]["QUERY PLAN"])
    found = list(nodes(plan["Plan"]))
    thrown_away = sum(
        node.get(kind, 0) * node["Actual Loops"]
        for node in found
        for kind in ("Rows Removed by Filter", "Rows Removed by Join Filter")
    )
    read = sum(node["Actual Rows"] * node["Actual Loops"] for node in found if node.get("Relation Name") == "commands")
    return plan["Plan"]["Actual Rows"], thrown_away, read


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


async def test_a_plan_of_an_empty_table_does_not_read_it_whole_when_it_is_full(dsn: str) -> None:
    """A gateway plans each statement once per connection, which may be the moment after the installation."""
    database = await Database.open(
        dsn, dice=system_world().dice, application_name="tests", pool_size=1, limits=GATEWAY_LIMITS
    )
    try:
        await seed.add_lease(database)
        node_ids = [f"n{number:03}" for number in range(NODES)]
        for node_id in node_ids:
            await seed.add_node(database, node_id)
        await database.query(
            "UPDATE node_sessions SET gateway_id = $1, session_id = 's', session_epoch = 1, last_seen = compute_now()",
            seed.LEASE.gateway_id,
        )
        await use_each(database, node_ids)
        await database.query(INSERT, node_ids, "done-", 5, 40)
        before = await whole_reads(database)
        await use_each(database, node_ids)
        assert await whole_reads(database) == before
    finally:
        await database.close()


async def use_each(database: Database, node_ids: list[str]) -> None:
    """Run what a gateway runs for each command, and behind its notifications."""
    lanes = (LaneDemand(lane=1, free=EACH, held=(), pending=EACH),)
    demands = [
        DispatchDemand(node_id=one, session_id="s", epoch=1, boot_id="b", lanes=lanes, kinds=None, signed_only=False)
        for one in node_ids
    ]
    news = [
        delivery.CommandNews(
            node_id=node_id,
            command_id=f"unknown-{node_id}",
            state=CommandState.RUNNING,
            saw_acked=True,
            saw_running=True,
            reason="",
            message="",
            result=b"",
            signature=b"",
            authenticated=True,
            progress=b"",
            started_at_ms=0,
            outbox_id="",
        )
        for node_id in node_ids
    ]
    keys = [SessionKey(node_id=node_id, session_id="s", epoch=1) for node_id in node_ids]
    for _ in range(8):
        assert await delivery.nodes_with_work(database, gateway_id=seed.LEASE.gateway_id, ahead_ms=10_000) == []
        assert await delivery.dispatch(database, demands, lease=seed.LEASE) == []
        assert (await delivery.store_command_news(database, news, event_type="command.finished")).moved == 0
        assert await delivery.look_at(database, node_ids, ahead_ms=10_000) == delivery.LookedAt(
            cancels=(), due_in_ms={}
        )
        assert await delivery.marked(database, keys) == {}


async def whole_reads(database: Database) -> int:
    """Return how often the commands were read from the first to the last."""
    await database.query("SELECT pg_stat_force_next_flush()")
    [row] = await database.query("SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 'commands'")
    return int(row["seq_scan"])
