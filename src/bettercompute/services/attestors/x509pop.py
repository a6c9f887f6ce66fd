"""Attestor `x509pop`: a node whose certificate has expired proves that it has its key, and joins again by itself.

The proof covers the new certificate request, the node id and the time, within 60 s of the database's and once. The
certificate must be of the node's present identity, not revoked and not replaced by one that was used, and at most 72 h
past its expiry: a key that lay about for longer is no evidence of who has it. One that is still good is
refused: it is renewed instead, and nobody can talk a node into one generation after the other. The same request gets
the same certificate, and a new one for the same key if that has expired before anybody used it, so that a node which
was cut off between the answer and its disk is not locked out. See docs/security.md, "Coming back after expiry";
decisions 0146.
"""

from __future__ import annotations

from dataclasses import dataclass

from bettercompute.pki import possession
from bettercompute.pki.possession import Shown
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import Purpose, x509pop_input
from bettercompute.protocol.frames import decode_message
from bettercompute.protocol.limits import MAX_JOIN_BYTES
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.services import presented
from bettercompute.services.attestors.port import Grant, Moment
from bettercompute.services.issuing import REASON_REJOINED, IssuedIdentity, Issuer, Request, issued_before
from bettercompute.store import certificates as stored_certificates
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

    shown: Shown
    request: Request
    client_time_ms: int
    proof_sha256: str
    issuer: Issuer
    sealed_to: None = None

    async def redeem(self, transaction: Transaction, moment: Moment) -> Grant | IssuedIdentity:
        """Let the node join again, or refuse; under the lock that Hello, Renew and revoking take too."""
        self._check_times(moment.now_ms)
        found = await presented.look_up(transaction, self.shown)
        node_id, generation = found.node.node_id, found.node.identity_generation
        present = found.certificate
        if present.revoked_at_ms is not None and present.revocation_reason != REASON_REJOINED:
            raise self._refused(Reason.REVOKED, f"was revoked ({present.revocation_reason})")
        answered = await issued_before(transaction, node_id=node_id, request=self.request)
        if answered is not None and _is_waiting(answered, identity_generation=generation):
            if answered.not_after_ms > moment.now_ms:
                return IssuedIdentity.of(answered)
            await self._use_proof(transaction, now_ms=moment.now_ms)
            return await self._reissue(transaction, answered, now_ms=moment.now_ms)
        self._check_newest(present, identity_generation=generation)
        await self._use_proof(transaction, now_ms=moment.now_ms)
        assert self.shown.identity.role is not None, "examine compared the roles"
        return Grant(
            node_id=node_id,
            site=self.shown.identity.site,
            role=self.shown.identity.role,
            tenant_controlled=self.shown.identity.tenant_controlled,
            allowed_kinds=present.allowed_kinds,
            granted_by=f"node/{node_id}",
        )

    def _check_times(self, now_ms: int) -> None:
        possession.check_dated(self.client_time_ms, now_ms=now_ms)
        if now_ms < self.shown.not_after_ms - EARLY_MS:
            raise refuse(
                Reason.CONFLICT,
                f"certificate {self.shown.serial} of node {self.shown.identity.node_id} is still good: dial with it, "
                "and renew it",
            )
        if now_ms > self.shown.not_after_ms + EXPIRED_MAX_MS:
            hours = (now_ms - self.shown.not_after_ms) // 3_600_000
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
        await presented.use_proof(transaction, purpose=Purpose.X509POP, proof_sha256=self.proof_sha256, now_ms=now_ms)

    async def _reissue(self, transaction: Transaction, answered: StoredCertificate, *, now_ms: int) -> IssuedIdentity:
        """Answer a request whose certificate has expired unused: nobody but the holder of its key can use another."""
        await stored_certificates.withdraw(transaction, serial=answered.serial)
        return await self.issuer.issue(
            transaction,
            self.shown.identity,
            self.request,
            identity_generation=answered.identity_generation,
            allowed_kinds=answered.allowed_kinds,
            now_ms=now_ms,
        )

    def _refused(self, reason: Reason, why: str) -> Exception:
        return refuse(
            reason, f"certificate {self.shown.serial} of node {self.shown.identity.node_id} {why}: {_NEW_TOKEN}"
        )


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
        shown = possession.shown(
            chain_der,
            roots=[authority.certificate for authority in self.issuer.keys.node_cas],
            trust_domain=self.issuer.installation.trust_domain,
        )
        identity = shown.identity
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
        return X509PopClaim(
            shown=shown,
            request=csr,
            client_time_ms=evidence.client_time_ms,
            proof_sha256=possession.prove(shown, signed, evidence.proof),
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
