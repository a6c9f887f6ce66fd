"""`/v1/commands` and `/v1/batches`: have something done, and see or await what becomes of it."""

from __future__ import annotations

import base64
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query
from pydantic import BaseModel, Field, StringConstraints

from bettercompute import telemetry
from bettercompute.api.auth import Principal, Role, require
from bettercompute.api.context import ApiContext, Context
from bettercompute.api.enqueue import BATCH_NODES_MAX, Wanted, enqueue
from bettercompute.api.paging import PAGE_ROWS, AfterId, Limit, Page, command_state
from bettercompute.api.shapes import CommandShape, command_shape
from bettercompute.api.storable import Body, Id, JsonObject, Text
from bettercompute.delivery.commands import TERMINAL
from bettercompute.errors import Refused
from bettercompute.protocol.limits import MAX_BIGINT, MAX_NOT_AFTER_MS, MAX_TIMEOUT_MS
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import commands, controller_runs, nodes

NOT_AFTER_MS = 24 * 3_600_000
# Longer than proxies keep a silent request.
WAIT_MS_MAX = 30_000

IdempotencyKey = Annotated[Id, StringConstraints(max_length=255)]

router = APIRouter(prefix="/v1", tags=["commands"])


class RunRequest(Body):
    """Run a kind on named nodes, or on all."""

    kind: Text
    payload: JsonObject = Field(default_factory=dict)
    nodes: Annotated[list[Id], Field(max_length=BATCH_NODES_MAX)] | None = None
    all: bool = False
    timeout_ms: Annotated[int, Field(ge=1, le=MAX_TIMEOUT_MS)] | None = None
    not_after_ms: Annotated[int, Field(ge=1, le=MAX_NOT_AFTER_MS)] = NOT_AFTER_MS


class Made(BaseModel):
    """A command that was made."""

    id: str
    node_id: str


class RunAnswer(BaseModel):
    """The commands of a run. After `gives_up_after_ms` none of them can still begin or run."""

    batch_id: str
    kind: str
    gives_up_after_ms: int
    commands: list[Made]
    without_session: list[str]
    """The nodes that were not connected when it was made: their commands wait until they are, or until `not_after`."""


class OutputShape(BaseModel):
    """A piece of a command's output; bytes dropped before it will never come."""

    offset: int
    data_base64: str
    dropped_bytes: int


class Output(BaseModel):
    """Pieces in their order. Ask again from `next_offset` while the command runs."""

    items: list[OutputShape]
    next_offset: int


class CancelRequest(Body):
    """Why, for the node's log and the audit log."""

    reason: Text = ""


class CancelAnswer(BaseModel):
    """What the cancel met, and how the command stands now."""

    id: str
    outcome: str
    state: str


class BatchItem(BaseModel):
    """How one command of a batch stands."""

    id: str
    node_id: str
    state: str
    reason: str
    message: str


class Batch(BaseModel):
    """How a batch stands."""

    batch_id: str
    open: int
    items: list[BatchItem]


@router.post("/commands", status_code=201)
async def run(
    request: RunRequest,
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.OPERATOR))],
    idempotency_key: Annotated[IdempotencyKey | None, Header()] = None,
) -> RunAnswer:
    """Enqueue a command for each node."""
    if request.all == bool(request.nodes):
        raise refuse(Reason.BAD_REQUEST, "name the nodes in `nodes`, or set `all`; one of the two")
    wanted = Wanted(
        kind=request.kind,
        payload=request.payload,
        node_ids=None if request.all else request.nodes,
        timeout_ms=request.timeout_ms,
        not_after_in_ms=request.not_after_ms,
        asked_by=caller.name,
        idempotency_key=idempotency_key,
    )
    return RunAnswer(**await enqueue(context, wanted))


@router.get("/commands")
async def list_commands(
    context: Context,
    _: Annotated[Principal, Depends(require(Role.VIEWER))],
    after: AfterId = None,
    limit: Limit = PAGE_ROWS,
    node_id: Id | None = None,
    kind: Text | None = None,
    state: Text | None = None,
    batch_id: Id | None = None,
) -> Page[CommandShape]:
    """List commands, the newest first; those of one batch in the order in which they were made."""
    if node_id is not None and await nodes.get(context.database, node_id=node_id) is None:
        raise refuse(Reason.NOT_FOUND, f"no node {node_id}: `nodes list` shows the ones there are")
    states = None if state is None else [command_state(state)]
    if batch_id is not None:
        if not await commands.list_batch(context.database, batch_id=batch_id, page_size=1):
            raise _no_batch(batch_id)
        page = await commands.list_batch(
            context.database,
            batch_id=batch_id,
            after=after or "",
            page_size=limit,
            node_id=node_id,
            kind=kind,
            states=states,
        )
    else:
        page = await commands.list_page(
            context.database,
            before=after or commands.NEWEST,
            page_size=limit,
            node_id=node_id,
            kind=kind,
            states=states,
        )
    now_ms = await controller_runs.now_ms(context.database)
    return Page(
        items=[command_shape(command, now_ms=now_ms) for command in page],
        next=page[-1].command_id if len(page) == limit else None,
    )


@router.get("/commands/{command_id}")
async def get_command(
    command_id: Id, context: Context, _: Annotated[Principal, Depends(require(Role.VIEWER))]
) -> CommandShape:
    """Return one command with its result."""
    command = await commands.get(context.database, command_id=command_id)
    if command is None:
        raise refuse(Reason.NOT_FOUND, f"no command {command_id}: `commands list` shows the latest")
    return command_shape(command, now_ms=await controller_runs.now_ms(context.database))


@router.get("/commands/{command_id}/output")
async def get_output(
    command_id: Id,
    context: Context,
    _: Annotated[Principal, Depends(require(Role.VIEWER))],
    from_offset: Annotated[int, Query(ge=0, le=MAX_BIGINT)] = 0,
) -> Output:
    """Return the next pieces of what a command has written so far; about the last 64 KiB are kept."""
    if not await commands.states(context.database, command_ids=[command_id]):
        raise refuse(Reason.NOT_FOUND, f"no command {command_id}: `commands list` shows the latest")
    pieces = await commands.output(context.database, command_id=command_id, from_offset=from_offset)
    return Output(
        items=[
            OutputShape(
                offset=piece.output_offset,
                data_base64=base64.b64encode(piece.data).decode(),
                dropped_bytes=piece.dropped_bytes,
            )
            for piece in pieces
        ],
        next_offset=pieces[-1].output_offset + max(1, len(pieces[-1].data)) if pieces else from_offset,
    )


@router.post("/commands/{command_id}/cancel")
async def cancel(
    command_id: Id,
    request: CancelRequest,
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.OPERATOR))],
) -> CancelAnswer:
    """Ask for a command's end. It is kept until the node has heard of it; a result that came first stands."""
    async with context.database.transaction() as transaction:
        outcomes = await commands.request_cancel(
            transaction,
            command_ids=[command_id],
            requested_by=caller.name,
            reason=request.reason,
            draw_id=context.world.ids.uuid7,
            event_type=telemetry.EVENT_COMMAND_FINISHED,
        )
        outcome = outcomes[command_id]
        if outcome is commands.CancelOutcome.UNKNOWN:
            raise refuse(Reason.NOT_FOUND, f"no command {command_id}: `commands list` shows the latest")
        await context.record(
            transaction,
            actor=caller.name,
            action="command.cancel",
            target=f"command/{command_id}",
            why=request.reason,
            details={"outcome": outcome.value},
        )
    command = await commands.get(context.database, command_id=command_id)
    assert command is not None, "the transaction saw it"
    return CancelAnswer(id=command_id, outcome=outcome.value, state=command.state.name.lower())


@router.get("/batches/{batch_id}")
async def get_batch(
    batch_id: Id,
    context: Context,
    _: Annotated[Principal, Depends(require(Role.VIEWER))],
    wait_ms: Annotated[int, Query(ge=0, le=WAIT_MS_MAX, description="Wait this long for news.")] = 0,
    open_: Annotated[
        int | None,
        Query(alias="open", ge=0, le=BATCH_NODES_MAX, description="How many were open when last asked: fewer is news."),
    ] = None,
) -> Batch:
    """Return how each command of a run stands, at once or as soon as one more of them has ended."""
    deadline_ms = context.world.clock.monotonic_ms() + wait_ms
    while True:
        batch = await _batch(context, batch_id)
        left_ms = deadline_ms - context.world.clock.monotonic_ms()
        if left_ms <= 0 or batch.open == 0 or open_ is None or batch.open < open_:
            return batch
        await context.finished.wait(timeout_s=left_ms / 1000)


def _no_batch(batch_id: str) -> Refused:
    return refuse(Reason.NOT_FOUND, f"no batch {batch_id}: `commands list` shows the latest commands with theirs")


async def _batch(context: ApiContext, batch_id: str) -> Batch:
    rows = await commands.states_of_batch(context.database, batch_id=batch_id)
    if not rows:
        raise _no_batch(batch_id)
    items = [
        BatchItem(
            id=row.command_id,
            node_id=row.node_id,
            state=row.state.name.lower(),
            reason=row.reason,
            message=row.message,
        )
        for row in rows
    ]
    return Batch(batch_id=batch_id, open=sum(row.state not in TERMINAL for row in rows), items=items)
