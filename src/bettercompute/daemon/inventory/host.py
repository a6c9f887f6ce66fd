"""The machine that collectors read: files below one folder, bounded, and a stated reason for what could not be read.

Decides how much of a file or a folder is read at most, and which reason stands for which failure. The live machine is
the folder `/` with NVML and the kernel's address table; a test brings a recorded folder and recorded answers instead.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NewType

# The largest file of interest is a package database; everything in /proc and /sys fits in the smaller bound.
MAX_FILE_BYTES = 1024 * 1024
MAX_PACKAGE_DATABASE_BYTES = 32 * 1024 * 1024
# A server with 2,048 processors and one with 4,096 PCI functions still fit.
MAX_FOLDER_ENTRIES = 16_384

Reason = NewType("Reason", str)
NOT_FOUND = Reason("not-found")
PERMISSION_DENIED = Reason("permission-denied")
TOO_LARGE = Reason("too-large")
MALFORMED = Reason("malformed")
READ_FAILED = Reason("read-failed")
PLACEHOLDER = Reason("placeholder")
NO_DRIVER = Reason("no-driver")
UNSUPPORTED = Reason("unsupported")
TIMED_OUT = Reason("timed-out")
COLLECTOR_FAILED = Reason("collector-failed")
PROGRAM_FAILED = Reason("program-failed")

_ABSENT_ERRNOS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO})
_DENIED_ERRNOS = frozenset({errno.EACCES, errno.EPERM})
# sysfs answers these where a device has no such property: the speed of a link that is down, the carrier of a downed
# one.
_NO_PROPERTY_ERRNOS = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_ERRNO_REASONS = {
    **dict.fromkeys(_ABSENT_ERRNOS, NOT_FOUND),
    **dict.fromkeys(_DENIED_ERRNOS, PERMISSION_DENIED),
    **dict.fromkeys(_NO_PROPERTY_ERRNOS, UNSUPPORTED),
}


class Unreadable(Exception):
    """A file, folder or library that gave nothing, with the reason that the section will state."""

    def __init__(self, path: str, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{path}: {reason}{f' ({detail})' if detail else ''}")
        self.path = path
        self.reason = reason
        self.detail = detail

    @property
    def stated(self) -> str:
        """The reason as a section states it."""
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


@dataclass(frozen=True, slots=True, order=True)
class InterfaceAddress:
    """One IPv4 address of an interface, as the kernel tells it: `address` with its prefix length, `192.0.2.7/24`."""

    interface: str
    address: str


def unreadable(path: str, error: OSError) -> Unreadable:
    """Return the reason that stands for a failed system call."""
    reason = _ERRNO_REASONS.get(error.errno or 0)
    if reason is not None:
        return Unreadable(path, reason)
    return Unreadable(path, READ_FAILED, errno.errorcode.get(error.errno or 0, "unknown error"))


def read_file(file: Path, *, shown: str, limit_bytes: int) -> bytes:
    """Return a file's bytes; raises `Unreadable`, also for a file longer than `limit_bytes` or not a regular one."""
    try:
        # Non-blocking: a named pipe in a file's place must not hold the collector.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        with os.fdopen(descriptor, "rb", buffering=0) as opened:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Unreadable(shown, MALFORMED, "not a regular file")
            return _read_bounded(opened.read, shown, limit_bytes)
    except OSError as error:
        raise unreadable(shown, error) from None


def _ipv4_addresses() -> Sequence[InterfaceAddress]:
    import psutil

    found = []
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family == socket.AF_INET and entry.netmask:
                interface = ipaddress.IPv4Interface(f"{entry.address}/{entry.netmask}")
                found.append(InterfaceAddress(interface=name, address=str(interface)))
    return found


def _load_nvml() -> Any:
    # Looked for first: `pynvml` takes 10 MB, which a daemon without a driver would carry for nothing.
    import ctypes

    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        raise ImportError(str(error)) from None
    import pynvml

    return pynvml


def _libc_version() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except ValueError:  # a C library that is not GNU's does not know the name
        return ""


def _file_system_bytes(mount_point: str) -> int:
    size = os.statvfs(mount_point)
    return size.f_blocks * size.f_frsize


@dataclass(frozen=True, slots=True)
class SystemCalls:
    """What no file tells. `nvml` returns the module `pynvml` or one that answers like it."""

    nvml: Callable[[], Any]
    ipv4_addresses: Callable[[], Sequence[InterfaceAddress]]
    file_system_bytes: Callable[[str], int]
    architecture: str
    page_size_bytes: int
    libc_version: str


@dataclass(frozen=True, slots=True)
class HostRoot:
    """A machine: files below `folder`, and what only system calls tell. Paths are given without a leading slash."""

    folder: Path
    calls: SystemCalls

    @classmethod
    def live(cls) -> HostRoot:
        """Return the machine that this process runs on."""
        return cls(
            folder=Path("/"),
            calls=SystemCalls(
                nvml=_load_nvml,
                ipv4_addresses=_ipv4_addresses,
                file_system_bytes=_file_system_bytes,
                architecture=os.uname().machine,
                page_size_bytes=os.sysconf("SC_PAGE_SIZE"),
                libc_version=_libc_version(),
            ),
        )

    def data(self, path: str, *, limit_bytes: int = MAX_FILE_BYTES) -> bytes:
        """Return a file's bytes; raises `Unreadable`, also for a file longer than `limit_bytes` or a special one."""
        return read_file(self.folder / path, shown=path, limit_bytes=limit_bytes)

    def text(self, path: str, *, limit_bytes: int = MAX_FILE_BYTES) -> str:
        """Return a file's text without surrounding blanks; NULs become blanks, bytes that are not UTF-8 U+FFFD.

        No section holds a NUL: PostgreSQL stores none.
        """
        return self.data(path, limit_bytes=limit_bytes).decode(errors="replace").replace("\0", " ").strip()

    def entries(self, path: str) -> list[str]:
        """Return the sorted names in a folder; raises `Unreadable`, also when there are more than the bound."""
        names: list[str] = []
        try:
            with os.scandir(self.folder / path) as listing:
                for entry in listing:
                    if len(names) == MAX_FOLDER_ENTRIES:
                        raise Unreadable(path, TOO_LARGE, f"more than {MAX_FOLDER_ENTRIES} entries")
                    names.append(entry.name)
        except OSError as error:
            raise unreadable(path, error) from None
        return sorted(names)

    def exists(self, path: str) -> bool:
        """Return whether something readable is there, links followed."""
        return os.path.exists(self.folder / path)  # noqa: PTH110 - Path.exists raises where this says no

    def link_target(self, path: str) -> str:
        """Return what a symbolic link points at, as it is written in it. Empty if it is none."""
        try:
            return os.readlink(self.folder / path)  # noqa: PTH115 - a path would lose how it is written
        except OSError:
            return ""

    def link_name(self, path: str) -> str:
        """Return the last part of a link's target: how sysfs names a driver or a group. Empty if it is no link."""
        return self.link_target(path).rpartition("/")[2]

    def device_path(self, path: str) -> str:
        """Return where links lead, relative to the folder: the way through the buses that sysfs encodes in it."""
        folder = os.path.realpath(self.folder)
        return os.path.relpath(os.path.realpath(self.folder / path), folder)


def _read_bounded(read: Callable[[int], bytes | None], path: str, limit_bytes: int) -> bytes:
    """Read to the end: sysfs and procfs files tell no size, and give short reads."""
    pieces = []
    left = limit_bytes + 1
    while left > 0 and (piece := read(left)):
        pieces.append(piece)
        left -= len(piece)
    if left <= 0:
        raise Unreadable(path, TOO_LARGE, f"more than {limit_bytes} bytes")
    return b"".join(pieces)
