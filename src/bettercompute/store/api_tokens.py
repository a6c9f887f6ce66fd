"""Decide what is kept of the HTTP API's bearer tokens: a name, a role, and a SHA-256 to know the token by."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from bettercompute.store import json_columns
from bettercompute.store.database import Queries, Row

TOKEN_PREFIX = "bct1_"  # noqa: S105 - a prefix, no secret


def sha256_of(token: str) -> bytes:
    """Return what is kept of a token: enough to recognise it, nothing to use it by."""
    return hashlib.sha256(token.encode()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiToken:
    """A token as people see it; `role` is viewer, operator or admin."""

    token_id: str
    name: str
    role: str
    label_scope: Mapping[str, str] | None
    """None: every node; else the labels that a node must carry."""
    created_at_ms: int
    created_by: str
    expires_at_ms: int | None
    revoked_at_ms: int | None


async def create(
    queries: Queries,
    *,
    token_id: str,
    name: str,
    sha256: bytes,
    role: str,
    created_by: str,
    lifetime_ms: int | None = None,
    label_scope: Mapping[str, str] | None = None,
) -> bool:
    """Record a token; False when the name is taken. `lifetime_ms` None: it does not expire."""
    row = await queries.fetch_one(
        "api_tokens.insert",
        token_id=token_id,
        name=name,
        sha256=sha256,
        role=role,
        label_scope=None if label_scope is None else json_columns.encode(label_scope),
        created_by=created_by,
        lifetime_ms=lifetime_ms,
    )
    return row is not None


async def find(queries: Queries, *, sha256: bytes) -> ApiToken | None:
    """Return the token with this SHA-256, unless it has expired or was revoked."""
    row = await queries.fetch_one("api_tokens.find", sha256=sha256)
    return None if row is None else _token(row)


async def list_all(queries: Queries) -> list[ApiToken]:
    """Return the tokens by name."""
    return [_token(row) for row in await queries.fetch("api_tokens.list")]


async def revoke(queries: Queries, *, name: str) -> bool:
    """Make a token useless; False when there is none of this name that is not yet revoked."""
    return await queries.fetch_one("api_tokens.revoke", name=name) is not None


def _token(row: Row) -> ApiToken:
    scope = row["label_scope"]
    return ApiToken(
        **{name: row[name] for name in ApiToken.__dataclass_fields__ if name != "label_scope"},
        label_scope=None if scope is None else json_columns.decode(scope),
    )
