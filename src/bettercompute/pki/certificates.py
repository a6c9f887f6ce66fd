"""The certificates of the three hierarchies, and what is checked before one is believed.

* the *serving CA* signs the gateways' serving leaves; daemons pin it by the SHA-256 of its public key;
* the *node CA* signs node leaves, for client authentication only, and can sign no further CA;
* the *command root* signs the worker leaves whose keys sign intent.

Everything is ECDSA on P-256 with SHA-256. Times come in as Unix milliseconds and serial numbers as random bytes, so
that the same inputs describe the same certificate; X.509 counts seconds, so milliseconds are cut off. See
docs/security.md, "Keys"; decisions 0111.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import verification
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from bettercompute.errors import Refused
from bettercompute.pki.identity import UNREADABLE, NodeIdentity
from bettercompute.protocol.limits import MAX_TIME_MS
from bettercompute.protocol.statuses import Reason, refuse

DAY_MS = 24 * 60 * 60 * 1000
BACKDATE_MS = 5 * 60 * 1000  # notBefore lies this far back, for peers whose clocks are a little behind
NODE_LIFETIME_MS = DAY_MS  # a stolen node key is worth a day; renewal is automatic
SERVING_LIFETIME_MAX_MS = 90 * DAY_MS  # server_time is believed only inside it: it bounds a lie (decisions 0110)
WORKER_LIFETIME_MS = 365 * DAY_MS
AUTHORITY_LIFETIME_MS = 3650 * DAY_MS
SERIAL_BYTES = 16  # random, with the top bits fixed so that every serial has 32 hex digits
CERTIFICATE_BYTES_MAX = 8 * 1024  # ours are under 1 KiB
CSR_BYTES_MAX = 4 * 1024  # ours are about 250 bytes
CHAIN_LENGTH_MAX = 4
SERVING_NAMES_MAX = 64

_WORKER_STATEMENT = "urn:bc:worker"
_DNS_LABEL = re.compile(r"[a-z0-9-]{1,63}", re.ASCII)


class Use(Enum):
    """What a chain is verified for: the extended key usages its leaf must have, and nothing beside them."""

    CLIENT = (ExtendedKeyUsageOID.CLIENT_AUTH,)
    SERVER = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)  # a gateway calls services, too
    INTENT = ()
    """A worker's signature: its leaf has no TLS usage at all."""


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate with the key that it certifies: what signs others."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def generate_key() -> ec.EllipticCurvePrivateKey:
    """Return a new P-256 key from the kernel's generator, by way of OpenSSL."""
    return ec.generate_private_key(ec.SECP256R1())


def make_serving_ca(*, serial: bytes, now_ms: int) -> Authority:
    """Make the CA of the gateways' serving leaves.

    Its usage is not narrowed to servers: gateways also authenticate to each other under it.
    """
    return _make_authority("better-compute serving CA", serial=serial, now_ms=now_ms, usage=None)


def make_node_ca(*, serial: bytes, now_ms: int) -> Authority:
    """Make the CA of the node leaves: for client authentication only, path length 0."""
    return _make_authority(
        "better-compute node CA", serial=serial, now_ms=now_ms, usage=ExtendedKeyUsageOID.CLIENT_AUTH
    )


def make_command_root(*, serial: bytes, now_ms: int) -> Authority:
    """Make the root to which the worker keys chain that sign intent."""
    return _make_authority("better-compute command root", serial=serial, now_ms=now_ms, usage=None)


def make_serving_leaf(
    issuer: Authority,
    *,
    public_key: ec.EllipticCurvePublicKey,
    names: Sequence[str],
    serial: bytes,
    now_ms: int,
    lifetime_ms: int = SERVING_LIFETIME_MAX_MS,
) -> x509.Certificate:
    """Make a gateway's certificate for DNS names and IP addresses, valid for at most 90 days."""
    if not 1 <= len(names) <= SERVING_NAMES_MAX:
        limit = f"a serving certificate needs 1 to {SERVING_NAMES_MAX} names"
        raise refuse(Reason.INVALID_NAME, f"{limit} and was given {len(names)}: pass --san")
    if not 0 < lifetime_ms <= SERVING_LIFETIME_MAX_MS:
        limit = f"a serving certificate may live at most {SERVING_LIFETIME_MAX_MS // DAY_MS} days"
        raise refuse(Reason.BAD_REQUEST, f"{limit}, not {lifetime_ms} ms")
    return _make_leaf(
        issuer,
        common_name="better-compute gateway",
        public_key=public_key,
        names=[_serving_name(name) for name in names],
        use=Use.SERVER,
        serial=serial,
        now_ms=now_ms,
        lifetime_ms=lifetime_ms,
    )


def make_node_leaf(
    issuer: Authority,
    *,
    public_key: ec.EllipticCurvePublicKey,
    identity: NodeIdentity,
    serial: bytes,
    now_ms: int,
    lifetime_ms: int = NODE_LIFETIME_MS,
) -> x509.Certificate:
    """Make a node's certificate: its identity and the statements about its key, for client authentication only."""
    return _make_leaf(
        issuer,
        common_name=identity.node_id,
        public_key=public_key,
        names=[x509.UniformResourceIdentifier(uri) for uri in identity.uris],
        use=Use.CLIENT,
        serial=serial,
        now_ms=now_ms,
        lifetime_ms=lifetime_ms,
    )


def make_worker_leaf(
    issuer: Authority,
    *,
    public_key: ec.EllipticCurvePublicKey,
    serial: bytes,
    now_ms: int,
    lifetime_ms: int = WORKER_LIFETIME_MS,
) -> x509.Certificate:
    """Make the certificate of a key that signs commands and specs; it is good for no TLS at all."""
    return _make_leaf(
        issuer,
        common_name="better-compute worker",
        public_key=public_key,
        names=[x509.UniformResourceIdentifier(_WORKER_STATEMENT)],
        use=Use.INTENT,
        serial=serial,
        now_ms=now_ms,
        lifetime_ms=lifetime_ms,
    )


def make_csr(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Make a certificate request (DER) that says nothing but the key: every name is given by JoinService."""
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(Encoding.DER)


def check_csr(csr_der: bytes) -> ec.EllipticCurvePublicKey:
    """Return the key of a certificate request that its own holder signed; refuse INVALID_ARGUMENT anything else.

    Names and extensions that the request asks for are not read: they are given, never taken.
    """
    if len(csr_der) > CSR_BYTES_MAX:
        raise _bad_csr(f"it has {len(csr_der)} bytes, the limit is {CSR_BYTES_MAX}")
    try:
        request = x509.load_der_x509_csr(csr_der)
        public_key = request.public_key()
        algorithm = request.signature_hash_algorithm
        proven = request.is_signature_valid
    except (*UNREADABLE, InvalidSignature) as error:
        raise _bad_csr("it is not a DER certificate request, or of an unsupported algorithm") from error
    if not is_p256(public_key):
        raise _bad_csr("its key is not on P-256")
    if not isinstance(algorithm, hashes.SHA256) or not proven:
        raise _bad_csr("it is not signed with its own key by ECDSA with SHA-256")
    assert isinstance(public_key, ec.EllipticCurvePublicKey)
    return public_key


def verify_chain(
    chain_der: Sequence[bytes],
    *,
    roots: Sequence[x509.Certificate],
    use: Use,
    now_ms: int,
) -> x509.Certificate:
    """Return the leaf of a chain (DER, leaf first) to one of `roots` that is valid at `now_ms`, for `use` and no other.

    The path is built by `cryptography`; what it leaves to policy is decided here: P-256 throughout, the exact extended
    key usage, no CA as a leaf. Refuses UNAUTHENTICATED and says which of it failed.
    """
    if not 1 <= len(chain_der) <= CHAIN_LENGTH_MAX:
        raise _bad_certificate(f"the chain has {len(chain_der)} certificates, the limit is 1 to {CHAIN_LENGTH_MAX}")
    if not 0 <= now_ms <= MAX_TIME_MS:
        raise _bad_certificate(f"{now_ms} ms is no time at which it could be valid")
    leaf, *intermediates = map(load_certificate, chain_der)
    if leaf in roots:
        raise _bad_certificate("the leaf is one of the roots itself")
    _check_leaf(leaf, use)
    if not roots:
        raise _bad_certificate("there is no root to verify it against")
    policies = verification.ExtensionPolicy
    builder = (
        verification.PolicyBuilder()
        .store(verification.Store(list(roots)))
        .time(_time(now_ms).replace(tzinfo=None))
        .max_chain_depth(CHAIN_LENGTH_MAX - 2)
        .extension_policies(ca_policy=policies.webpki_defaults_ca(), ee_policy=policies.permit_all())
    )
    try:
        verified = builder.build_client_verifier().verify(leaf, intermediates)
    except (verification.VerificationError, *UNREADABLE) as error:
        raise _unverified(leaf, error, now_ms=now_ms) from error
    for authority in verified.chain[1:]:
        if not is_p256(authority.public_key()):
            raise _bad_certificate("a CA of its chain has a key that is not on P-256")
    return leaf


def load_certificate(der: bytes) -> x509.Certificate:
    """Parse one certificate of at most 8 KiB; refuse UNAUTHENTICATED what is none."""
    if len(der) > CERTIFICATE_BYTES_MAX:
        raise _bad_certificate(f"it has {len(der)} bytes, the limit is {CERTIFICATE_BYTES_MAX}")
    try:
        certificate = x509.load_der_x509_certificate(der)
    except UNREADABLE as error:
        raise _bad_certificate("it is not a DER certificate") from error
    try:
        certificate.public_key()  # parsed when it is asked for, which nobody after this expects to fail
    except UNREADABLE as error:
        raise _bad_certificate("its key cannot be read") from error
    return certificate


def chain_from_pem(text: bytes) -> tuple[bytes, ...]:
    """Return the certificates of a PEM file as DER, in the file's order; refuse a file that holds none."""
    try:
        certificates = x509.load_pem_x509_certificates(text)
    except UNREADABLE as error:
        raise _bad_certificate("the file holds no PEM certificate") from error
    return tuple(certificate.public_bytes(Encoding.DER) for certificate in certificates)


def chain_to_pem(chain_der: Iterable[bytes]) -> bytes:
    """Return a chain as PEM, in its order."""
    return b"".join(load_certificate(der).public_bytes(Encoding.PEM) for der in chain_der)


def is_p256(key: object) -> bool:
    """Say whether this is an elliptic-curve public key on P-256."""
    return isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)


def spki_sha256(holder: x509.Certificate | ec.EllipticCurvePublicKey) -> str:
    """Return the SHA-256 of a SubjectPublicKeyInfo in lower-case hex: what a daemon pins, and a key's `kid`."""
    public_key = holder.public_key() if isinstance(holder, x509.Certificate) else holder
    return hashlib.sha256(public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def serial_text(certificate: x509.Certificate) -> str:
    """Return a certificate's serial number as stored and shown: lower-case hex, no sign, no separators."""
    return format(certificate.serial_number, "x")


def not_before_ms(certificate: x509.Certificate) -> int:
    """Return the start of a certificate's validity in Unix milliseconds."""
    return round(certificate.not_valid_before_utc.timestamp() * 1000)


def not_after_ms(certificate: x509.Certificate) -> int:
    """Return the end of a certificate's validity in Unix milliseconds."""
    return round(certificate.not_valid_after_utc.timestamp() * 1000)


def _make_authority(common_name: str, *, serial: bytes, now_ms: int, usage: x509.ObjectIdentifier | None) -> Authority:
    key = generate_key()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    builder = (
        _builder(subject=name, issuer=name, public_key=key.public_key(), serial=serial)
        .not_valid_before(_time(now_ms - BACKDATE_MS))
        .not_valid_after(_time(now_ms + AUTHORITY_LIFETIME_MS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if usage is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    return Authority(builder.sign(key, hashes.SHA256()), key)


def _make_leaf(
    issuer: Authority,
    *,
    common_name: str,
    public_key: ec.EllipticCurvePublicKey,
    names: Sequence[x509.GeneralName],
    use: Use,
    serial: bytes,
    now_ms: int,
    lifetime_ms: int,
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    issuer_key = issuer.key.public_key()
    builder = (
        _builder(subject=subject, issuer=issuer.certificate.subject, public_key=public_key, serial=serial)
        .not_valid_before(_time(now_ms - BACKDATE_MS))
        .not_valid_after(_time(now_ms + lifetime_ms))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )
    if use.value:
        builder = builder.add_extension(x509.ExtendedKeyUsage(use.value), critical=False)
    return builder.sign(issuer.key, hashes.SHA256())


def _builder(
    *, subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, serial: bytes
) -> x509.CertificateBuilder:
    assert len(serial) == SERIAL_BYTES, "a serial number is made from 16 random bytes"
    number = int.from_bytes(serial, "big") & ((1 << 127) - 1) | (1 << 126)
    return x509.CertificateBuilder(
        subject_name=subject, issuer_name=issuer, public_key=public_key, serial_number=number
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
        **dict.fromkeys(others, False),
    )


def _serving_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    labels = name.removeprefix("*.").split(".")
    if len(name) > 253 or not all(_DNS_LABEL.fullmatch(label) for label in labels):
        raise refuse(Reason.INVALID_NAME, f"{name!r} is neither a DNS name in lower case nor an IP address")
    return x509.DNSName(name)


def _check_leaf(leaf: x509.Certificate, use: Use) -> None:
    if not is_p256(leaf.public_key()):
        raise _bad_certificate("its key is not on P-256")
    try:
        constraints = leaf.extensions.get_extension_for_class(x509.BasicConstraints).value
        key_usage = leaf.extensions.get_extension_for_class(x509.KeyUsage).value
        listed = [item.value for item in leaf.extensions if isinstance(item.value, x509.ExtendedKeyUsage)]
        usages = [usage for usages in listed for usage in usages]
    except UNREADABLE as error:
        raise _bad_certificate("an extension that every certificate of ours has is missing or unreadable") from error
    if constraints.ca or key_usage.key_cert_sign or not key_usage.digital_signature:
        raise _bad_certificate("it is not a leaf that may sign")
    if usages != list(use.value):
        raise _bad_certificate(f"its extended key usage is not that of a {use.name.lower()} certificate, and only that")


def _unverified(leaf: x509.Certificate, error: Exception, *, now_ms: int) -> Refused:
    """Say in words what the path builder does not: the commonest reason is time."""
    if now_ms < not_before_ms(leaf):
        since = leaf.not_valid_before_utc.isoformat()
        return _bad_certificate(f"it is not valid before {since}: is this host's clock right?")
    if now_ms > not_after_ms(leaf):
        until = leaf.not_valid_after_utc.isoformat()
        return refuse(Reason.CERTIFICATE_EXPIRED, f"the certificate is refused: it expired at {until}")
    return _bad_certificate(f"its chain does not verify: {error}")


def _time(at_ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=at_ms // 1000)


def _bad_certificate(why: str) -> Refused:
    return refuse(Reason.BAD_CERTIFICATE, f"the certificate is refused: {why}")


def _bad_csr(why: str) -> Refused:
    return refuse(Reason.BAD_CSR, f"the certificate request is refused: {why}")
