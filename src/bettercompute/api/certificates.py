"""`/v1/nodes/ID/certificates`: what a node's identity stands on, and what became of each certificate."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel

from bettercompute.api import label_scopes
from bettercompute.api.auth import Principal, Role, require
from bettercompute.api.context import Context
from bettercompute.api.shapes import rfc3339
from bettercompute.api.standing import no_node
from bettercompute.api.storable import Id
from bettercompute.store import certificates, controller_runs, nodes
from bettercompute.store.certificates import StoredCertificate

# A node has one or two that are good, and those of the last week.
SHOWN_MAX = 20

router = APIRouter(prefix="/v1/nodes", tags=["nodes"])


class CertificateShape(BaseModel):
    """A certificate: `unused`, `in-use`, `superseded`, `revoked` or `expired`."""

    serial: str
    state: str
    reason: str
    """Why it was revoked."""
    identity_generation: int
    issued_at: str | None
    first_used_at: str | None
    not_after: str | None


class CertificatesAnswer(BaseModel):
    """The newest certificates of a node, and which identity of its id it has now."""

    node_id: str
    identity_generation: int
    items: list[CertificateShape]


@router.get("/{node_id}/certificates")
async def list_certificates(
    node_id: Id, context: Context, caller: Annotated[Principal, Depends(require(Role.VIEWER, scoped=True))]
) -> CertificatesAnswer:
    """List a node's certificates, the newest first."""
    await label_scopes.check_nodes(context.database, caller, [node_id])
    node = await nodes.get(context.database, node_id=node_id)
    if node is None:
        raise no_node(node_id)
    found = await certificates.of_node(context.database, node_id=node_id, page_size=SHOWN_MAX)
    now_ms = await controller_runs.now_ms(context.database)
    return CertificatesAnswer(
        node_id=node_id,
        identity_generation=node.identity_generation,
        items=[_shape(one, now_ms=now_ms) for one in found],
    )


def _shape(one: StoredCertificate, *, now_ms: int) -> CertificateShape:
    return CertificateShape(
        serial=one.serial,
        state=_state(one, now_ms=now_ms),
        reason=one.revocation_reason or "",
        identity_generation=one.identity_generation,
        issued_at=rfc3339(one.issued_at_ms),
        first_used_at=rfc3339(one.first_used_at_ms),
        not_after=rfc3339(one.not_after_ms),
    )


def _state(one: StoredCertificate, *, now_ms: int) -> str:
    if one.revoked_at_ms is not None:
        return "revoked"
    if one.superseded_at_ms is not None:
        return "superseded"
    if one.not_after_ms <= now_ms:
        return "expired"
    return "unused" if one.first_used_at_ms is None else "in-use"
