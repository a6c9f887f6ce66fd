"""Compact JWE to one public key, ECDH-ES+A256KW with A256GCM: join tokens, secrets and workload tokens.

One algorithm pair, one `typ` and one set of bounds per purpose. joserfc does the cryptography and is kept behind our
own checks, because it takes more than we want: any `typ`, an empty `crit`, `zip`, `jku`, `apu`, JSON with repeated
names. What it is given has been parsed here first: exactly our header names, exactly our key type and curve, canonical
base64url, bounded sizes. The content is a JSON object of strings and whole numbers that always says when it was sealed
and until when it is good. See docs/security.md, "Envelopes and bundles".
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ec
from joserfc import jwe
from joserfc.errors import JoseError
from joserfc.jwk import ECKey

from bettercompute.errors import Refused
from bettercompute.pki.certificates import is_p256
from bettercompute.protocol.statuses import Reason, refuse

ALGORITHM = "ECDH-ES+A256KW"
ENCRYPTION = "A256GCM"
ALGORITHMS = (ALGORITHM, ENCRYPTION)

_HEADER_NAMES = frozenset({"alg", "enc", "typ", "epk"})
_EPK_NAMES = frozenset({"kty", "crv", "x", "y"})
_HEADER_CHARACTERS_MAX = 512  # ours have 240 to 260
_WRAPPED_KEY_BYTES = 40  # RFC 3394: 256 bits and one block
_NONCE_BYTES = 12
_TAG_BYTES = 16
_COORDINATE_BYTES = 32
_ISSUED = "iat_ms"
_EXPIRES = "exp_ms"
_TIME_MAX_MS = 1 << 53  # what every JSON reader keeps exactly

Claims = Mapping[str, str | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedPurpose:
    """What one kind of sealed content may be."""

    typ: str
    content_bytes_max: int
    lifetime_ms_max: int
    refused_as: Reason
    clock_checked: bool
    """Whether the opener compares the times with its own: not at Join, where a node may not have a clock yet."""


JOIN_TOKEN = SealedPurpose(
    typ="bcjoin+jwe",
    content_bytes_max=4096,
    lifetime_ms_max=10 * 60 * 1000,
    refused_as=Reason.TOKEN_MALFORMED,
    clock_checked=False,
)
SECRET = SealedPurpose(
    typ="bcsecret+jwe",
    content_bytes_max=96 * 1024,
    lifetime_ms_max=2 * 60 * 1000,
    refused_as=Reason.BAD_REQUEST,
    clock_checked=True,
)
WORKLOAD_TOKEN = SealedPurpose(
    typ="bcworkload+jwe",
    content_bytes_max=16 * 1024,
    lifetime_ms_max=2 * 60 * 1000,
    refused_as=Reason.BAD_REQUEST,
    clock_checked=True,
)

CLOCK_SKEW_MS = 60 * 1000  # between two hosts of ours that both have a clock


class _Registry(jwe.JWERegistry):
    """joserfc's own bounds, raised to the largest content that a purpose allows."""

    max_ciphertext_length = 4 * SECRET.content_bytes_max // 3 + 4


def seal(
    recipient: ec.EllipticCurvePublicKey, purpose: SealedPurpose, claims: Claims, *, now_ms: int, lifetime_ms: int
) -> str:
    """Seal `claims` to `recipient`'s key, good from `now_ms` for `lifetime_ms`."""
    assert is_p256(recipient), "every key of ours is on P-256"
    assert 0 < lifetime_ms <= purpose.lifetime_ms_max, f"a {purpose.typ} lives at most {purpose.lifetime_ms_max} ms"
    assert _ISSUED not in claims, f"{_ISSUED} is written here"
    assert _EXPIRES not in claims, f"{_EXPIRES} is written here"
    content = {**claims, _ISSUED: now_ms, _EXPIRES: now_ms + lifetime_ms}
    plaintext = json.dumps(content, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()
    assert len(plaintext) <= purpose.content_bytes_max, f"a {purpose.typ} holds {purpose.content_bytes_max} bytes"
    header = {"alg": ALGORITHM, "enc": ENCRYPTION, "typ": purpose.typ}
    return jwe.encrypt_compact(header, plaintext, ECKey.import_key(recipient), registry=_registry())


def unseal(
    key: ec.EllipticCurvePrivateKey, purpose: SealedPurpose, compact: str, *, now_ms: int
) -> dict[str, str | int]:
    """Open what was sealed to `key` for `purpose` and return its claims, `iat_ms` and `exp_ms` included.

    Anything else is refused INVALID_ARGUMENT, without saying more to a stranger than which check failed.
    """
    _check_form(compact, purpose)
    try:
        plaintext = jwe.decrypt_compact(compact, ECKey.import_key(key), registry=_registry()).plaintext
    except (JoseError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _refused(purpose, "it was not sealed to this key, or was altered on the way") from error
    assert plaintext is not None, "decrypting yields a plaintext or raises"
    claims = _parse_claims(plaintext, purpose)
    _check_times(claims, purpose, now_ms=now_ms)
    return claims


def base64url(data: bytes) -> str:
    """Encode as base64url without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def base64url_decode(text: str) -> bytes:
    """Decode base64url in its one canonical spelling; raise ValueError for padding and loose end bits."""
    try:
        data = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ValueError("not base64url") from error
    if base64url(data) != text:
        raise ValueError("not canonical base64url")
    return data


def _registry() -> jwe.JWERegistry:
    return _Registry(algorithms=ALGORITHMS)


def _check_form(compact: str, purpose: SealedPurpose) -> None:
    """Check everything about a JWE that can be checked without a key."""
    length_max = _HEADER_CHARACTERS_MAX + 4 * (purpose.content_bytes_max + 128) // 3
    if len(compact) > length_max:
        raise _refused(purpose, f"it has {len(compact)} characters, the limit is {length_max}")
    segments = compact.split(".")
    if len(segments) != 5:
        raise _refused(purpose, f"it has {len(segments)} segments, a compact JWE has 5")
    try:
        header_bytes, wrapped_key, nonce, ciphertext, tag = (base64url_decode(segment) for segment in segments)
        header = json.loads(header_bytes, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise _refused(purpose, "its segments are not canonical base64url, or its header is no JSON object") from error
    if len(segments[0]) > _HEADER_CHARACTERS_MAX or not isinstance(header, dict) or header.keys() != _HEADER_NAMES:
        raise _refused(purpose, f"its header does not have exactly the names {', '.join(sorted(_HEADER_NAMES))}")
    if (header["alg"], header["enc"], header["typ"]) != (ALGORITHM, ENCRYPTION, purpose.typ):
        raise _refused(purpose, f"it is not of type {purpose.typ} by {ALGORITHM} and {ENCRYPTION}")
    _check_ephemeral_key(header["epk"], purpose)
    if (len(wrapped_key), len(nonce), len(tag)) != (_WRAPPED_KEY_BYTES, _NONCE_BYTES, _TAG_BYTES):
        raise _refused(purpose, "its wrapped key, nonce or tag has the wrong length")
    if len(ciphertext) > purpose.content_bytes_max:
        raise _refused(purpose, f"it holds {len(ciphertext)} bytes, the limit is {purpose.content_bytes_max}")


def _check_ephemeral_key(epk: object, purpose: SealedPurpose) -> None:
    """Check that `epk` is a bare public point on P-256: joserfc would also take a private key or another curve."""
    if not isinstance(epk, dict) or epk.keys() != _EPK_NAMES or (epk["kty"], epk["crv"]) != ("EC", "P-256"):
        raise _refused(purpose, "its ephemeral key is not a bare P-256 public key")
    try:
        x, y = (base64url_decode(epk[name]) for name in ("x", "y"))
        if (len(x), len(y)) != (_COORDINATE_BYTES, _COORDINATE_BYTES):
            raise ValueError("a coordinate has the wrong length")
        ec.EllipticCurvePublicNumbers(int.from_bytes(x, "big"), int.from_bytes(y, "big"), ec.SECP256R1()).public_key()
    except (ValueError, TypeError, AttributeError) as error:
        raise _refused(purpose, "its ephemeral key is not a point on P-256") from error


def _parse_claims(plaintext: bytes, purpose: SealedPurpose) -> dict[str, str | int]:
    try:
        claims = json.loads(plaintext, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise _refused(purpose, "its content is no JSON object") from error
    if not isinstance(claims, dict) or not all(type(value) in (str, int) for value in claims.values()):
        raise _refused(purpose, "its content is not an object of strings and whole numbers")
    return claims


def _check_times(claims: Claims, purpose: SealedPurpose, *, now_ms: int) -> None:
    issued, expires = claims.get(_ISSUED), claims.get(_EXPIRES)
    if not (isinstance(issued, int) and isinstance(expires, int) and 0 <= issued < expires < _TIME_MAX_MS):
        raise _refused(
            purpose, f"it does not say when it was sealed ({_ISSUED}) and until when it is good ({_EXPIRES})"
        )
    if expires - issued > purpose.lifetime_ms_max:
        raise _refused(purpose, f"it claims to live {expires - issued} ms, the limit is {purpose.lifetime_ms_max}")
    if not purpose.clock_checked:
        return
    if not issued - CLOCK_SKEW_MS <= now_ms < expires + CLOCK_SKEW_MS:
        raise _refused(purpose, "it is not good at this time: is this host's clock right?")


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a name is repeated")
    return names


def _refused(purpose: SealedPurpose, why: str) -> Refused:
    return refuse(purpose.refused_as, f"the sealed content ({purpose.typ}) is refused: {why}")
