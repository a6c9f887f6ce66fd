"""`pki init` and `pki issue-gateway`: how the control plane's keys are made.

They live as PEM files in one folder, which is written whole or not at all and never overwritten: a CA that is made anew
under joined nodes locks every one of them out.
"""

from __future__ import annotations

from collections.abc import Sequence

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from bettercompute.pki import certificates, keyfiles
from bettercompute.pki.certificates import Authority
from bettercompute.pki.keyfiles import KeyFolder
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.world import World

# The serving leaf's file name beside the keys of `pki init`.
GATEWAY = "gateway"


def initialise(folder: KeyFolder, *, world: World) -> tuple[str, ...]:
    """Make every CA and key, and return their names; refuse CONFLICT when the folder holds a key already."""
    held = folder.names()
    if held:
        raise refuse(
            Reason.CONFLICT,
            f"{folder.folder} holds keys already ({', '.join(held)}): nodes that joined under them would be locked "
            "out; choose another folder, or move this one away by hand",
        )
    now_ms = world.clock.now_ms()

    def serial() -> bytes:
        return world.ids.random_bytes(certificates.SERIAL_BYTES)

    command_root = certificates.make_command_root(serial=serial(), now_ms=now_ms)
    worker = certificates.generate_key()
    worker_leaf = certificates.make_worker_leaf(
        command_root, public_key=worker.public_key(), serial=serial(), now_ms=now_ms
    )
    files = {
        **_authority_files(keyfiles.SERVING_CA, certificates.make_serving_ca(serial=serial(), now_ms=now_ms)),
        **_authority_files(keyfiles.NODE_CA, certificates.make_node_ca(serial=serial(), now_ms=now_ms)),
        **_authority_files(keyfiles.COMMAND_ROOT, command_root),
        **_files(keyfiles.WORKER, worker, _chain_pem(worker_leaf, command_root.certificate)),
    }
    for name in (keyfiles.JOIN_SIGNING, keyfiles.JOIN_ENCRYPTION):
        key = certificates.generate_key()
        files |= _files(name, key, keyfiles.public_key_to_pem(key.public_key()))
    folder.create(files)
    return tuple(folder.names())


def issue_gateway(
    folder: KeyFolder,
    *,
    names: Sequence[str],
    world: World,
    lifetime_ms: int = certificates.SERVING_LIFETIME_MAX_MS,
    out: KeyFolder | None = None,
) -> x509.Certificate:
    """Make a serving key and leaf for `names` and write them, with the CA below the leaf, in place of the last ones.

    `out` gets all that a gateway on another host needs: these two, and the certificates of the serving CA and of the
    node CA, whose keys stay here.
    """
    serving_ca = folder.authority(keyfiles.SERVING_CA)
    key = certificates.generate_key()
    leaf = certificates.make_serving_leaf(
        serving_ca,
        public_key=key.public_key(),
        names=names,
        serial=world.ids.random_bytes(certificates.SERIAL_BYTES),
        now_ms=world.clock.now_ms(),
        lifetime_ms=lifetime_ms,
    )
    if out is not None:
        # Each may list two: while a CA is being rotated, gateways believe both.
        for name in (keyfiles.SERVING_CA, keyfiles.NODE_CA):
            folder.certificate(name)
            out.write_list(name, folder.pem(name))
    (out or folder).write_chain(GATEWAY, key, _chain_pem(leaf, serving_ca.certificate))
    return leaf


def _chain_pem(*chain: x509.Certificate) -> bytes:
    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in chain)


def _authority_files(name: str, authority: Authority) -> dict[str, bytes]:
    return _files(name, authority.key, authority.certificate.public_bytes(Encoding.PEM))


def _files(name: str, key: ec.EllipticCurvePrivateKey, public_pem: bytes) -> dict[str, bytes]:
    return {f"{name}.key": keyfiles.key_to_pem(key), f"{name}.pem": public_pem}
