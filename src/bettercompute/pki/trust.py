"""The trust bundle: what the control plane publishes, and what a daemon accepts.

A daemon takes a bundle only when a join-signing key that it already pins signed it, it is of the daemon's own trust
domain, and its version is greater than the one held. The control plane raises the version whenever the content changes
and never otherwise, so a change always reaches the fleet. Everything inside is parsed before the bundle is published,
and again before it is believed. See docs/security.md, "Envelopes and bundles".
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key
from google.protobuf.message import DecodeError

from bettercompute.errors import Refused
from bettercompute.pki import identity, quorum, signatures
from bettercompute.pki.certificates import is_p256
from bettercompute.pki.quorum import NO_APPROVERS, ApproverSet, SetChange
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import trust_bundle_input
from bettercompute.protocol.limits import MAX_TRUST_BUNDLE_BYTES
from bettercompute.protocol.statuses import Reason, refuse

COMMAND_ROOTS_MAX = 8  # two while one is being replaced, and room for roots of few kinds
KEYS_MAX = 8
_SHA256_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRoot:
    """A root of worker keys, the kinds that they may sign (empty: all), and when (0: no bound of its own)."""

    certificate: x509.Certificate
    allowed_kinds: tuple[str, ...] = ()
    not_before_ms: int = 0
    not_after_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustContent:
    """What a bundle says, beside its version and its time; the keys in use come first."""

    trust_domain: str
    command_roots: tuple[CommandRoot, ...]
    join_signing_keys: tuple[ec.EllipticCurvePublicKey, ...]
    join_encryption_keys: tuple[ec.EllipticCurvePublicKey, ...]
    serving_ca_pins: tuple[str, ...]
    approvers: ApproverSet = NO_APPROVERS
    approver_signatures: tuple[bytes, ...] = ()
    """Serialized Signatures by which the approvers of the set before this one agreed to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """A bundle that was verified: its content parsed, and the bytes as they were signed."""

    version: int
    content: TrustContent
    signed: bytes
    """The serialized SignedTrustBundle, kept and relayed as it is."""


def content_sha256(content: TrustContent) -> bytes:
    """Return what tells two contents apart, whatever their versions and times."""
    return hashlib.sha256(_bundle(content, version=0, now_ms=0).SerializeToString(deterministic=True)).digest()


def sign(content: TrustContent, *, version: int, key: ec.EllipticCurvePrivateKey, now_ms: int) -> Trust:
    """Sign `content` as a version; what daemons would refuse is refused here, so that it is never published."""
    body = _bundle(content, version=version, now_ms=now_ms).SerializeToString(deterministic=True)
    signed = messages.SignedTrustBundle(body=body, signature=signatures.sign(key, trust_bundle_input(body)))
    return verify(signed.SerializeToString(deterministic=True), pinned_keys=content.join_signing_keys)


def verify(signed: bytes, *, pinned_keys: Sequence[ec.EllipticCurvePublicKey]) -> Trust:
    """Verify a serialized SignedTrustBundle under one of the pinned join-signing keys and parse all of it."""
    if len(signed) > MAX_TRUST_BUNDLE_BYTES:
        raise _bad_bundle(f"it has {len(signed)} bytes, the limit is {MAX_TRUST_BUNDLE_BYTES}")
    try:
        envelope = messages.SignedTrustBundle.FromString(signed)
        signatures.verify_pinned(envelope.signature, pinned_keys, trust_bundle_input(envelope.body))
        bundle = messages.TrustBundle.FromString(envelope.body)
    except DecodeError as error:
        raise _bad_bundle("it does not decode") from error
    if bundle.version < 1:
        raise _bad_bundle("it has no version")
    return Trust(version=bundle.version, content=_parse(bundle), signed=signed)


def accept(
    signed: bytes, *, held: Trust | None, trust_domain: str, pinned_keys: Sequence[ec.EllipticCurvePublicKey]
) -> Trust | None:
    """Return a bundle that a daemon takes in place of the one it holds; None when it is not newer, a refusal when it is
    bad.
    """
    trust = verify(signed, pinned_keys=pinned_keys)
    if trust.content.trust_domain != trust_domain:
        raise _bad_bundle(f"it is of trust domain {trust.content.trust_domain}, this node is of {trust_domain}")
    if held is not None and trust.version <= held.version:
        return None
    return trust


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenTrust:
    """What a newer bundle makes of a node's trust."""

    trust: Trust
    approvers: ApproverSet
    """What the node enforces from here on: the bundle's set, or still its own."""
    change: SetChange


def take(signed: bytes, *, held: Trust, approvers: ApproverSet) -> TakenTrust | None:
    """Return what follows from a relayed bundle for a node that holds these; None when it is not newer, a refusal when
    it is bad.
    """
    content = held.content
    newer = accept(signed, held=held, trust_domain=content.trust_domain, pinned_keys=content.join_signing_keys)
    if newer is None:
        return None
    enforced, change = enforced_approvers(approvers, newer)
    return TakenTrust(trust=newer, approvers=enforced, change=change)


def newer_of(held: Trust, brought: Trust) -> Trust:
    """Return what a node trusts that holds one bundle when an answer brings another: never the older of the two, as far
    as they are of one installation. Whoever relays an answer decides when it comes.
    """
    if held.version <= brought.version or held.content.trust_domain != brought.content.trust_domain:
        return brought
    try:
        return verify(held.signed, pinned_keys=brought.content.join_signing_keys)
    except Refused:
        return brought


def enforced_approvers(held: ApproverSet, trust: Trust) -> tuple[ApproverSet, SetChange]:
    """Return the approver set that a node enforces once it took a bundle, and why: the bundle's, or still its own."""
    content = trust.content
    given = [messages.Signature.FromString(signature) for signature in content.approver_signatures]
    change = quorum.judge_set(held, content.approvers, given, trust_domain=content.trust_domain)
    return (content.approvers if change is SetChange.TAKE else held), change


def read_own(signed: bytes) -> Trust:
    """Read back a bundle from one's own disk or database: whole, and signed by a key that it lists itself.

    This proves integrity and not origin; who wrote it there had verified it.
    """
    try:
        bundle = messages.TrustBundle.FromString(messages.SignedTrustBundle.FromString(signed).body)
    except DecodeError as error:
        raise _bad_bundle("it does not decode") from error
    return verify(signed, pinned_keys=_parse(bundle).join_signing_keys)


def _parse(bundle: messages.TrustBundle) -> TrustContent:
    counts = (len(bundle.join_signing_keys), len(bundle.join_encryption_keys), len(bundle.serving_ca_spki_sha256))
    if not all(1 <= count <= KEYS_MAX for count in counts) or len(bundle.command_signing_roots) > COMMAND_ROOTS_MAX:
        raise _bad_bundle(
            f"it needs 1 to {KEYS_MAX} join-signing keys, join-encryption keys and serving CA pins each, "
            f"and at most {COMMAND_ROOTS_MAX} command roots"
        )
    if not identity.is_trust_domain(bundle.trust_domain):
        raise _bad_bundle(f"{bundle.trust_domain[:80]!a} is not a trust domain")
    if len(bundle.approver_set_signatures) > quorum.APPROVERS_MAX:
        raise _bad_bundle(f"it has over {quorum.APPROVERS_MAX} signatures under its approver set")
    if any(len(pin) != _SHA256_BYTES for pin in bundle.serving_ca_spki_sha256):
        raise _bad_bundle("a serving CA pin is not a SHA-256")
    return TrustContent(
        trust_domain=bundle.trust_domain,
        command_roots=tuple(_root(message) for message in bundle.command_signing_roots),
        join_signing_keys=tuple(_key(spki) for spki in bundle.join_signing_keys),
        join_encryption_keys=tuple(_key(spki) for spki in bundle.join_encryption_keys),
        serving_ca_pins=tuple(pin.hex() for pin in bundle.serving_ca_spki_sha256),
        approvers=quorum.approver_set_of(bundle),
        approver_signatures=tuple(
            signature.SerializeToString(deterministic=True) for signature in bundle.approver_set_signatures
        ),
    )


def _bundle(content: TrustContent, *, version: int, now_ms: int) -> messages.TrustBundle:
    return messages.TrustBundle(
        version=version,
        trust_domain=content.trust_domain,
        command_signing_roots=[_root_message(root) for root in content.command_roots],
        join_signing_keys=[_spki(public_key) for public_key in content.join_signing_keys],
        join_encryption_keys=[_spki(public_key) for public_key in content.join_encryption_keys],
        serving_ca_spki_sha256=[bytes.fromhex(pin) for pin in content.serving_ca_pins],
        issued_at_ms=now_ms,
        approver_keys=content.approvers.keys,
        approver_threshold=content.approvers.threshold,
        quorum_tiers=content.approvers.tiers,  # type: ignore[arg-type]  # also numbers without a name yet
        unbatched_destructive_per_hour=content.approvers.unbatched_per_hour,
        approver_set_epoch=content.approvers.epoch,
        approver_set_signatures=map(messages.Signature.FromString, content.approver_signatures),
    )


def _root(message: messages.CommandSigningRoot) -> CommandRoot:
    try:
        certificate = x509.load_der_x509_certificate(message.certificate)
        key = certificate.public_key()
        is_authority = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except identity.UNREADABLE as error:
        raise _bad_bundle("a command root is no CA certificate") from error
    if not is_authority or not is_p256(key):
        raise _bad_bundle("a command root is not a CA on P-256")
    return CommandRoot(
        certificate=certificate,
        allowed_kinds=tuple(message.allowed_kinds),
        not_before_ms=message.not_before_ms,
        not_after_ms=message.not_after_ms,
    )


def _root_message(root: CommandRoot) -> messages.CommandSigningRoot:
    return messages.CommandSigningRoot(
        certificate=root.certificate.public_bytes(Encoding.DER),
        allowed_kinds=root.allowed_kinds,
        not_before_ms=root.not_before_ms,
        not_after_ms=root.not_after_ms,
    )


def _key(spki: bytes) -> ec.EllipticCurvePublicKey:
    try:
        key = load_der_public_key(spki)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _bad_bundle("a join key is no SubjectPublicKeyInfo") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not is_p256(key):
        raise _bad_bundle("a join key is not on P-256")
    return key


def _spki(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _bad_bundle(why: str) -> Refused:
    return refuse(Reason.BAD_PROOF, f"the trust bundle is refused: {why}")
