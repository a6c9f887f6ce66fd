"""What the record says of a certificate that a node presents to renew it, to come back by it, or to vouch by it.

A database that was restored from a backup has forgotten the certificates that were issued since; their nodes hold them
nevertheless, and must not be lost for it. Such a one is put on record when its node proves that it has the key, and
from then on is judged like every other. One that is older than the node's identity, or than a certificate that the node
is known to have used, was not forgotten by a restore: it was replaced. See docs/security.md, "Renewing" and "Coming
back after expiry"; decisions 0128 and 0176.
"""

from __future__ import annotations

from dataclasses import dataclass

from bettercompute.pki.possession import REPLAY_KEPT_MS, Shown
from bettercompute.protocol.envelopes import Purpose
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import certificates as stored_certificates
from bettercompute.store import nodes, replay
from bettercompute.store.certificates import NEW_TOKEN, StoredCertificate
from bettercompute.store.database import Transaction
from bettercompute.store.nodes import Node


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
        raise refuse(Reason.NOT_JOINED, f"node {node_id} has not joined here: {NEW_TOKEN}")
    node = await nodes.get(transaction, node_id=node_id)
    assert node is not None, "a session's row goes with its node's"
    if node.quarantined_at_ms is not None:
        raise refuse(Reason.QUARANTINED, f"node {node_id} is quarantined ({node.quarantine_reason}): {NEW_TOKEN}")
    if node.revoked_at_ms is not None:
        raise refuse(Reason.REVOKED, f"node {node_id} was revoked by {node.revoked_by}: {NEW_TOKEN}")
    certificate = await stored_certificates.find(transaction, serial=shown.serial)
    if certificate is None:
        certificate = await stored_certificates.put_on_record(
            transaction, shown, identity_generation=node.identity_generation
        )
    elif certificate.node_id != node_id:
        raise refuse(Reason.BAD_CERTIFICATE, f"certificate {shown.serial} is recorded for another node than {node_id}")
    return Presented(node=node, certificate=certificate)


async def use_proof(transaction: Transaction, *, purpose: Purpose, proof_sha256: str, now_ms: int) -> None:
    """Use a proof up; refuse BAD_PROOF one that was used, on whichever instance."""
    expires_at_ms = now_ms + REPLAY_KEPT_MS
    if not await replay.consume(transaction, purpose=purpose, jti=proof_sha256, expires_at_ms=expires_at_ms):
        raise refuse(Reason.BAD_PROOF, "the proof was used before: make a new one each time")
