"""`/v1/events`: what has happened, as pages or as server-sent events that resume from any position.

A position is given after the commit, so that a reader who has passed it has missed nothing. A subscriber costs a slot
and one page: it reads the table by its own position. Whoever does not take a page in time is dropped, and may
resume.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Depends, Header, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Send

from bettercompute.api import label_scopes
from bettercompute.api.auth import Principal, Role, require
from bettercompute.api.context import ApiContext, Context
from bettercompute.api.paging import PAGE_ROWS, Limit
from bettercompute.api.problems import problem
from bettercompute.api.shapes import rfc3339
from bettercompute.api.storable import Id
from bettercompute.protocol.limits import MAX_BIGINT
from bettercompute.protocol.statuses import Reason
from bettercompute.store import channels, outbox
from bettercompute.store.outbox import PublishedEvent

# Each may hold one page; more readers than this want a copy of the table.
SUBSCRIBERS_MAX = 64
FOLLOW_ROWS = 200
# A page is a few hundred kilobytes: who has not taken it by then does not read.
SEND_S = 20.0
# And who does not for as long again is not told why.
END_S = 20.0
# Proxies end what is silent for a minute.
KEEP_ALIVE_S = 15.0
# Then the client resumes, and its token is looked at again.
FOLLOW_S = 3_600.0
EVENT_STREAM = "text/event-stream"

_DROPPED = (
    "event: dropped\ndata: "
    + json.dumps(
        {
            "reason": Reason.SLOW_CONSUMER.value,
            "message": f"nothing was read for {SEND_S:.0f} s: go on after the last id, and read as it comes",
        }
    )
    + "\n\n"
)

_log = structlog.get_logger(__name__)

router = APIRouter(prefix="/v1", tags=["events"])

Position = Annotated[int, Query(ge=0, le=MAX_BIGINT)]
Wanted = Callable[[Sequence[PublishedEvent]], Awaitable[list[PublishedEvent]]]


class EventShape(BaseModel):
    """Something that happened."""

    position: int
    id: str
    type: str
    node_id: str | None
    at: str | None
    payload: dict[str, Any]


class EventPage(BaseModel):
    """Events in the order of positions. `next`: go on after it; None: this is all so far."""

    items: list[EventShape]
    next: int | None
    last_position: int
    first_position: int | None
    """What was before it has been removed by retention."""


@router.get("/events", response_model=EventPage, responses={200: {"content": {EVENT_STREAM: {}}}})
async def list_events(
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.VIEWER, scoped=True))],
    after: Position | None = None,
    limit: Limit = PAGE_ROWS,
    node_id: Id | None = None,
    accept: Annotated[str, Header()] = "",
    last_event_id: Annotated[int | None, Header(ge=0, le=MAX_BIGINT)] = None,
) -> EventPage | Response:
    """List events after a position; as `text/event-stream`, go on with those to come, without a position from now."""
    if node_id is not None:
        await label_scopes.check_nodes(context.database, caller, [node_id])
    bounds = await outbox.bounds(context.database)
    wanted = partial(_wanted, context, caller, node_id)
    if EVENT_STREAM in accept:
        begin = last_event_id if last_event_id is not None else after
        return _subscribe(context, begin if begin is not None else bounds.last_position, wanted)
    page = await outbox.read_from(context.database, after_position=after or 0, page_size=limit)
    return EventPage(
        items=[_shape(event) for event in await wanted(page)],
        next=page[-1].position if len(page) == limit else None,
        last_position=bounds.last_position,
        first_position=bounds.first_position,
    )


async def _wanted(
    context: ApiContext, caller: Principal, node_id: str | None, page: Sequence[PublishedEvent]
) -> list[PublishedEvent]:
    """Return those of a page that are of the node, if one is asked for, and of nodes within the caller's scope now."""
    of_node = [event for event in page if node_id in {None, event.node_id}]
    node_ids = {event.node_id for event in of_node if event.node_id is not None}
    within = await label_scopes.within(context.database, caller, node_ids)
    return of_node if within is None else [event for event in of_node if event.node_id in within]


def _subscribe(context: ApiContext, after: int, wanted: Wanted) -> Response:
    if context.finished.subscribers >= SUBSCRIBERS_MAX:
        return problem(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"{SUBSCRIBERS_MAX} readers follow the events here, which is the most: try again in a minute",
            reason=Reason.OVERLOADED,
            headers={"retry-after": "60"},
        )
    return EventStream(follow(context, after=after, wanted=wanted), media_type=EVENT_STREAM)


class EventStream(StreamingResponse):
    """Sends as fast as the reader takes it, and drops a reader who takes nothing."""

    async def stream_response(self, send: Send) -> None:
        """Send the stream."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = b""
        try:
            async for chunk in self.body_iterator:
                assert isinstance(chunk, str)
                async with asyncio.timeout(SEND_S):
                    await send({"type": "http.response.body", "body": chunk.encode(), "more_body": True})
        except TimeoutError:
            _log.warning("a reader of events was dropped", reason=Reason.SLOW_CONSUMER, after_s=SEND_S)
            last = _DROPPED.encode()
        finally:
            # Gives the slot back first: who does not read keeps nobody else from reading.
            assert isinstance(self.body_iterator, AsyncGenerator)
            await self.body_iterator.aclose()
        # The page that was not taken was not begun either. Who reads on, late, is told why nothing follows; whoever
        # never does is left without an end, for which it would have to read: the server ends the connection.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await send({"type": "http.response.body", "body": last, "more_body": False})


async def _all(page: Sequence[PublishedEvent]) -> list[PublishedEvent]:
    return list(page)


async def follow(context: ApiContext, *, after: int, wanted: Wanted = _all) -> AsyncGenerator[str, None]:
    """Yield server-sent events after a position, those of each page that are `wanted`, for an hour at most."""
    context.finished.subscribers += 1
    try:
        first = (await outbox.bounds(context.database)).first_position
        if first is not None and after + 1 < first:
            yield _frame("gap", {"after": after, "first_position": first}, position=first - 1)
            after = first - 1
        else:
            # Where it begins, so that whoever loses the connection before the first event can resume all the same.
            yield f": {after}\nid: {after}\n\n"
        idle_since_s = asyncio.get_running_loop().time()
        ends_at_s = idle_since_s + FOLLOW_S
        while asyncio.get_running_loop().time() < ends_at_s:
            page = await outbox.read_from(context.database, after_position=after, page_size=FOLLOW_ROWS)
            if page:
                after = page[-1].position
            shapes = [(event, _shape(event).model_dump()) for event in await wanted(page)]
            now_s = asyncio.get_running_loop().time()
            if shapes:
                yield "".join(_frame(event.type, shape, position=event.position) for event, shape in shapes)
                idle_since_s = now_s
            elif now_s - idle_since_s > KEEP_ALIVE_S:
                # The position goes along, so that a reader of few nodes does not come back to where it began.
                yield f": {after}\nid: {after}\n\n"
                idle_since_s = now_s
            if len(page) < FOLLOW_ROWS:
                await context.finished.wait(timeout_s=KEEP_ALIVE_S, channel=channels.STREAM)
    finally:
        context.finished.subscribers -= 1


def _frame(name: str, data: dict[str, Any], *, position: int) -> str:
    return f"id: {position}\nevent: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


def _shape(event: PublishedEvent) -> EventShape:
    return EventShape(
        position=event.position,
        id=event.id,
        type=event.type,
        node_id=event.node_id,
        at=rfc3339(event.created_at_ms),
        payload=dict(event.payload),
    )
