"""Challenges of JoinService: made without being stored, told from forged ones, and each for one request.

A challenge says until when it is good and carries a MAC over the attestor and the certificate request it was given to,
so that strangers who ask for one leave no trace. The MAC's key is derived from the join-encryption key, which every
instance of JoinService holds, also after a restart. That it is used once, the database says. See docs/security.md,
"Attestors"; decisions 0148.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from bettercompute.errors import Refused
from bettercompute.protocol.envelopes import part, sha256
from bettercompute.protocol.limits import MAX_TIME_MS
from bettercompute.protocol.statuses import Reason, refuse

LIFETIME_MS = 120_000  # a machine answers at once; two slow round trips fit
NONCE_BYTES = 16
_VERSION = b"\x01"
_TIME_BYTES = 8
_MAC_BYTES = 32
CHALLENGE_BYTES = len(_VERSION) + _TIME_BYTES + NONCE_BYTES + _MAC_BYTES
_INFO = b"bettercompute.v1/join-challenge"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinChallenge:
    """A challenge that is ours, for this request."""

    nonce: str
    """In hex: what it is known by when it is used."""
    expires_at_ms: int


def make_challenge(
    key: ec.EllipticCurvePrivateKey, *, attestor: str, csr_der: bytes, nonce: bytes, expires_at_ms: int
) -> bytes:
    """Return a challenge for one attestor and certificate request."""
    assert len(nonce) == NONCE_BYTES, "a nonce has 16 bytes"
    head = _VERSION + expires_at_ms.to_bytes(_TIME_BYTES, "big") + nonce
    return head + _mac(key, head, attestor=attestor, csr_der=csr_der)


def read_challenge(
    keys: Sequence[ec.EllipticCurvePrivateKey], challenge: bytes, *, attestor: str, csr_der: bytes
) -> JoinChallenge:
    """Read back a challenge that one of `keys` made for this attestor and request; refuse any other."""
    if len(challenge) != CHALLENGE_BYTES or not challenge.startswith(_VERSION):
        raise _refused(f"it has {len(challenge)} bytes, or is of another version; ours have {CHALLENGE_BYTES}")
    head, mac = challenge[:-_MAC_BYTES], challenge[-_MAC_BYTES:]
    if not any(hmac.compare_digest(_mac(key, head, attestor=attestor, csr_der=csr_der), mac) for key in keys):
        raise _refused("it was given for another request, altered, or not given here")
    expires_at_ms = int.from_bytes(head[1 : 1 + _TIME_BYTES], "big")
    assert expires_at_ms <= MAX_TIME_MS, "whoever made it read a clock"
    return JoinChallenge(nonce=head[1 + _TIME_BYTES :].hex(), expires_at_ms=expires_at_ms)


def _mac(key: ec.EllipticCurvePrivateKey, head: bytes, *, attestor: str, csr_der: bytes) -> bytes:
    secret = key.private_numbers().private_value.to_bytes(32, "big")
    derived = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=_INFO).derive(secret)
    return hmac.digest(derived, part(attestor.encode()) + part(sha256(csr_der)) + part(head), "sha256")


def _refused(why: str) -> Refused:
    return refuse(Reason.BAD_PROOF, f"the answer is to no challenge of ours: {why}; ask for a new one")
