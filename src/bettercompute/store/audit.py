"""Decide what is kept of every act that changes something: who, what, to what, why, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bettercompute.store import json_columns
from bettercompute.store.database import Queries

# Sorts after every id.
NEWEST = "\uffff"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEntry:
    """An act. No secret and no token ever enters `details`."""

    id: str
    """UUIDv7: entries are listed by it."""
    actor: str
    action: str
    """For example `token.create`."""
    target: str
    """For example `node/n1`."""
    outcome: str
    """`done`, or the reason code of the refusal."""
    why: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An act that was recorded."""

    id: str
    at_ms: int
    actor: str
    action: str
    target: str
    why: str
    outcome: str
    details: Mapping[str, Any]


async def record(queries: Queries, entry: NewEntry) -> None:
    """Record an act, in its own transaction or the act's."""
    await queries.execute(
        "audit.insert",
        id=entry.id,
        actor=entry.actor,
        action=entry.action,
        target=entry.target,
        why=entry.why,
        outcome=entry.outcome,
        details=json_columns.encode(entry.details),
    )


async def list_page(
    queries: Queries,
    *,
    before: str = NEWEST,
    page_size: int,
    target: str | None = None,
    actor: str | None = None,
    action: str | None = None,
) -> list[Entry]:
    """Return the next older entries before the id `before`, newest first; with `target`, all of that target."""
    if target is not None:
        rows = await queries.fetch("audit.list_of_target", target=target, before=before, page_size=page_size)
    else:
        rows = await queries.fetch("audit.list", actor=actor, action=action, before=before, page_size=page_size)
    return [
        Entry(
            **{name: row[name] for name in Entry.__dataclass_fields__ if name != "details"},
            details=json_columns.decode(row["details"]),
        )
        for row in rows
    ]
