"""`/v1/gateways`: the gateways by their leases, and the wish that one gives its sessions away.

Asking twice changes nothing, so no idempotency key is needed; the gateway follows within a renewal of its lease.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel

from bettercompute.api.auth import Principal, Role, require
from bettercompute.api.context import ApiContext, Context
from bettercompute.api.shapes import rfc3339
from bettercompute.api.storable import Id
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import leases
from bettercompute.store.leases import Lease

router = APIRouter(prefix="/v1/gateways", tags=["gateways"])


class GatewayShape(BaseModel):
    """A gateway by its lease."""

    gateway_id: str
    live: bool
    draining: bool
    advertise_url: str
    version: str
    sessions: int
    sessions_max: int
    drain_requested_at: str | None
    drain_requested_by: str | None
    started_at: str | None
    renewed_at: str | None
    retired_at: str | None


class GatewayDetail(GatewayShape):
    """A gateway with the nodes whose session is its own by their rows: exact, where `sessions` is a renewal old."""

    nodes: int
    node_ids: list[str]
    """The first of them."""
    refuses: bool
    """It has seen that it is to drain: nobody comes in any more."""


@router.get("")
async def list_gateways(
    context: Context, _: Annotated[Principal, Depends(require(Role.VIEWER))]
) -> dict[str, list[GatewayShape]]:
    """List the gateways that are not retired."""
    return {"items": [GatewayShape(**_fields(lease)) for lease in await leases.list_all(context.database)]}


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
    return GatewayDetail(**_fields(lease), nodes=held.nodes, node_ids=list(held.names), refuses=lease.refuses)


def _fields(lease: Lease) -> dict[str, Any]:
    """Return the fields of a `GatewayShape`."""
    return {
        "gateway_id": lease.name,
        "live": lease.live,
        "draining": lease.draining,
        "advertise_url": lease.advertise_url,
        "version": lease.version,
        "sessions": lease.stream_count,
        "sessions_max": lease.stream_limit,
        "drain_requested_at": rfc3339(lease.drain_requested_at_ms),
        "drain_requested_by": lease.drain_requested_by,
        "started_at": rfc3339(lease.started_at_ms),
        "renewed_at": rfc3339(lease.renewed_at_ms),
        "retired_at": rfc3339(lease.retired_at_ms),
    }
