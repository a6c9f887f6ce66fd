"""The keys that the control plane's services hold, read from the folder that `pki init` made.

While a key is being rotated the folder holds two of its purpose, as NAME and NAME-next or NAME-previous. Which of them
is in use is not said by their names but by the database (`pki.rotation`): `in_use` puts that one first. So a folder
that was left halfway through a renaming, or that still has the names of before a switch, is as good as a tidy one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from bettercompute.errors import Unavailable
from bettercompute.pki import certificates, keyfiles, rotation
from bettercompute.pki.certificates import Authority
from bettercompute.pki.keyfiles import KeyFolder
from bettercompute.pki.rotation import KeyStage, Purpose, TrustedKey, in_stage
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import trust as stored_trust
from bettercompute.store.database import Queries

NEXT_SUFFIX = "-next"
PREVIOUS_SUFFIX = "-previous"


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
    older_signing: ec.EllipticCurvePrivateKey | None = field(default=None, repr=False)
    """The join-signing key that every node knows, while another is already in use."""

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

    def by_purpose(self) -> tuple[tuple[TrustedKey, ...], ...]:
        """Return what of the keys is public, purpose by purpose, that of the plain name first."""
        pairs = zip(self.join_signing_keys, self.join_encryption_keys, strict=False)
        return (
            tuple(of_certificate(Purpose.COMMAND_ROOT, root) for root in self.command_roots),
            tuple(of_pair(signing.public_key(), encryption.public_key()) for signing, encryption in pairs),
            tuple(of_certificate(Purpose.SERVING_CA, ca) for ca in self.serving_cas),
            tuple(of_certificate(Purpose.NODE_CA, ca.certificate) for ca in self.node_cas),
        )

    def in_use(self, keys: Sequence[TrustedKey]) -> ServiceKeys:
        """Return them with those first that are current, and without what is not trusted.

        Raises Unavailable where this folder lacks one that is needed: another process has switched to it.
        """
        node_cas = {certificates.spki_sha256(ca.certificate): ca for ca in self.node_cas}
        signing = {certificates.spki_sha256(key.public_key()): key for key in self.join_signing_keys}
        encryption = {_spki(key.public_key()): key for key in self.join_encryption_keys}
        pairs = _held(rotation.trusted(keys, Purpose.JOIN_SIGNING), by=lambda key: key.key_sha256 in signing)
        pairs = _held(pairs, by=lambda key: key.companion_der in encryption)
        cas = _held(rotation.trusted(keys, Purpose.NODE_CA), by=lambda key: key.key_sha256 in node_cas)
        return replace(
            self,
            node_cas=tuple(node_cas[key.key_sha256] for key in cas) or self.node_cas,
            join_signing_keys=tuple(signing[key.key_sha256] for key in pairs) or self.join_signing_keys,
            join_encryption_keys=tuple(encryption[key.companion_der] for key in pairs) or self.join_encryption_keys,
            older_signing=self.bundle_key(keys),
        )

    def answering(self, sealed_to: ec.EllipticCurvePublicKey | None) -> ec.EllipticCurvePrivateKey:
        """Return the key that signs an answer: the one that goes with the key to which the caller's token was sealed.

        Whoever comes without a token knows the keys of a trust bundle, however old: the older key signs.
        """
        if sealed_to is not None:
            for signing, encryption in zip(self.join_signing_keys, self.join_encryption_keys, strict=False):
                if encryption.public_key() == sealed_to:
                    return signing
        return self.older_signing or self.join_signing

    def held(self) -> ServiceKeys:
        """Return themselves: keys that nobody rotates are a `KeySource`, too."""
        return self

    def read(self) -> ServiceKeys:
        """Return themselves, as above."""
        return self

    async def refresh(self, _: Queries) -> None:
        """Do nothing, as above."""

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


class KeySource(Protocol):
    """Where a service finds the keys in use."""

    def held(self) -> ServiceKeys:
        """Return the keys as they were in use at the last refresh."""
        ...

    def read(self) -> ServiceKeys:
        """Return the keys that are here now, whichever of them are in use."""
        ...

    async def refresh(self, queries: Queries) -> None:
        """Look which keys are in use; Unavailable where one is that is not held here."""
        ...


class KeyRing:
    """The keys of a folder, in the order in which the database has them in use. Satisfies `KeySource`.

    The files are read again only when the folder has changed, as a rotation does it while the process runs.
    """

    def __init__(self, folder: KeyFolder) -> None:
        """Refuses INVALID_CONFIG a folder that lacks a key."""
        self._folder = folder
        self._changed_ns = self._stamp()
        self._read = self._keys = load_service_keys(folder)

    def held(self) -> ServiceKeys:
        """Return the keys as they were in use at the last refresh."""
        return self._keys

    def read(self) -> ServiceKeys:
        """Return the keys of the folder as it is now, the plain names first."""
        changed_ns = self._stamp()
        if changed_ns != self._changed_ns:
            self._read, self._changed_ns = load_service_keys(self._folder), changed_ns
        return self._read

    async def refresh(self, queries: Queries) -> None:
        """Look which keys are in use; Unavailable where one is that is not held here."""
        trusted = await stored_trust.keys(queries)
        self._keys = self.read().in_use(trusted)

    def _stamp(self) -> int:
        return self._folder.folder.stat().st_mtime_ns


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


def _held(trusted: Sequence[TrustedKey], *, by: Callable[[TrustedKey], bool]) -> tuple[TrustedKey, ...]:
    """Return those of the trusted keys that are held here, in their order; the one in use must be."""
    if trusted and not by(trusted[0]):
        raise _lacking(trusted[0].purpose, trusted[0].key_sha256)
    return tuple(key for key in trusted if by(key))


def _lacking(purpose: Purpose, key_sha256: str) -> Unavailable:
    return Unavailable(
        f"this process's key folder lacks the {purpose} that is in use ({key_sha256[:16]}): copy the files of the "
        "folder in which the rotation was prepared"
    )


def _spki(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
