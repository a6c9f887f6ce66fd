"""Decide how published events get their order: rows commit with what they tell of, one publisher numbers them after.

Numbering at insert would lose rows: a transaction that drew a lower number may commit after a reader has passed it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bettercompute.store import channels, json_columns
from bettercompute.store.database import Database, Queries, Transaction

PUBLISH_BATCH = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvent:
    """Something to publish; `type` is one of telemetry's event names."""

    id: str
    """UUIDv7: a second row of the same id is dropped."""
    type: str
    node_id: str | None
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedEvent:
    """An event in the stream; readers resume by `position`."""

    position: int
    id: str
    type: str
    node_id: str | None
    payload: Mapping[str, Any]
    created_at_ms: int


@dataclass(frozen=True, slots=True)
class StreamBounds:
    """What of the stream is there. Positions before `first_position` were removed by retention; None: it is empty."""

    first_position: int | None
    last_position: int


async def publish(transaction: Transaction, events: Sequence[NewEvent]) -> None:
    """Write events in the transaction of what they tell of."""
    if not events:
        return
    await transaction.execute(
        "outbox.insert",
        ids=[event.id for event in events],
        types=[event.type for event in events],
        node_ids=[event.node_id for event in events],
        payloads=[json_columns.encode(event.payload) for event in events],
    )
    await transaction.execute("outbox.notify", channel=channels.OUTBOX, payload="")


async def assign_positions(database: Database, *, batch_size: int = PUBLISH_BATCH) -> int:
    """Number the next committed events and return how many; any number of publishers take turns.

    Where nothing waits no turn is taken: that would write a lock, and wait for its fsync, each second of an idle day.
    What is committed after the look is found by the next one.
    """
    [waiting] = await database.fetch("outbox.any_waiting")
    if not waiting["found"]:
        return 0

    async def work(transaction: Transaction) -> int:
        [publisher] = await transaction.fetch("outbox.lock_publisher")
        rows = await transaction.fetch("outbox.assign", last_position=publisher["last_position"], batch_size=batch_size)
        if rows:
            last_position = max(row["position"] for row in rows)
            await transaction.execute("outbox.advance", last_position=last_position)
            await transaction.execute("outbox.notify", channel=channels.STREAM, payload=str(last_position))
        return len(rows)

    return await database.retrying(work)


async def read_from(queries: Queries, *, after_position: int, page_size: int = 500) -> list[PublishedEvent]:
    """Return the next events of the stream."""
    rows = await queries.fetch("outbox.read_from", after_position=after_position, page_size=page_size)
    return [
        PublishedEvent(
            position=row["position"],
            id=row["id"],
            type=row["type"],
            node_id=row["node_id"],
            payload=json_columns.decode(row["payload"]),
            created_at_ms=row["created_at_ms"],
        )
        for row in rows
    ]


async def bounds(queries: Queries) -> StreamBounds:
    """Return the first and the last position of the stream."""
    [row] = await queries.fetch("outbox.bounds")
    return StreamBounds(row["first_position"], row["last_position"])
