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


def serving_end(load: Callable[[], ServerSecrets]) -> Callable[[], int | None]:
    """Return a source of the moment until which the serving certificate is good; it never fails."""
    held: tuple[bytes, int] | None = None

    def not_after_ms() -> int | None:
        nonlocal held
        try:
            chain_pem = load().certificate_chain_pem
            if held is None or held[0] != chain_pem:
                leaf = certificates.load_certificate(certificates.chain_from_pem(chain_pem)[0])
                held = chain_pem, certificates.not_after_ms(leaf)
        except (BetterComputeError, OSError):
            return None
        return held[1]

    return not_after_ms


def _certificates(folder: KeyFolder, names: list[str]) -> Mapping[str, x509.Certificate]:
    slots = [name + slot for name in names for slot in SLOTS]
    return {slot: folder.certificate(slot) for slot in slots if folder.path(f"{slot}.pem").is_file()}


def _disk(config: Config) -> Disk:
    usage = shutil.disk_usage(config.state_path)
    return Disk(path=str(config.state_path), total_bytes=usage.total, free_bytes=usage.free)
