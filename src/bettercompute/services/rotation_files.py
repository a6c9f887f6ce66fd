"""The key files of a rotation: the next key beside the one in use, then in its place, then alone.

Every step is made of renames and whole writes, each durable before the next, and may be repeated from its beginning:
processes find keys by what they are and not by the names of their files (`services.keys`), so that a crash between two
renames takes nothing from anybody. See docs/rotation.md, "The life of a key"; decisions 0130.
"""

from __future__ import annotations

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from bettercompute.errors import Refused
from bettercompute.pki import certificates, keyfiles
from bettercompute.pki.certificates import Authority
from bettercompute.pki.keyfiles import KeyFolder
from bettercompute.pki.rotation import Purpose, TrustedKey
from bettercompute.services.keys import NEXT_SUFFIX, PREVIOUS_SUFFIX, of_certificate, of_pair
from bettercompute.services.pki_setup import GATEWAY
from bettercompute.world import World

# The files of a purpose; the first name is what the purpose is known by, and its certificate is moved last.
NAMES = {
    Purpose.COMMAND_ROOT: (keyfiles.COMMAND_ROOT, keyfiles.WORKER),
    Purpose.JOIN_SIGNING: (keyfiles.JOIN_SIGNING, keyfiles.JOIN_ENCRYPTION),
    Purpose.SERVING_CA: (keyfiles.SERVING_CA,),
    Purpose.NODE_CA: (keyfiles.NODE_CA,),
}
# Of these gateways read NAME.pem as the list of what they believe: during a rotation it holds both.
LISTED = frozenset({Purpose.SERVING_CA, Purpose.NODE_CA})

assert GATEWAY not in {name for names in NAMES.values() for name in names}, "a gateway's leaf is not rotated here"


def prepare(folder: KeyFolder, purpose: Purpose, *, world: World) -> TrustedKey:
    """Make the next key of a purpose, unless a former attempt has made it, and return what of it is public."""
    match purpose:
        case Purpose.COMMAND_ROOT:
            return of_certificate(purpose, _next_root(folder, world=world).certificate)
        case Purpose.JOIN_SIGNING:
            signing, encryption = (_next_key(folder, name) for name in NAMES[purpose])
            return of_pair(signing.public_key(), encryption.public_key())
        case Purpose.SERVING_CA | Purpose.NODE_CA:
            authority = _next_authority(folder, purpose, world=world)
            _write_list(folder, purpose, in_use=folder.certificate(purpose), other=authority.certificate)
            return of_certificate(purpose, authority.certificate)


def next_key_sha256(folder: KeyFolder, purpose: Purpose) -> str:
    """Return which key a switch is meant to put in use: the next one, or, once that was done, the one in its place."""
    name = NAMES[purpose][0]
    slot = name + NEXT_SUFFIX if folder.has(f"{name}{NEXT_SUFFIX}.pem") else name
    if purpose is Purpose.JOIN_SIGNING:
        return certificates.spki_sha256(folder.key(slot).public_key())
    return certificates.spki_sha256(folder.certificate(slot))


def put_in_place(folder: KeyFolder, purpose: Purpose) -> None:
    """Give the next key the plain name, and the one that it replaced the name of the previous; after the switch."""
    main = NAMES[purpose][0]
    for name in reversed(NAMES[purpose]):
        for ending in ("key", "pem"):
            if not folder.has(f"{name}{NEXT_SUFFIX}.{ending}"):
                continue
            if name == main and ending == "pem" and purpose in LISTED:
                _put_list_in_place(folder, purpose)
                continue
            if folder.has(f"{name}.{ending}"):
                folder.move(f"{name}.{ending}", f"{name}{PREVIOUS_SUFFIX}.{ending}")
            folder.move(f"{name}{NEXT_SUFFIX}.{ending}", f"{name}.{ending}")


def drop_previous(folder: KeyFolder, purpose: Purpose) -> None:
    """Remove what was replaced; after it was retired."""
    if purpose in LISTED and folder.has(f"{purpose}{PREVIOUS_SUFFIX}.pem"):
        folder.write_list(purpose, folder.certificate(purpose).public_bytes(Encoding.PEM))
    for name in NAMES[purpose]:
        for ending in ("key", "pem"):
            folder.remove(f"{name}{PREVIOUS_SUFFIX}.{ending}")


def _next_root(folder: KeyFolder, *, world: World) -> Authority:
    """Return the next command root, with a worker key below it."""
    root = _next_authority(folder, Purpose.COMMAND_ROOT, world=world)
    slot = keyfiles.WORKER + NEXT_SUFFIX
    now_ms = world.clock.now_ms()
    try:
        chain_der = certificates.chain_from_pem(folder.pem(slot))
        leaf = certificates.verify_chain(
            chain_der, roots=[root.certificate], use=certificates.Use.INTENT, now_ms=now_ms
        )
        if leaf.public_key() == folder.key(slot).public_key():
            return root
    except Refused:
        pass  # It is not there, or not whole: a crash came before it was.
    worker = certificates.generate_key()
    leaf = certificates.make_worker_leaf(
        root,
        public_key=worker.public_key(),
        serial=world.ids.random_bytes(certificates.SERIAL_BYTES),
        now_ms=now_ms,
    )
    folder.write_chain(slot, worker, _pem(leaf) + _pem(root.certificate))
    return root


def _next_authority(folder: KeyFolder, purpose: Purpose, *, world: World) -> Authority:
    slot = purpose + NEXT_SUFFIX
    try:
        return folder.authority(slot)
    except Refused:
        pass  # as above
    make = {
        Purpose.COMMAND_ROOT: certificates.make_command_root,
        Purpose.SERVING_CA: certificates.make_serving_ca,
        Purpose.NODE_CA: certificates.make_node_ca,
    }[purpose]
    authority = make(serial=world.ids.random_bytes(certificates.SERIAL_BYTES), now_ms=world.clock.now_ms())
    folder.write_authority(slot, authority)
    return authority


def _next_key(folder: KeyFolder, name: str) -> ec.EllipticCurvePrivateKey:
    slot = name + NEXT_SUFFIX
    try:
        return folder.key(slot)
    except Refused:
        key = certificates.generate_key()
        folder.write_key(slot, key)
        return key


def _write_list(folder: KeyFolder, purpose: Purpose, *, in_use: x509.Certificate, other: x509.Certificate) -> None:
    folder.write_list(purpose, _pem(in_use) + _pem(other))


def _put_list_in_place(folder: KeyFolder, purpose: Purpose) -> None:
    new = folder.certificate(purpose + NEXT_SUFFIX)
    old = folder.certificate(purpose)
    if old.public_key() != new.public_key():
        folder.write_list(purpose + PREVIOUS_SUFFIX, _pem(old))
        _write_list(folder, purpose, in_use=new, other=old)
    folder.remove(f"{purpose}{NEXT_SUFFIX}.pem")


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)
