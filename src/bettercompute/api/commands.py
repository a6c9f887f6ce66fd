"""`/v1/commands`: have something done, and see what becomes of it. `batches` awaits it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query
from pydantic import BaseModel, Field, StringConstraints

from bettercompute import telemetry
from bettercompute.api import label_scopes, payloads, quorums
from bettercompute.api.auth import Principal, Role, require
from bettercompute.api.context import ApiContext, Context
from bettercompute.api.enqueue import Wanted, check_times, enqueue, kind_named
from bettercompute.api.paging import PAGE_ROWS, AfterId, Limit, Page, SelectorText, command_state
from bettercompute.api.shapes import CommandShape, OutputShape, command_shape, next_offset, output_shapes
from bettercompute.api.storable import Body, Id, JsonObject, Text
from bettercompute.api.targets import BATCH_NODES_MAX, Targets, choose
from bettercompute.delivery import selectors
from bettercompute.protocol.limits import MAX_BIGINT, MAX_NOT_AFTER_MS, MAX_TIMEOUT_MS
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import commands, controller_runs, nodes

NOT_AFTER_MS = 24 * 3_600_000
# Each is looked up by itself for its newest commands.
SELECTED_NODES_MAX = 500

IdempotencyKey = Annotated[Id, StringConstraints(max_length=255)]

router = APIRouter(prefix="/v1", tags=["commands"])


class RunRequest(Body):
    """Run a kind on named nodes, on those that a selector means, or on all."""

    kind: Text
    payload: JsonObject = Field(default_factory=dict)
    nodes: Annotated[list[Id], Field(max_length=BATCH_NODES_MAX)] | None = None
    selector: SelectorText | None = None
    all: bool = False
    batch_id: Id | None = None
    """Add to this batch, which the same caller began with the same kind: how a run proceeds step by step."""
    timeout_ms: Annotated[int, Field(ge=1, le=MAX_TIMEOUT_MS)] | None = None
    not_before_ms: Annotated[int, Field(ge=0, le=MAX_NOT_AFTER_MS)] = 0
    """Not sent before so long from now, by the database's clock; less than `not_after_ms`."""
    not_after_ms: Annotated[int, Field(ge=1, le=MAX_NOT_AFTER_MS)] = NOT_AFTER_MS
    unbatched: bool = False
    """Of a destructive kind: use the few an hour that the approver set lets pass without its word."""
    stepwise: bool = False
    """Of a run that needs approval: once approved, send each command only when `POST /v1/batches/ID/steps` names it."""


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
    approvals_required: int = 0
    """So many approvers must sign the batch before any of it is sent; 0: none."""


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


class Asked(BaseModel):
    """A node that would be asked."""

    node_id: str
    state: str


class Preview(BaseModel):
    """Who would be asked, had it been a run."""

    kind: str
    nodes: list[Asked]
    approvals_required: int = 0
    """So many approvers would have to sign."""


@router.post("/commands", status_code=201)
async def run(
    request: RunRequest,
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.OPERATOR, scoped=True))],
    idempotency_key: Annotated[IdempotencyKey | None, Header()] = None,
) -> RunAnswer:
    """Enqueue a command for each node."""
    await label_scopes.check_nodes(context.database, caller, request.nodes or ())
    wanted = Wanted(
        kind=request.kind,
        payload=request.payload,
        targets=_targets(request, caller),
        timeout_ms=request.timeout_ms,
        not_before_in_ms=request.not_before_ms,
        not_after_in_ms=request.not_after_ms,
        asked_by=caller.name,
        idempotency_key=idempotency_key,
        batch_id=request.batch_id,
        unbatched=request.unbatched,
        stepwise=request.stepwise,
    )
    return RunAnswer(**await enqueue(context, wanted))


@router.post("/commands/preview")
async def preview(
    request: RunRequest, context: Context, caller: Annotated[Principal, Depends(require(Role.OPERATOR, scoped=True))]
) -> Preview:
    """Check a run and say which nodes would be asked, without asking them."""
    await label_scopes.check_nodes(context.database, caller, request.nodes or ())
    kind = kind_named(request.kind)
    check_times(not_before_in_ms=request.not_before_ms, not_after_in_ms=request.not_after_ms)
    payloads.read(kind, request.payload)
    chosen = await choose(context.database, kind, _targets(request, caller))
    approvers = await quorums.approvers_for(context.database, kind, unbatched=request.unbatched)
    return Preview(
        kind=kind.name,
        nodes=[Asked(node_id=node.node_id, state=node.state) for node in chosen],
        approvals_required=approvers.threshold if approvers else 0,
    )


def _targets(request: RunRequest, caller: Principal) -> Targets:
    if (request.all, bool(request.nodes), request.selector is not None).count(True) != 1:
        raise refuse(
            Reason.BAD_REQUEST, "name the nodes in `nodes`, select them by `selector`, or set `all`; one of the three"
        )
    return Targets(
        node_ids=request.nodes or None,
        requirements=(
            *label_scopes.requirements(caller),
            *(() if request.selector is None else selectors.parse(request.selector)),
        ),
    )


@router.get("/commands")
async def list_commands(
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.VIEWER, scoped=True))],
    after: AfterId = None,
    limit: Limit = PAGE_ROWS,
    node_id: Id | None = None,
    kind: Text | None = None,
    state: Text | None = None,
    batch_id: Id | None = None,
    selector: SelectorText | None = None,
) -> Page[CommandShape]:
    """List commands, the newest first; those of one batch in the order in which they were made."""
    if selector is not None and (node_id is not None or batch_id is not None):
        raise refuse(Reason.BAD_REQUEST, "a selector goes with neither node_id nor batch_id: leave one of them out")
    if node_id is not None and await nodes.get(context.database, node_id=node_id) is None:
        raise refuse(Reason.NOT_FOUND, f"no node {node_id}: `nodes list` shows the ones there are")
    await label_scopes.check_nodes(context.database, caller, () if node_id is None else (node_id,))
    if batch_id is not None:
        await label_scopes.check_batch(context.database, caller, batch_id)
    states = None if state is None else [command_state(state)]
    if batch_id is not None:
        if not await commands.list_batch(context.database, batch_id=batch_id, page_size=1):
            raise refuse(
                Reason.NOT_FOUND, f"no batch {batch_id}: `commands list` shows the latest commands with theirs"
            )
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
            node_ids=[node_id] if node_id is not None else await _selected(context, selector, caller),
            kind=kind,
            states=states,
        )
    now_ms = await controller_runs.now_ms(context.database)
    return Page(
        items=[command_shape(command, now_ms=now_ms) for command in page],
        next=page[-1].command_id if len(page) == limit else None,
    )


async def _selected(context: ApiContext, selector: str | None, caller: Principal) -> list[str] | None:
    wanted = (*label_scopes.requirements(caller), *(() if selector is None else selectors.parse(selector)))
    if not wanted:
        return None
    chosen = await nodes.choose(context.database, wanted, page_size=SELECTED_NODES_MAX + 1)
    if len(chosen) > SELECTED_NODES_MAX:
        raise refuse(
            Reason.BAD_REQUEST,
            f"the selector means more than {SELECTED_NODES_MAX} nodes: select fewer, or list the commands of a batch",
        )
    return [node.node_id for node in chosen]


@router.get("/commands/{command_id}")
async def get_command(
    command_id: Id, context: Context, caller: Annotated[Principal, Depends(require(Role.VIEWER, scoped=True))]
) -> CommandShape:
    """Return one command with its result."""
    await label_scopes.check_command(context.database, caller, command_id)
    command = await commands.get(context.database, command_id=command_id)
    if command is None:
        raise refuse(Reason.NOT_FOUND, f"no command {command_id}: `commands list` shows the latest")
    return command_shape(command, now_ms=await controller_runs.now_ms(context.database))


@router.get("/commands/{command_id}/output")
async def get_output(
    command_id: Id,
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.VIEWER, scoped=True))],
    from_offset: Annotated[int, Query(ge=0, le=MAX_BIGINT)] = 0,
) -> Output:
    """Return the next pieces of what a command has written so far; about the last 64 KiB are kept."""
    await label_scopes.check_command(context.database, caller, command_id)
    if not await commands.states(context.database, command_ids=[command_id]):
        raise refuse(Reason.NOT_FOUND, f"no command {command_id}: `commands list` shows the latest")
    pieces = await commands.output(context.database, command_id=command_id, from_offset=from_offset)
    return Output(
        items=output_shapes(pieces, from_offset=from_offset),
        next_offset=next_offset(pieces, from_offset=from_offset),
    )


@router.post("/commands/{command_id}/cancel")
async def cancel(
    command_id: Id,
    request: CancelRequest,
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.OPERATOR, scoped=True))],
) -> CancelAnswer:
    """Ask for a command's end. It is kept until the node has heard of it; a result that came first stands."""
    await label_scopes.check_command(context.database, caller, command_id)
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
