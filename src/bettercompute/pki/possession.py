"""Proof of possession: a node shows a certificate of ours and proves that it holds the key, dated by server time.

One rule for Renew, for the re-join of an expired node and for what a site agent vouches for, which differ in what is
signed and in the time at which the chain must be good. Whether the certificate still counts is not decided here: the
record says that. See docs/security.md, "Renewing" and "Coming back after expiry".
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from bettercompute.pki import certificates, signatures
from bettercompute.pki.certificates import Use
from bettercompute.pki.identity import NodeIdentity, identity_of
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason, refuse

PROOF_WINDOW_MS = 60 * 1000
REPLAY_KEPT_MS = 120 * 1000  # twice the window: a proof may come that early and be replayed that late

assert REPLAY_KEPT_MS >= 2 * PROOF_WINDOW_MS, "a proof must not be forgotten while it would still be accepted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A certificate that chains to a node CA of ours, and the chain that it was shown in; anybody may show one."""

    identity: NodeIdentity
    chain_der: tuple[bytes, ...]
    public_key: ec.EllipticCurvePublicKey
    serial: str
    not_before_ms: int
    not_after_ms: int


def shown(
    chain_der: Sequence[bytes], *, roots: Sequence[x509.Certificate], trust_domain: str, now_ms: int | None = None
) -> Shown:
    """Return what a chain (leaf first, not empty) shows; without `now_ms` it is judged as of the leaf's last moment."""
    if now_ms is None:
        now_ms = certificates.not_after_ms(certificates.load_certificate(chain_der[0]))
    leaf = certificates.verify_chain(chain_der, roots=roots, use=Use.CLIENT, now_ms=now_ms)
    identity = identity_of(leaf)
    if identity.trust_domain != trust_domain:
        raise refuse(Reason.BAD_CERTIFICATE, f"the certificate is of trust domain {identity.trust_domain}, not ours")
    if identity.attestation_key_sha256 is not None:
        raise refuse(Reason.ATTESTOR_UNKNOWN, "a certificate whose key a TPM certifies is not supported yet")
    public_key = leaf.public_key()
    assert isinstance(public_key, ec.EllipticCurvePublicKey), "verify_chain lets only P-256 pass"
    return Shown(
        identity=identity,
        chain_der=tuple(chain_der),
        public_key=public_key,
        serial=certificates.serial_text(leaf),
        not_before_ms=certificates.not_before_ms(leaf),
        not_after_ms=certificates.not_after_ms(leaf),
    )


def check_dated(client_time_ms: int, *, now_ms: int) -> None:
    """Refuse BAD_PROOF one that is dated too far from server time."""
    skew_ms = abs(now_ms - client_time_ms)
    if skew_ms > PROOF_WINDOW_MS:
        raise refuse(
            Reason.BAD_PROOF,
            f"the proof is {skew_ms} ms from server time, the limit is {PROOF_WINDOW_MS}: date it by server time",
        )


def prove(certificate: Shown, signing_input: bytes, proof: messages.Signature) -> str:
    """Return what the proof is known by, in hex; refuse BAD_PROOF one that the certificate's key has not made.

    It is the digest of what was signed, never of the signature: its twin would be another.
    """
    signatures.verify(proof, certificate.public_key, signing_input)
    return hashlib.sha256(signing_input).hexdigest()
