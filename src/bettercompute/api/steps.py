"""`/v1/batches/ID/steps` and `/stop`: a run that was approved as a whole goes on a few nodes at a time.

All its commands are there from the beginning, for approvers sign a whole; who asked for it releases them one after the
other, and can end what it has not released. The pace is the maker's promise and not the approvers': a node asks only
whether its command was approved. See docs/security.md, "Approvers"; decisions 0177.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field

from bettercompute import telemetry
from bettercompute.api import label_scopes
from bettercompute.api.auth import Principal, Role, require
from bettercompute.api.context import Context
from bettercompute.api.storable import Body, Id
from bettercompute.api.targets import BATCH_NODES_MAX
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import approvers as stored
from bettercompute.store import commands
from bettercompute.store.approvers import ApprovalBatch
from bettercompute.store.database import Transaction

router = APIRouter(prefix="/v1/batches", tags=["commands"])


class StepRequest(Body):
    """The commands whose turn it is."""

    commands: Annotated[list[Id], Field(min_length=1, max_length=BATCH_NODES_MAX)]


class StepAnswer(BaseModel):
    """How the batch stands; its commands are released when it is `approved`, and not otherwise."""

    batch_id: str
    state: str
    released: int
    """How many of them were not released before."""


class StopAnswer(BaseModel):
    """How many commands ended that had not been released."""

    batch_id: str
    cancelled: int


@router.post("/{batch_id}/steps")
async def step(
    batch_id: Id,
    request: StepRequest,
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.OPERATOR, scoped=True))],
) -> StepAnswer:
    """Have the next commands of an approved run sent. The same step may be asked again."""
    await label_scopes.check_batch(context.database, caller, batch_id)
    async with context.database.transaction() as transaction:
        batch = await _own(transaction, batch_id, caller)
        strangers = await stored.not_of_batch(transaction, batch_id=batch_id, command_ids=request.commands)
        if strangers:
            raise refuse(Reason.NOT_FOUND, f"batch {batch_id} has no command {', '.join(strangers)}")
        released = 0
        if batch.state == stored.APPROVED:
            released = await stored.release_step(transaction, batch_id=batch_id, command_ids=request.commands)
        if released:
            await context.record(
                transaction,
                actor=caller.name,
                action="batch.step",
                target=f"batch/{batch_id}",
                details={"released": released},
            )
    return StepAnswer(batch_id=batch_id, state=batch.shown_state, released=released)


@router.post("/{batch_id}/stop")
async def stop(
    batch_id: Id, context: Context, caller: Annotated[Principal, Depends(require(Role.OPERATOR, scoped=True))]
) -> StopAnswer:
    """End what was not released yet; what was goes on. Of a batch that waits for approvals nothing will run."""
    await label_scopes.check_batch(context.database, caller, batch_id)
    async with context.database.transaction() as transaction:
        batch = await _own(transaction, batch_id, caller)
        why = "the run was stopped by who asked for it"
        held = await stored.held_of(transaction, batch_id=batch_id)
        if batch.state == stored.WAITING:
            await stored.decide_batch(
                transaction, batch_id=batch_id, state=stored.REFUSED, decided_by=caller.name, why=why
            )
        await commands.request_cancel(
            transaction,
            command_ids=held,
            requested_by=caller.name,
            reason=why,
            draw_id=context.world.ids.uuid7,
            event_type=telemetry.EVENT_COMMAND_FINISHED,
        )
        if held:
            await context.record(
                transaction,
                actor=caller.name,
                action="batch.stop",
                target=f"batch/{batch_id}",
                details={"cancelled": len(held)},
            )
    return StopAnswer(batch_id=batch_id, cancelled=len(held))


async def _own(transaction: Transaction, batch_id: str, caller: Principal) -> ApprovalBatch:
    """Return a run in steps of the caller's, locked."""
    batch = await stored.lock_batch(transaction, batch_id=batch_id)
    if batch is None or not batch.stepwise:
        raise refuse(Reason.NOT_FOUND, f"no batch {batch_id} that is approved and goes in steps")
    if batch.asked_by != caller.name:
        raise refuse(
            Reason.CONFLICT, f"batch {batch_id} is {batch.kind} of {batch.asked_by}: only its maker leads it on"
        )
    return batch
