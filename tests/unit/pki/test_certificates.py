"""Three hierarchies, and everything that is refused before a certificate is believed."""

from __future__ import annotations

import datetime as dt
import hashlib
import subprocess
from dataclasses import dataclass, replace
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from bettercompute.errors import Refused
from bettercompute.pki import certificates
from bettercompute.pki.certificates import Authority, Use, verify_chain
from bettercompute.pki.identity import NodeIdentity, identity_of
from bettercompute.protocol.statuses import Reason, Status

NOW_MS = 1_800_000_000_000
SERIAL = bytes(range(16))
IDENTITY = NodeIdentity(trust_domain="bc.local", site="default", node_id="n1", role="node")


@pytest.fixture(scope="module")
def node_ca() -> Authority:
    return certificates.make_node_ca(serial=SERIAL, now_ms=NOW_MS)


@pytest.fixture(scope="module")
def serving_ca() -> Authority:
    return certificates.make_serving_ca(serial=SERIAL, now_ms=NOW_MS)


def node_leaf(issuer: Authority, *, now_ms: int = NOW_MS) -> x509.Certificate:
    key = certificates.generate_key().public_key()
    return certificates.make_node_leaf(issuer, public_key=key, identity=IDENTITY, serial=SERIAL, now_ms=now_ms)


def der(*chain: x509.Certificate) -> list[bytes]:
    return [certificate.public_bytes(Encoding.DER) for certificate in chain]


def refused(
    chain: list[bytes],
    authority: Authority,
    *,
    why: str,
    use: Use = Use.CLIENT,
    now_ms: int = NOW_MS,
    reason: Reason = Reason.BAD_CERTIFICATE,
) -> None:
    with pytest.raises(Refused, match=why) as caught:
        verify_chain(chain, roots=[authority.certificate], use=use, now_ms=now_ms)
    assert (caught.value.status, caught.value.reason) == (Status.UNAUTHENTICATED, reason)


def test_a_node_leaf_is_for_clients_a_day_and_five_minutes_back(node_ca):
    leaf = node_leaf(node_ca)
    assert certificates.not_before_ms(leaf) == NOW_MS - 5 * 60 * 1000
    assert certificates.not_after_ms(leaf) == NOW_MS + 24 * 60 * 60 * 1000
    usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert identity_of(verify_chain(der(leaf), roots=[node_ca.certificate], use=Use.CLIENT, now_ms=NOW_MS)) == IDENTITY
    assert (
        verify_chain(der(leaf, node_ca.certificate), roots=[node_ca.certificate], use=Use.CLIENT, now_ms=NOW_MS) == leaf
    )


def test_a_serving_leaf_names_hosts_and_addresses(serving_ca):
    leaf = certificates.make_serving_leaf(
        serving_ca,
        public_key=certificates.generate_key().public_key(),
        names=["localhost", "gw.example.org", "*.example.org", "127.0.0.1", "::1"],
        serial=SERIAL,
        now_ms=NOW_MS,
    )
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "gw.example.org", "*.example.org"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]
    assert certificates.not_after_ms(leaf) - NOW_MS == 90 * 24 * 60 * 60 * 1000
    assert verify_chain(der(leaf), roots=[serving_ca.certificate], use=Use.SERVER, now_ms=NOW_MS) == leaf
    refused(der(leaf), serving_ca, why="not that of a client certificate")


@pytest.mark.parametrize(
    "name", ["", "a..b", "UPPER.example", "a b", "-" * 64, "a/b", "*", "*.", "x" * 254, "ä.example"]
)
def test_a_bad_serving_name_is_refused(serving_ca, name):
    with pytest.raises(Refused, match="neither a DNS name in lower case nor an IP address") as caught:
        certificates.make_serving_leaf(
            serving_ca, public_key=serving_ca.key.public_key(), names=[name], serial=SERIAL, now_ms=NOW_MS
        )
    assert caught.value.status == Status.INVALID_ARGUMENT


@pytest.mark.parametrize(("names", "lifetime_ms"), [([], 1), (["a"] * 65, 1), (["a"], 0), (["a"], 90 * 86_400_000 + 1)])
def test_a_serving_leaf_has_bounds(serving_ca, names, lifetime_ms):
    with pytest.raises(Refused, match="a serving certificate"):
        certificates.make_serving_leaf(
            serving_ca,
            public_key=serving_ca.key.public_key(),
            names=names,
            serial=SERIAL,
            now_ms=NOW_MS,
            lifetime_ms=lifetime_ms,
        )


def test_a_worker_leaf_is_for_no_tls(serving_ca):
    root = certificates.make_command_root(serial=SERIAL, now_ms=NOW_MS)
    leaf = certificates.make_worker_leaf(
        root, public_key=certificates.generate_key().public_key(), serial=SERIAL, now_ms=NOW_MS
    )
    assert verify_chain(der(leaf), roots=[root.certificate], use=Use.INTENT, now_ms=NOW_MS) == leaf
    refused(der(leaf), root, use=Use.SERVER, why="not that of a server certificate")
    refused(der(leaf), serving_ca, use=Use.INTENT, why="does not verify")


@pytest.mark.parametrize("byte", [0, 0x7F, 0xFF])
def test_serials_are_positive_and_of_one_length(byte):
    authority = certificates.make_node_ca(serial=bytes([byte]) * 16, now_ms=NOW_MS)
    assert authority.certificate.serial_number > 0
    assert len(certificates.serial_text(authority.certificate)) == 32


def test_another_root_of_the_same_name_is_not_the_root(node_ca):
    refused(der(node_leaf(certificates.make_node_ca(serial=SERIAL, now_ms=NOW_MS))), node_ca, why="does not verify")


def test_a_chain_that_brings_its_own_root_is_refused(node_ca):
    stranger = certificates.make_node_ca(serial=SERIAL, now_ms=NOW_MS)
    refused(der(node_leaf(stranger), stranger.certificate), node_ca, why="does not verify")


def test_either_of_two_roots_will_do(node_ca):
    other = certificates.make_node_ca(serial=SERIAL, now_ms=NOW_MS)
    roots = [other.certificate, node_ca.certificate]
    for issuer in (other, node_ca):
        leaf = node_leaf(issuer)
        assert verify_chain(der(leaf), roots=roots, use=Use.CLIENT, now_ms=NOW_MS) == leaf


@pytest.mark.parametrize(
    ("now_ms", "reason", "why"),
    [
        (NOW_MS - 5 * 60 * 1000 - 1, Reason.BAD_CERTIFICATE, "not valid before"),
        (NOW_MS + 24 * 60 * 60 * 1000 + 1000, Reason.CERTIFICATE_EXPIRED, "it expired at"),
    ],
)
def test_outside_its_time_a_leaf_is_refused(node_ca, now_ms, reason, why):
    refused(der(node_leaf(node_ca)), node_ca, why=why, now_ms=now_ms, reason=reason)


def test_outside_its_time_a_root_verifies_nothing(node_ca):
    late_ms = NOW_MS + certificates.AUTHORITY_LIFETIME_MS + 1000
    refused(der(node_leaf(node_ca, now_ms=late_ms)), node_ca, why="does not verify", now_ms=late_ms)


def test_no_root_verifies_nothing(node_ca):
    with pytest.raises(Refused, match="no root"):
        verify_chain(der(node_leaf(node_ca)), roots=[], use=Use.CLIENT, now_ms=NOW_MS)


def test_a_chain_has_bounds(node_ca):
    leaf = der(node_leaf(node_ca))
    refused([], node_ca, why="0 certificates")
    refused(leaf * 5, node_ca, why="5 certificates")
    refused([b"\0" * 9000], node_ca, why="9000 bytes")
    refused([b"nonsense"], node_ca, why="not a DER certificate")
    refused([leaf[0] + b"\0"], node_ca, why="not a DER certificate")


def test_a_root_is_no_leaf(node_ca):
    refused(der(node_ca.certificate), node_ca, why="one of the roots")


def test_an_altered_leaf_is_refused(node_ca):
    leaf = bytearray(der(node_leaf(node_ca))[0])
    leaf[-1] ^= 1
    refused([bytes(leaf)], node_ca, why="the certificate is refused")


@dataclass(frozen=True)
class Recipe:
    """A certificate that is made by hand, to have the flaw that ours never have."""

    key: Any = None
    ca: bool | None = False
    key_cert_sign: bool = False
    digital_signature: bool = True
    usages: tuple[x509.ObjectIdentifier, ...] = (ExtendedKeyUsageOID.CLIENT_AUTH,)
    path_length: int | None = None
    unknown_critical: bool = False

    def make(self, issuer: Authority) -> x509.Certificate:
        key = self.key or certificates.generate_key()
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "by hand")]))
            .issuer_name(issuer.certificate.subject)
            .public_key(key.public_key())
            .serial_number(7)
            .not_valid_before(issuer.certificate.not_valid_before_utc)
            .not_valid_after(issuer.certificate.not_valid_before_utc + dt.timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(IDENTITY.spiffe_id)]), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.key.public_key()), False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        )
        if self.ca is not None:
            builder = builder.add_extension(x509.BasicConstraints(self.ca, self.path_length), critical=True)
        flags = dict.fromkeys(
            (
                "content_commitment",
                "key_encipherment",
                "data_encipherment",
                "key_agreement",
                "crl_sign",
                "encipher_only",
                "decipher_only",
            ),
            False,
        )
        builder = builder.add_extension(
            x509.KeyUsage(key_cert_sign=self.key_cert_sign, digital_signature=self.digital_signature, **flags), True
        )
        if self.usages:
            builder = builder.add_extension(x509.ExtendedKeyUsage(self.usages), critical=False)
        if self.unknown_critical:
            unknown = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.3.6.1.4.1.99999.1"), b"\x05\x00")
            builder = builder.add_extension(unknown, critical=True)
        return builder.sign(issuer.key, hashes.SHA256())


def test_a_leaf_by_hand_without_a_flaw_is_believed(node_ca):
    leaf = Recipe().make(node_ca)
    assert verify_chain(der(leaf), roots=[node_ca.certificate], use=Use.CLIENT, now_ms=NOW_MS) == leaf


@pytest.mark.parametrize(
    "flaw",
    [
        {"ca": True, "key_cert_sign": True},
        {"ca": True},
        {"ca": None},
        {"key_cert_sign": True},
        {"digital_signature": False},
        {"usages": ()},
        {"usages": (ExtendedKeyUsageOID.SERVER_AUTH,)},
        {"usages": (ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH)},
        {"usages": (ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE,)},
        {"key": ec.generate_private_key(ec.SECP384R1())},
        {"key": ed25519.Ed25519PrivateKey.generate()},
        {"key": rsa.generate_private_key(65537, 2048)},
    ],
    ids=lambda flaw: "-".join(
        f"{name}={value if name != 'key' else type(value).__name__}" for name, value in flaw.items()
    ),
)
def test_a_leaf_with_a_flaw_is_refused(node_ca, flaw):
    refused(der(replace(Recipe(), **flaw).make(node_ca)), node_ca, why="the certificate is refused")


def test_the_node_ca_signs_no_further_ca(node_ca):
    key = certificates.generate_key()
    between = Authority(Recipe(key=key, ca=True, key_cert_sign=True, usages=()).make(node_ca), key)
    refused(der(Recipe().make(between), between.certificate), node_ca, why="does not verify")


def test_a_ca_on_another_curve_is_refused():
    key = ec.generate_private_key(ec.SECP384R1())
    made = certificates.make_node_ca(serial=bytes(16), now_ms=NOW_MS)
    itself = Authority(made.certificate, key)
    root = Recipe(key=key, ca=True, key_cert_sign=True, digital_signature=False, usages=()).make(itself)
    other = Authority(root, key)
    refused(der(Recipe().make(other)), other, why="not on P-256")


def test_a_leaf_signs_nothing(node_ca):
    key = certificates.generate_key()
    leaf = certificates.make_node_leaf(
        node_ca, public_key=key.public_key(), identity=IDENTITY, serial=SERIAL, now_ms=NOW_MS
    )
    refused(der(Recipe().make(Authority(leaf, key)), leaf), node_ca, why="does not verify")


def test_a_request_is_good_for_its_key_only():
    key = certificates.generate_key()
    assert certificates.check_csr(certificates.make_csr(key)) == key.public_key()


def other_request(key, algorithm) -> bytes:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, algorithm).public_bytes(Encoding.DER)


def altered_request() -> bytes:
    csr = bytearray(certificates.make_csr(certificates.generate_key()))
    csr[-1] ^= 1
    return bytes(csr)


@pytest.mark.parametrize(
    ("csr", "why"),
    [
        (b"", "not a DER certificate request"),
        (b"x" * 100, "not a DER certificate request"),
        (b"x" * 5000, "5000 bytes, the limit is 4096"),
        (other_request(ec.generate_private_key(ec.SECP384R1()), hashes.SHA256()), "not on P-256"),
        (other_request(ec.generate_private_key(ec.SECP256K1()), hashes.SHA256()), "not on P-256"),
        (other_request(ed25519.Ed25519PrivateKey.generate(), None), "not on P-256"),
        (other_request(rsa.generate_private_key(65537, 2048), hashes.SHA256()), "not on P-256"),
        (other_request(ec.generate_private_key(ec.SECP256R1()), hashes.SHA512()), "not signed with its own key"),
        (altered_request(), "not signed with its own key"),
        (certificates.make_csr(certificates.generate_key()) + b"\0", "not a DER certificate request"),
    ],
)
def test_a_bad_request_is_refused(csr, why):
    with pytest.raises(Refused, match=why) as caught:
        certificates.check_csr(csr)
    assert (caught.value.status, caught.value.reason) == (Status.INVALID_ARGUMENT, Reason.BAD_CSR)


def test_a_pin_is_the_hash_of_the_public_key(serving_ca):
    spki = serving_ca.key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    expected = hashlib.sha256(spki).hexdigest()
    assert certificates.spki_sha256(serving_ca.certificate) == expected
    assert certificates.spki_sha256(serving_ca.key.public_key()) == expected


def test_chains_travel_as_pem(node_ca):
    chain = der(node_leaf(node_ca), node_ca.certificate)
    assert list(certificates.chain_from_pem(certificates.chain_to_pem(chain))) == chain
    with pytest.raises(Refused, match="no PEM certificate"):
        certificates.chain_from_pem(b"nothing")


@pytest.mark.parametrize(
    ("use", "purpose", "good"),
    [("node", "sslclient", True), ("node", "sslserver", False), ("serving", "sslserver", True)],
)
def test_openssl_is_of_the_same_mind(tmp_path, node_ca, serving_ca, use, purpose, good):
    if use == "node":
        authority, leaf = node_ca, node_leaf(node_ca)
    else:
        authority = serving_ca
        leaf = certificates.make_serving_leaf(
            serving_ca, public_key=certificates.generate_key().public_key(), names=["gw"], serial=SERIAL, now_ms=NOW_MS
        )
    (tmp_path / "ca.pem").write_bytes(authority.certificate.public_bytes(Encoding.PEM))
    (tmp_path / "leaf.pem").write_bytes(leaf.public_bytes(Encoding.PEM))
    command = ["openssl", "verify", "-x509_strict", "-purpose", purpose, "-attime", str(NOW_MS // 1000)]
    run = subprocess.run(
        [*command, "-CAfile", tmp_path / "ca.pem", tmp_path / "leaf.pem"], capture_output=True, text=True, check=False
    )
    assert (run.returncode == 0) == good, run.stdout + run.stderr
