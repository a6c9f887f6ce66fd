"""`/v1/tokens`: join tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_der_public_key
from fastapi import APIRouter, Depends
from pydantic import Field

from bettercompute.api.auth import Principal, Role, require
from bettercompute.api.context import Context, JoinEndpoint
from bettercompute.api.paging import PAGE_ROWS, AfterId, Limit, Page
from bettercompute.api.shapes import TokenShape, token_shape
from bettercompute.api.storable import Body, Id, Text
from bettercompute.pki import join_token, rotation
from bettercompute.pki.identity import check_node_id, check_role, check_site
from bettercompute.pki.rotation import KeyStage, Purpose, TrustedKey
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import tokens
from bettercompute.store import trust as stored_trust

TTL_MS = 24 * 3_600_000
# A token that lies about for longer than a month is a key under the mat.
TTL_MS_MAX = 31 * 24 * 3_600_000

router = APIRouter(prefix="/v1/tokens", tags=["tokens"])


class MachineRequest(Body):
    """Which machine a credential is for, as far as that is known; what is not said is not asked for."""

    dmi_uuid: Text = ""
    serial: Text = ""
    board_serial: Text = ""
    mac_addresses: Annotated[tuple[Text, ...], Field(max_length=16)] = ()


class TokenRequest(Body):
    """A join token is wanted, or with attestor `provisioned` a credential for one machine."""

    site: Text | None = None
    role: Text = "node"
    node_id: Text | None = None
    ttl_ms: Annotated[int, Field(ge=1_000, le=TTL_MS_MAX)] = TTL_MS
    attestor: Literal["join-token", "provisioned"] = "join-token"
    machine: MachineRequest | None = None


class NewTokenShape(TokenShape):
    """A token with the string that a node joins by: shown this once."""

    token: str


@router.post("", status_code=201)
async def create(
    request: TokenRequest, context: Context, caller: Annotated[Principal, Depends(require(Role.OPERATOR))]
) -> NewTokenShape:
    """Make a join token, good for one node once."""
    if request.node_id is not None:
        check_node_id(request.node_id)
    site = check_site(request.site or context.site)
    machine = _machine(request)
    secret = context.world.ids.random_bytes(join_token.SECRET_BYTES)
    token_id = context.world.ids.uuid7()
    endpoint = _in_use(context.join_endpoint, await stored_trust.keys(context.database))
    text = join_token.format_token(
        join_token.JoinToken(
            secret=secret,
            gateway_urls=endpoint.gateway_urls,
            serving_ca_pins=endpoint.serving_ca_pins,
            join_signing_key=endpoint.join_signing_key,
            join_encryption_key=endpoint.join_encryption_key,
            attestor=request.attestor,
        )
    )
    wanted = tokens.NewToken(
        token_id=token_id,
        secret_sha256=bytes.fromhex(join_token.secret_sha256(secret)),
        site=site,
        role=check_role(request.role),
        created_by=caller.name,
        lifetime_ms=request.ttl_ms,
        node_id=request.node_id,
        attestor=request.attestor,
        machine=machine,
    )
    async with context.database.transaction() as transaction:
        await tokens.create(transaction, wanted)
        await context.record(transaction, actor=caller.name, action="token.create", target=f"token/{token_id}")
    made = await tokens.get(context.database, token_id=token_id)
    assert made is not None, "the transaction committed"
    return NewTokenShape(**token_shape(made).model_dump(), token=text)


def _machine(request: TokenRequest) -> dict[str, Any]:
    """Return the machine that a credential is for; refuse what makes no sense for the attestor."""
    machine = {} if request.machine is None else request.machine.model_dump()
    named = {name: value for name, value in machine.items() if value}
    if request.attestor == "join-token" and named:
        raise refuse(
            Reason.BAD_REQUEST, "a join token is good for any machine: ask for attestor provisioned to name one"
        )
    if request.attestor == "provisioned" and request.node_id is None:
        raise refuse(Reason.BAD_REQUEST, "a credential of attestor provisioned is for one node: say node_id")
    return named


def _in_use(endpoint: JoinEndpoint, keys: Sequence[TrustedKey]) -> JoinEndpoint:
    """Return what a token of now pins: the join keys in use, and every serving CA that a gateway may show."""
    join_keys = rotation.in_stage(keys, Purpose.JOIN_SIGNING, KeyStage.CURRENT)
    pins = tuple(key.key_sha256 for key in rotation.trusted(keys, Purpose.SERVING_CA))
    if not join_keys or not pins:
        return endpoint
    return JoinEndpoint(
        gateway_urls=endpoint.gateway_urls,
        serving_ca_pins=pins,
        join_signing_key=_public_key(join_keys[0].public_der),
        join_encryption_key=_public_key(join_keys[0].companion_der),
    )


def _public_key(spki_der: bytes) -> ec.EllipticCurvePublicKey:
    key = load_der_public_key(spki_der)
    assert isinstance(key, ec.EllipticCurvePublicKey), "it was checked before it was stored"
    return key


@router.get("")
async def list_tokens(
    context: Context,
    _: Annotated[Principal, Depends(require(Role.OPERATOR))],
    after: AfterId = None,
    limit: Limit = PAGE_ROWS,
) -> Page[TokenShape]:
    """List tokens, the newest first."""
    page = await tokens.list_page(context.database, before=after or tokens.NEWEST, page_size=limit)
    return Page(items=[token_shape(token) for token in page], next=page[-1].token_id if len(page) == limit else None)


@router.delete("/{token_id}")
async def revoke(
    token_id: Id, context: Context, caller: Annotated[Principal, Depends(require(Role.OPERATOR))]
) -> TokenShape:
    """Make an unused token unusable."""
    async with context.database.transaction() as transaction:
        if await tokens.revoke(transaction, token_id=token_id, revoked_by=caller.name):
            await context.record(transaction, actor=caller.name, action="token.revoke", target=f"token/{token_id}")
    token = await tokens.get(context.database, token_id=token_id)
    if token is None:
        raise refuse(Reason.NOT_FOUND, f"no token {token_id}: `token list` shows the ones there are")
    if token.used_at_ms is not None:
        raise refuse(
            Reason.CONFLICT,
            f"token {token_id} is spent: node {token.used_node_id} joined by it; to shut that out, revoke the node",
        )
    return token_shape(token)
