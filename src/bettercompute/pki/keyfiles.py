"""Keys and certificates as files, and the one way in which this project puts small files on disk so that they survive a
crash.

A file is written under a temporary name, fsynced, renamed over its place, and its folder fsynced: at every instant the
place holds the old content or the new one. `Disk` is the handful of steps this is made of, so that tests can stop
between any two.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from bettercompute.errors import Refused
from bettercompute.pki.certificates import Authority, is_p256
from bettercompute.pki.identity import UNREADABLE
from bettercompute.protocol.statuses import Reason, refuse

SERVING_CA = "serving-ca"
NODE_CA = "node-ca"
COMMAND_ROOT = "command-root"
WORKER = "worker"
JOIN_SIGNING = "join-signing"
JOIN_ENCRYPTION = "join-encryption"

PRIVATE_FILE_MODE = 0o600
PRIVATE_FOLDER_MODE = 0o700
FILE_BYTES_MAX = 4 * 1024 * 1024  # the largest file read here is a trust bundle; more is not ours
_TEMPORARY = ".new"


class Disk(Protocol):
    """The steps of a durable change. Each happened or raised; only a sync makes names survive what comes after it."""

    def read(self, path: Path) -> bytes | None:
        """Return a file's content, or None when there is no such file."""
        ...

    def is_folder(self, path: Path) -> bool:
        """Say whether there is a folder here."""
        ...

    def names(self, folder: Path) -> list[str]:
        """Return the names in a folder, sorted; [] when there is no such folder."""
        ...

    def link_target(self, path: Path) -> str | None:
        """Return what a symlink says, or None when there is no such symlink."""
        ...

    def make_folder(self, folder: Path) -> None:
        """Make a folder readable by its owner only; one that exists is left as it is."""
        ...

    def write_synced(self, path: Path, data: bytes) -> None:
        """Write a file readable by its owner only, replacing any content, and fsync it."""
        ...

    def link(self, path: Path, target: str) -> None:
        """Make a symlink at a free place."""
        ...

    def rename(self, source: Path, destination: Path) -> None:
        """Rename, over a file or symlink that is there, or to a free place."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file or symlink; one that is gone already is fine."""
        ...

    def remove_folder(self, folder: Path) -> None:
        """Remove an empty folder; one that is gone already is fine."""
        ...

    def sync_folder(self, folder: Path) -> None:
        """Fsync a folder: the names in it survive from here on."""
        ...


class LocalDisk:
    """The machine's own disk."""

    def read(self, path: Path) -> bytes | None:
        """Return a file's content, or None when there is no such file."""
        try:
            with path.open("rb") as file:
                data = file.read(FILE_BYTES_MAX + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if len(data) > FILE_BYTES_MAX:
            raise OSError(errno.EFBIG, f"more than {FILE_BYTES_MAX} bytes, which no file of ours has", str(path))
        return data

    def is_folder(self, path: Path) -> bool:
        """Say whether there is a folder here."""
        return path.is_dir()

    def names(self, folder: Path) -> list[str]:
        """Return the names in a folder, sorted; [] when there is no such folder."""
        try:
            return sorted(path.name for path in folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def link_target(self, path: Path) -> str | None:
        """Return what a symlink says, or None when there is no such symlink."""
        try:
            return str(path.readlink())
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINVAL, errno.ENOTDIR):
                return None
            raise

    def make_folder(self, folder: Path) -> None:
        """Make a folder readable by its owner only; one that exists is left as it is."""
        folder.mkdir(mode=PRIVATE_FOLDER_MODE, exist_ok=True)

    def write_synced(self, path: Path, data: bytes) -> None:
        """Write a file readable by its owner only, replacing any content, and fsync it."""
        # Removed first, never truncated: a link planted in its place is not followed, and the mode is always ours.
        self.remove(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, PRIVATE_FILE_MODE), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def link(self, path: Path, target: str) -> None:
        """Make a symlink at a free place."""
        path.symlink_to(target)

    def rename(self, source: Path, destination: Path) -> None:
        """Rename, over a file or symlink that is there, or to a free place."""
        source.replace(destination)

    def remove(self, path: Path) -> None:
        """Remove a file or symlink; one that is gone already is fine."""
        path.unlink(missing_ok=True)

    def remove_folder(self, folder: Path) -> None:
        """Remove an empty folder; one that is gone already is fine."""
        try:
            folder.rmdir()
        except FileNotFoundError:
            return

    def sync_folder(self, folder: Path) -> None:
        """Fsync a folder: the names in it survive from here on."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace_file(disk: Disk, path: Path, data: bytes) -> None:
    """Put `data` at `path` by write, fsync, rename, fsync of the folder."""
    temporary = path.with_name(path.name + _TEMPORARY)
    disk.write_synced(temporary, data)
    disk.rename(temporary, path)
    disk.sync_folder(path.parent)


def replace_link(disk: Disk, path: Path, target: str) -> None:
    """Point the symlink `path` at `target` by making another and renaming it over, then fsync the folder."""
    temporary = path.with_name(path.name + _TEMPORARY)
    disk.remove(temporary)
    disk.link(temporary, target)
    disk.rename(temporary, path)
    disk.sync_folder(path.parent)


def place_folder(disk: Disk, folder: Path, files: Mapping[str, bytes]) -> None:
    """Make `folder` with exactly these files appear at a free place at once, and durably."""
    temporary = folder.with_name(folder.name + _TEMPORARY)
    remove_folder_with_files(disk, temporary)
    disk.make_folder(temporary)
    for name, data in files.items():
        disk.write_synced(temporary / name, data)
    disk.sync_folder(temporary)
    disk.rename(temporary, folder)
    disk.sync_folder(folder.parent)


def remove_folder_with_files(disk: Disk, folder: Path) -> None:
    """Remove a folder that holds only files; safe to repeat after a crash."""
    for name in disk.names(folder):
        disk.remove(folder / name)
    disk.remove_folder(folder)


def make_folders(disk: Disk, folder: Path) -> None:
    """Make a folder and the missing ones above it, each fsynced into its parent."""
    missing = [candidate for candidate in (folder, *folder.parents) if not disk.is_folder(candidate)]
    for candidate in reversed(missing):
        disk.make_folder(candidate)
        disk.sync_folder(candidate.parent)


def key_to_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key as unencrypted PKCS#8 PEM: the file's mode is what guards it."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def public_key_to_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return a public key as SubjectPublicKeyInfo PEM."""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def key_from_pem(data: bytes, *, name: str) -> ec.EllipticCurvePrivateKey:
    """Return the P-256 private key of a PEM file; refuse what is none, naming the file."""
    try:
        key = load_pem_private_key(data, password=None)
    except UNREADABLE as error:
        raise _unreadable(name, "it holds no unencrypted PEM private key") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not is_p256(key.public_key()):
        raise _unreadable(name, "its key is not on P-256")
    return key


def public_key_from_pem(data: bytes, *, name: str) -> ec.EllipticCurvePublicKey:
    """Return the P-256 public key of a PEM file; refuse what is none, naming the file."""
    try:
        key = load_pem_public_key(data)
    except UNREADABLE as error:
        raise _unreadable(name, "it holds no PEM public key") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not is_p256(key):
        raise _unreadable(name, "its key is not on P-256")
    return key


class KeyFolder:
    """`state_dir/pki`: each key as NAME.key, with its certificate or public key as NAME.pem."""

    def __init__(self, folder: Path, *, disk: Disk | None = None) -> None:
        self.folder = folder
        self._disk: Disk = LocalDisk() if disk is None else disk

    def names(self) -> list[str]:
        """Return the names of the keys that are here."""
        return [name.removesuffix(".key") for name in self._disk.names(self.folder) if name.endswith(".key")]

    def has(self, file_name: str) -> bool:
        """Say whether there is such a file."""
        return file_name in self._disk.names(self.folder)

    def create(self, files: Mapping[str, bytes]) -> None:
        """Make the folder with exactly these files, at once; it must not hold any yet."""
        make_folders(self._disk, self.folder.parent)
        place_folder(self._disk, self.folder, files)

    def write_authority(self, name: str, authority: Authority) -> None:
        """Write a key and its certificate."""
        self._write(name, key_to_pem(authority.key), authority.certificate.public_bytes(Encoding.PEM))

    def write_chain(self, name: str, key: ec.EllipticCurvePrivateKey, chain_pem: bytes) -> None:
        """Write a key and its certificate with those above it."""
        self._write(name, key_to_pem(key), chain_pem)

    def write_key(self, name: str, key: ec.EllipticCurvePrivateKey) -> None:
        """Write a key that no certificate names, with its public half beside it."""
        self._write(name, key_to_pem(key), public_key_to_pem(key.public_key()))

    def write_certificate(self, name: str, certificate: x509.Certificate) -> None:
        """Write a certificate whose key stays elsewhere."""
        make_folders(self._disk, self.folder)
        replace_file(self._disk, self.folder / f"{name}.pem", certificate.public_bytes(Encoding.PEM))

    def write_list(self, name: str, pem: bytes) -> None:
        """Write NAME.pem as it is, in place of what is there: certificates whose keys may stay elsewhere."""
        make_folders(self._disk, self.folder)
        replace_file(self._disk, self.folder / f"{name}.pem", pem)

    def move(self, file_name: str, new_name: str) -> None:
        """Give a file another name, in place of what has it."""
        self._disk.rename(self.folder / file_name, self.folder / new_name)
        self._disk.sync_folder(self.folder)

    def remove(self, file_name: str) -> None:
        """Remove a file; one that is gone already is fine."""
        self._disk.remove(self.folder / file_name)
        self._disk.sync_folder(self.folder)

    def authority(self, name: str) -> Authority:
        """Read a key and its certificate; refuse when one is missing or they do not belong together."""
        key, certificate = self.key(name), self.certificate(name)
        if certificate.public_key() != key.public_key():
            raise _unreadable(str(self.folder / f"{name}.key"), f"it is not the key of {name}.pem")
        return Authority(certificate, key)

    def key(self, name: str) -> ec.EllipticCurvePrivateKey:
        """Read a private key."""
        return key_from_pem(self._read(f"{name}.key"), name=str(self.folder / f"{name}.key"))

    def certificate(self, name: str) -> x509.Certificate:
        """Read the first certificate of NAME.pem; its key may be elsewhere."""
        try:
            return x509.load_pem_x509_certificates(self._read(f"{name}.pem"))[0]
        except UNREADABLE as error:
            raise _unreadable(str(self.folder / f"{name}.pem"), "it holds no PEM certificate") from error

    def pem(self, name: str) -> bytes:
        """Read NAME.pem as it is."""
        return self._read(f"{name}.pem")

    def path(self, file_name: str) -> Path:
        """Return where a file of this folder is."""
        return self.folder / file_name

    def _write(self, name: str, key_pem: bytes, public_pem: bytes) -> None:
        make_folders(self._disk, self.folder)
        # The public half first: a folder that was left halfway is recognised by the missing key.
        replace_file(self._disk, self.folder / f"{name}.pem", public_pem)
        replace_file(self._disk, self.folder / f"{name}.key", key_pem)

    def _read(self, file_name: str) -> bytes:
        try:
            data = self._disk.read(self.folder / file_name)
        except OSError as error:
            raise _unreadable(str(self.folder / file_name), error.strerror or "it cannot be read") from error
        if data is None:
            raise _unreadable(str(self.folder / file_name), "there is no such file: run `better-compute pki init`")
        return data


def _unreadable(path: str, why: str) -> Refused:
    return refuse(Reason.INVALID_CONFIG, f"{path} cannot be used: {why}")
