"""`/v1/nodes`: the fleet, and identities made without a token."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field

from bettercompute.api import label_scopes
from bettercompute.api.auth import Principal, Role, require
from bettercompute.api.context import Context
from bettercompute.api.paging import PAGE_ROWS, AfterNode, Limit, Page, SelectorText
from bettercompute.api.shapes import Label, NodeDetail, NodeShape, labels_of, node_detail, node_fields
from bettercompute.api.storable import Body, Id, Storable, Text
from bettercompute.delivery import selectors
from bettercompute.delivery.selectors import Requirement, check_label, check_label_key
from bettercompute.pki.identity import UNREADABLE, check_role, check_site
from bettercompute.protocol.limits import MAX_LABELS
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import attestation, conditions, controller_runs, inventory, nodes

CSR_PEM_CHARACTERS_MAX = 16_384

router = APIRouter(prefix="/v1/nodes", tags=["nodes"])


class ProvisionRequest(Body):
    """A joined identity is wanted for this certificate request."""

    csr_pem: Annotated[str, Field(max_length=CSR_PEM_CHARACTERS_MAX), Storable]
    site: Text | None = None
    role: Text = "node"
    replace: bool = False
    """Take the identity of a node that there is: its certificates are revoked and its session ends."""


class ProvisionAnswer(BaseModel):
    """What goes on disk beside the key: `nodes provision` writes it."""

    node_id: str
    chain_pem: str
    serving_ca_pem: str
    trust_bundle_base64: str
    identity: dict[str, Any]


class LabelsRequest(Body):
    """What is to change; labels that are not named stay."""

    set: Annotated[dict[Text, Text], Field(max_length=MAX_LABELS)] = Field(default_factory=dict)
    remove: Annotated[list[Text], Field(max_length=MAX_LABELS)] = Field(default_factory=list)


class LabelsAnswer(BaseModel):
    """A node's labels as they are now."""

    node_id: str
    labels: list[Label]


@router.get("")
async def list_nodes(
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.VIEWER, scoped=True))],
    after: AfterNode = None,
    limit: Limit = PAGE_ROWS,
    site: Text | None = None,
    role: Text | None = None,
    state: Literal["joined", "connected", "disconnected", "unreachable"] | None = None,
    selector: SelectorText | None = None,
) -> Page[NodeShape]:
    """List nodes in the order of their ids."""
    requirements = [
        *label_scopes.requirements(caller),
        *(
            Requirement(key=key, values=(value,))
            for key, value in {
                "site": None if site is None else check_site(site),
                "role": None if role is None else check_role(role),
                "state": state,
            }.items()
            if value is not None
        ),
    ]
    if selector is not None:
        requirements += selectors.parse(selector)
    page = await nodes.list_page(context.database, after=after or "", page_size=limit, requirements=requirements)
    now_ms = await controller_runs.now_ms(context.database)
    return Page(
        items=[NodeShape(**node_fields(node, now_ms=now_ms)) for node in page],
        next=page[-1].node_id if len(page) == limit else None,
    )


@router.get("/{node_id}")
async def get_node(
    node_id: Id, context: Context, caller: Annotated[Principal, Depends(require(Role.VIEWER, scoped=True))]
) -> NodeDetail:
    """Return one node with its conditions and inventory."""
    await label_scopes.check_nodes(context.database, caller, [node_id])
    node = await nodes.get(context.database, node_id=node_id)
    if node is None:
        raise refuse(Reason.NOT_FOUND, f"no node {node_id}: `nodes list` shows the ones there are")
    held = await conditions.of_node(context.database, node_id=node_id)
    sections = await inventory.read(context.database, node_ids=[node_id])
    attested = await attestation.of_node(context.database, node_id=node_id)
    now_ms = await controller_runs.now_ms(context.database)
    return node_detail(node, conditions=held, sections=sections.get(node_id, {}), attestation=attested, now_ms=now_ms)


@router.patch("/{node_id}/labels")
async def change_labels(
    node_id: Id,
    request: LabelsRequest,
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.OPERATOR))],
) -> LabelsAnswer:
    """Set and remove labels of a node. What the control plane says of it (`bc.dev/...`) is not for operators to say."""
    for key, value in request.set.items():
        check_label(key, value)
    for key in request.remove:
        check_label_key(key)
    both = sorted(request.set.keys() & set(request.remove))
    if both:
        raise refuse(Reason.BAD_REQUEST, f"label {both[0]} is both set and removed: decide for one")
    async with context.database.transaction() as transaction:
        if not await nodes.lock_session(transaction, node_id=node_id):
            raise refuse(Reason.NOT_FOUND, f"no node {node_id}: `nodes list` shows the ones there are")
        await nodes.change_labels(
            transaction, node_id=node_id, source=nodes.OPERATOR, wanted=request.set, removed=request.remove
        )
        await context.record(
            transaction,
            actor=caller.name,
            action="node.label",
            target=f"node/{node_id}",
            details={"set": request.set, "removed": sorted(request.remove)},
        )
        node = await nodes.get(transaction, node_id=node_id)
    assert node is not None, "its session's row is locked"
    return LabelsAnswer(node_id=node_id, labels=labels_of(node))


@router.post("/{node_id}/provision")
async def provision(
    node_id: Id,
    request: ProvisionRequest,
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.ADMIN))],
) -> ProvisionAnswer:
    """Join a node without a token. The same certificate request may ask again and gets the same certificate."""
    try:
        csr = x509.load_pem_x509_csr(request.csr_pem.encode())
    except UNREADABLE:
        raise refuse(Reason.BAD_CSR, "csr_pem is no PEM certificate request") from None
    made = await context.provisioner.provision(
        node_id=node_id,
        site=request.site or context.site,
        role=check_role(request.role),
        csr_der=csr.public_bytes(Encoding.DER),
        asked_by=caller.name,
        replace=request.replace,
    )
    return ProvisionAnswer(
        node_id=made.node_id,
        chain_pem=made.chain_pem.decode(),
        serving_ca_pem=made.serving_ca_pem.decode(),
        trust_bundle_base64=base64.b64encode(made.signed_trust_bundle).decode(),
        identity=dict(made.identity),
    )
