"""What an error of SQLite or of the disk means for the journal: damage, or something that waiting or a person cures.

Only damage may set a journal aside, for with it goes what the node owes. Everything else, also what nobody thought of,
is a refusal in words. See docs/daemon.md, "What is kept through what"; decisions 0080.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from types import MappingProxyType

# SQLite's primary result codes; an extended one carries its primary code in the lowest byte.
_PRIMARY = 0xFF
_ERROR, _PERM, _BUSY, _LOCKED, _NOMEM, _READONLY, _IOERR, _CORRUPT = 1, 3, 5, 6, 7, 8, 10, 11
_FULL, _CANTOPEN, _TOOBIG, _AUTH, _NOTADB = 13, 14, 18, 23, 26

# ERROR: a table or column that each journal has is missing. TOOBIG: a length beyond any that was ever written.
_DAMAGE_AT_OPEN = frozenset({_CORRUPT, _NOTADB, _ERROR, _TOOBIG})
# In use the tables are known, and a statement that fails is a mistake of ours.
_DAMAGE_IN_USE = frozenset({_CORRUPT, _NOTADB})
# A write by a disk that is full, failing or read-only.
_UNWRITABLE = frozenset({_FULL, _IOERR, _READONLY, _CANTOPEN, _PERM, _AUTH, _NOMEM})

_FREE_SPACE = "free space on its disk"
_MAKE_WRITABLE = "make the folder and the files in it writable for bcd's user, and its file system too"
_LOOK_AT_DISK = "look at the disk and the kernel's log; what is there is left as it is"
_END_OTHER = "end the other process that has it open"
_GIVE_MEMORY = "give bcd more memory"

_CURES: Mapping[int, str] = MappingProxyType(
    {
        _FULL: _FREE_SPACE,
        _READONLY: _MAKE_WRITABLE,
        _CANTOPEN: _MAKE_WRITABLE,
        _PERM: _MAKE_WRITABLE,
        _AUTH: _MAKE_WRITABLE,
        _BUSY: _END_OTHER,
        _LOCKED: _END_OTHER,
        _NOMEM: _GIVE_MEMORY,
    }
)
_CURES_BY_ERRNO: Mapping[int, str] = MappingProxyType(
    {
        errno.ENOSPC: _FREE_SPACE,
        errno.EDQUOT: _FREE_SPACE,
        errno.EACCES: _MAKE_WRITABLE,
        errno.EPERM: _MAKE_WRITABLE,
        errno.EROFS: _MAKE_WRITABLE,
        errno.EISDIR: "move the folder of that name away",
        errno.EMFILE: "raise the limit of open files",
        errno.ENFILE: "raise the limit of open files",
    }
)


def code_of(error: Exception) -> int | None:
    """Return SQLite's code; None where Python could not make a value of what SQLite read."""
    if isinstance(error, MemoryError):  # how Python tells NOMEM
        return _NOMEM
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else int(code)


def is_damage_at_open(code: int | None) -> bool:
    """Say whether an error of SQLite while a journal is opened means damage; None: Python cannot read a value."""
    return code is None or code & _PRIMARY in _DAMAGE_AT_OPEN


def is_damage_in_use(code: int | None) -> bool:
    """Say whether an error of SQLite by an open journal means damage."""
    return code is not None and code & _PRIMARY in _DAMAGE_IN_USE


def is_unwritable(code: int | None) -> bool:
    """Say whether a write failed by its disk, its folder or the host: what was promised waits until it can be done."""
    return code is not None and code & _PRIMARY in _UNWRITABLE


def is_full(code: int | None) -> bool:
    """Say whether SQLite's page bound or the disk has no room."""
    return code is not None and code & _PRIMARY == _FULL


def cure_of(code: int | None) -> str:
    """Return what an operator does about an error of SQLite that is no damage."""
    return _LOOK_AT_DISK if code is None else _CURES.get(code & _PRIMARY, _LOOK_AT_DISK)


def cure_of_errno(number: int | None) -> str:
    """Return what an operator does about an error of the operating system."""
    return _LOOK_AT_DISK if number is None else _CURES_BY_ERRNO.get(number, _LOOK_AT_DISK)
