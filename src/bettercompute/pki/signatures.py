"""ES256 over signed envelopes.

A signature is 64 raw bytes, r || s, over the exact bytes of `protocol.envelopes`; nobody re-encodes anything to verify
it. It comes with a `kid` (the SHA-256 of the signer's public key) and, where the verifier pins a root and not the key,
with a certificate chain. Of an ECDSA signature a twin (r, n - s) verifies as well, so nothing may recognise a replay by
signature bytes. See docs/protocol.md, "Signed envelopes".
"""

from __future__ import annotations

from collections.abc import Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

from bettercompute.errors import Refused
from bettercompute.pki import certificates
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason, refuse

SIGNATURE_BYTES = 64
_HALF_BYTES = SIGNATURE_BYTES // 2
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551

# RFC 6979: the nonce comes from key and message, so that two clones of one random generator do not reveal the key.
_SIGN = ec.ECDSA(hashes.SHA256(), deterministic_signing=True)
_VERIFY = ec.ECDSA(hashes.SHA256())


def sign_raw(key: ec.EllipticCurvePrivateKey, data: bytes) -> bytes:
    """Sign `data` by ES256 and return r || s, always 64 bytes."""
    assert isinstance(key.curve, ec.SECP256R1), "every key of ours is on P-256"
    r, s = decode_dss_signature(key.sign(data, _SIGN))
    return r.to_bytes(_HALF_BYTES, "big") + s.to_bytes(_HALF_BYTES, "big")


def verify_raw(public_key: ec.EllipticCurvePublicKey, signature: bytes, data: bytes) -> None:
    """Verify r || s over `data`; refuse UNAUTHENTICATED any other form (DER, 63 or 65 bytes, r or s out of range)."""
    if not isinstance(public_key.curve, ec.SECP256R1):
        raise _bad_signature(f"the key is on {public_key.curve.name}, not on P-256")
    if len(signature) != SIGNATURE_BYTES:
        raise _bad_signature(f"it has {len(signature)} bytes; the raw form r || s has {SIGNATURE_BYTES}")
    r, s = (int.from_bytes(half, "big") for half in (signature[:_HALF_BYTES], signature[_HALF_BYTES:]))
    if not (0 < r < _P256_ORDER and 0 < s < _P256_ORDER):
        raise _bad_signature("r or s is out of range")
    try:
        public_key.verify(encode_dss_signature(r, s), data, _VERIFY)
    except InvalidSignature as error:
        raise _bad_signature("it does not verify: another key signed it, or the content was altered") from error


def sign(
    key: ec.EllipticCurvePrivateKey, signing_input: bytes, *, chain_der: Sequence[bytes] = ()
) -> messages.Signature:
    """Sign one of `protocol.envelopes`' inputs; `chain_der` (leaf first) goes along when the verifier pins a root."""
    return messages.Signature(
        value=sign_raw(key, signing_input),
        kid=certificates.spki_sha256(key.public_key()),
        certificate_chain=list(chain_der),
    )


def verify(signature: messages.Signature, public_key: ec.EllipticCurvePublicKey, signing_input: bytes) -> None:
    """Verify an envelope under a key that is known; a chain that came with it is not looked at."""
    verify_raw(public_key, signature.value, signing_input)


def verify_pinned(
    signature: messages.Signature, pinned_keys: Sequence[ec.EllipticCurvePublicKey], signing_input: bytes
) -> None:
    """Verify an envelope under that one of the pinned keys which its `kid` names."""
    for key in pinned_keys:
        if certificates.spki_sha256(key) == signature.kid:
            return verify(signature, key, signing_input)
    raise _bad_signature(f"it is by key {signature.kid[:64]!a}, which is not pinned here")


def verify_chained(
    signature: messages.Signature,
    signing_input: bytes,
    *,
    roots: Sequence[x509.Certificate],
    use: certificates.Use,
    now_ms: int,
) -> x509.Certificate:
    """Verify an envelope under the chain that it carries, and that under pinned roots; return the signer's leaf."""
    leaf = certificates.verify_chain(list(signature.certificate_chain), roots=roots, use=use, now_ms=now_ms)
    public_key = leaf.public_key()
    assert isinstance(public_key, ec.EllipticCurvePublicKey), "verify_chain lets only P-256 pass"
    verify_raw(public_key, signature.value, signing_input)
    return leaf


def _bad_signature(why: str) -> Refused:
    return refuse(Reason.BAD_PROOF, f"the signature is refused: {why}")
