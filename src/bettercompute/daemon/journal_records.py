"""What the journal holds, and the writes that change it, as plain values.

Every write is idempotent: one whose commit has an unknown outcome is simply applied again. Rows are stored column for
column; `row_crc` covers every column of a row and its table's name, because SQLite itself notices few flipped bits. See
docs/delivery.md, "The journal"; decisions 0104, 0105 and 0115.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

from bettercompute.delivery.commands import CommandState
from bettercompute.delivery.journal_rules import JOURNAL_BYTES_MAX, JournalEntry
from bettercompute.pki.quorum import Unbatched
from bettercompute.session.effects import AcceptCommand, FinishCommand, JournalWrite

Value: TypeAlias = int | str | bytes


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """A process group that a command's handler started: id and start time, so that a reused id is never signalled."""

    command_id: str
    process_group: int
    start_ticks: int
    boot_id: str


@dataclass(frozen=True, slots=True)
class EventEntry:
    """One journaled event. `event_id` is drawn at birth and survives a change of the journal's id."""

    seq: int
    event_id: str
    event: bytes
    """The `Event` message, serialized."""
    recovered: bool


@dataclass(frozen=True, slots=True)
class JournalMeta:
    """The one row of cursors and of running counts (`commands` to `documents`), by which a vanished row is noticed."""

    journal_id: str
    birth: bytes
    """16 random bytes of this file, which tie it to its seal even when the journal takes a new id."""
    commits: int = 0
    commands: int = 0
    cancelled: int = 0
    processes: int = 0
    events: int = 0
    documents: int = 0
    last_epoch: int = 0
    time_mark_ms: int = 0
    confirmed_ms: int = 0
    """0: never confirmed."""
    hello_nonce: bytes = b""
    previous_hello_nonce: bytes = b""
    last_event_seq: int = 0
    acked_event_seq: int = 0


@dataclass(frozen=True, slots=True)
class JournalLimits:
    """How large the journal may grow (decisions 0115)."""

    max_bytes: int = JOURNAL_BYTES_MAX
    reserve_bytes: int = 32 * 1024 * 1024
    """What only promised writes may use: results of every command that can be running (10 of 1 MiB), and the log."""
    ballast_bytes: int = 16 * 1024 * 1024
    wal_bytes: int = 4 * 1024 * 1024

    def __post_init__(self) -> None:
        """Refuse limits that leave no room for new entries."""
        assert 0 < self.reserve_bytes < self.max_bytes, "the reserve must leave room for new entries"


LIMITS = JournalLimits()


class JournalFullError(Exception):
    """There is no room: the bound is reached (`disk` False), or the disk's (`disk` True), or it cannot be written."""

    def __init__(self, message: str, *, disk: bool) -> None:
        super().__init__(message)
        self.disk = disk

    @classmethod
    def at_bound(cls, path: Path, limits: JournalLimits) -> JournalFullError:
        """Return the error of a journal that may not grow."""
        return cls(f"{path} has reached its bound of {limits.max_bytes} bytes", disk=False)


# Conditions of a node whose journal takes nothing new.
JOURNAL_FULL = "JournalFull"
JOURNAL_DISK_FULL = "JournalDiskFull"


@dataclass(frozen=True, slots=True)
class JournalHealth:
    """Whether new commands can be kept; if not, the condition's name and a sentence with the cure."""

    accepting: bool = True
    condition: str = ""
    message: str = ""

    @classmethod
    def without_room(cls, error: JournalFullError) -> JournalHealth:
        """Return the health of a journal that has met this error."""
        cure = "free space on its disk, or make it writable" if error.disk else "it empties as results are acked"
        message = f"{error}: new commands are answered BUSY and new events dropped until there is room; {cure}"
        return cls(accepting=False, condition=JOURNAL_DISK_FULL if error.disk else JOURNAL_FULL, message=message)


class JournalDamagedError(Exception):
    """What is on the disk is not what was written."""


class JournalUnfinishedError(JournalDamagedError):
    """Its making never came to an end: nothing was ever in it, and whoever may write makes it anew."""


@dataclass(frozen=True, slots=True)
class JournalContents:
    """What is known right after opening. Updates that were acked stay on disk."""

    meta: JournalMeta
    commands: tuple[JournalEntry, ...] = ()
    cancelled: dict[str, int] = field(default_factory=dict)
    """Ids cancelled before their delivery, with the time mark of then."""
    processes: tuple[ProcessMark, ...] = ()
    documents: dict[str, bytes] = field(default_factory=dict)
    set_aside: str = ""
    """Why a damaged journal was set aside just now, and under which name; empty when all was well."""


# The tables, in the order of their columns; the first column is the key. A row of `commands` is a `JournalEntry`; its
# delivered `Command` is dropped when it is done. Another shape is another `FORMAT`.
FORMAT = 1
TABLES: dict[str, tuple[str, ...]] = {
    "commands": (
        *("command_id", "kind", "lane", "attempt", "state", "not_after_ms", "process_id", "started", "start_boot_id"),
        *("start_role", "start_version", "terminal_update", "command", "done_mark_ms", "acked"),
    ),
    "cancelled": ("command_id", "mark_ms"),
    "processes": ("process_group", "command_id", "start_ticks", "boot_id"),
    "events": ("seq", "event_id", "event", "recovered"),
    "documents": ("name", "body"),
}

NAMES = [
    (table, column)
    for table, columns in sorted({"meta": ("id", *(column.name for column in fields(JournalMeta))), **TABLES}.items())
    for column in (*columns, "crc")
]
"""Every table with its columns, as a sound file has them."""


_ENTRY_COLUMNS = tuple(column.name for column in fields(JournalEntry))
_COMMAND_COLUMN = _ENTRY_COLUMNS.index("command")
_entry_columns = attrgetter(*_ENTRY_COLUMNS)  # `astuple` would copy each value deeply, for every entry on the hot path


def entry_values(entry: JournalEntry, *, command: bytes) -> tuple[Value, ...]:
    """Return an entry with its delivered command as the columns of `commands`."""
    columns = _entry_columns(entry)
    values = [value if isinstance(value, str | bytes) else int(value) for value in columns]
    values[_COMMAND_COLUMN] = command
    return tuple(values)


def entry_of(row: tuple[Value, ...]) -> JournalEntry:
    """Return the entry in a row of `commands`."""
    values: dict[str, Any] = dict(zip(_ENTRY_COLUMNS, row, strict=True))
    values |= {
        "state": CommandState(values["state"]),
        "started": bool(values["started"]),
        "acked": bool(values["acked"]),
    }
    return JournalEntry(**values)


def mark_of(row: tuple[Value, ...]) -> ProcessMark:
    """Return the mark in a row of `processes`."""
    process_group, command_id, start_ticks, boot_id = row
    return ProcessMark(str(command_id), int(process_group), int(start_ticks), str(boot_id))


def without_acked_update(entry: JournalEntry) -> JournalEntry:
    """Return the entry as it is kept in memory: an update that was acked is read from disk when it is asked for."""
    return replace(entry, update=b"") if entry.acked else entry


def row_crc(table: str, values: tuple[Value, ...]) -> int:
    """Return the CRC-32 of a row: the table's name and every column, each with its type and length."""
    crc = zlib.crc32(table.encode())
    for value in values:
        if isinstance(value, bytes):
            crc = zlib.crc32(value, zlib.crc32(b"b%d:" % len(value), crc))
        elif isinstance(value, str):
            text = value.encode()
            crc = zlib.crc32(text, zlib.crc32(b"s%d:" % len(text), crc))
        else:
            crc = zlib.crc32(b"i%d:" % value, crc)
    return crc


# Writes beside those of the session's rules (`session.effects.JournalWrite`).


@dataclass(frozen=True, slots=True)
class NoteProcess:
    """A process group exists and waits to be let go: its program runs only after this is durable."""

    mark: ProcessMark


@dataclass(frozen=True, slots=True)
class DropProcess:
    """The process group has been reaped, to its last member."""

    process_group: int


@dataclass(frozen=True, slots=True)
class AppendEvents:
    """Events with their sequence numbers, which the caller counts up from `JournalMeta.last_event_seq`."""

    events: tuple[EventEntry, ...]


@dataclass(frozen=True, slots=True)
class RenewJournal:
    """The control plane remembers more than this journal: go on under a new id, with the same entries.

    The kept events are numbered anew from 1 and marked recovered: their seqs belonged to the old id.
    """

    journal_id: str


@dataclass(frozen=True, slots=True)
class PutDocument:
    """A named blob that outlives a restart: the trust bundle, the desired state, inventory hashes. Empty deletes it."""

    name: str
    body: bytes


UNBATCHED_DOCUMENT = "unbatched"


def unbatched_body(unbatched: Unbatched) -> bytes:
    """Return the count of destructive commands without an approval as a document."""
    return json.dumps({"boot_id": unbatched.boot_id, "at_ms": unbatched.at_ms}).encode()


def unbatched_of(body: bytes) -> Unbatched | None:
    """Read it back; None when there never was one. Its row's CRC vouches for the form."""
    if not body:
        return None
    content = json.loads(body)
    return Unbatched(content["boot_id"], tuple(content["at_ms"]))


Write: TypeAlias = JournalWrite | NoteProcess | DropProcess | AppendEvents | RenewJournal | PutDocument

REFUSABLE = (AcceptCommand, AppendEvents)
"""What is answered "full" at once when there is no room (the daemon says BUSY, an event is dropped and counted); all
other writes wait for room, because something already promised depends on them."""


def weight_bytes(write: Write) -> int:
    """Return about how much a write adds to the file: what the bound is compared with before it is applied."""
    match write:
        case AcceptCommand(command=body) | FinishCommand(update=body) | PutDocument(body=body):
            return 512 + len(body)
        case AppendEvents(events):
            return sum(128 + len(event.event) for event in events)
        case _:
            return 256
