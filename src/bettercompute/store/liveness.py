"""What the Liveness controller reads and writes: sessions that nobody speaks for, nodes that stay away."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bettercompute.store.database import Queries


@dataclass(frozen=True, slots=True, kw_only=True)
class OverdueSession:
    """A connected node that may have to be declared disconnected; ages by the database's clock."""

    node_id: str
    gateway_id: str
    session_id: str
    session_epoch: int
    last_seen_ms: int
    last_seen_age_ms: int
    heartbeat_interval_ms: int
    lease_expired_ms: int | None
    """None while its gateway's lease is alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AwayNode:
    """A node that has been disconnected for long."""

    node_id: str
    session_epoch: int
    disconnected_age_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A session to be declared ended, exactly as it was read."""

    session: OverdueSession
    reason: str
    outbox_id: str
    payload: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Away:
    """A node to be declared unreachable."""

    node: AwayNode
    reason: str
    outbox_id: str
    payload: Mapping[str, object]


async def overdue(
    queries: Queries, *, after: str, page_size: int, lost_after_ms: int, stale_after_ms: int
) -> list[OverdueSession]:
    """Return the next sessions after the node id `after` that may be over."""
    rows = await queries.fetch(
        "liveness.overdue",
        after=after,
        page_size=page_size,
        lost_after_ms=lost_after_ms,
        stale_after_ms=stale_after_ms,
    )
    return [OverdueSession(**{name: row[name] for name in OverdueSession.__dataclass_fields__}) for row in rows]


async def long_disconnected(queries: Queries, *, page_size: int, unreachable_after_ms: int) -> list[AwayNode]:
    """Return nodes that have been disconnected for longer than this."""
    rows = await queries.fetch(
        "liveness.long_disconnected", page_size=page_size, unreachable_after_ms=unreachable_after_ms
    )
    return [AwayNode(**{name: row[name] for name in AwayNode.__dataclass_fields__}) for row in rows]


async def mark_disconnected(queries: Queries, lost: Sequence[Lost], *, event_type: str) -> list[str]:
    """Declare sessions ended; return the nodes that were still as they had been read."""
    rows = await queries.fetch(
        "liveness.mark_disconnected",
        node_ids=[item.session.node_id for item in lost],
        gateway_ids=[item.session.gateway_id for item in lost],
        session_ids=[item.session.session_id for item in lost],
        session_epochs=[item.session.session_epoch for item in lost],
        last_seens_ms=[item.session.last_seen_ms for item in lost],
        reasons=[item.reason for item in lost],
        outbox_ids=[item.outbox_id for item in lost],
        outbox_payloads=[json.dumps(item.payload) for item in lost],
        event_type=event_type,
    )
    return [row["node_id"] for row in rows]


async def mark_unreachable(queries: Queries, away: Sequence[Away], *, event_type: str) -> list[str]:
    """Declare nodes unreachable; return those that had not come back."""
    rows = await queries.fetch(
        "liveness.mark_unreachable",
        node_ids=[item.node.node_id for item in away],
        session_epochs=[item.node.session_epoch for item in away],
        reasons=[item.reason for item in away],
        outbox_ids=[item.outbox_id for item in away],
        outbox_payloads=[json.dumps(item.payload) for item in away],
        event_type=event_type,
    )
    return [row["node_id"] for row in rows]
