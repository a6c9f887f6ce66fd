"""Signatures and signing inputs against another implementation: Node.js, whose crypto takes r || s (`ieee-p1363`).

Where there is no `node` in PATH the tests are skipped and say so. The vectors in tests/vectors/signatures.json are
checked in: whoever writes a third implementation finds there a key, an input and a signature for every purpose.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_der_public_key,
)

from bettercompute.errors import Refused
from bettercompute.pki import certificates, signatures
from bettercompute.protocol.envelopes import Purpose

VECTOR_FOLDER = Path(__file__).parents[2] / "vectors"
SCRIPT = Path(__file__).with_name("other_implementation.mjs")
NODE = shutil.which("node")
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551

needs_node = pytest.mark.skipif(
    NODE is None, reason="no `node` in PATH: signatures are not checked by a second implementation"
)

INPUTS = json.loads((VECTOR_FOLDER / "signing_inputs.json").read_text())["vectors"]
SIGNATURES = json.loads((VECTOR_FOLDER / "signatures.json").read_text())["vectors"]


def ask_node(**asked: list[dict[str, Any]]) -> dict[str, Any]:
    assert NODE is not None
    done = subprocess.run(
        [NODE, str(SCRIPT)], input=json.dumps(asked), capture_output=True, text=True, check=True, timeout=300
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def spki(key: ec.EllipticCurvePublicKey) -> str:
    return base64.b64encode(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).decode()


def pkcs8(key: ec.EllipticCurvePrivateKey) -> str:
    return base64.b64encode(key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())).decode()


def public_key_of(vector: dict[str, Any]) -> ec.EllipticCurvePublicKey:
    key = load_der_public_key(base64.b64decode(vector["spki"]))
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key


# The vectors


def test_every_purpose_has_a_vector():
    assert {vector["purpose"] for vector in SIGNATURES} == {purpose.value for purpose in Purpose}
    assert [vector["input"] for vector in SIGNATURES] == [vector["input"] for vector in INPUTS]


@pytest.mark.parametrize("vector", SIGNATURES, ids=[vector["name"] for vector in SIGNATURES])
def test_the_vector_is_what_we_sign_and_verify(vector):
    key = ec.derive_private_key(int(vector["private_key"], 16), ec.SECP256R1())
    assert spki(key.public_key()) == vector["spki"]
    data = bytes.fromhex(vector["input"])
    assert signatures.sign_raw(key, data).hex() == vector["signature"]
    signatures.verify_raw(public_key_of(vector), bytes.fromhex(vector["signature"]), data)


@needs_node
def test_node_makes_the_same_inputs_of_the_parts_and_verifies_every_vector():
    from_parts = [
        {
            "spki": vector["spki"],
            "purpose": vector["purpose"],
            "parts": vector["parts"],
            "signature": vector["signature"],
        }
        for vector in SIGNATURES
    ]
    from_input = [
        {"spki": vector["spki"], "input": vector["input"], "signature": vector["signature"]} for vector in SIGNATURES
    ]
    assert ask_node(verify=[*from_parts, *from_input])["verified"] == [True] * (2 * len(SIGNATURES))


@needs_node
def test_a_vector_is_good_for_no_other_purpose():
    """Each signature under the purpose and the parts of each other one, by both implementations."""
    crossed = [
        {
            "spki": signer["spki"],
            "purpose": other["purpose"],
            "parts": signer["parts"],
            "signature": signer["signature"],
        }
        for signer in SIGNATURES
        for other in SIGNATURES
        if other["purpose"] != signer["purpose"]
    ]
    assert not any(ask_node(verify=crossed)["verified"])


# Random keys


def judged_alike(count: int) -> None:
    """Sign with `count` fresh keys on both sides; each side verifies what the other made."""
    keys = [certificates.generate_key() for _ in range(count)]
    inputs = [f"message {number}".encode() for number in range(count)]
    ours = [signatures.sign_raw(key, data) for key, data in zip(keys, inputs, strict=True)]
    assert {len(signature) for signature in ours} == {64}
    answer = ask_node(
        verify=[
            {"spki": spki(key.public_key()), "input": data.hex(), "signature": signature.hex()}
            for key, data, signature in zip(keys, inputs, ours, strict=True)
        ],
        sign=[{"pkcs8": pkcs8(key), "input": data.hex()} for key, data in zip(keys, inputs, strict=True)],
    )
    assert answer["verified"] == [True] * count
    for key, data, theirs in zip(keys, inputs, map(bytes.fromhex, answer["signed"]), strict=True):
        assert len(theirs) == 64
        signatures.verify_raw(key.public_key(), theirs, data)


@needs_node
def test_random_keys_are_judged_alike():
    judged_alike(200)


@needs_node
@pytest.mark.long
def test_ten_thousand_random_keys_are_judged_alike():
    for _ in range(10):
        judged_alike(1_000)


# What is malformed

KEY = ec.derive_private_key(0xC0FFEE, ec.SECP256R1())
DATA = b"data"
RAW = signatures.sign_raw(KEY, DATA)


def der_integer(number: int) -> bytes:
    content = number.to_bytes(number.bit_length() // 8 + 1, "big")
    return bytes([2, len(content)]) + content


def der_form(raw: bytes) -> bytes:
    content = der_integer(int.from_bytes(raw[:32], "big")) + der_integer(int.from_bytes(raw[32:], "big"))
    return bytes([0x30, len(content)]) + content


MALFORMED = {
    "empty": b"",
    "63 bytes": RAW[:63],
    "65 bytes": RAW + b"\0",
    "65 bytes, a zero before": b"\0" + RAW,
    "DER": der_form(RAW),
    "r is 0": bytes(32) + RAW[32:],
    "s is 0": RAW[:32] + bytes(32),
    "both are 0": bytes(64),
    "r is the order": ORDER.to_bytes(32, "big") + RAW[32:],
    "s is the order": RAW[:32] + ORDER.to_bytes(32, "big"),
    "r and s are past the order": b"\xff" * 64,
    "halves changed about": RAW[32:] + RAW[:32],
    "a bit of r": bytes([RAW[0] ^ 1]) + RAW[1:],
    "a bit of s": RAW[:-1] + bytes([RAW[-1] ^ 1]),
}


@needs_node
def test_both_refuse_what_is_malformed():
    asked = [{"spki": spki(KEY.public_key()), "input": DATA.hex(), "signature": RAW.hex()}] + [
        {"spki": spki(KEY.public_key()), "input": DATA.hex(), "signature": form.hex()} for form in MALFORMED.values()
    ]
    assert ask_node(verify=asked)["verified"] == [True] + [False] * len(MALFORMED)
    for form in MALFORMED.values():
        with pytest.raises(Refused):
            signatures.verify_raw(KEY.public_key(), form, DATA)


@needs_node
@pytest.mark.parametrize("curve", [ec.SECP256K1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_both_refuse_another_curve(curve):
    """Also where the signature is good on that curve: Node.js makes it, since ours signs on P-256 only."""
    key = ec.generate_private_key(curve)
    signature = ask_node(sign=[{"pkcs8": pkcs8(key), "input": DATA.hex()}])["signed"][0]
    asked = {"spki": spki(key.public_key()), "input": DATA.hex(), "signature": signature}
    assert ask_node(verify=[asked])["verified"] == [False]
    with pytest.raises(Refused, match="not on P-256"):
        signatures.verify_raw(key.public_key(), bytes.fromhex(signature), DATA)
    with pytest.raises(Refused):
        signatures.verify_raw(KEY.public_key(), bytes.fromhex(signature), DATA)
