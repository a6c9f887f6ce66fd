"""ES256 in its raw form, checked against the library's own DER form, and everything else refused."""

from __future__ import annotations

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given, settings
from hypothesis import strategies as st

from bettercompute.errors import Refused
from bettercompute.pki import certificates, signatures
from bettercompute.pki.certificates import Use
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import join_response_input, trust_bundle_input
from bettercompute.protocol.statuses import Reason, Status

ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
NOW_MS = 1_800_000_000_000
KEY = ec.derive_private_key(0xC0FFEE, ec.SECP256R1())
DATA = join_response_input(b"body")


def der_integer(number: int) -> bytes:
    """Encode an INTEGER by hand: nothing here is shared with the code under test."""
    content = number.to_bytes(number.bit_length() // 8 + 1, "big")
    return bytes([2, len(content)]) + content


def der_signature(raw: bytes) -> bytes:
    content = der_integer(int.from_bytes(raw[:32], "big")) + der_integer(int.from_bytes(raw[32:], "big"))
    return bytes([0x30, len(content)]) + content


@settings(max_examples=300)
@given(st.integers(min_value=1, max_value=ORDER - 1), st.binary(max_size=100))
def test_raw_signatures_have_64_bytes_and_verify_as_der(secret, data):
    key = ec.derive_private_key(secret, ec.SECP256R1())
    raw = signatures.sign_raw(key, data)
    assert len(raw) == 64
    key.public_key().verify(der_signature(raw), data, ec.ECDSA(hashes.SHA256()))
    signatures.verify_raw(key.public_key(), raw, data)


def from_der(der: bytes) -> bytes:
    """Take r and s out of a DER signature by hand."""
    length = der[3]
    r, s = der[4 : 4 + length], der[6 + length :]
    return r.lstrip(b"\0").rjust(32, b"\0") + s.lstrip(b"\0").rjust(32, b"\0")


@settings(max_examples=200)
@given(st.binary(max_size=100))
def test_the_library_s_signatures_verify_in_the_raw_form(data):
    raw = from_der(KEY.sign(data, ec.ECDSA(hashes.SHA256())))
    signatures.verify_raw(KEY.public_key(), raw, data)


@pytest.mark.long
def test_ten_thousand_random_keys():
    for _ in range(10_000):
        key = certificates.generate_key()
        raw = signatures.sign_raw(key, DATA)
        assert len(raw) == 64
        key.public_key().verify(der_signature(raw), DATA, ec.ECDSA(hashes.SHA256()))
        signatures.verify_raw(key.public_key(), from_der(key.sign(DATA, ec.ECDSA(hashes.SHA256()))), DATA)


def test_short_numbers_keep_their_zeros():
    """One signature in 128 has a leading zero byte; find one of each half and see it padded."""
    seen = set()
    for number in range(2000):
        raw = signatures.sign_raw(KEY, number.to_bytes(4, "big"))
        assert len(raw) == 64
        seen |= {half for half in (0, 32) if raw[half] == 0}
        if raw[0] == 0 or raw[32] == 0:
            signatures.verify_raw(KEY.public_key(), raw, number.to_bytes(4, "big"))
    assert seen == {0, 32}


def test_a_signature_depends_on_key_and_message_only():
    assert signatures.sign_raw(KEY, DATA) == signatures.sign_raw(KEY, DATA)
    assert signatures.sign_raw(KEY, DATA) != signatures.sign_raw(KEY, DATA + b"x")


RAW = signatures.sign_raw(KEY, DATA)


@pytest.mark.parametrize(
    ("signature", "why"),
    [
        (b"", "0 bytes"),
        (RAW[:63], "63 bytes"),
        (RAW + b"\0", "65 bytes"),
        (der_signature(RAW), "bytes; the raw form"),
        (bytes(32) + RAW[32:], "out of range"),
        (RAW[:32] + bytes(32), "out of range"),
        (bytes(64), "out of range"),
        (ORDER.to_bytes(32, "big") + RAW[32:], "out of range"),
        (RAW[:32] + ORDER.to_bytes(32, "big"), "out of range"),
        (b"\xff" * 64, "out of range"),
        (RAW[32:] + RAW[:32], "does not verify"),
        (RAW[:-1] + bytes([RAW[-1] ^ 1]), "does not verify"),
    ],
)
def test_other_forms_are_refused(signature, why):
    with pytest.raises(Refused, match=why) as caught:
        signatures.verify_raw(KEY.public_key(), signature, DATA)
    assert (caught.value.status, caught.value.reason) == (Status.UNAUTHENTICATED, Reason.BAD_PROOF)


def test_a_key_on_another_curve_is_refused():
    for curve in (ec.SECP256K1(), ec.SECP384R1()):
        with pytest.raises(Refused, match="not on P-256"):
            signatures.verify_raw(ec.generate_private_key(curve).public_key(), RAW, DATA)


def test_the_twin_verifies_too_so_nothing_may_count_on_the_bytes():
    twin = RAW[:32] + (ORDER - int.from_bytes(RAW[32:], "big")).to_bytes(32, "big")
    assert twin != RAW
    signatures.verify_raw(KEY.public_key(), twin, DATA)


def test_an_envelope_names_its_key_and_is_of_one_purpose():
    signature = signatures.sign(KEY, DATA)
    assert signature.kid == certificates.spki_sha256(KEY.public_key())
    signatures.verify(signature, KEY.public_key(), DATA)
    with pytest.raises(Refused, match="does not verify"):
        signatures.verify(signature, KEY.public_key(), trust_bundle_input(b"body"))
    with pytest.raises(Refused, match="does not verify"):
        signatures.verify(signature, certificates.generate_key().public_key(), DATA)
    with pytest.raises(InvalidSignature):
        KEY.public_key().verify(der_signature(signature.value), b"body", ec.ECDSA(hashes.SHA256()))


def test_only_a_pinned_key_will_do():
    other = certificates.generate_key().public_key()
    signature = signatures.sign(KEY, DATA)
    signatures.verify_pinned(signature, [other, KEY.public_key()], DATA)
    for pinned in ([], [other]):
        with pytest.raises(Refused, match="not pinned here"):
            signatures.verify_pinned(signature, pinned, DATA)
    claimed = messages.Signature(value=signature.value, kid=certificates.spki_sha256(other))
    with pytest.raises(Refused, match="does not verify"):
        signatures.verify_pinned(claimed, [other, KEY.public_key()], DATA)


def test_a_chain_leads_to_a_pinned_root_or_is_refused():
    root, stranger = (certificates.make_command_root(serial=bytes(16), now_ms=NOW_MS) for _ in range(2))
    leaf = certificates.make_worker_leaf(root, public_key=KEY.public_key(), serial=bytes(16), now_ms=NOW_MS)
    signature = signatures.sign(KEY, DATA, chain_der=[leaf.public_bytes(Encoding.DER)])

    def verify(
        signed: bytes, authority: certificates.Authority, *, now_ms: int = NOW_MS, use: Use = Use.INTENT
    ) -> object:
        return signatures.verify_chained(signature, signed, roots=[authority.certificate], use=use, now_ms=now_ms)

    assert verify(DATA, root) == leaf
    with pytest.raises(Refused, match="does not verify"):
        verify(DATA, stranger)
    with pytest.raises(Refused, match="it expired at"):
        verify(DATA, root, now_ms=NOW_MS + certificates.WORKER_LIFETIME_MS + 1000)
    with pytest.raises(Refused, match="extended key usage"):
        verify(DATA, root, use=Use.CLIENT)
    with pytest.raises(Refused, match="the signature is refused"):
        verify(DATA + b"x", root)
    with pytest.raises(Refused, match="0 certificates"):
        signatures.verify_chained(
            signatures.sign(KEY, DATA), DATA, roots=[root.certificate], use=Use.INTENT, now_ms=NOW_MS
        )
