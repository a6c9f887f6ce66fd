"""Dispatch stays linear when the planner's statistics are of a moment at which nothing was pending: the usual state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from bettercompute.session.gateway_state import DispatchDemand, LaneDemand
from bettercompute.store import delivery, statements
from bettercompute.store.database import Database
from bettercompute.store.sessions import Lease
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
    rows = await database.query(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement.sql}", *statement.bind(recorder.arguments))
    [plan] = json.loads(rows[0]["QUERY PLAN"])
    assert plan["Plan"]["Actual Rows"] == NODES * EACH
    thrown_away = sum(
        node.get(kind, 0) * node["Actual Loops"]
        for node in nodes(plan["Plan"])
        for kind in ("Rows Removed by Filter", "Rows Removed by Join Filter")
    )
    assert thrown_away <= 10 * NODES * EACH


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)
