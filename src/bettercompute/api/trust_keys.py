"""`/v1/pki`: what nodes trust, who holds which version of it, and the steps by which its keys are rotated.

New keys are made where the key folder is, by the command line; what comes here is public. See docs/rotation.md,
"The life of a key"; decisions 0130.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, Field

from bettercompute.api.auth import Principal, Role, require
from bettercompute.api.context import Context, Rotated
from bettercompute.api.paging import PAGE_ROWS, AfterId, Limit, Page
from bettercompute.api.shapes import rfc3339
from bettercompute.api.storable import Body, Id
from bettercompute.pki.rotation import EXCEPTED_MAX, Purpose, TrustedKey
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import approvers as stored_approvers
from bettercompute.store import trust as stored_trust

CERTIFICATE_CHARACTERS_MAX = 16 * 1024
Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$", max_length=CERTIFICATE_CHARACTERS_MAX)]
ExceptNodes = Annotated[list[Id], Field(max_length=EXCEPTED_MAX)]
KeySha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

router = APIRouter(prefix="/v1/pki", tags=["pki"])


class KeyShape(BaseModel):
    """A key that is or was trusted. Only `current` is in use; `retired` is trusted no more."""

    purpose: str
    key_sha256: str
    stage: str
    first_version: int
    """The first trust version that lists it; 0: none does."""
    changed_at: str | None


class HoldersShape(BaseModel):
    """How many nodes hold a trust version."""

    version: int
    connected: int
    nodes: int


class TrustShape(BaseModel):
    """The trust bundle in force, what it is made of, and who holds which version."""

    version: int
    published_at: str | None
    bundle_bytes: int
    approver_set_epoch: int
    keys: list[KeyShape]
    holders: list[HoldersShape]


class NodeTrustShape(BaseModel):
    """What a node holds, as it said last."""

    node_id: str
    connected: bool
    trust_version: int
    behind: bool
    approver_set_epoch: int | None
    approver_set_sha256: str | None
    quorum_behind: bool
    """It enforces another approver set than the one in force: `pki approvers` says what to do."""


class PrepareRequest(Body):
    """The public half of the new key, in hex: a certificate in DER; for join-signing a SubjectPublicKeyInfo in DER."""

    public_der: Hex
    companion_der: Hex = ""
    """The join-encryption key that goes with a join-signing key."""


class SwitchRequest(Body):
    """Which key is to be in use: the one that was prepared. It waits for all nodes that need to know it but these."""

    key_sha256: KeySha256
    except_nodes: ExceptNodes = Field(default_factory=list)


class RetireRequest(Body):
    """Which nodes are not waited for though they depend on the replaced key: they will need a new token."""

    except_nodes: ExceptNodes = Field(default_factory=list)


class RotatedShape(BaseModel):
    """How the keys stand after a step, and the trust version that says so."""

    trust_version: int
    keys: list[KeyShape]
    left_behind: list[str]
    """The excepted nodes that it would have waited for."""


@router.get("/trust")
async def get_trust(context: Context, _: Annotated[Principal, Depends(require(Role.VIEWER))]) -> TrustShape:
    """Return what nodes are to trust, and how many hold which version of it."""
    bundle = await stored_trust.current(context.database)
    if bundle is None:
        raise refuse(Reason.NOT_FOUND, "no trust bundle is published yet: the control plane is starting")
    approvers = await stored_approvers.current(context.database)
    return TrustShape(
        version=bundle.version,
        published_at=rfc3339(bundle.created_at_ms),
        bundle_bytes=len(bundle.signed_bundle),
        approver_set_epoch=0 if approvers is None else approvers.approvers.epoch,
        keys=[_key(key) for key in await stored_trust.keys(context.database)],
        holders=[
            HoldersShape(version=held.version, connected=held.connected, nodes=held.nodes)
            for held in await stored_trust.holders(context.database)
        ],
    )


@router.get("/trust/nodes")
async def list_holders(
    context: Context,
    _: Annotated[Principal, Depends(require(Role.VIEWER))],
    after: AfterId = None,
    limit: Limit = PAGE_ROWS,
    behind: Annotated[bool, Query(description="Only those that do not hold the version in force.")] = False,
) -> Page[NodeTrustShape]:
    """List nodes with the trust version and the approver set that they hold."""
    bundle = await stored_trust.current(context.database)
    version = 0 if bundle is None else bundle.version
    found = await stored_approvers.current(context.database)
    epoch = 0 if found is None else found.approvers.epoch
    sha256 = b"" if found is None else found.approvers.sha256
    page = await stored_trust.nodes(
        context.database, after=after or "", page_size=limit, version=version, behind_only=behind
    )
    items = [
        NodeTrustShape(
            node_id=node.node_id,
            connected=node.connected,
            trust_version=node.trust_version,
            behind=node.trust_version < version,
            approver_set_epoch=node.approver_set_epoch,
            approver_set_sha256=None if node.approver_set_sha256 is None else node.approver_set_sha256.hex(),
            quorum_behind=(node.approver_set_epoch or 0, node.approver_set_sha256 or b"") != (epoch, sha256),
        )
        for node in page
    ]
    return Page(items=items, next=page[-1].node_id if len(page) == limit else None)


@router.post("/keys/{purpose}/prepare")
async def prepare(
    purpose: Purpose,
    request: PrepareRequest,
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.ADMIN))],
) -> RotatedShape:
    """Have a new key trusted beside the one in use."""
    rotated = await context.trust.prepare(
        purpose=purpose,
        public_der=bytes.fromhex(request.public_der),
        companion_der=bytes.fromhex(request.companion_der),
        asked_by=caller.name,
    )
    return _rotated(rotated, purpose)


@router.post("/keys/{purpose}/switch")
async def switch(
    purpose: Purpose,
    request: SwitchRequest,
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.ADMIN))],
) -> RotatedShape:
    """Put the prepared key in use; refused while nodes do not know it, whose names are told."""
    rotated = await context.trust.switch(
        purpose=purpose, key_sha256=request.key_sha256, asked_by=caller.name, excepted=request.except_nodes
    )
    return _rotated(rotated, purpose)


@router.post("/keys/{purpose}/retire")
async def retire(
    purpose: Purpose,
    request: RetireRequest,
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.ADMIN))],
) -> RotatedShape:
    """Have the replaced key trusted no more; refused while something depends on it, which is named."""
    rotated = await context.trust.retire(purpose=purpose, asked_by=caller.name, excepted=request.except_nodes)
    return _rotated(rotated, purpose)


def _rotated(rotated: Rotated, purpose: Purpose) -> RotatedShape:
    keys = [_key(key) for key in rotated.keys if key.purpose is purpose]
    return RotatedShape(trust_version=rotated.version, keys=keys, left_behind=list(rotated.left_behind))


def _key(key: TrustedKey) -> KeyShape:
    return KeyShape(
        purpose=key.purpose,
        key_sha256=key.key_sha256,
        stage=key.stage,
        first_version=key.first_version,
        changed_at=rfc3339(key.changed_at_ms),
    )
