"""Attestor `x509pop`: a node whose certificate has expired proves that it has its key, and joins again by itself.

The proof covers the new certificate request, the node id and the time, within 60 s of the database's and once. The
certificate must be recorded, of the node's present identity, not revoked and not replaced by one that was used, and at
most 72 h past its expiry: a key that lay about for longer is no evidence of who has it. One that is still good is
refused: it is renewed instead, and nobody can talk a node into one generation after the other. The same request gets
the same certificate, and a new one for the same key if that has expired before anybody used it, so that a node which
was cut off between the answer and its disk is not locked out. See docs/security.md, "Coming back after expiry";
decisions 0146.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ec

from bettercompute.pki import certificates, signatures
from bettercompute.pki.certificates import Use
from bettercompute.pki.identity import NodeIdentity, identity_of
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import Purpose, x509pop_input
from bettercompute.protocol.frames import decode_message
from bettercompute.protocol.limits import MAX_JOIN_BYTES
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.services.attestors.port import Grant, Moment
from bettercompute.services.issuing import REASON_REJOINED, IssuedIdentity, Issuer, Request, issued_before
from bettercompute.services.renew import PROOF_WINDOW_MS, REPLAY_KEPT_MS
from bettercompute.store import certificates as stored_certificates
from bettercompute.store import nodes, replay
from bettercompute.store.certificates import StoredCertificate
from bettercompute.store.database import Transaction

NAME = "x509pop"
EXPIRED_MAX_MS = 72 * 3_600_000
# Two hosts of ours may differ by so much about when it expires; asking for longer would let a gateway cause re-joins.
EARLY_MS = 60_000
_NEW_TOKEN = "join anew with a new token"  # noqa: S105 - a cure, no secret


@dataclass(frozen=True, slots=True, kw_only=True)
class X509PopClaim:
    """A proof that verifies under a certificate of ours; whether that is still good for it, the database says."""

    identity: NodeIdentity
    serial: str
    not_after_ms: int
    request: Request
    client_time_ms: int
    proof_sha256: str
    issuer: Issuer
    sealed_to: None = None

    async def redeem(self, transaction: Transaction, moment: Moment) -> Grant | IssuedIdentity:
        """Let the node join again, or refuse; under the lock that Hello, Renew and revoking take too."""
        self._check_times(moment.now_ms)
        node_id = self.identity.node_id
        if not await nodes.lock_session(transaction, node_id=node_id):
            raise refuse(Reason.NOT_JOINED, f"node {node_id} is not known here: {_NEW_TOKEN}")
        node = await nodes.get(transaction, node_id=node_id)
        present = await stored_certificates.find(transaction, serial=self.serial)
        assert node is not None, "a session's row goes with its node's"
        if present is None or present.node_id != node_id:
            raise refuse(
                Reason.NOT_JOINED, f"certificate {self.serial} is not recorded for node {node_id}: {_NEW_TOKEN}"
            )
        if node.quarantined_at_ms is not None:
            raise refuse(Reason.QUARANTINED, f"node {node_id} is quarantined ({node.quarantine_reason}): {_NEW_TOKEN}")
        if present.revoked_at_ms is not None and present.revocation_reason != REASON_REJOINED:
            raise self._refused(Reason.REVOKED, f"was revoked ({present.revocation_reason})")
        answered = await issued_before(transaction, node_id=node_id, request=self.request)
        generation = node.identity_generation
        if answered is not None and _is_waiting(answered, identity_generation=generation):
            if answered.not_after_ms > moment.now_ms:
                return IssuedIdentity.of(answered)
            await self._use_proof(transaction, now_ms=moment.now_ms)
            return await self._reissue(transaction, answered, now_ms=moment.now_ms)
        self._check_newest(present, identity_generation=generation)
        await self._use_proof(transaction, now_ms=moment.now_ms)
        assert self.identity.role is not None, "examine compared the roles"
        return Grant(
            node_id=node_id,
            site=self.identity.site,
            role=self.identity.role,
            tenant_controlled=self.identity.tenant_controlled,
            allowed_kinds=present.allowed_kinds,
            granted_by=f"node/{node_id}",
        )

    def _check_times(self, now_ms: int) -> None:
        skew_ms = abs(now_ms - self.client_time_ms)
        if skew_ms > PROOF_WINDOW_MS:
            raise refuse(
                Reason.BAD_PROOF,
                f"the proof is {skew_ms} ms from server time, the limit is {PROOF_WINDOW_MS}: date it by server time",
            )
        if now_ms < self.not_after_ms - EARLY_MS:
            raise refuse(
                Reason.CONFLICT,
                f"certificate {self.serial} of node {self.identity.node_id} is still good: dial with it, and renew it",
            )
        if now_ms > self.not_after_ms + EXPIRED_MAX_MS:
            hours = (now_ms - self.not_after_ms) // 3_600_000
            raise self._refused(
                Reason.CERTIFICATE_EXPIRED,
                f"expired {hours} h ago, and {EXPIRED_MAX_MS // 3_600_000} h are the limit for coming back by it",
            )

    def _check_newest(self, present: StoredCertificate, *, identity_generation: int) -> None:
        if present.identity_generation != identity_generation:
            raise self._refused(Reason.OLD_GENERATION, "is of an older identity of the node")
        if present.superseded_at_ms is not None:
            raise self._refused(Reason.SUPERSEDED_CERTIFICATE, "was replaced by a newer one")
        if present.revoked_at_ms is not None:
            raise self._refused(Reason.REVOKED, f"was revoked ({present.revocation_reason})")

    async def _use_proof(self, transaction: Transaction, *, now_ms: int) -> None:
        if not await replay.consume(
            transaction, purpose=Purpose.X509POP, jti=self.proof_sha256, expires_at_ms=now_ms + REPLAY_KEPT_MS
        ):
            raise refuse(Reason.BAD_PROOF, "the proof was used before: make a new one for each re-join")

    async def _reissue(self, transaction: Transaction, answered: StoredCertificate, *, now_ms: int) -> IssuedIdentity:
        """Answer a request whose certificate has expired unused: nobody but the holder of its key can use another."""
        await stored_certificates.withdraw(transaction, serial=answered.serial)
        return await self.issuer.issue(
            transaction,
            self.identity,
            self.request,
            identity_generation=answered.identity_generation,
            allowed_kinds=answered.allowed_kinds,
            now_ms=now_ms,
        )

    def _refused(self, reason: Reason, why: str) -> Exception:
        return refuse(reason, f"certificate {self.serial} of node {self.identity.node_id} {why}: {_NEW_TOKEN}")


@dataclass(frozen=True, slots=True)
class X509PopAttestor:
    """Verifies proofs of possession under certificates that may have expired."""

    issuer: Issuer

    def examine(self, request: messages.JoinRequest, csr: Request, *, role: str) -> X509PopClaim:
        """Verify the chain as of its leaf's last moment, the identity, and the proof by that leaf's key."""
        evidence = decode_message(messages.X509PopEvidence, request.evidence, limit=MAX_JOIN_BYTES)
        chain_der = list(evidence.certificate_chain)
        if not chain_der:
            raise refuse(Reason.ATTESTATION, f"the evidence of {NAME} holds no certificate: send the chain, leaf first")
        not_after_ms = certificates.not_after_ms(certificates.load_certificate(chain_der[0]))
        roots = [authority.certificate for authority in self.issuer.keys.node_cas]
        leaf = certificates.verify_chain(chain_der, roots=roots, use=Use.CLIENT, now_ms=not_after_ms)
        identity = identity_of(leaf)
        if identity.trust_domain != self.issuer.installation.trust_domain:
            raise refuse(
                Reason.BAD_CERTIFICATE, f"the certificate is of trust domain {identity.trust_domain}, not ours"
            )
        if identity.attestation_key_sha256 is not None:
            raise refuse(Reason.ATTESTOR_UNKNOWN, "re-joining by a key that a TPM certifies is not supported yet")
        if identity.role != role:
            raise refuse(
                Reason.ROLE_MISMATCH,
                f"the certificate is for role {identity.role}, and the request asks for {role}: a re-join keeps it",
            )
        if request.node_id not in {"", identity.node_id}:
            raise refuse(
                Reason.NODE_MISMATCH,
                f"the certificate is node {identity.node_id}'s, and the request is for {request.node_id}",
            )
        signed = x509pop_input(csr=csr.csr_der, node_id=identity.node_id, client_time_ms=evidence.client_time_ms)
        public_key = leaf.public_key()
        assert isinstance(public_key, ec.EllipticCurvePublicKey), "verify_chain lets only P-256 pass"
        signatures.verify(evidence.proof, public_key, signed)
        return X509PopClaim(
            identity=identity,
            serial=certificates.serial_text(leaf),
            not_after_ms=not_after_ms,
            request=csr,
            client_time_ms=evidence.client_time_ms,
            # Of what was signed, never of the signature: its twin would be another.
            proof_sha256=hashlib.sha256(signed).hexdigest(),
            issuer=self.issuer,
        )


def _is_waiting(answered: StoredCertificate, *, identity_generation: int) -> bool:
    """Say whether what this request got before is still its node's, and nobody has used it."""
    return (
        answered.identity_generation == identity_generation
        and answered.revoked_at_ms is None
        and answered.superseded_at_ms is None
        and answered.first_used_at_ms is None
    )
