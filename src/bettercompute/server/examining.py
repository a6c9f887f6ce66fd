"""What `doctor` and a gateway's lease say of this host: its certificates as they lie on disk, and the disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping

from cryptography import x509

from bettercompute.errors import BetterComputeError
from bettercompute.pki import certificates, keyfiles
from bettercompute.pki.keyfiles import KeyFolder
from bettercompute.server.config import Config
from bettercompute.services.doctor.finding import Disk, Surroundings
from bettercompute.services.doctor.service import DoctorService
from bettercompute.store.database import Database
from bettercompute.store.leases import HeldCertificates
from bettercompute.transport.tls import ServerSecrets
from bettercompute.world import World

# While a key is rotated the new one lies beside it.
SLOTS = ("", "-next")


def make_doctor(config: Config, *, database: Database, dsn: str, world: World) -> DoctorService:
    """Return the doctor of this installation, as seen from this host."""
    folder = KeyFolder(config.pki_path)
    names = [keyfiles.SERVING_CA, keyfiles.NODE_CA]
    if config.pki.command_signing:
        names += [keyfiles.COMMAND_ROOT, keyfiles.WORKER]
    return DoctorService(
        Surroundings(
            database=database,
            dsn=dsn,
            world=world,
            authorities=lambda: _certificates(folder, names),
            disk=lambda: _disk(config),
        )
    )


def held_certificates(load: Callable[[], ServerSecrets]) -> Callable[[], HeldCertificates | None]:
    """Return a source of what a gateway shows and believes; it never fails."""
    held: tuple[ServerSecrets, HeldCertificates] | None = None

    def now() -> HeldCertificates | None:
        nonlocal held
        try:
            secrets = load()
            if held is None or held[0] is not secrets:
                held = secrets, _held(secrets)
        except (BetterComputeError, OSError):
            return None
        return held[1]

    return now


def _held(secrets: ServerSecrets) -> HeldCertificates:
    leaf, *issuers = map(certificates.load_certificate, certificates.chain_from_pem(secrets.certificate_chain_pem))
    believed = map(certificates.load_certificate, certificates.chain_from_pem(secrets.client_ca_pem))
    return HeldCertificates(
        serving_not_after_ms=certificates.not_after_ms(leaf),
        serving_ca_sha256=certificates.spki_sha256(issuers[-1]) if issuers else None,
        node_cas_sha256=tuple(map(certificates.spki_sha256, believed)),
    )


def _certificates(folder: KeyFolder, names: list[str]) -> Mapping[str, x509.Certificate]:
    slots = [name + slot for name in names for slot in SLOTS]
    return {slot: folder.certificate(slot) for slot in slots if folder.path(f"{slot}.pem").is_file()}


def _disk(config: Config) -> Disk:
    usage = shutil.disk_usage(config.state_path)
    return Disk(path=str(config.state_path), total_bytes=usage.total, free_bytes=usage.free)
