"""`/v1/approvals`: the batches that wait for approvers, what is in them, and what approvers say.

An approver reads the bodies of all commands, computes the scope root from them, and signs that: what the API shows and
what is signed cannot differ. See docs/security.md, "Approvers"; decisions 0131.
"""

from __future__ import annotations

import base64
from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field

from bettercompute import telemetry
from bettercompute.api.approvers import Base64, read_signature, verified
from bettercompute.api.auth import Principal, Role, require
from bettercompute.api.context import ApiContext, Context
from bettercompute.api.paging import PAGE_ROWS, AfterId, Limit, Page
from bettercompute.api.shapes import rfc3339
from bettercompute.api.storable import Body, Id, Text
from bettercompute.errors import Refused
from bettercompute.pki import certificates, quorum
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import batch_approval_input
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import approvers as stored
from bettercompute.store import commands
from bettercompute.store.approvers import ApprovalBatch, StoredSet
from bettercompute.store.database import Queries

router = APIRouter(prefix="/v1/approvals", tags=["approvers"])


class ApprovalShape(BaseModel):
    """A batch that approvers have to agree to."""

    batch_id: str
    kind: str
    scope_root: str
    scope_size: int
    not_after: str | None
    not_after_ms: int
    trust_domain: str
    state: str
    """`waiting`, `approved`, `refused` or `expired`."""
    asked_by: str
    asked_at: str | None
    approved_by: list[str]
    """Names, or key ids, of the approvers who have signed."""
    approvals_required: int
    decided_at: str | None
    decided_by: str | None
    why: str
    stepwise: bool
    """Once approved it is sent in steps, as `asked_by` releases them. Nodes do not judge that."""


class ScopeShape(BaseModel):
    """One command of a batch: its leaf is made of these."""

    command_id: str
    node_id: str
    kind: str
    body: str
    """The serialized CommandBody that the node will get, in base64."""


class ApproveRequest(Body):
    """A serialized Signature over the batch, purpose `batch-approval`, in base64."""

    signature: Base64


class RefuseRequest(Body):
    """Why the batch must not run."""

    reason: Annotated[Text, Field(min_length=1)]


@router.get("")
async def list_waiting(context: Context, _: Annotated[Principal, Depends(require(Role.VIEWER))]) -> list[ApprovalShape]:
    """List the batches that wait, the soonest to expire first."""
    held = await stored.current(context.database)
    return [_shape(batch, held) for batch in await stored.waiting_batches(context.database)]


@router.get("/{batch_id}")
async def get_approval(
    batch_id: Id, context: Context, _: Annotated[Principal, Depends(require(Role.VIEWER))]
) -> ApprovalShape:
    """Return one batch."""
    return await _shown(context, batch_id)


@router.get("/{batch_id}/scope")
async def scope(
    batch_id: Id,
    context: Context,
    _: Annotated[Principal, Depends(require(Role.VIEWER))],
    after: AfterId = None,
    limit: Limit = PAGE_ROWS,
) -> Page[ScopeShape]:
    """List the commands of a batch with their bodies, in the order of the leaves."""
    page = await stored.scope(context.database, batch_id=batch_id, after=after or "", page_size=limit)
    items = [
        ScopeShape(
            command_id=item.command_id,
            node_id=item.node_id,
            kind=item.kind,
            body=base64.b64encode(item.body).decode(),
        )
        for item in page
    ]
    return Page(items=items, next=page[-1].command_id if len(page) == limit else None)


@router.post("/{batch_id}/signatures", status_code=201)
async def approve(
    batch_id: Id,
    request: ApproveRequest,
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.OPERATOR))],
) -> ApprovalShape:
    """Add an approver's signature; with enough of them the commands are released."""
    signature = read_signature(request.signature)
    async with context.database.transaction() as transaction:
        batch = _waiting(await stored.lock_batch(transaction, batch_id=batch_id), batch_id)
        held = await stored.current(transaction)
        if held is None or not held.approvers.keys:
            raise refuse(Reason.CONFLICT, "the approver set was given up meanwhile: run the kind anew")
        approval = _approval(batch)
        signing_input = batch_approval_input(approval, trust_domain=batch.trust_domain)
        key = next(
            (
                key
                for key in map(quorum.approver_key, held.approvers.keys)
                if certificates.spki_sha256(key) == signature.kid
            ),
            None,
        )
        if key is None:
            raise refuse(Reason.ACCESS_DENIED, "this key is not of an approver of the set in force")
        verified(signature, key=key, signing_input=signing_input)
        if any(given.kid == signature.kid for given in approval.signatures):
            raise refuse(Reason.CONFLICT, "this approver has signed the batch already")
        # Of approvers who have left since they signed nothing is kept: it would count nowhere.
        kids = {certificates.spki_sha256(quorum.approver_key(spki)) for spki in held.approvers.keys}
        kept = [*(given for given in approval.signatures if given.kid in kids), signature]
        del approval.signatures[:]
        approval.signatures.extend(kept)
        await stored.sign_batch(
            transaction,
            batch_id=batch_id,
            signatures=[given.SerializeToString(deterministic=True) for given in kept],
        )
        who = held.names.get(signature.kid) or signature.kid
        released = 0
        if quorum.approvers_who_signed(held.approvers, approval.signatures, signing_input) >= held.approvers.threshold:
            await stored.decide_batch(transaction, batch_id=batch_id, state=stored.APPROVED, decided_by=who)
            released = await stored.release(
                transaction,
                batch_id=batch_id,
                approval=approval.SerializeToString(deterministic=True),
                stepwise=batch.stepwise,
            )
        await context.record(
            transaction,
            actor=caller.name,
            action="batch.approve",
            target=f"batch/{batch_id}",
            details={"approver": who, "kid": signature.kid, "released": released},
        )
    return await _shown(context, batch_id)


@router.post("/{batch_id}/refusal", status_code=201)
async def refuse_batch(
    batch_id: Id,
    request: RefuseRequest,
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.OPERATOR))],
) -> ApprovalShape:
    """End a batch that waits: none of it will run."""
    async with context.database.transaction() as transaction:
        _waiting(await stored.lock_batch(transaction, batch_id=batch_id), batch_id)
        await stored.decide_batch(
            transaction, batch_id=batch_id, state=stored.REFUSED, decided_by=caller.name, why=request.reason
        )
        await commands.request_cancel(
            transaction,
            command_ids=await stored.pending_of(transaction, batch_id=batch_id),
            requested_by=caller.name,
            reason=f"approval refused: {request.reason}",
            draw_id=context.world.ids.uuid7,
            event_type=telemetry.EVENT_COMMAND_FINISHED,
        )
        await context.record(
            transaction,
            actor=caller.name,
            action="batch.refuse",
            target=f"batch/{batch_id}",
            why=request.reason,
        )
    return await _shown(context, batch_id)


def _approval(batch: ApprovalBatch) -> messages.BatchApproval:
    return messages.BatchApproval(
        batch_id=batch.batch_id,
        scope_root=batch.scope_root,
        scope_size=batch.scope_size,
        not_after_ms=batch.not_after_ms,
        signatures=[messages.Signature.FromString(signature) for signature in batch.signatures],
    )


def _waiting(batch: ApprovalBatch | None, batch_id: str) -> ApprovalBatch:
    if batch is None:
        raise _no_batch(batch_id)
    if batch.shown_state != stored.WAITING:
        who = f" by {batch.decided_by}" if batch.decided_by else ""
        raise refuse(Reason.CONFLICT, f"batch {batch_id} is {batch.shown_state}{who}: there is nothing to approve")
    return batch


async def _shown(context: ApiContext, batch_id: str) -> ApprovalShape:
    queries: Queries = context.database
    batch = await stored.batch(queries, batch_id=batch_id)
    if batch is None:
        raise _no_batch(batch_id)
    return _shape(batch, await stored.current(queries))


def _shape(batch: ApprovalBatch, held: StoredSet | None) -> ApprovalShape:
    names = {} if held is None else held.names
    kids = [messages.Signature.FromString(signature).kid for signature in batch.signatures]
    return ApprovalShape(
        batch_id=batch.batch_id,
        kind=batch.kind,
        scope_root=batch.scope_root.hex(),
        scope_size=batch.scope_size,
        not_after=rfc3339(batch.not_after_ms),
        not_after_ms=batch.not_after_ms,
        trust_domain=batch.trust_domain,
        state=batch.shown_state,
        asked_by=batch.asked_by,
        asked_at=rfc3339(batch.asked_at_ms),
        approved_by=[names.get(kid) or kid for kid in kids],
        approvals_required=0 if held is None else held.approvers.threshold,
        decided_at=rfc3339(batch.decided_at_ms),
        decided_by=batch.decided_by,
        why=batch.why,
        stepwise=batch.stepwise,
    )


def _no_batch(batch_id: str) -> Refused:
    return refuse(
        Reason.NOT_FOUND,
        f"no batch {batch_id} waits, or waited, for approvals: `better-compute approve` lists those that do",
    )
