"""The journal's files and folder: lock, refusal of network file systems, seal, ballast, setting aside.

SQLite alone cannot tell a journal whose last commits were cut off by one flipped bit in the write-ahead log from one
that crashed before them: both replay to an older, sound state. The *seal* can: a counter of commits beside the
database, fsynced after each commit and before anybody is told. A database behind its seal has lost what was promised.
See docs/delivery.md, "The journal"; docs/daemon.md, "What lies in the state folder"; decisions 0080.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import struct
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from bettercompute.errors import Refused, Unavailable

# gRPC's numbers; an error of this file never goes on the wire, but says who must act like any other.
_FAILED_PRECONDITION = 9

# Where fsync or file locks are known to mean less than they say.
NETWORK_FILE_SYSTEMS = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "coda", "9p", "virtiofs", "davfs", "fuse.davfs2"),
        *("ceph", "fuse.ceph", "fuse.ceph-fuse", "glusterfs", "fuse.glusterfs", "lustre", "beegfs", "beegfs_nodev"),
        *("gpfs", "ocfs2", "gfs2", "orangefs", "pvfs2", "wekafs", "panfs", "vboxsf", "fuse.vmhgfs-fuse"),
        *("fuse.sshfs", "fuse.s3fs", "fuse.juicefs", "fuse.rclone", "fuse.gcsfuse", "fuse.goofys", "fuse.blobfuse2"),
        *("fuse.mountpoint-s3", "fuse.seaweedfs", "fuse.mfs", "fuse.mfsmount", "fuse.alluxio-fuse"),
    }
)

# A damaged journal is evidence, and 256 MiB: two of them are kept.
KEPT_SET_ASIDE = 2

_SEAL = struct.Struct(">8s16sQI")
_SEAL_MAGIC = b"bcdseal1"
# Two slots in different sectors, written in turn: a torn write leaves the one before it.
_SEAL_SLOT_BYTES = 4096


def prepare_folder(folder: Path) -> None:
    """Make `folder` (0700) or tighten it; raise `Refused` where a journal cannot be kept safely."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (FileExistsError, NotADirectoryError) as error:
        raise Refused(
            f"state_dir {folder} is no folder, or lies below a file: move that file away, or set state_dir elsewhere",
            status=_FAILED_PRECONDITION,
            reason="state-dir-no-folder",
        ) from error
    except OSError as error:
        raise _unwritable(folder, error) from error
    if status.st_uid != os.geteuid():
        raise Refused(
            f"state_dir {folder} belongs to user id {status.st_uid}, and bcd runs as user id {os.geteuid()}: "
            "run bcd as its owner, or give it a state_dir of its own",
            status=_FAILED_PRECONDITION,
            reason="state-dir-owner",
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        try:
            folder.chmod(0o700)
        except OSError as error:
            raise _unwritable(folder, error) from error
    kind = file_system_of(folder, Path("/proc/self/mountinfo"))
    if kind in NETWORK_FILE_SYSTEMS:
        raise Refused(
            f"state_dir {folder} is on a network file system ({kind}), where neither locks nor fsync can be relied on: "
            "results could be lost, or commands run twice. Set state_dir to a folder on a local disk",
            status=_FAILED_PRECONDITION,
            reason="network-file-system",
        )


def file_system_of(folder: Path, mountinfo: Path) -> str:
    """Return the type of the file system that holds `folder`, as the kernel names it; empty when it cannot be told."""
    try:
        lines = mountinfo.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    path = str(folder.resolve())
    best, kind = "", ""
    for line in lines:
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        mount = fields[4].replace("\\040", " ").rstrip("/")
        # A later mount on the same point hides the earlier one.
        if (path == mount or path.startswith(mount + "/")) and len(mount) >= len(best):
            best, kind = mount, right.split()[0]
    return kind


@dataclass(slots=True)
class FolderLock:
    """One daemon per state folder, by a lock that the kernel drops however the process ends."""

    descriptor: int
    HELD: ClassVar[str] = "state-dir-locked"
    """The reason of the refusal when another process holds it."""

    @classmethod
    def take(cls, folder: Path) -> FolderLock:
        """Lock `folder`, or raise `Unavailable` naming who holds it."""
        path = folder / "lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unwritable(folder, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            who = f" (process {holder})" if holder.isdigit() else ""
            raise Unavailable(
                f"another bcd{who} holds the state folder {folder}: stop it, or give this one a state_dir of its own",
                reason=cls.HELD,
            ) from error
        with contextlib.suppress(OSError):  # a full disk must not keep the daemon from starting; the pid is for people
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        return cls(descriptor)

    def release(self) -> None:
        """Give the folder up."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Seal:
    """The counter of promised commits, beside the database."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1

    def read(self) -> tuple[bytes, int] | None:
        """Return the journal's birth bytes and the highest promised commit, or None where no slot can be believed."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        found: list[tuple[int, bytes]] = []
        for offset in (0, _SEAL_SLOT_BYTES):
            record = data[offset : offset + _SEAL.size]
            if len(record) < _SEAL.size:
                continue
            magic, birth, commits, crc = _SEAL.unpack(record)
            if magic == _SEAL_MAGIC and crc == zlib.crc32(record[:-4]):
                found.append((commits, birth))
        if not found:
            return None
        commits, birth = max(found)
        return birth, commits

    def create(self, birth: bytes, commits: int) -> None:
        """Write both slots anew, so that later writes need no space; under its name the file is whole or not there."""
        self.close()
        unnamed = self.path.with_name(self.path.name + ".new")
        self._descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.pwrite(self._descriptor, bytes(2 * _SEAL_SLOT_BYTES), 0)
        for slot in (commits, commits + 1):
            os.pwrite(self._descriptor, self._record(birth, commits), slot % 2 * _SEAL_SLOT_BYTES)
        os.fsync(self._descriptor)
        unnamed.rename(self.path)
        sync_folder(self.path.parent)

    def write(self, birth: bytes, commits: int) -> None:
        """Promise `commits`: durable when this returns."""
        if self._descriptor < 0:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        os.pwrite(self._descriptor, self._record(birth, commits), commits % 2 * _SEAL_SLOT_BYTES)
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @staticmethod
    def _record(birth: bytes, commits: int) -> bytes:
        head = _SEAL.pack(_SEAL_MAGIC, birth, commits, 0)[:-4]
        return head + struct.pack(">I", zlib.crc32(head))


@dataclass(frozen=True, slots=True)
class Ballast:
    """Space kept back: on a full disk even a DELETE fails, and freeing this lets results be written and sent."""

    path: Path
    size_bytes: int

    def held(self) -> bool:
        """Return whether the space is reserved."""
        try:
            return self.path.stat().st_size >= self.size_bytes
        except OSError:
            return False

    def take(self) -> bool:
        """Reserve the space, and say whether that worked; never while it would leave the disk nearly full."""
        if self.room_bytes() < 2 * self.size_bytes:
            return False
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            os.posix_fallocate(descriptor, 0, self.size_bytes)
        except OSError:
            self.free()
            return False
        finally:
            os.close(descriptor)
        return True

    def room_bytes(self) -> int:
        """Return what is left of the disk for us, the ballast not counted; a lot where that cannot be read."""
        try:
            free = os.statvfs(self.path.parent)
        except OSError:
            return sys.maxsize
        return free.f_bavail * free.f_frsize

    def free(self) -> bool:
        """Give the space up, and say whether there was any."""
        try:
            self.path.unlink()
        except OSError:
            return False
        return True


def reserve(path: Path, size_bytes: int) -> None:
    """Take a file's whole size from the disk beforehand, where it has it: what is in it stays."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
        finally:
            os.close(descriptor)


def occupied_bytes(path: Path) -> int:
    """Return what the files of a journal occupy on disk, log included."""
    size_bytes = 0
    for file in companions(path):
        with contextlib.suppress(OSError):
            size_bytes += file.stat().st_size
    return size_bytes


def keep_aside(database: Path, *, stamp: str) -> list[Path]:
    """Keep the journal's files as `<name>.damaged-<stamp>`, and no more than the newest few sets; return the new names.

    They are kept as they are only before SQLite closes the database: what it would then write goes into the file that
    stays behind under the old name, and the log that it would remove has another one.
    """
    kept = []
    for path in companions(database):
        if path.exists():
            target = path.with_name(f"{path.name}.damaged-{stamp}")
            if path != database or not _copied(path, target):
                path.rename(target)
            kept.append(target)
    for path in companions(database):
        old = sorted(path.parent.glob(f"{path.name}.damaged-*"))
        for extra in old[:-KEPT_SET_ASIDE]:
            extra.unlink()
    sync_folder(database.parent)
    return kept


def _copied(path: Path, target: Path) -> bool:
    """Copy a file; leave nothing where there is no room for it. The log beside it then still holds every change."""
    try:
        _copy(path, target)
    except OSError:
        target.unlink(missing_ok=True)
        return False
    return True


def _copy(path: Path, target: Path) -> None:
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with path.open("rb") as source, os.fdopen(descriptor, "wb") as copy:
        shutil.copyfileobj(source, copy, 1 << 20)
        copy.flush()
        os.fsync(copy.fileno())


def companions(database: Path) -> tuple[Path, ...]:
    """Return the files that together are one journal."""
    return (
        database,
        database.with_name(database.name + "-wal"),
        database.with_name(database.name + "-shm"),
        database.with_name(database.name + "-seal"),
    )


def remove(database: Path) -> None:
    """Remove what a making that failed or was killed left behind, also what SQLite makes before there is a log."""
    seal = database.with_name(database.name + "-seal.new")
    for path in (*companions(database), database.with_name(database.name + "-journal"), seal):
        with contextlib.suppress(OSError):
            path.unlink()


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritable(folder: Path, error: OSError) -> Unavailable:
    cure = "free some space on that disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make it writable for bcd"
    return Unavailable(
        f"state_dir {folder} cannot be used: {os.strerror(error.errno or 0)}: {cure}, or set state_dir elsewhere",
        reason="state-dir-unwritable",
    )
