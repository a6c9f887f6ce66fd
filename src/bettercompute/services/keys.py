"""The keys that the control plane's services hold, read from the folder that `pki init` made.

While a key is being rotated the folder holds two of its purpose, as NAME and NAME-next or NAME-previous. Which of them
is in use is not said by their names but by the database (`pki.rotation`): `in_use` puts that one first. So a folder
that was left halfway through a renaming, or that still has the names of before a switch, is as good as a tidy one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from bettercompute.errors import Unavailable
from bettercompute.pki import certificates, keyfiles, rotation
from bettercompute.pki.certificates import Authority
from bettercompute.pki.keyfiles import KeyFolder
from bettercompute.pki.rotation import KeyStage, Purpose, TrustedKey, in_stage
from bettercompute.protocol.statuses import Reason, refuse

NEXT_SUFFIX = "-next"
PREVIOUS_SUFFIX = "-previous"

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceKeys:
    """What JoinService needs: it signs node certificates, answers and trust bundles, and opens sealed tokens.

    Of each purpose the key in use comes first.
    """

    node_cas: tuple[Authority, ...] = field(repr=False)
    join_signing_keys: tuple[ec.EllipticCurvePrivateKey, ...] = field(repr=False)
    join_encryption_keys: tuple[ec.EllipticCurvePrivateKey, ...] = field(repr=False)
    serving_cas: tuple[x509.Certificate, ...]
    command_roots: tuple[x509.Certificate, ...]

    @property
    def node_ca(self) -> Authority:
        """The CA that issues node certificates."""
        return self.node_cas[0]

    @property
    def join_signing(self) -> ec.EllipticCurvePrivateKey:
        """The signing key that new join tokens pin."""
        return self.join_signing_keys[0]

    @property
    def join_encryption(self) -> ec.EllipticCurvePrivateKey:
        """The key to which new join tokens are sealed."""
        return self.join_encryption_keys[0]

    @property
    def serving_ca(self) -> x509.Certificate:
        """The CA that issues gateways' certificates."""
        return self.serving_cas[0]

    @property
    def command_root(self) -> x509.Certificate:
        """The root of the worker key in use."""
        return self.command_roots[0]

    @property
    def serving_ca_pin(self) -> str:
        """The SHA-256 of the serving CA's public key, in hex."""
        return certificates.spki_sha256(self.serving_ca)

    @property
    def serving_ca_pem(self) -> bytes:
        """The serving CAs that a gateway may present, for clients that cannot pin."""
        return b"".join(authority.public_bytes(Encoding.PEM) for authority in self.serving_cas)

    def own(self) -> tuple[TrustedKey, ...]:
        """Return the keys that stand under the plain names: with them an installation is founded."""
        return (
            of_certificate(Purpose.COMMAND_ROOT, self.command_root),
            of_pair(self.join_signing.public_key(), self.join_encryption.public_key()),
            of_certificate(Purpose.SERVING_CA, self.serving_ca),
            of_certificate(Purpose.NODE_CA, self.node_ca.certificate),
        )

    def in_use(self, keys: Sequence[TrustedKey]) -> ServiceKeys:
        """Return them with those first that are current, and without what is not trusted.

        Raises Unavailable where this folder lacks one that is needed: another process has switched to it.
        """
        node_cas = {certificates.spki_sha256(ca.certificate): ca for ca in self.node_cas}
        signing = {certificates.spki_sha256(key.public_key()): key for key in self.join_signing_keys}
        encryption = {_spki(key.public_key()): key for key in self.join_encryption_keys}
        pairs = rotation.trusted(keys, Purpose.JOIN_SIGNING)
        return replace(
            self,
            node_cas=_held(node_cas, rotation.trusted(keys, Purpose.NODE_CA), by=lambda key: key.key_sha256),
            join_signing_keys=_held(signing, pairs, by=lambda key: key.key_sha256),
            join_encryption_keys=_held(encryption, pairs, by=lambda key: key.companion_der),
        )

    def bundle_key(self, keys: Sequence[TrustedKey]) -> ec.EllipticCurvePrivateKey:
        """Return the key that signs trust bundles and renewals: the previous one until it is retired.

        A node that was away since before the rotation knows no other.
        """
        for stage in (KeyStage.PREVIOUS, KeyStage.CURRENT):
            for key in in_stage(keys, Purpose.JOIN_SIGNING, stage):
                for held in self.join_signing_keys:
                    if certificates.spki_sha256(held.public_key()) == key.key_sha256:
                        return held
                raise _lacking(Purpose.JOIN_SIGNING, key.key_sha256)
        return self.join_signing


def of_certificate(purpose: Purpose, certificate: x509.Certificate) -> TrustedKey:
    """Return a CA or root as what is kept of it."""
    return TrustedKey(
        purpose=purpose,
        key_sha256=certificates.spki_sha256(certificate),
        public_der=certificate.public_bytes(Encoding.DER),
        stage=KeyStage.NEXT,
    )


def of_pair(signing: ec.EllipticCurvePublicKey, encryption: ec.EllipticCurvePublicKey) -> TrustedKey:
    """Return the two join keys as what is kept of them."""
    return TrustedKey(
        purpose=Purpose.JOIN_SIGNING,
        key_sha256=certificates.spki_sha256(signing),
        public_der=_spki(signing),
        companion_der=_spki(encryption),
        stage=KeyStage.NEXT,
    )


def load_service_keys(folder: KeyFolder) -> ServiceKeys:
    """Read the keys; refuse INVALID_CONFIG what is missing or damaged, naming the file."""
    return ServiceKeys(
        node_cas=authorities(folder, keyfiles.NODE_CA),
        join_signing_keys=private_keys(folder, keyfiles.JOIN_SIGNING),
        join_encryption_keys=private_keys(folder, keyfiles.JOIN_ENCRYPTION),
        serving_cas=held_certificates(folder, keyfiles.SERVING_CA),
        command_roots=held_certificates(folder, keyfiles.COMMAND_ROOT),
    )


def held_certificates(folder: KeyFolder, name: str) -> tuple[x509.Certificate, ...]:
    """Return the certificates of NAME, NAME-next and NAME-previous that are here; refuse when none is."""
    return tuple(folder.certificate(slot) for slot in _slots(folder, name, "pem"))


def private_keys(folder: KeyFolder, name: str) -> tuple[ec.EllipticCurvePrivateKey, ...]:
    """Return the keys of NAME, NAME-next and NAME-previous that are here; refuse when none is."""
    return tuple(folder.key(slot) for slot in _slots(folder, name, "key"))


def authorities(folder: KeyFolder, name: str) -> tuple[Authority, ...]:
    """Return the keys of NAME, NAME-next and NAME-previous with their certificates, whatever name each stands under."""
    keys = private_keys(folder, name)
    found = [
        Authority(certificate, key)
        for certificate in held_certificates(folder, name)
        for key in keys
        if key.public_key() == certificate.public_key()
    ]
    if not found:
        raise refuse(
            Reason.INVALID_CONFIG,
            f"{folder.path(f'{name}.key')} cannot be used: it is not the key of {name}.pem",
        )
    return tuple(found)


def _slots(folder: KeyFolder, name: str, ending: str) -> list[str]:
    slots = (name, name + NEXT_SUFFIX, name + PREVIOUS_SUFFIX)
    there = [slot for slot in slots if folder.has(f"{slot}.{ending}")]
    return there or [name]


def _held(held: Mapping[K, T], trusted: Sequence[TrustedKey], *, by: Callable[[TrustedKey], K]) -> tuple[T, ...]:
    """Return those of the trusted keys that are held here, in their order; the one in use must be."""
    if trusted and by(trusted[0]) not in held:
        raise _lacking(trusted[0].purpose, trusted[0].key_sha256)
    return tuple(held[by(key)] for key in trusted if by(key) in held)


def _lacking(purpose: Purpose, key_sha256: str) -> Unavailable:
    return Unavailable(
        f"this process's key folder lacks the {purpose} that is in use ({key_sha256[:16]}): copy the files of the "
        "folder in which the rotation was prepared"
    )


def _spki(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
