"""What nodes told of themselves: events in the order of their journal, and the stretches that a journal had to drop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bettercompute.protocol.limits import MAX_BIGINT, MAX_NAME_CHARS
from bettercompute.store.database import Queries

# Above every journal id that a node may say.
_ABOVE_ALL = "\U0010ffff" * (MAX_NAME_CHARS + 1)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an event stands among its node's: its journal, and its number there."""

    journal_id: str
    seq: int


NEWEST = Place(_ABOVE_ALL, MAX_BIGINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent:
    """An event as its node told it."""

    place: Place
    event_id: str
    type: str
    occurred_at_ms: int
    """By the node's clock."""
    received_at_ms: int
    recovered: bool
    """Sent again after the journal had gone back."""
    payload_json: bytes
    """A JSON object as the node wrote it; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventGap:
    """Events of a journal that its node dropped before they were acked."""

    journal_id: str
    first_seq: int
    last_seq: int
    noticed_at_ms: int


async def page(queries: Queries, *, node_id: str, before: Place, page_size: int) -> Sequence[NodeEvent]:
    """Return the events before a place, the newest first."""
    rows = await queries.fetch(
        "node_events.page",
        node_id=node_id,
        before_journal_id=before.journal_id,
        before_seq=before.seq,
        page_size=page_size,
    )
    return [
        NodeEvent(
            place=Place(row["journal_id"], row["seq"]),
            event_id=row["event_id"],
            type=row["type"],
            occurred_at_ms=row["occurred_at_ms"],
            received_at_ms=row["received_at_ms"],
            recovered=row["recovered"],
            payload_json=bytes(row["payload"]),
        )
        for row in rows
    ]


async def gaps(queries: Queries, *, node_id: str, page_size: int) -> Sequence[EventGap]:
    """Return the newest gaps of a node."""
    rows = await queries.fetch("node_events.gaps", node_id=node_id, page_size=page_size)
    return [
        EventGap(
            journal_id=row["journal_id"],
            first_seq=row["first_seq"],
            last_seq=row["last_seq"],
            noticed_at_ms=row["noticed_at_ms"],
        )
        for row in rows
    ]
