"""Decide who uses a join token: one atomic statement, before any effect; and say why it was not redeemed."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bettercompute.pki.join_token import JOIN_TOKEN
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import json_columns
from bettercompute.store.database import Queries, Row, Transaction

# Sorts after every id.
NEWEST = "\uffff"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """A token about to be made; the database keeps only the SHA-256 of its secret."""

    token_id: str
    """UUIDv7: tokens are listed by it."""
    secret_sha256: bytes
    site: str
    role: str
    created_by: str
    lifetime_ms: int
    tenant_controlled: bool = False
    node_id: str | None = None
    """None: JoinService names the node."""
    allowed_kinds: tuple[str, ...] | None = None
    attestor: str = JOIN_TOKEN
    """`provisioned`: a credential for one machine, which must fix the node."""
    machine: Mapping[str, Any] = field(default_factory=dict)
    """Which one, as far as the operator says it: fields of HardwareClaims."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token as people see it."""

    token_id: str
    site: str
    role: str
    tenant_controlled: bool
    node_id: str | None
    allowed_kinds: tuple[str, ...] | None
    expires_at_ms: int
    created_at_ms: int
    created_by: str
    used_at_ms: int | None
    used_node_id: str | None
    used_source: str | None
    revoked_at_ms: int | None
    revoked_by: str | None
    expired: bool
    attestor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedMachine:
    """For which node and machine a credential was made. `used`: it was redeemed before."""

    node_id: str
    machine: Mapping[str, Any]
    used: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Redeemed:
    """What a token grants. `again`: the same certificate request has redeemed it before and lost the answer."""

    token_id: str
    site: str
    role: str
    tenant_controlled: bool
    allowed_kinds: tuple[str, ...] | None
    node_id: str
    again: bool


async def create(queries: Queries, token: NewToken) -> int:
    """Record a token and return when it expires, in Unix milliseconds."""
    [row] = await queries.fetch(
        "tokens.insert",
        token_id=token.token_id,
        secret_sha256=token.secret_sha256,
        site=token.site,
        role=token.role,
        tenant_controlled=token.tenant_controlled,
        node_id=token.node_id,
        allowed_kinds=None if token.allowed_kinds is None else list(token.allowed_kinds),
        lifetime_ms=token.lifetime_ms,
        created_by=token.created_by,
        attestor=token.attestor,
        machine=json_columns.encode(token.machine),
    )
    return int(row["expires_at_ms"])


async def redeem(
    transaction: Transaction,
    *,
    secret_sha256: bytes,
    csr_sha256: bytes,
    role: str,
    drawn_node_id: str,
    asked_node_id: str | None,
    source: str,
    attestor: str = JOIN_TOKEN,
) -> Redeemed:
    """Use a token for one certificate request, or refuse and say why.

    The node is the token's, else `drawn_node_id`. `asked_node_id` is what the node says it is, `source` from where it
    called. Of several that redeem at once, one wins and the others wait for its transaction.
    """
    row = await transaction.fetch_one(
        "tokens.redeem",
        secret_sha256=secret_sha256,
        csr_sha256=csr_sha256,
        role=role,
        node_id=drawn_node_id,
        asked_node_id=asked_node_id,
        source=source,
        attestor=attestor,
    )
    if row is not None:
        return _redeemed(row, again=False)
    row = await transaction.fetch_one("tokens.find_by_secret", secret_sha256=secret_sha256)
    row = _known(row, attestor=attestor)
    if row["revoked_at_ms"] is not None:
        raise refuse(Reason.TOKEN_REVOKED, f"join token {row['token_id']} was revoked: make another one")
    if row["used_at_ms"] is not None and hmac.compare_digest(row["used_csr_sha256"], csr_sha256):
        return _redeemed(row, again=True)
    _refuse_redeeming(row, role=role, asked_node_id=asked_node_id)
    raise refuse(Reason.CONFLICT, f"join token {row['token_id']} changed just now: try again")


async def expected(queries: Queries, *, secret_sha256: bytes, attestor: str) -> ExpectedMachine:
    """Return for which machine a credential was made; refuse one that is not known, or of another attestor."""
    row = await queries.fetch_one("tokens.find_by_secret", secret_sha256=secret_sha256)
    row = _known(row, attestor=attestor)
    return ExpectedMachine(
        node_id=row["node_id"], machine=json_columns.decode(row["machine"]), used=row["used_at_ms"] is not None
    )


def _known(row: Row | None, *, attestor: str) -> Row:
    if row is None:
        raise refuse(Reason.TOKEN_UNKNOWN, "this join token is not known here: make one with `token create`")
    if row["attestor"] != attestor:
        raise refuse(
            Reason.ATTESTATION,
            f"join token {row['token_id']} is for attestor {row['attestor']}, not {attestor}: "
            "join by that one, or make another token",
        )
    return row


def _refuse_redeeming(row: Row, *, role: str, asked_node_id: str | None) -> None:
    token = f"join token {row['token_id']}"
    if row["used_at_ms"] is not None:
        raise refuse(
            Reason.TOKEN_USED,
            f"{token} was used by node {row['used_node_id']}; each is good for one machine: make another one",
        )
    if row["expired"]:
        raise refuse(Reason.TOKEN_EXPIRED, f"{token} has expired: make another one")
    if row["role"] != role:
        raise refuse(Reason.TOKEN_ROLE, f"{token} is for role {row['role']}, not {role}: make one for this role")
    if row["node_id"] not in {None, asked_node_id} and asked_node_id is not None:
        raise refuse(
            Reason.TOKEN_NODE, f"{token} is for node {row['node_id']}, not {asked_node_id}: make one for this node"
        )


async def get(queries: Queries, *, token_id: str) -> Token | None:
    """Return one token."""
    row = await queries.fetch_one("tokens.get", token_id=token_id)
    return None if row is None else _token(row)


async def list_page(queries: Queries, *, before: str = NEWEST, page_size: int) -> list[Token]:
    """Return the next older tokens before the id `before`, newest first."""
    return [_token(row) for row in await queries.fetch("tokens.list", before=before, page_size=page_size)]


async def revoke(queries: Queries, *, token_id: str, revoked_by: str) -> bool:
    """Make a token useless; return False when there is none of this id that is unused and not yet revoked."""
    return await queries.fetch_one("tokens.revoke", token_id=token_id, revoked_by=revoked_by) is not None


def _redeemed(row: Row, *, again: bool) -> Redeemed:
    return Redeemed(
        token_id=row["token_id"],
        site=row["site"],
        role=row["role"],
        tenant_controlled=row["tenant_controlled"],
        allowed_kinds=_kinds(row),
        node_id=row["used_node_id"],
        again=again,
    )


def _token(row: Row) -> Token:
    plain = {name: row[name] for name in Token.__dataclass_fields__ if name != "allowed_kinds"}
    return Token(**plain, allowed_kinds=_kinds(row))


def _kinds(row: Row) -> tuple[str, ...] | None:
    return None if row["allowed_kinds"] is None else tuple(row["allowed_kinds"])
