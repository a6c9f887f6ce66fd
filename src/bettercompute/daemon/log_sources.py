"""What `logs.collect` may read of files, and how: only below configured folders, through no link, within a bound.

Each name on the way is opened relative to the folder before it and never followed when it is a link, so that nobody who
may write below an allowed folder can point the daemon, which may run as root, at another file. See docs/daemon.md,
"What a command may do".
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from bettercompute.daemon.inventory.host import MALFORMED, PERMISSION_DENIED, Unreadable, unreadable

FILES_MAX = 64
# A day of a busy host's journal compresses to a tenth of this; more belongs into a log pipeline.
SIZE_DEFAULT_BYTES = 64 << 20
SIZE_LIMIT_BYTES = 1 << 30
# A longer line is cut there, so that a file without line ends costs no more memory than this.
LINE_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LogsSettings:
    """What `logs.collect` may do on this node: the `[logs]` table."""

    folders: tuple[str, ...] = ()
    """Absolute paths below which files may be read; none: only the system's journal."""
    size_max_bytes: int = SIZE_DEFAULT_BYTES
    allow_http: bool = False
    """Whether an upload may go over plain HTTP."""
    allow_networks: tuple[str, ...] = ()
    """Networks that may be uploaded to although they are loopback, link-local or a cloud's metadata service."""
    ca_file: Path | None = None
    """The authorities that an upload's server is checked against, instead of the host's."""


@dataclass(slots=True)
class Packing:
    """Writes lines into `target`, compressed or not, up to a bound; the figures are the result's."""

    target: BinaryIO
    limit_bytes: int
    compress: bool
    contains: bytes = b""
    lines: int = 0
    read_bytes: int = 0
    truncated: bool = False
    stopped: bool = False
    """Set by another thread: take no more."""
    _sink: BinaryIO = field(init=False)

    def __post_init__(self) -> None:
        self._sink = self.target
        if self.compress:
            # Without a name and a time in it, equal lines make equal uploads.
            packed = gzip.GzipFile(filename="", mode="wb", fileobj=self.target, mtime=0)
            self._sink = packed  # type: ignore[assignment]  # only `write` and `close` are used

    def add(self, source: BinaryIO) -> None:
        """Take the lines of a file that contain the text, until the bound. A file may be endless, or grow for ever."""
        while not (self.truncated or self.stopped) and (line := source.readline(LINE_MAX_BYTES)):
            if self.contains not in line:
                continue
            if self.read_bytes + len(line) > self.limit_bytes:
                self.truncated = True
                return
            self._sink.write(line)
            self.read_bytes += len(line)
            self.lines += 1

    def finish(self) -> int:
        """End the stream and return the size of what `target` holds."""
        if self._sink is not self.target:
            self._sink.close()
        self.target.flush()
        return self.target.seek(0, os.SEEK_END)


def open_below(folders: Sequence[str], path: str) -> BinaryIO:
    """Open a regular file below one of the folders; raises `Unreadable` with the reason for any other."""
    wanted = PurePosixPath(path)
    if not wanted.is_absolute() or ".." in wanted.parts or "\0" in path:
        raise Unreadable(path, MALFORMED, "an absolute path without `..` is needed")
    for folder in folders:
        if wanted.is_relative_to(folder) and wanted != PurePosixPath(folder):
            return _open_steps(folder, wanted.relative_to(folder).parts, shown=path)
    raise Unreadable(path, PERMISSION_DENIED, "not below a folder of `folders` under [logs] in bcd's configuration")


def _open_steps(folder: str, names: Sequence[str], *, shown: str) -> BinaryIO:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY | os.O_NONBLOCK
    held = -1
    try:
        # The folder itself is the operator's word and may be a link.
        held = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        for step, name in enumerate(names, start=1):
            more = os.O_DIRECTORY if step < len(names) else 0
            opened = os.open(name, flags | more, dir_fd=held)
            os.close(held)
            held = opened
        if not stat.S_ISREG(os.fstat(held).st_mode):
            raise Unreadable(shown, MALFORMED, "not a regular file")
        file = os.fdopen(held, "rb")
        held = -1
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Unreadable(shown, MALFORMED, "a symbolic link, which is not followed") from None
        raise unreadable(shown, error) from None
    else:
        return file
    finally:
        if held >= 0:
            os.close(held)


def pieces(file: BinaryIO, *, size: int = 64 << 10) -> Iterator[bytes]:
    """Return a file's content from its beginning in pieces."""
    file.seek(0)
    while piece := file.read(size):
        yield piece


def sha256_of(file: BinaryIO) -> bytes:
    """Return the SHA-256 of a file's content."""
    digest = hashlib.sha256()
    for piece in pieces(file):
        digest.update(piece)
    return digest.digest()
