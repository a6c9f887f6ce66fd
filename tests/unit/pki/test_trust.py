"""What is published rises with every change; what is accepted is verified, newer and of the same trust domain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from bettercompute.errors import Refused
from bettercompute.pki import certificates, signatures, trust
from bettercompute.pki.trust import CommandRoot, Trust, TrustContent
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import join_response_input, trust_bundle_input
from bettercompute.protocol.statuses import Reason, Status

NOW_MS = 1_800_000_000_000
SIGNING, OTHER = certificates.generate_key(), certificates.generate_key()
ROOT = certificates.make_command_root(serial=bytes(16), now_ms=NOW_MS)
CONTENT = TrustContent(
    trust_domain="bc.local",
    command_roots=(CommandRoot(certificate=ROOT.certificate, allowed_kinds=("node.reboot",), not_after_ms=NOW_MS),),
    join_signing_keys=(SIGNING.public_key(),),
    join_encryption_keys=(OTHER.public_key(),),
    serving_ca_pins=("ab" * 32,),
)


def publish(content: TrustContent = CONTENT, *, held: Trust | None = None) -> Trust:
    return trust.sign(content, version=1 if held is None else held.version + 1, key=SIGNING, now_ms=NOW_MS)


def accept(signed: bytes, *, held: Trust | None = None, domain: str = "bc.local") -> Trust | None:
    return trust.accept(signed, held=held, trust_domain=domain, pinned_keys=[SIGNING.public_key()])


def signed(bundle: messages.TrustBundle, *, key: ec.EllipticCurvePrivateKey = SIGNING) -> bytes:
    body = bundle.SerializeToString()
    envelope = messages.SignedTrustBundle(body=body, signature=signatures.sign(key, trust_bundle_input(body)))
    return envelope.SerializeToString()


def bundle_of(one: Trust) -> messages.TrustBundle:
    return messages.TrustBundle.FromString(messages.SignedTrustBundle.FromString(one.signed).body)


def test_a_first_bundle_is_version_1_and_comes_back_whole():
    first = publish()
    assert first.version == 1
    assert accept(first.signed) == first
    assert first.content == CONTENT
    assert trust.read_own(first.signed) == first
    assert bundle_of(first).issued_at_ms == NOW_MS


def test_a_content_is_the_same_whatever_its_version_and_time():
    assert trust.content_sha256(CONTENT) == trust.content_sha256(publish().content)
    assert trust.content_sha256(CONTENT) != trust.content_sha256(replace(CONTENT, command_roots=()))
    assert trust.content_sha256(CONTENT) != trust.content_sha256(replace(CONTENT, trust_domain="other"))


def test_a_newer_bundle_is_taken():
    first = publish()
    second = publish(replace(CONTENT, command_roots=()), held=first)
    assert second.version == 2
    assert accept(second.signed, held=first) == second


def test_only_a_newer_bundle_is_taken():
    first = publish()
    second = publish(replace(CONTENT, command_roots=()), held=first)
    for held in (second, replace(second, version=3)):
        assert accept(second.signed, held=held) is None
        assert accept(first.signed, held=held) is None


def refused(data: bytes, why: str, *, domain: str = "bc.local") -> None:
    with pytest.raises(Refused, match=why) as caught:
        accept(data, domain=domain)
    assert (caught.value.status, caught.value.reason) == (Status.UNAUTHENTICATED, Reason.BAD_PROOF)


def test_a_bundle_of_another_hand_or_domain_is_refused():
    refused(signed(bundle_of(publish()), key=OTHER), "not pinned here")
    refused(publish().signed, "this node is of other.example", domain="other.example")


def test_a_bundle_is_of_its_purpose():
    body = bundle_of(publish()).SerializeToString()
    envelope = messages.SignedTrustBundle(body=body, signature=signatures.sign(SIGNING, join_response_input(body)))
    refused(envelope.SerializeToString(), "does not verify")


def test_an_altered_bundle_is_refused():
    envelope = messages.SignedTrustBundle.FromString(publish().signed)
    envelope.body += b"\x08\x07"
    refused(envelope.SerializeToString(), "does not verify")
    for data in (b"", b"\xff" * 10):
        refused(data, "refused")
        with pytest.raises(Refused, match="refused"):
            trust.read_own(data)
    refused(bytes(256 * 1024 + 1), "the limit is 262144")


def p384() -> bytes:
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def leaf() -> bytes:
    certificate = certificates.make_worker_leaf(ROOT, public_key=OTHER.public_key(), serial=bytes(16), now_ms=NOW_MS)
    return certificate.public_bytes(Encoding.DER)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("version", 0, "no version"),
        ("trust_domain", "BC.local", "not a trust domain"),
        ("join_signing_keys", [], "it needs 1 to 8"),
        ("join_signing_keys", [b"x"], "no SubjectPublicKeyInfo"),
        ("join_signing_keys", [p384()], "not on P-256"),
        ("join_encryption_keys", [], "it needs 1 to 8"),
        ("join_encryption_keys", [p384()] * 9, "it needs 1 to 8"),
        ("serving_ca_spki_sha256", [], "it needs 1 to 8"),
        ("serving_ca_spki_sha256", [bytes(31)], "not a SHA-256"),
        ("command_signing_roots", [messages.CommandSigningRoot(certificate=b"x")], "no CA certificate"),
        ("command_signing_roots", [messages.CommandSigningRoot(certificate=leaf())], "not a CA"),
        ("command_signing_roots", [messages.CommandSigningRoot()] * 9, "at most 8"),
    ],
)
def test_a_well_signed_bundle_with_bad_content_is_refused(field, value, why):
    bundle = bundle_of(publish())
    bundle.ClearField(field)
    if isinstance(value, list):
        getattr(bundle, field).extend(value)
    else:
        setattr(bundle, field, value)
    refused(signed(bundle), why)


def test_what_daemons_would_refuse_is_not_published():
    with pytest.raises(Refused, match="it needs 1 to 8"):
        publish(replace(CONTENT, serving_ca_pins=()))
    with pytest.raises(Refused, match="not pinned"):
        publish(replace(CONTENT, join_signing_keys=(OTHER.public_key(),)))
    with pytest.raises(Refused, match="not a trust domain"):
        publish(replace(CONTENT, trust_domain="-"))
    kinds = tuple(f"kind.{number:050}" for number in range(5000))
    with pytest.raises(Refused, match="the limit is 262144"):
        publish(replace(CONTENT, command_roots=(CommandRoot(certificate=ROOT.certificate, allowed_kinds=kinds),)))
