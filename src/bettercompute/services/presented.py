"""What the record says of a certificate that a node presents to renew it, to come back by it, or to vouch by it.

A database that was restored from a backup has forgotten the certificates that were issued since; their nodes hold them
nevertheless, and must not be lost for it. Such a one is put on record when its node proves that it has the key, and
from then on is judged like every other. One that is older than the node's identity, or than a certificate that the node
is known to have used, was not forgotten by a restore: it was replaced. See docs/security.md, "Renewing" and "Coming
back after expiry"; decisions 0128 and 0176.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from bettercompute.pki import certificates
from bettercompute.pki.possession import REPLAY_KEPT_MS, Shown
from bettercompute.protocol.envelopes import Purpose
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import certificates as stored_certificates
from bettercompute.store import nodes, replay
from bettercompute.store.certificates import NewCertificate, StoredCertificate
from bettercompute.store.database import Transaction
from bettercompute.store.nodes import Node

_NEW_TOKEN = "join anew with a new token"  # noqa: S105 - a cure, no secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Presented:
    """A node that is here and may speak, and its certificate as it is on record."""

    node: Node
    certificate: StoredCertificate


async def look_up(transaction: Transaction, shown: Shown) -> Presented:
    """Return node and certificate under the lock that Hello, Renew, re-joining and revoking take; refuse who may not.

    Whether the certificate still counts for what is asked the caller decides.
    """
    node_id = shown.identity.node_id
    if not await nodes.lock_session(transaction, node_id=node_id):
        raise refuse(Reason.NOT_JOINED, f"node {node_id} has not joined here: {_NEW_TOKEN}")
    node = await nodes.get(transaction, node_id=node_id)
    assert node is not None, "a session's row goes with its node's"
    if node.quarantined_at_ms is not None:
        raise refuse(Reason.QUARANTINED, f"node {node_id} is quarantined ({node.quarantine_reason}): {_NEW_TOKEN}")
    if node.revoked_at_ms is not None:
        raise refuse(Reason.REVOKED, f"node {node_id} was revoked by {node.revoked_by}: {_NEW_TOKEN}")
    certificate = await stored_certificates.find(transaction, serial=shown.serial)
    if certificate is None:
        certificate = await _put_on_record(transaction, shown, node)
    elif certificate.node_id != node_id:
        raise refuse(Reason.BAD_CERTIFICATE, f"certificate {shown.serial} is recorded for another node than {node_id}")
    return Presented(node=node, certificate=certificate)


async def use_proof(transaction: Transaction, *, purpose: Purpose, proof_sha256: str, now_ms: int) -> None:
    """Use a proof up; refuse BAD_PROOF one that was used, on whichever instance."""
    expires_at_ms = now_ms + REPLAY_KEPT_MS
    if not await replay.consume(transaction, purpose=purpose, jti=proof_sha256, expires_at_ms=expires_at_ms):
        raise refuse(Reason.BAD_PROOF, "the proof was used before: make a new one each time")


async def _put_on_record(transaction: Transaction, shown: Shown, node: Node) -> StoredCertificate:
    """Record a certificate of the node's identity from after the backup; it allows what the newest one allows."""
    what = f"certificate {shown.serial} of node {node.node_id} is not on record, and older than"
    recorded = await stored_certificates.of_node(transaction, node_id=node.node_id)
    present = [one for one in recorded if one.identity_generation == node.identity_generation]
    if present and min(one.not_before_ms for one in present) > shown.not_before_ms:
        raise refuse(Reason.OLD_GENERATION, f"{what} the node's present identity: {_NEW_TOKEN}")
    if any(one.not_before_ms > shown.not_before_ms for one in present if one.first_used_at_ms is not None):
        raise refuse(Reason.SUPERSEDED_CERTIFICATE, f"{what} one that the node has used: {_NEW_TOKEN}")
    new = NewCertificate(
        serial=shown.serial,
        node_id=node.node_id,
        identity_generation=node.identity_generation,
        # Which request it answered is forgotten; this is the digest of none.
        csr_sha256=hashlib.sha256(shown.chain_der[0]).digest(),
        chain=certificates.chain_to_pem(shown.chain_der),
        not_before_ms=shown.not_before_ms,
        not_after_ms=shown.not_after_ms,
        allowed_kinds=recorded[0].allowed_kinds if recorded else None,
    )
    await stored_certificates.insert(transaction, new, issued_at_ms=shown.not_before_ms + certificates.BACKDATE_MS)
    found = await stored_certificates.find(transaction, serial=shown.serial)
    assert found is not None, "it was inserted above"
    return found
