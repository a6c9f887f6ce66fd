"""Renew: a younger certificate for a node that proves that it is the one it says.

The node proves that it holds the key of its present certificate, within 60 s of server time and once. Renewal is
idempotent per certificate request. The old and the new serial are both good until the new one is first used; at most
two serials of a node wait unused, and of more the oldest is dropped, so that a node which lost its pending keys is not
locked out. Nor is one whose certificate a restore of the database has forgotten. See docs/security.md, "Renewing";
decisions 0046, 0111 and 0128.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ec

from bettercompute.pki import certificates, signatures
from bettercompute.pki.certificates import Use
from bettercompute.pki.identity import NodeIdentity, identity_of
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import Purpose, renew_pop_input
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.services.issuing import IssuedIdentity, Issuer, Request, answered_before, check_still_good
from bettercompute.store import certificates as stored_certificates
from bettercompute.store import nodes, replay
from bettercompute.store.database import Transaction
from bettercompute.store.nodes import Node

PROOF_WINDOW_MS = 60 * 1000
REPLAY_KEPT_MS = 120 * 1000  # twice the window: a proof may come that early and be replayed that late
UNUSED_SERIALS_MAX = 2

assert REPLAY_KEPT_MS >= 2 * PROOF_WINDOW_MS, "a proof must not be forgotten while it would still be accepted"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenRenewal:
    """A renewal whose proof of possession was checked, and not used yet."""

    identity: NodeIdentity
    serial: str
    request: Request
    proof_sha256: str


def check_renewal(
    renewal: messages.RenewRequest,
    request: Request,
    *,
    peer_chain: Sequence[bytes],
    issuer: Issuer,
    now_ms: int,
) -> ProvenRenewal:
    """Check chain, identity and proof; `peer_chain` is TLS's, or empty where the request brings its own."""
    chain_der = list(peer_chain) or list(renewal.certificate_chain)
    if not chain_der:
        raise refuse(Reason.NO_CERTIFICATE, "Renew needs the node's present certificate, by TLS or in the request")
    roots = [authority.certificate for authority in issuer.keys.node_cas]
    leaf = certificates.verify_chain(chain_der, roots=roots, use=Use.CLIENT, now_ms=now_ms)
    identity = identity_of(leaf)
    if identity.trust_domain != issuer.installation.trust_domain:
        raise refuse(Reason.BAD_CERTIFICATE, f"the certificate is of trust domain {identity.trust_domain}, not ours")
    if identity.attestation_key_sha256 is not None:
        raise refuse(Reason.ATTESTOR_UNKNOWN, "renewing a key that a TPM certifies is not supported yet")
    skew_ms = abs(now_ms - renewal.client_time_ms)
    if skew_ms > PROOF_WINDOW_MS:
        raise refuse(
            Reason.BAD_PROOF,
            f"the proof is {skew_ms} ms from server time, the limit is {PROOF_WINDOW_MS}: date it by server time",
        )
    signed = renew_pop_input(csr=request.csr_der, node_id=identity.node_id, client_time_ms=renewal.client_time_ms)
    public_key = leaf.public_key()
    assert isinstance(public_key, ec.EllipticCurvePublicKey), "verify_chain lets only P-256 pass"
    signatures.verify(renewal.proof, public_key, signed)
    return ProvenRenewal(
        identity=identity,
        serial=certificates.serial_text(leaf),
        request=request,
        # Of what was signed, never of the signature: its twin would be another.
        proof_sha256=hashlib.sha256(signed).hexdigest(),
    )


async def renew(transaction: Transaction, proven: ProvenRenewal, *, issuer: Issuer, now_ms: int) -> IssuedIdentity:
    """Issue the node's next certificate, under the lock that Hello, revoking and re-joining of the node take too."""
    node_id = proven.identity.node_id
    if not await nodes.lock_session(transaction, node_id=node_id):
        raise refuse(Reason.NOT_JOINED, f"node {node_id} has not joined: join with a token")
    node = await nodes.get(transaction, node_id=node_id)
    present = await stored_certificates.find(transaction, serial=proven.serial)
    assert node is not None, "a session's row goes with its node's"
    if present is not None and present.node_id != node_id:
        raise refuse(Reason.BAD_CERTIFICATE, f"certificate {proven.serial} is recorded for another node than {node_id}")
    if node.quarantined_at_ms is not None:
        raise refuse(Reason.QUARANTINED, f"node {node_id} is quarantined ({node.quarantine_reason}): join anew")
    if node.revoked_at_ms is not None:
        raise refuse(Reason.REVOKED, f"node {node_id} was revoked by {node.revoked_by}: join anew with a new token")
    if present is None:
        allowed_kinds = await _kinds_of_latest(transaction, node_id=node_id)
    else:
        check_still_good(present, identity_generation=node.identity_generation, now_ms=now_ms)
        allowed_kinds = present.allowed_kinds
    before = await answered_before(transaction, node_id=node_id, request=proven.request, now_ms=now_ms)
    if before is not None:
        return before
    if not await replay.consume(
        transaction, purpose=Purpose.RENEW_POP, jti=proven.proof_sha256, expires_at_ms=now_ms + REPLAY_KEPT_MS
    ):
        raise refuse(Reason.BAD_PROOF, "the proof was used before: make a new one for each renewal")
    await _drop_unused(transaction, node=node, presented=proven.serial, now_ms=now_ms)
    return await issuer.issue(
        transaction,
        proven.identity,
        proven.request,
        identity_generation=node.identity_generation,
        allowed_kinds=allowed_kinds,
        now_ms=now_ms,
    )


async def _kinds_of_latest(transaction: Transaction, *, node_id: str) -> tuple[str, ...] | None:
    """Return what the newest certificate on record allows: the one presented was issued after a backup was made."""
    latest = await stored_certificates.of_node(transaction, node_id=node_id, page_size=1)
    return latest[0].allowed_kinds if latest else None


async def _drop_unused(transaction: Transaction, *, node: Node, presented: str, now_ms: int) -> None:
    """Make room for one more unused serial; the one that is presented stays, used or not."""
    unused = [
        one
        for one in await stored_certificates.of_node(transaction, node_id=node.node_id)
        if one.identity_generation == node.identity_generation
        and one.first_used_at_ms is None
        and one.superseded_at_ms is None
        and one.revoked_at_ms is None
        and one.not_after_ms > now_ms
        and one.serial != presented
    ]
    dropped = [one.serial for one in unused[UNUSED_SERIALS_MAX - 1 :]]
    await stored_certificates.supersede(transaction, node_id=node.node_id, serials=dropped)
