"""Decide what is kept of node certificates, and how revoking shows in the rows. Hello notes the first use of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bettercompute.store import channels
from bettercompute.store.database import Queries, Row, Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCertificate:
    """A certificate about to be issued. `chain` is whatever the same request must get again, byte by byte."""

    serial: str
    """Hexadecimal, lower case."""
    node_id: str
    identity_generation: int
    csr_sha256: bytes
    chain: bytes
    not_before_ms: int
    not_after_ms: int
    allowed_kinds: tuple[str, ...] | None = None
    """None: every kind of the role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCertificate:
    """A row of node_certs."""

    serial: str
    node_id: str
    identity_generation: int
    csr_sha256: bytes
    chain: bytes
    not_before_ms: int
    not_after_ms: int
    issued_at_ms: int
    allowed_kinds: tuple[str, ...] | None
    first_used_at_ms: int | None
    superseded_at_ms: int | None
    revoked_at_ms: int | None
    revocation_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocation:
    """One revoked serial that has not expired yet."""

    serial: str
    node_id: str
    revoked_at_ms: int
    revocation_reason: str
    revocation_notice: bytes | None
    """The serialized `RevocationNotice` without its serials; None: the reason says it all."""


async def insert(transaction: Transaction, certificate: NewCertificate, *, issued_at_ms: int | None = None) -> None:
    """Record a certificate before it is given out, or one that was issued before and is not on record."""
    await transaction.execute(
        "certificates.insert",
        serial=certificate.serial,
        node_id=certificate.node_id,
        identity_generation=certificate.identity_generation,
        csr_sha256=certificate.csr_sha256,
        chain=certificate.chain,
        not_before_ms=certificate.not_before_ms,
        not_after_ms=certificate.not_after_ms,
        issued_at_ms=issued_at_ms,
        allowed_kinds=None if certificate.allowed_kinds is None else list(certificate.allowed_kinds),
    )


async def find(queries: Queries, *, serial: str) -> StoredCertificate | None:
    """Return the certificate with this serial."""
    row = await queries.fetch_one("certificates.find", serial=serial)
    return None if row is None else _certificate(row)


async def find_by_request(queries: Queries, *, node_id: str, csr_sha256: bytes) -> StoredCertificate | None:
    """Return what the node got for this certificate request, if it has asked before."""
    row = await queries.fetch_one("certificates.find_by_request", node_id=node_id, csr_sha256=csr_sha256)
    return None if row is None else _certificate(row)


async def of_node(queries: Queries, *, node_id: str, page_size: int = 100) -> list[StoredCertificate]:
    """Return the node's certificates, newest first."""
    rows = await queries.fetch("certificates.of_node", node_id=node_id, page_size=page_size)
    return [_certificate(row) for row in rows]


async def revoke_generation(
    transaction: Transaction, *, node_id: str, identity_generation: int, reason: str, notice: bytes | None = None
) -> tuple[str, ...]:
    """Revoke every serial of one identity, tell the gateways, and return the serials.

    Expired ones too: for a while they could still prove a re-join. `notice` is the serialized `RevocationNotice`; None:
    the reason says it all. The caller holds the node's session row (`nodes.lock_session`), as Renew does: no serial is
    issued beside it.
    """
    rows = await transaction.fetch(
        "certificates.revoke_generation",
        node_id=node_id,
        identity_generation=identity_generation,
        reason=reason,
        notice=notice,
    )
    if rows:
        await transaction.execute(
            "certificates.notify_revoked", channel=channels.REVOCATIONS, payloads=channels.payloads([node_id])
        )
    return tuple(sorted(row["serial"] for row in rows))


async def supersede(transaction: Transaction, *, node_id: str, serials: Sequence[str]) -> None:
    """End serials that were issued and never used. The caller holds the node's session row (`nodes.lock_session`)."""
    if serials:
        await transaction.execute("certificates.supersede", node_id=node_id, serials=list(serials))


async def withdraw(transaction: Transaction, *, serial: str) -> None:
    """Forget a certificate that nobody has used, so that its request can be answered anew.

    The caller holds the node's session row (`nodes.lock_session`).
    """
    await transaction.execute("certificates.withdraw", serial=serial)


async def revoked_since(queries: Queries, *, since_ms: int) -> list[Revocation]:
    """Return the unexpired serials revoked at or after a moment of the database's clock; 0 returns all of them."""
    rows = await queries.fetch("certificates.revoked_since", since_ms=since_ms)
    return [Revocation(**{name: row[name] for name in Revocation.__dataclass_fields__}) for row in rows]


def _certificate(row: Row) -> StoredCertificate:
    kinds = row["allowed_kinds"]
    return StoredCertificate(
        **{name: row[name] for name in StoredCertificate.__dataclass_fields__ if name != "allowed_kinds"},
        allowed_kinds=None if kinds is None else tuple(kinds),
    )
