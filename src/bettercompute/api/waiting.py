"""`/v1/commands/ID/why` and `/abandon`: what a command waits for, and its end when nobody will ever tell."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field

from bettercompute import telemetry
from bettercompute.api import label_scopes
from bettercompute.api.auth import Principal, Role, require
from bettercompute.api.context import Context
from bettercompute.api.storable import Body, Id, Text
from bettercompute.delivery.waiting import WaitingFacts, decide
from bettercompute.errors import Refused
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import waiting
from bettercompute.store.database import Queries

router = APIRouter(prefix="/v1/commands", tags=["commands"])


class ReasonShape(BaseModel):
    """One thing that a command waits for."""

    code: str
    sentence: str


class WhyAnswer(BaseModel):
    """What a command waits for, the decisive reason first."""

    id: str
    node_id: str
    state: str
    reasons: list[ReasonShape]
    credit_holders: list[str]
    """The other commands of the lane that hold a credit of the node."""


class AbandonRequest(Body):
    """Why nobody waits for it any more: for the audit log and the command's message."""

    reason: Annotated[Text, Field(min_length=1)]


class AbandonAnswer(BaseModel):
    """The command as it ended."""

    id: str
    state: str
    reason: str


@router.get("/{command_id}/why")
async def why(
    command_id: Id, context: Context, caller: Annotated[Principal, Depends(require(Role.VIEWER, scoped=True))]
) -> WhyAnswer:
    """Say what exactly a command waits for."""
    await label_scopes.check_command(context.database, caller, command_id)
    facts = await _facts(context.database, command_id)
    return WhyAnswer(
        id=command_id,
        node_id=facts.node_id,
        state=facts.state.name.lower(),
        reasons=[ReasonShape(code=reason.wait.value, sentence=reason.sentence) for reason in decide(facts)],
        credit_holders=[holder.command_id for holder in (*facts.holders, *facts.abandoned)],
    )


@router.post("/{command_id}/abandon")
async def abandon(
    command_id: Id,
    request: AbandonRequest,
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.ADMIN))],
) -> AbandonAnswer:
    """End a command in flight as failed without its node's word; what the node reports later is dropped."""
    async with context.database.transaction() as transaction:
        ended = await waiting.abandon(
            transaction,
            command_id=command_id,
            abandoned_by=caller.name,
            why=request.reason,
            outbox_id=context.world.ids.uuid7(),
            event_type=telemetry.EVENT_COMMAND_FINISHED,
        )
        if ended:
            await context.record(
                transaction,
                actor=caller.name,
                action="command.abandon",
                target=f"command/{command_id}",
                why=request.reason,
            )
    if not ended:
        facts = await _facts(context.database, command_id)
        cure = "cancel it instead" if facts.state.name == "PENDING" else "nothing is left to abandon"
        raise refuse(Reason.CONFLICT, f"command {command_id} is {facts.state.name.lower()}, not in flight: {cure}")
    return AbandonAnswer(id=command_id, state="failed", reason=waiting.ABANDONED_REASON)


async def _facts(queries: Queries, command_id: str) -> WaitingFacts:
    found = await waiting.facts(queries, command_id=command_id)
    if found is None:
        raise no_command(command_id)
    return found


def no_command(command_id: str) -> Refused:
    """Return the refusal of an id that no command has."""
    return refuse(Reason.NOT_FOUND, f"no command {command_id}: `commands list` shows the latest")
