"""What the journal holds, and the writes that change it, as plain values (decisions 4, 5 and 15).

Every write is idempotent: one whose commit has an unknown outcome is simply applied again. Rows are stored column for
column; `row_crc` covers every column of a row and its table's name, because SQLite itself notices few flipped bits.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TypeAlias

Value: TypeAlias = int | str | bytes


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """One command that this node accepted, until its result is acked and its id may be forgotten."""

    command_id: str
    kind: str
    lane: int
    attempt: int
    state: int
    """`CommandState` of the wire: acked, running, or the terminal state."""
    not_after_ms: int
    accepted_by: str
    """The daemon process that accepted it, or took it up again at a redelivery."""
    started: bool
    """Written, and fsynced, before the effect begins."""
    start_boot_id: str
    start_role: str
    start_version: str
    """Boot, role and daemon version at the start: what the proofs of self-terminating kinds compare with."""
    command: bytes
    """The delivered `Command`, byte for byte; empty once it is done."""
    result: bytes
    """The terminal `CommandUpdate`, serialized; empty until it is done."""
    done_mark_ms: int
    """The stored server time at completion: ids are kept 24 h from here."""
    acked: bool


@dataclass(frozen=True, slots=True)
class CancelledId:
    """A cancel for a command this node has never seen, so that its late delivery is refused."""

    command_id: str
    mark_ms: int


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
    hello_nonce: bytes = b""
    previous_hello_nonce: bytes = b""
    last_event_seq: int = 0
    acked_event_seq: int = 0


# The tables, in the order of their columns; the first column is the key.
TABLES: dict[str, tuple[str, ...]] = {
    "commands": (
        *("command_id", "kind", "lane", "attempt", "state", "not_after_ms", "accepted_by", "started", "start_boot_id"),
        *("start_role", "start_version", "command", "result", "done_mark_ms", "acked"),
    ),
    "cancelled": ("command_id", "mark_ms"),
    "processes": ("process_group", "command_id", "start_ticks", "boot_id"),
    "events": ("seq", "event_id", "event", "recovered"),
    "documents": ("name", "body"),
}


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


# Writes. Those in `REFUSABLE` are answered "full" at once when there is no room (the daemon says BUSY, an event is
# dropped and counted); all others wait for room, because something already promised depends on them.


@dataclass(frozen=True, slots=True)
class AcceptCommand:
    """Keep a command that was delivered, before its ack is sent; an entry of the same id stays as it is."""

    entry: CommandEntry


@dataclass(frozen=True, slots=True)
class TakeUpCommand:
    """A redelivery of a command that an earlier process left unfinished: it belongs to this process now."""

    command_id: str
    attempt: int
    accepted_by: str
    command: bytes


@dataclass(frozen=True, slots=True)
class StartCommand:
    """The effect is about to begin."""

    command_id: str
    state: int
    boot_id: str
    role: str
    version: str


@dataclass(frozen=True, slots=True)
class NoteProcess:
    """A process group exists and waits to be let go: its program runs only after this is durable."""

    mark: ProcessMark


@dataclass(frozen=True, slots=True)
class DropProcess:
    """The process group has been reaped, to its last member."""

    process_group: int


@dataclass(frozen=True, slots=True)
class FinishCommand:
    """The terminal update, before it is sent."""

    command_id: str
    state: int
    result: bytes
    done_mark_ms: int


@dataclass(frozen=True, slots=True)
class AckCommands:
    """The gateway has committed these results."""

    command_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ForgetCommands:
    """These ids have been kept long enough, as done or as cancelled."""

    command_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RememberCancelled:
    """A cancel came for an id that is unknown here."""

    cancelled: CancelledId


@dataclass(frozen=True, slots=True)
class AppendEvents:
    """Events with their sequence numbers, which the caller counts up from `JournalMeta.last_event_seq`."""

    events: tuple[EventEntry, ...]


@dataclass(frozen=True, slots=True)
class AckEvents:
    """The gateway has committed events up to and with this one."""

    seq: int


@dataclass(frozen=True, slots=True)
class SetCursors:
    """New values of the meta row; None leaves one as it is."""

    last_epoch: int | None = None
    time_mark_ms: int | None = None
    hello_nonce: bytes | None = None
    previous_hello_nonce: bytes | None = None


@dataclass(frozen=True, slots=True)
class TakeNewJournalId:
    """The control plane remembers more than this journal: go on under a new id, with the same entries.

    The kept events are numbered anew from 1 and marked recovered: their seqs belonged to the old id.
    """

    journal_id: str


@dataclass(frozen=True, slots=True)
class PutDocument:
    """A named blob that outlives a restart: the trust bundle, the desired state, inventory hashes. Empty deletes it."""

    name: str
    body: bytes


Write: TypeAlias = (
    AcceptCommand
    | TakeUpCommand
    | StartCommand
    | NoteProcess
    | DropProcess
    | FinishCommand
    | AckCommands
    | ForgetCommands
    | RememberCancelled
    | AppendEvents
    | AckEvents
    | SetCursors
    | TakeNewJournalId
    | PutDocument
)

REFUSABLE = (AcceptCommand, AppendEvents)


def weight_bytes(write: Write) -> int:
    """Return about how much a write adds to the file: what the bound is compared with before it is applied."""
    match write:
        case AcceptCommand(entry):
            return 512 + len(entry.command)
        case FinishCommand(result=result):
            return 512 + len(result)
        case AppendEvents(events):
            return sum(128 + len(event.event) for event in events)
        case PutDocument(body=body):
            return 128 + len(body)
        case _:
            return 256
