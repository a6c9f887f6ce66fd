"""What is sealed to a key comes out with that key only, in one form only."""

from __future__ import annotations

import base64
import json
import warnings
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.concatkdf import ConcatKDFHash
from cryptography.hazmat.primitives.keywrap import aes_key_unwrap, aes_key_wrap
from hypothesis import given, settings
from hypothesis import strategies as st
from joserfc import jwe
from joserfc.jwk import ECKey, OctKey, OKPKey

from bettercompute.errors import Refused
from bettercompute.pki import sealed
from bettercompute.pki.sealed import JOIN_TOKEN, SECRET, WORKLOAD_TOKEN
from bettercompute.protocol.statuses import Reason, Status

NOW_MS = 1_800_000_000_000
KEY = ec.derive_private_key(0xC0FFEE, ec.SECP256R1())
EPHEMERAL = ec.derive_private_key(0xBEEF, ec.SECP256R1())


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def point(key: ec.EllipticCurvePublicKey) -> dict[str, str]:
    numbers = key.public_numbers()
    return {
        "kty": "EC",
        "crv": "P-256",
        "x": b64(numbers.x.to_bytes(32, "big")),
        "y": b64(numbers.y.to_bytes(32, "big")),
    }


def key_encryption_key(shared: bytes, alg: str = "ECDH-ES+A256KW") -> bytes:
    """RFC 7518, 4.6.2, by hand: a second implementation beside joserfc."""
    name = alg.encode()
    other = len(name).to_bytes(4, "big") + name + bytes(4) + bytes(4) + (256).to_bytes(4, "big")
    return ConcatKDFHash(hashes.SHA256(), 32, other).derive(shared)


def seal_by_hand(
    content: bytes, *, header: dict[str, Any] | None = None, raw_header: bytes | None = None, typ: str = "bcjoin+jwe"
) -> str:
    """Seal any content under any header, correctly, so that only the thing under test is wrong."""
    if header is None:
        header = {"alg": "ECDH-ES+A256KW", "enc": "A256GCM", "typ": typ, "epk": point(EPHEMERAL.public_key())}
    protected = b64(raw_header if raw_header is not None else json.dumps(header).encode())
    content_key, nonce = bytes(range(32)), bytes(12)
    wrapped = aes_key_wrap(key_encryption_key(EPHEMERAL.exchange(ec.ECDH(), KEY.public_key())), content_key)
    ciphertext = AESGCM(content_key).encrypt(nonce, content, protected.encode())
    return ".".join((protected, b64(wrapped), b64(nonce), b64(ciphertext[:-16]), b64(ciphertext[-16:])))


def content_of(claims: dict[str, Any] | None = None) -> bytes:
    return json.dumps({"iat_ms": NOW_MS, "exp_ms": NOW_MS + 1000, "a": "b", **(claims or {})}).encode()


def seal(claims: dict[str, str | int], purpose: sealed.SealedPurpose = JOIN_TOKEN) -> str:
    return sealed.seal(KEY.public_key(), purpose, claims, now_ms=NOW_MS, lifetime_ms=60_000)


def unseal(compact: str, purpose: sealed.SealedPurpose = JOIN_TOKEN, *, now_ms: int = NOW_MS) -> dict[str, str | int]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return sealed.unseal(KEY, purpose, compact, now_ms=now_ms)


def refused(compact: str, why: str, purpose: sealed.SealedPurpose = JOIN_TOKEN, *, now_ms: int = NOW_MS) -> None:
    with pytest.raises(Refused, match=why) as caught:
        unseal(compact, purpose, now_ms=now_ms)
    assert (caught.value.status, caught.value.reason) == (Status.INVALID_ARGUMENT, purpose.refused_as)


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=20), st.text(max_size=100) | st.integers(-(2**53), 2**53), max_size=8))
def test_claims_come_back(claims):
    claims = {name: value for name, value in claims.items() if name not in ("iat_ms", "exp_ms")}
    assert unseal(seal(claims)) == {**claims, "iat_ms": NOW_MS, "exp_ms": NOW_MS + 60_000}


def test_a_second_implementation_opens_it():
    protected, wrapped, nonce, ciphertext, tag = seal({"a": "b"}).split(".")
    header = json.loads(unb64(protected))
    assert header.keys() == {"alg", "enc", "typ", "epk"}
    numbers = ec.EllipticCurvePublicNumbers(
        int.from_bytes(unb64(header["epk"]["x"]), "big"),
        int.from_bytes(unb64(header["epk"]["y"]), "big"),
        ec.SECP256R1(),
    )
    shared = KEY.exchange(ec.ECDH(), numbers.public_key())
    content_key = aes_key_unwrap(key_encryption_key(shared), unb64(wrapped))
    plaintext = AESGCM(content_key).decrypt(unb64(nonce), unb64(ciphertext) + unb64(tag), protected.encode())
    assert json.loads(plaintext) == {"a": "b", "iat_ms": NOW_MS, "exp_ms": NOW_MS + 60_000}


def test_what_a_second_implementation_sealed_is_opened():
    assert unseal(seal_by_hand(content_of()))["a"] == "b"


def test_each_sealing_has_a_key_of_its_own():
    assert len({json.loads(unb64(seal({}).split(".")[0]))["epk"]["x"] for _ in range(10)}) == 10


def test_another_key_opens_nothing():
    with pytest.raises(Refused, match="not sealed to this key"):
        sealed.unseal(EPHEMERAL, JOIN_TOKEN, seal({}), now_ms=NOW_MS)


@pytest.mark.parametrize("segment", range(5))
def test_no_segment_can_be_altered(segment):
    segments = seal({"a": "b"}).split(".")
    data = bytearray(unb64(segments[segment]))
    data[len(data) // 2] ^= 1
    segments[segment] = b64(bytes(data))
    refused(".".join(segments), "refused")


@pytest.mark.parametrize("other", [SECRET, WORKLOAD_TOKEN])
def test_what_is_sealed_for_one_purpose_is_good_for_no_other(other):
    refused(seal({}), f"not of type {other.typ.replace('+', '.')}", other)
    refused(seal({}, other), "not of type bcjoin.jwe")


def test_sizes_are_bounded():
    biggest = "x" * (JOIN_TOKEN.content_bytes_max - len(json.dumps({"a": "", "iat_ms": NOW_MS, "exp_ms": NOW_MS})) + 4)
    assert unseal(seal({"a": biggest}))["a"] == biggest
    with pytest.raises(AssertionError):
        seal({"a": biggest + "xxx"})
    refused(seal_by_hand(content_of({"a": biggest + "x" * 20})), "the limit is 4096")
    refused("x" * 100_000, "100000 characters")
    secret = "x" * (SECRET.content_bytes_max - 100)
    assert unseal(seal({"a": secret}, SECRET), SECRET)["a"] == secret


GOOD_HEADER = {"alg": "ECDH-ES+A256KW", "enc": "A256GCM", "typ": "bcjoin+jwe", "epk": point(EPHEMERAL.public_key())}


@pytest.mark.parametrize(
    "changes",
    [
        {"zip": "DEF"},
        {"crit": []},
        {"crit": ["typ"]},
        {"jku": "https://example.org/"},
        {"jwk": point(EPHEMERAL.public_key())},
        {"x5c": ["AAAA"]},
        {"kid": "k"},
        {"apu": "QQ"},
        {"apv": "QQ"},
        {"cty": "json"},
        {"typ": None},
        {"typ": "BCJOIN+JWE"},
        {"typ": "JWE"},
        {"typ": 7},
        {"alg": "ECDH-ES"},
        {"alg": "ECDH-ES+A128KW"},
        {"alg": "dir"},
        {"alg": "RSA1_5"},
        {"alg": "PBES2-HS256+A128KW"},
        {"alg": ["ECDH-ES+A256KW"]},
        {"enc": "A128GCM"},
        {"enc": "A256CBC-HS512"},
        {"epk": None},
        {"epk": "x"},
        {"epk": []},
        {"epk": {**point(EPHEMERAL.public_key()), "d": b64(bytes(32))}},
        {"epk": {**point(EPHEMERAL.public_key()), "kid": "k"}},
        {"epk": {**point(EPHEMERAL.public_key()), "crv": "P-384"}},
        {"epk": {**point(EPHEMERAL.public_key()), "kty": "OKP"}},
        {"epk": {**point(EPHEMERAL.public_key()), "x": b64(bytes(32))}},
        {"epk": {**point(EPHEMERAL.public_key()), "x": b64(bytes(32)), "y": b64(bytes(32))}},
        {"epk": {**point(EPHEMERAL.public_key()), "x": b64(b"\0" + unb64(point(EPHEMERAL.public_key())["x"]))}},
        {"epk": {**point(EPHEMERAL.public_key()), "x": point(EPHEMERAL.public_key())["x"] + "="}},
        {"epk": {**point(EPHEMERAL.public_key()), "y": 7}},
        {"epk": {"kty": "EC", "crv": "P-256", "x": point(EPHEMERAL.public_key())["x"]}},
    ],
    ids=str,
)
def test_another_header_is_refused(changes):
    header = {name: value for name, value in {**GOOD_HEADER, **changes}.items() if value is not None}
    refused(seal_by_hand(content_of(), header=header), "refused")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b'"alg"',
        b"{",
        json.dumps(GOOD_HEADER).encode()[:-1] + b',"typ":"bcjoin+jwe"}',
        json.dumps(GOOD_HEADER).encode().replace(b'"kty"', b'"x":"AA","kty"'),
        b"\xff\xfe",
        b"[" * 100_000,
        json.dumps(GOOD_HEADER).encode() + b" " * 600,
    ],
    ids=lambda raw: repr(raw[:20]),
)
def test_a_header_that_is_no_plain_object_is_refused(raw):
    refused(seal_by_hand(content_of(), raw_header=raw), "refused")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s[:-1],
        lambda s: [*s, ""],
        lambda s: [s[0], "", *s[2:]],
        lambda s: [s[0] + "=", *s[1:]],
        lambda s: [*s[:4], s[4] + "="],
        lambda s: [*s[:4], s[4] + "A"],
        lambda s: [*s[:4], s[4][:-1] + "é"],
        lambda s: [*s[:4], s[4][:-2] + "+/"],
        lambda s: [*s[:4], s[4][:-1] + chr(ord(s[4][-1]) + 1)],
        lambda s: [*s[:4], b64(unb64(s[4])[:12])],
        lambda s: [*s[:2], b64(bytes(16)), *s[3:]],
        lambda s: [s[0], b64(bytes(48)), *s[2:]],
        lambda s: [s[0], s[1], s[2], "\n" + s[3], s[4]],
        lambda s: s[:0],
    ],
)
def test_another_form_is_refused(spoil):
    refused(".".join(spoil(seal_by_hand(content_of()).split("."))), "refused")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 4000,
        content_of({"a": None}),
        content_of({"a": True}),
        content_of({"a": 1.5}),
        content_of({"a": float("nan")}),
        content_of({"a": {}}),
        content_of({"iat_ms": "1"}),
        content_of({"iat_ms": True}),
        content_of({"iat_ms": -1}),
        content_of({"exp_ms": NOW_MS}),
        content_of({"exp_ms": NOW_MS + JOIN_TOKEN.lifetime_ms_max + 1}),
        content_of({"exp_ms": 1 << 60}),
        content_of()[:-1] + b',"a":"c"}',
        b'{"a":' + b"1" * 4000 + b"}",
    ],
    ids=lambda content: repr(content[:60]),
)
def test_other_content_is_refused(content):
    refused(seal_by_hand(content), "refused")


@pytest.mark.parametrize(("now_ms", "good"), [(-60_000, True), (-60_001, False), (119_999, True), (120_000, False)])
def test_a_secret_is_good_for_its_time(now_ms, good):
    compact = seal({}, SECRET)
    if good:
        unseal(compact, SECRET, now_ms=NOW_MS + now_ms)
    else:
        refused(compact, "not good at this time", SECRET, now_ms=NOW_MS + now_ms)


def test_a_node_without_a_clock_may_join():
    compact = sealed.seal(KEY.public_key(), JOIN_TOKEN, {}, now_ms=0, lifetime_ms=1000)
    assert unseal(compact)["iat_ms"] == 0


@pytest.mark.parametrize(
    ("alg", "enc", "key"),
    [
        ("dir", "A256GCM", OctKey.generate_key(256)),
        ("ECDH-ES", "A256GCM", ECKey.import_key(KEY.public_key())),
        ("ECDH-ES+A128KW", "A256GCM", ECKey.import_key(KEY.public_key())),
        ("ECDH-ES+A256KW", "A256GCM", OKPKey.generate_key("X25519")),
        ("ECDH-ES+A256KW", "A128CBC-HS256", ECKey.import_key(KEY.public_key())),
        ("ECDH-ES+A256KW", "A256GCM", ECKey.generate_key("P-384")),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_the_library_would_take_is_refused(alg, enc, key):
    header = {"alg": alg, "enc": enc, "typ": "bcjoin+jwe"}
    compact = jwe.encrypt_compact(header, content_of(), key, algorithms=[alg, enc])
    refused(compact, "refused")


@given(st.binary(max_size=40))
def test_base64url_has_one_spelling(data):
    text = sealed.base64url(data)
    assert sealed.base64url_decode(text) == data
    for other in (text + "=", text + "\n", " " + text, text + "A" * (4 - len(text) % 4 + 1)):
        with pytest.raises(ValueError, match="base64url"):
            sealed.base64url_decode(other)


def test_reasons_are_those_of_the_purpose():
    assert JOIN_TOKEN.refused_as == Reason.TOKEN_MALFORMED
