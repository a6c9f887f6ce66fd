"""Decide what is kept of controllers' runs: a controller that was away itself must not judge the silence of others."""

from __future__ import annotations

from dataclasses import dataclass

from bettercompute.store.database import Queries


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRun:
    """The last run of a controller, by the database's clock, and that clock now."""

    name: str
    holder: str
    ran_at_ms: int
    grace_until_ms: int | None
    now_ms: int


async def record(queries: Queries, *, name: str, holder: str, grace_until_ms: int | None = None) -> None:
    """Note that the controller has run; `grace_until_ms` is until when it makes no transitions."""
    await queries.execute("controller_runs.record", name=name, holder=holder, grace_until_ms=grace_until_ms)


async def get(queries: Queries, *, name: str) -> LastRun | None:
    """Return the controller's last run."""
    row = await queries.fetch_one("controller_runs.get", name=name)
    return None if row is None else LastRun(**{field: row[field] for field in LastRun.__dataclass_fields__})


async def now_ms(queries: Queries) -> int:
    """Return the clock of record, in Unix milliseconds."""
    [row] = await queries.fetch("controller_runs.now")
    return int(row["now_ms"])
