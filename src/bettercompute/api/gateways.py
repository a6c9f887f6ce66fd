"""`/v1/gateways`: the gateways by their leases, and the wish that one gives its sessions away.

Asking twice changes nothing, so no idempotency key is needed; the gateway follows within a renewal of its lease.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from bettercompute.api.auth import Principal, Role, require
from bettercompute.api.context import ApiContext, Context
from bettercompute.api.shapes import GatewayDetail, GatewayShape, gateway_fields
from bettercompute.api.storable import Id
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import leases
from bettercompute.store.leases import Lease

router = APIRouter(prefix="/v1/gateways", tags=["gateways"])


@router.get("")
async def list_gateways(
    context: Context, _: Annotated[Principal, Depends(require(Role.VIEWER))]
) -> dict[str, list[GatewayShape]]:
    """List the gateways that are not retired."""
    return {"items": [GatewayShape(**gateway_fields(lease)) for lease in await leases.list_all(context.database)]}


@router.get("/{gateway_id}")
async def get_gateway(
    gateway_id: Id, context: Context, _: Annotated[Principal, Depends(require(Role.VIEWER))]
) -> GatewayDetail:
    """Return one gateway, also a retired one, with the nodes that it holds."""
    return await _detail(context, await _lease(context, gateway_id))


@router.post("/{gateway_id}/drain")
async def drain(
    gateway_id: Id, context: Context, caller: Annotated[Principal, Depends(require(Role.OPERATOR))]
) -> GatewayDetail:
    """Ask a gateway to refuse new sessions and to send the ones it has elsewhere, spread over time."""
    async with context.database.transaction() as transaction:
        asked = await leases.request_drain(transaction, name=gateway_id, requested_by=caller.name)
        if asked:
            await context.record(transaction, actor=caller.name, action="gateway.drain", target=f"gateway/{gateway_id}")
    return await _detail(context, await _lease(context, gateway_id, must_live=not asked))


@router.delete("/{gateway_id}/drain")
async def undo_drain(
    gateway_id: Id, context: Context, caller: Annotated[Principal, Depends(require(Role.OPERATOR))]
) -> GatewayDetail:
    """Let a gateway take sessions again; those that have left stay where they are."""
    async with context.database.transaction() as transaction:
        asked = await leases.undo_drain(transaction, name=gateway_id)
        if asked:
            await context.record(
                transaction, actor=caller.name, action="gateway.undo-drain", target=f"gateway/{gateway_id}"
            )
    return await _detail(context, await _lease(context, gateway_id, must_live=not asked))


async def _lease(context: ApiContext, gateway_id: str, *, must_live: bool = False) -> Lease:
    lease = await leases.get(context.database, name=gateway_id)
    if lease is None:
        raise refuse(Reason.NOT_FOUND, f"no gateway {gateway_id}: `gateway list` shows the ones there are")
    if must_live:
        raise refuse(Reason.CONFLICT, f"gateway {gateway_id} has ended: it takes no sessions and gives none away")
    return lease


async def _detail(context: ApiContext, lease: Lease) -> GatewayDetail:
    held = await leases.held(context.database, name=lease.name)
    return GatewayDetail(**gateway_fields(lease), nodes=held.nodes, node_ids=list(held.names), refuses=lease.refuses)
