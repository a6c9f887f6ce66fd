"""`/v1/nodes/ID/events`: what a node told of itself, which its journal kept until it was stored here, and what is lost.

See docs/delivery.md, "Events".
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, StringConstraints

from bettercompute.api import label_scopes
from bettercompute.api.auth import Principal, Role, require
from bettercompute.api.context import Context
from bettercompute.api.paging import PAGE_ROWS, Limit
from bettercompute.api.shapes import rfc3339
from bettercompute.api.standing import no_node
from bettercompute.api.storable import Id, Storable
from bettercompute.protocol.limits import MAX_BIGINT, MAX_NAME_CHARS
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import node_events, nodes
from bettercompute.store.node_events import NodeEvent, Place

GAPS_SHOWN_MAX = 100

_PLACE = re.compile(r"([0-9]{1,19}):(.*)", re.ASCII | re.DOTALL)

Before = Annotated[
    Annotated[str, StringConstraints(max_length=MAX_NAME_CHARS + 20), Storable] | None,
    Query(description="`next` of the page before."),
]

router = APIRouter(prefix="/v1/nodes", tags=["nodes"])


class NodeEventShape(BaseModel):
    """An event of a node. `at` is by the node's clock; `recovered`: sent again after its journal had gone back."""

    journal_id: str
    seq: int
    id: str
    type: str
    at: str | None
    received_at: str | None
    recovered: bool
    payload: dict[str, Any]


class EventGapShape(BaseModel):
    """Events that the node's journal dropped before they could be sent."""

    journal_id: str
    first_seq: int
    last_seq: int
    noticed_at: str | None


class NodeEventPage(BaseModel):
    """Events, the newest first, and the newest gaps. `next` goes on with older events; None: there are none kept."""

    items: list[NodeEventShape]
    gaps: list[EventGapShape]
    next: str | None


@router.get("/{node_id}/events")
async def list_node_events(
    node_id: Id,
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.VIEWER, scoped=True))],
    before: Before = None,
    limit: Limit = PAGE_ROWS,
) -> NodeEventPage:
    """List what a node told of itself."""
    await label_scopes.check_nodes(context.database, caller, [node_id])
    place = node_events.NEWEST if before is None else _place(before)
    if await nodes.get(context.database, node_id=node_id) is None:
        raise no_node(node_id)
    page = await node_events.page(context.database, node_id=node_id, before=place, page_size=limit)
    gaps = await node_events.gaps(context.database, node_id=node_id, page_size=GAPS_SHOWN_MAX)
    last = page[-1].place if len(page) == limit else None
    return NodeEventPage(
        items=[_shape(event) for event in page],
        gaps=[
            EventGapShape(
                journal_id=gap.journal_id,
                first_seq=gap.first_seq,
                last_seq=gap.last_seq,
                noticed_at=rfc3339(gap.noticed_at_ms),
            )
            for gap in gaps
        ],
        next=None if last is None else f"{last.seq}:{last.journal_id}",
    )


def _place(text: str) -> Place:
    match = _PLACE.fullmatch(text)
    if match is None or int(match[1]) > MAX_BIGINT:
        raise refuse(Reason.BAD_REQUEST, "before: that is no place in this list; pass `next` of the page before")
    return Place(match[2], int(match[1]))


def _shape(event: NodeEvent) -> NodeEventShape:
    return NodeEventShape(
        journal_id=event.place.journal_id,
        seq=event.place.seq,
        id=event.event_id,
        type=event.type,
        at=rfc3339(event.occurred_at_ms),
        received_at=rfc3339(event.received_at_ms),
        recovered=event.recovered,
        payload=json.loads(event.payload_json or b"{}"),
    )
