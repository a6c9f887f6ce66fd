"""`/v1/api-tokens`: who may ask this API, as which role, about which nodes, and for how long."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field

from bettercompute.api.auth import Principal, Role, require
from bettercompute.api.context import Context
from bettercompute.api.shapes import rfc3339
from bettercompute.api.storable import Body, Id, Text
from bettercompute.delivery.selectors import SYSTEM_PREFIX, check_label
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import api_tokens
from bettercompute.store.api_tokens import ApiToken

SECRET_BYTES = 24
TTL_MS_MAX = 3_660 * 24 * 3_600_000
LABELS_MAX = 16
NAME = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,62}$"

router = APIRouter(prefix="/v1/api-tokens", tags=["api-tokens"])


class ApiTokenRequest(Body):
    """A token for somebody, or some program."""

    name: Annotated[str, Field(pattern=NAME)]
    role: Literal["viewer", "operator", "admin"] = "viewer"
    ttl_ms: Annotated[int | None, Field(ge=60_000, le=TTL_MS_MAX)] = None
    """None: until it is revoked."""
    labels: Annotated[dict[Text, Text], Field(max_length=LABELS_MAX, default_factory=dict)]
    """What a node must carry for the token to be good for it; none: every node."""


class ApiTokenShape(BaseModel):
    """A token without its secret."""

    name: str
    role: str
    labels: dict[str, str] | None
    created_at: str | None
    created_by: str
    expires_at: str | None
    revoked_at: str | None


class NewApiTokenShape(ApiTokenShape):
    """A token with its secret: shown this once."""

    token: str


Admin = Annotated[Principal, Depends(require(Role.ADMIN))]


@router.post("", status_code=201)
async def create(request: ApiTokenRequest, context: Context, caller: Admin) -> NewApiTokenShape:
    """Make a token. Its name is what the audit log will show, and is never given again."""
    for key, value in request.labels.items():
        if not key.startswith(SYSTEM_PREFIX):
            check_label(key, value)
    if request.labels and request.role == "admin":
        raise refuse(Reason.BAD_REQUEST, "what an administrator may do is about the whole installation: take operator")
    token = api_tokens.TOKEN_PREFIX + context.world.ids.random_bytes(SECRET_BYTES).hex()
    async with context.database.transaction() as transaction:
        made = await api_tokens.create(
            transaction,
            token_id=context.world.ids.uuid7(),
            name=request.name,
            sha256=api_tokens.sha256_of(token),
            role=request.role,
            created_by=caller.name,
            lifetime_ms=request.ttl_ms,
            label_scope=request.labels or None,
        )
        if not made:
            raise refuse(Reason.CONFLICT, f"there is, or was, a token of the name {request.name}: choose another")
        await context.record(
            transaction,
            actor=caller.name,
            action="api-token.create",
            target=f"api-token/{request.name}",
            details={"role": request.role, "labels": request.labels},
        )
    found = await api_tokens.find(context.database, sha256=api_tokens.sha256_of(token))
    assert found is not None, "the transaction committed"
    return NewApiTokenShape(**_shape(found).model_dump(), token=token)


@router.get("")
async def list_api_tokens(context: Context, _: Admin) -> list[ApiTokenShape]:
    """List tokens by name; secrets are not kept, and never shown."""
    return [_shape(token) for token in await api_tokens.list_all(context.database)]


@router.delete("/{name}", status_code=204)
async def revoke(name: Id, context: Context, caller: Admin) -> None:
    """Make a token useless from the next request on."""
    async with context.database.transaction() as transaction:
        if not await api_tokens.revoke(transaction, name=name):
            raise refuse(Reason.NOT_FOUND, f"no token {name} that is good: `api-token list` shows all")
        await context.record(transaction, actor=caller.name, action="api-token.revoke", target=f"api-token/{name}")


def _shape(token: ApiToken) -> ApiTokenShape:
    return ApiTokenShape(
        name=token.name,
        role=token.role,
        labels=None if token.label_scope is None else dict(token.label_scope),
        created_at=rfc3339(token.created_at_ms),
        created_by=token.created_by,
        expires_at=rfc3339(token.expires_at_ms),
        revoked_at=rfc3339(token.revoked_at_ms),
    )
