"""Certificates for tests, minted on the spot: a serving CA, a node CA, leaves of any age and name."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from bettercompute.transport.streams import Identity, ServerSecrets
from bettercompute.transport.tls import spki_sha256

DAY = timedelta(days=1)


@dataclass(frozen=True)
class Authority:
    """A CA."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    parent_pem: bytes = b""

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def pin(self) -> bytes:
        return spki_sha256(self.certificate.public_bytes(Encoding.DER))

    @staticmethod
    def new(name: str, *, issuer: Authority | None = None) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer.certificate.subject if issuer else subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + 365 * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        certificate = builder.sign(issuer.key if issuer else key, hashes.SHA256())
        return Authority(certificate, key, parent_pem=issuer.pem if issuer else b"")

    def issue(
        self,
        name: str,
        *,
        names: tuple[str, ...] = (),
        client: bool = False,
        not_before: timedelta = -DAY,
        not_after: timedelta = DAY,
    ) -> Identity:
        """Return a leaf and its key; the chain holds this CA and its parent, as servers must show it."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        usage = ExtendedKeyUsageOID.CLIENT_AUTH if client else ExtendedKeyUsageOID.SERVER_AUTH
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(self.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + not_before)
            .not_valid_after(now + not_after)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName([_san(text) for text in names]), critical=False)
        certificate = builder.sign(self.key, hashes.SHA256())
        return Identity(
            certificate_chain_pem=certificate.public_bytes(Encoding.PEM) + self.pem + self.parent_pem,
            private_key_pem=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        )


def _san(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


@dataclass(frozen=True)
class SharedPki:
    """What most tests need, made once per process."""

    serving_ca: Authority
    node_ca: Authority
    serving: Identity
    node: Identity

    @property
    def server_secrets(self) -> ServerSecrets:
        return ServerSecrets(self.serving.certificate_chain_pem, self.serving.private_key_pem, self.node_ca.pem)


@cache
def shared_pki() -> SharedPki:
    serving_ca = Authority.new("test serving CA")
    node_ca = Authority.new("test node CA")
    return SharedPki(
        serving_ca=serving_ca,
        node_ca=node_ca,
        serving=serving_ca.issue("gateway", names=("localhost", "gateway.test", "127.0.0.1", "::1")),
        node=node_ca.issue("node-1", client=True),
    )
