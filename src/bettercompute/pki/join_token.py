"""The one string that `token create` prints, and how a node proves that it holds it.

The string carries what a node without any trust yet needs to join: the secret, where to dial, the pin of the serving
CA, and the public points of the two join keys (the points themselves are the pins). It is binary fields in base64url
behind a prefix, with a checksum, so that a string cut by a terminal is told apart from one that nobody issued.

The secret travels only inside a JWE to the join-encryption key, together with the SHA-256 of the certificate request it
is meant for and the role it asks for. The gateway that relays it can neither read it nor use it for a request of its
own. See docs/security.md, "Joining"; decisions 0042 and 0111.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from bettercompute.errors import Refused
from bettercompute.pki import sealed
from bettercompute.pki.certificates import is_p256
from bettercompute.protocol.addresses import PORT_MAX, is_gateway_url
from bettercompute.protocol.statuses import Reason, refuse

PREFIX = "bcj1_"
JOIN_TOKEN = "join-token"  # noqa: S105 - an attestor's name
SECRET_BYTES = 32  # 256 bits: its plain SHA-256 may be stored, there is nothing to guess
GATEWAY_URLS_MAX = 8
GATEWAY_URL_CHARACTERS_MAX = 255  # a field's length is one byte
PINS_MAX = 4  # two while the serving CA is being replaced, and room
TOKEN_CHARACTERS_MAX = 4096
PROOF_LIFETIME_MS = sealed.JOIN_TOKEN.lifetime_ms_max

_CHECKSUM_BYTES = 4
_FIELD_SECRET = 1
_FIELD_GATEWAY_URL = 2
_FIELD_SERVING_CA_PIN = 3
_FIELD_JOIN_SIGNING_KEY = 4
_FIELD_JOIN_ENCRYPTION_KEY = 5
_FIELD_ATTESTOR = 6
_FIELDS = frozenset(range(_FIELD_SECRET, _FIELD_ATTESTOR + 1))
_ATTESTOR = re.compile(r"[a-z0-9][a-z0-9-]{0,31}", re.ASCII)
_SHA256_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinToken:
    """What the printed string holds; `serving_ca_pins` are SPKI SHA-256 in hex, any of which will do."""

    secret: bytes = field(repr=False)
    gateway_urls: tuple[str, ...]
    serving_ca_pins: tuple[str, ...]
    join_signing_key: ec.EllipticCurvePublicKey
    join_encryption_key: ec.EllipticCurvePublicKey
    attestor: str = JOIN_TOKEN
    """By which attestor its holder joins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinProof:
    """What a sealed token says: its secret, and the one request and role it was sealed for."""

    secret: bytes = field(repr=False)
    csr_sha256: str
    role: str
    sealed_at_ms: int
    """By the node's clock, which may be wrong: shown, never decided on."""


def secret_sha256(secret: bytes) -> str:
    """Return the form of a secret that is stored, in hex."""
    return hashlib.sha256(secret).hexdigest()


def format_token(token: JoinToken) -> str:
    """Return the printed string."""
    assert len(token.secret) == SECRET_BYTES, "a secret has 32 bytes"
    assert 1 <= len(token.serving_ca_pins) <= PINS_MAX, "a token pins at least one serving CA"
    fields = [(_FIELD_SECRET, token.secret)]
    fields += [(_FIELD_GATEWAY_URL, check_gateway_url(url).encode()) for url in _checked_urls(token.gateway_urls)]
    fields += [(_FIELD_SERVING_CA_PIN, bytes.fromhex(pin)) for pin in token.serving_ca_pins]
    fields += [
        (_FIELD_JOIN_SIGNING_KEY, point_bytes(token.join_signing_key)),
        (_FIELD_JOIN_ENCRYPTION_KEY, point_bytes(token.join_encryption_key)),
    ]
    if token.attestor != JOIN_TOKEN:  # not said where it goes without saying: an older bcd refuses the field
        fields.append((_FIELD_ATTESTOR, token.attestor.encode()))
    body = b"".join(bytes([number, len(value)]) + value for number, value in fields)
    return PREFIX + sealed.base64url(body + _checksum(body))


def parse_token(text: str) -> JoinToken:
    """Read a printed string; refuse INVALID_ARGUMENT one that was cut, altered or is no join token, and say which."""
    text = text.strip()
    if not text.startswith(PREFIX) or len(text) > TOKEN_CHARACTERS_MAX:
        raise _malformed(f"it does not begin with {PREFIX}, or is longer than {TOKEN_CHARACTERS_MAX} characters")
    try:
        data = sealed.base64url_decode(text.removeprefix(PREFIX))
    except ValueError as error:
        raise _malformed("it has characters that no token has, or lacks its end") from error
    body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if _checksum(body) != checksum:
        raise _malformed("its checksum is wrong: a part is missing or was altered")
    values: dict[int, list[bytes]] = {number: [] for number in _FIELDS}
    for number, value in _fields(body):
        if number not in values:
            raise _malformed(f"it has a field {number} that this version does not know: upgrade bcd")
        values[number].append(value)
    return _token(values)


def check_gateway_url(url: str) -> str:
    """Return `url` when a token may carry it, else refuse it INVALID_ARGUMENT."""
    if len(url) <= GATEWAY_URL_CHARACTERS_MAX and is_gateway_url(url):
        return url
    raise refuse(
        Reason.INVALID_NAME,
        f"{url[:GATEWAY_URL_CHARACTERS_MAX]!a} is not a gateway URL: write https://HOST:PORT in ASCII, an "
        f"IPv6 address in brackets, the port from 1 to {PORT_MAX}, at most {GATEWAY_URL_CHARACTERS_MAX} characters",
    )


def seal_proof(
    secret: bytes,
    *,
    join_encryption_key: ec.EllipticCurvePublicKey,
    csr_der: bytes,
    role: str,
    now_ms: int,
    challenge: bytes = b"",
) -> str:
    """Seal a token's secret for one certificate request and role, and for one challenge where there is one.

    `now_ms` is the node's clock.
    """
    claims = {
        "secret": sealed.base64url(secret),
        "csr_sha256": hashlib.sha256(csr_der).hexdigest(),
        "role": role,
    }
    if challenge:
        claims["challenge_sha256"] = hashlib.sha256(challenge).hexdigest()
    return sealed.seal(
        join_encryption_key, sealed.JOIN_TOKEN, claims, now_ms=max(now_ms, 0), lifetime_ms=PROOF_LIFETIME_MS
    )


def open_proof(
    key: ec.EllipticCurvePrivateKey, compact: str, *, csr_der: bytes, role: str, now_ms: int, challenge: bytes = b""
) -> JoinProof:
    """Open a sealed token and check that it is for this request, role and challenge; refuse INVALID_ARGUMENT anything
    else.
    """
    claims = sealed.unseal(key, sealed.JOIN_TOKEN, compact, now_ms=now_ms)
    secret, csr_sha256, sealed_role, sealed_at_ms = (
        claims.get(name) for name in ("secret", "csr_sha256", "role", "iat_ms")
    )
    if not (isinstance(secret, str) and isinstance(csr_sha256, str) and isinstance(sealed_role, str)):
        raise _malformed("its sealed form lacks the secret, the request's hash or the role")
    assert isinstance(sealed_at_ms, int), "unseal checks the times"
    try:
        secret_bytes = sealed.base64url_decode(secret)
    except ValueError as error:
        raise _malformed("its secret is not base64url") from error
    if len(secret_bytes) != SECRET_BYTES:
        raise _malformed(f"its secret has {len(secret_bytes)} bytes, a secret has {SECRET_BYTES}")
    if csr_sha256 != hashlib.sha256(csr_der).hexdigest():
        raise _malformed(
            "it was sealed for another certificate request: somebody between node and JoinService swapped it"
        )
    if claims.get("challenge_sha256") != (hashlib.sha256(challenge).hexdigest() if challenge else None):
        raise _malformed("it was sealed for another challenge")
    if sealed_role != role:
        raise _malformed(f"it was sealed for role {sealed_role[:40]!a}, and the request asks for {role!r}")
    return JoinProof(secret=secret_bytes, csr_sha256=csr_sha256, role=sealed_role, sealed_at_ms=sealed_at_ms)


def point_bytes(public_key: ec.EllipticCurvePublicKey) -> bytes:
    """Return a P-256 public key as its compressed point, 33 bytes."""
    assert is_p256(public_key), "every key of ours is on P-256"
    return public_key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def key_from_point(data: bytes) -> ec.EllipticCurvePublicKey:
    """Return the P-256 public key of a point in X9.62 form; raise ValueError when it is not on the curve."""
    return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), data)


def _token(values: dict[int, list[bytes]]) -> JoinToken:
    try:
        (secret,) = values[_FIELD_SECRET]
        (signing_point,) = values[_FIELD_JOIN_SIGNING_KEY]
        (encryption_point,) = values[_FIELD_JOIN_ENCRYPTION_KEY]
        (attestor,) = values[_FIELD_ATTESTOR] or [JOIN_TOKEN.encode()]
        token = JoinToken(
            secret=secret,
            gateway_urls=tuple(value.decode("ascii") for value in values[_FIELD_GATEWAY_URL]),
            serving_ca_pins=tuple(value.hex() for value in values[_FIELD_SERVING_CA_PIN]),
            join_signing_key=key_from_point(signing_point),
            join_encryption_key=key_from_point(encryption_point),
            attestor=attestor.decode("ascii"),
        )
    except ValueError as error:
        raise _malformed("a field is missing, repeated or not a point on P-256") from error
    pins_good = all(_SHA256_HEX.fullmatch(pin) for pin in token.serving_ca_pins)
    if len(secret) != SECRET_BYTES or not pins_good or not 1 <= len(token.serving_ca_pins) <= PINS_MAX:
        raise _malformed("its secret or pin has the wrong length")
    for url in _checked_urls(token.gateway_urls):
        check_gateway_url(url)
    if _ATTESTOR.fullmatch(token.attestor) is None:
        raise _malformed("the attestor that it names is no name")
    return token


def _checked_urls(urls: Sequence[str]) -> Sequence[str]:
    if not 1 <= len(urls) <= GATEWAY_URLS_MAX:
        raise _malformed(f"it names {len(urls)} gateway URLs, the limit is 1 to {GATEWAY_URLS_MAX}")
    return urls


def _fields(body: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(body):
        number, length = body[position], body[position + 1] if position + 1 < len(body) else 0
        value = body[position + 2 : position + 2 + length]
        if position + 2 > len(body) or len(value) != length:
            raise _malformed("its last field is cut")
        yield number, value
        position += 2 + length


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(PREFIX.encode() + body).digest()[:_CHECKSUM_BYTES]


def _malformed(why: str) -> Refused:
    return refuse(
        Reason.TOKEN_MALFORMED,
        f"the join token is malformed: {why}; copy the whole string that `better-compute token create` printed",
    )
