"""`/v1/nodes/ID/lock`, `/revoke` and `DELETE /v1/nodes/ID`: an operator's word on whether a node may be here.

Saying the same twice does no harm, so no idempotency key is needed: a second lock replaces the first, a second revoke
finds nothing left to revoke, a second forget no node.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field

from bettercompute import telemetry
from bettercompute.api import label_scopes
from bettercompute.api.auth import Principal, Role, require
from bettercompute.api.context import ApiContext, Context
from bettercompute.api.shapes import NodeShape, node_fields
from bettercompute.api.storable import Body, Id, Text
from bettercompute.delivery.commands import CommandState
from bettercompute.errors import Refused
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.session import standing as standing_rules
from bettercompute.session.standing import Revocation
from bettercompute.store import controller_runs, nodes, outbox, standing
from bettercompute.store.database import Queries, Transaction
from bettercompute.store.outbox import NewEvent
from bettercompute.store.standing import Ended

# Longer than this is meant for good: lock without an end, or revoke.
LOCK_TTL_MAX_MS = 366 * 86_400_000
WHY_CHARACTERS_MAX = 1_000

Why = Annotated[Text, Field(max_length=WHY_CHARACTERS_MAX)]

router = APIRouter(prefix="/v1/nodes", tags=["nodes"])


class LockRequest(Body):
    """For how long, and why: the node's log says it too."""

    ttl_ms: Annotated[int, Field(ge=1, le=LOCK_TTL_MAX_MS)] | None = None
    """None: until it is unlocked."""
    reason: Why = ""


class RevokeRequest(Body):
    """Why: for the node's log and the audit log."""

    reason: Why = ""


class EndedAnswer(BaseModel):
    """What an operator's word has ended."""

    node_id: str
    revoked_serials: list[str]
    commands_cancelled: int
    """They had not been sent."""
    commands_failed: int
    """They were in flight; what the node did with them is not known."""


@router.post("/{node_id}/lock")
async def lock(
    node_id: Id,
    request: LockRequest,
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.OPERATOR, scoped=True))],
) -> NodeShape:
    """End the node's session and let none begin, until the time is over or it is unlocked. Nothing is revoked."""
    async with context.database.transaction() as transaction:
        await _locked_row(transaction, caller, node_id)
        await standing.lock(
            transaction, node_id=node_id, ttl_ms=request.ttl_ms, locked_by=caller.name, reason=request.reason
        )
        await _tell(
            context,
            transaction,
            telemetry.EVENT_NODE_LOCKED,
            node_id,
            by=caller.name,
            reason=request.reason,
            ttlMs=request.ttl_ms,
        )
        await context.record(
            transaction,
            actor=caller.name,
            action="node.lock",
            target=f"node/{node_id}",
            why=request.reason,
            details={"ttl_ms": request.ttl_ms},
        )
        return await _shape(transaction, node_id)


@router.delete("/{node_id}/lock")
async def unlock(
    node_id: Id, context: Context, caller: Annotated[Principal, Depends(require(Role.OPERATOR, scoped=True))]
) -> NodeShape:
    """Let the node's sessions begin again. A node that is not locked stays as it is."""
    async with context.database.transaction() as transaction:
        await _locked_row(transaction, caller, node_id)
        if await standing.unlock(transaction, node_id=node_id):
            await _tell(context, transaction, telemetry.EVENT_NODE_UNLOCKED, node_id, by=caller.name)
            await context.record(transaction, actor=caller.name, action="node.unlock", target=f"node/{node_id}")
        return await _shape(transaction, node_id)


@router.post("/{node_id}/revoke")
async def revoke(
    node_id: Id,
    request: RevokeRequest,
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.ADMIN, scoped=True))],
) -> EndedAnswer:
    """End the node's identity: its session, its certificates, and what waits to be sent to it. It may join anew."""
    notice = standing_rules.revoked_notice(node_id, Revocation(by=caller.name, reason=request.reason))
    async with context.database.transaction() as transaction:
        await _locked_row(transaction, caller, node_id)
        ended = await standing.revoke(
            transaction,
            node_id=node_id,
            revoked_by=caller.name,
            reason=request.reason,
            notice=notice.SerializeToString(),
            draw_id=context.world.ids.uuid7,
            event_type=telemetry.EVENT_COMMAND_FINISHED,
        )
        answer = _ended(node_id, ended)
        await _tell(
            context,
            transaction,
            telemetry.EVENT_NODE_REVOKED,
            node_id,
            by=caller.name,
            reason=request.reason,
            serials=answer.revoked_serials,
        )
        await _record_end(context, transaction, caller, "node.revoke", answer, why=request.reason)
    return answer


@router.delete("/{node_id}")
async def forget(
    node_id: Id,
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.ADMIN, scoped=True))],
    reason: Why = "",
) -> EndedAnswer:
    """Remove a node that is gone, with its labels, spec and inventory. One that has a session is refused."""
    notice = standing_rules.forgotten_notice(node_id, by=caller.name)
    async with context.database.transaction() as transaction:
        await _locked_row(transaction, caller, node_id)
        gateway_id = await standing.holder(transaction, node_id=node_id)
        if gateway_id is not None:
            raise refuse(
                Reason.CONFLICT,
                f"node {node_id} has a session on {gateway_id}: stop its daemon, or `nodes revoke {node_id}`, and "
                "forget it when `nodes show` says that it is disconnected",
            )
        ended = await standing.forget(
            transaction,
            node_id=node_id,
            forgotten_by=caller.name,
            notice=notice.SerializeToString(),
            draw_id=context.world.ids.uuid7,
            event_type=telemetry.EVENT_COMMAND_FINISHED,
        )
        answer = _ended(node_id, ended)
        await _tell(context, transaction, telemetry.EVENT_NODE_FORGOTTEN, node_id, by=caller.name, reason=reason)
        await _record_end(context, transaction, caller, "node.forget", answer, why=reason)
    return answer


def no_node(node_id: str) -> Refused:
    """Return the refusal of an id that no node has."""
    return refuse(Reason.NOT_FOUND, f"no node {node_id}: `nodes list` shows the ones there are")


async def _locked_row(transaction: Transaction, caller: Principal, node_id: str) -> None:
    """Take turns with the node's Hello, its renewals and its joins; refuse a node outside of the caller's scope."""
    await label_scopes.check_nodes(transaction, caller, [node_id])
    if not await nodes.lock_session(transaction, node_id=node_id):
        raise no_node(node_id)


async def _shape(queries: Queries, node_id: str) -> NodeShape:
    node = await nodes.get(queries, node_id=node_id)
    assert node is not None, "its session's row is locked"
    return NodeShape(**node_fields(node, now_ms=await controller_runs.now_ms(queries)))


async def _tell(context: ApiContext, transaction: Transaction, name: str, node_id: str, **payload: object) -> None:
    event = NewEvent(id=context.world.ids.uuid7(), type=name, node_id=node_id, payload={"nodeId": node_id, **payload})
    await outbox.publish(transaction, [event])


def _ended(node_id: str, ended: Ended) -> EndedAnswer:
    return EndedAnswer(
        node_id=node_id,
        revoked_serials=list(ended.serials),
        commands_cancelled=ended.commands.get(CommandState.CANCELLED, 0),
        commands_failed=ended.commands.get(CommandState.FAILED, 0),
    )


async def _record_end(
    context: ApiContext, transaction: Transaction, caller: Principal, action: str, answer: EndedAnswer, *, why: str
) -> None:
    await context.record(
        transaction,
        actor=caller.name,
        action=action,
        target=f"node/{answer.node_id}",
        why=why,
        details=answer.model_dump(exclude={"node_id"}),
    )
