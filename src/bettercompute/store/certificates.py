"""Decide what is kept of node certificates, and how revoking shows in the rows. Hello notes the first use of each."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from bettercompute.pki import certificates as pki_certificates
from bettercompute.pki.possession import Shown
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import channels
from bettercompute.store.database import Queries, Row, Transaction

NEW_TOKEN = "join anew with a new token"  # noqa: S105 - a cure, no secret


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


async def put_on_record(transaction: Transaction, shown: Shown, *, identity_generation: int) -> StoredCertificate:
    """Record a certificate that a restore has forgotten, whose node has proven that it has the key, as one of the
    node's present identity; it allows what the newest one allows. Refuse one that was replaced, and not forgotten.

    The caller holds the node's session row (`nodes.lock_session`), and has found none of this serial. decisions 0176.
    """
    node_id = shown.identity.node_id
    what = f"certificate {shown.serial} of node {node_id} is not on record, and older than"
    recorded = await of_node(transaction, node_id=node_id)
    present = [one for one in recorded if one.identity_generation == identity_generation]
    if present and min(one.not_before_ms for one in present) > shown.not_before_ms:
        raise refuse(Reason.OLD_GENERATION, f"{what} the node's present identity: {NEW_TOKEN}")
    if any(one.not_before_ms > shown.not_before_ms for one in present if one.first_used_at_ms is not None):
        raise refuse(Reason.SUPERSEDED_CERTIFICATE, f"{what} one that the node has used: {NEW_TOKEN}")
    new = NewCertificate(
        serial=shown.serial,
        node_id=node_id,
        identity_generation=identity_generation,
        # Which request it answered is forgotten; this is the digest of none.
        csr_sha256=hashlib.sha256(shown.chain_der[0]).digest(),
        chain=pki_certificates.chain_to_pem(shown.chain_der),
        not_before_ms=shown.not_before_ms,
        not_after_ms=shown.not_after_ms,
        allowed_kinds=recorded[0].allowed_kinds if recorded else None,
    )
    await insert(transaction, new, issued_at_ms=shown.not_before_ms + pki_certificates.BACKDATE_MS)
    found = await find(transaction, serial=shown.serial)
    assert found is not None, "it was inserted above"
    return found


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
