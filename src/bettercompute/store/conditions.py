"""Decide what is kept of nodes' conditions: one row a type, whose time moves only when its status does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bettercompute.store.database import Queries

TRUE = "true"
FALSE = "false"
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCondition:
    """A condition as judged now. `source`: daemon, inventory, gateway or controller; `status`: true, false, unknown."""

    node_id: str
    type: str
    source: str
    status: str
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A stored condition; `changed_at_ms` is when its status last changed."""

    node_id: str
    type: str
    source: str
    status: str
    reason: str
    message: str
    changed_at_ms: int
    updated_at_ms: int


async def set_all(queries: Queries, conditions: Sequence[NewCondition]) -> None:
    """Write conditions of any nodes; of two of one type the later in the list wins."""
    last = {(condition.node_id, condition.type): condition for condition in conditions}
    ordered = [last[key] for key in sorted(last)]
    if not ordered:
        return
    await queries.execute(
        "conditions.set",
        node_ids=[condition.node_id for condition in ordered],
        types=[condition.type for condition in ordered],
        sources=[condition.source for condition in ordered],
        statuses=[condition.status for condition in ordered],
        reasons=[condition.reason for condition in ordered],
        messages=[condition.message for condition in ordered],
    )


async def of_node(queries: Queries, *, node_id: str) -> list[Condition]:
    """Return a node's conditions by type."""
    rows = await queries.fetch("conditions.of_node", node_id=node_id)
    return [Condition(**{name: row[name] for name in Condition.__dataclass_fields__}) for row in rows]
