"""The journal's database: tables, bounds, checks at open, one transaction per group of writes.

The only module that knows SQLite; synchronous, and owned by one thread (`group_commit.Journal`). When `apply` has
returned, the writes survive a power cut. At open the CRC of every row, the counts and the commit number of the meta row
and the seal beside the file are checked. Anything amiss, and the journal is set aside and a new one begins under a new
id, because an older state that looks sound would run commands twice. See docs/delivery.md, "The journal"; decisions
0105 and 0115.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path

from bettercompute.daemon import journal_faults as faults
from bettercompute.daemon import journal_records as records
from bettercompute.daemon.journal_files import Seal, companions, keep_aside, remove
from bettercompute.daemon.journal_records import (
    FORMAT,
    LIMITS,
    NAMES,
    TABLES,
    EventEntry,
    JournalContents,
    JournalDamagedError,
    JournalFullError,
    JournalLimits,
    JournalMeta,
    JournalUnfinishedError,
    Value,
    Write,
    entry_of,
    entry_values,
    mark_of,
    row_crc,
    weight_bytes,
    without_acked_update,
)
from bettercompute.delivery.commands import CommandState
from bettercompute.errors import Unavailable
from bettercompute.session import effects

DATABASE_NAME = "journal.db"
PAGE_BYTES = 4096

# What SQLite and the disk raise.
_FAULTS = (sqlite3.Error, OSError, MemoryError)

_META_COLUMNS = tuple(column.name for column in fields(JournalMeta))
_meta_columns = attrgetter(*_META_COLUMNS)
# SQLite's own check does not see a bit that has flipped in a name; every statement would fail, after each start again.
_NAMES_FOUND = """
SELECT t.name, c.name FROM sqlite_schema t, pragma_table_info(t.name) c WHERE t.type = 'table' ORDER BY t.name, c.cid
"""


class JournalDatabase:
    """An open journal. `open` and every later call must come from one thread."""

    def __init__(self, folder: Path, *, limits: JournalLimits = LIMITS) -> None:
        self.path = folder / DATABASE_NAME
        self.limits = limits
        self.meta: JournalMeta
        self._seal = Seal(self.path.with_name(self.path.name + "-seal"))
        self._connection: sqlite3.Connection
        self._counted: Counter[str] = Counter()  # rows that the present transaction has added, by table

    def open(self, *, new_journal_id: Callable[[], str], new_birth: Callable[[], bytes], stamp: str) -> JournalContents:
        """Open and check the journal, or set a damaged one aside as `stamp` and begin anew.

        Raise `Unavailable` when the disk does not let it be opened at all.
        """
        why = ""
        if any(path.exists() for path in companions(self.path)):
            try:
                return self.check()
            except JournalUnfinishedError:
                self.close()
                remove(self.path)
            except JournalDamagedError as error:
                why = f"{error}; the files were {self.set_aside(stamp)}"
        try:
            return replace(self._create(journal_id=new_journal_id(), birth=new_birth()), set_aside=why)
        except _FAULTS as error:
            self.close()
            remove(self.path)  # half made, it promised nothing
            raise self._unavailable(error) from error

    def check(self) -> JournalContents:
        """Open a journal that exists and check all of it; raise `JournalDamagedError`, the files still unchanged.

        Closing changes them: SQLite then writes the log into the database and removes it. `set_aside` comes before.
        """
        try:
            return self._load()
        except (*_FAULTS, UnicodeError) as error:  # a name in the schema that is no text any more
            if isinstance(error, sqlite3.Error | UnicodeError) and faults.is_damage_at_open(faults.code_of(error)):
                raise JournalDamagedError(f"SQLite says: {error}") from error
            self.close()
            raise self._unavailable(error) from error

    def set_aside(self, stamp: str) -> str:
        """Keep the files under other names as they are, and close the journal; return what was done, in words."""
        try:
            kept = keep_aside(self.path, stamp=stamp)
            self.close()
            self.path.unlink(missing_ok=True)
        except OSError as error:
            self.close()
            raise self._unavailable(error) from error
        return "set aside as " + (", ".join(path.name for path in kept) or "nothing")

    def close(self) -> None:
        """Close the files."""
        self._seal.close()
        if hasattr(self, "_connection"):
            self._connection.close()

    def apply(self, writes: Sequence[Write]) -> None:
        """Make `writes` durable in one transaction, all or none; raise `JournalFullError` or `JournalDamagedError`."""
        before, self._counted = self.meta, Counter()
        try:
            self._begin()
            for write in writes:
                self._apply_one(write)
            counts = {table: getattr(before, table) + change for table, change in self._counted.items()}
            self.meta = replace(self.meta, commits=before.commits + 1, **counts)
            self._write_meta()
            self._commit()
            self._promise()
        except BaseException as error:
            self.meta = before
            self._roll_back()
            if isinstance(error, _FAULTS):
                raise self.judged(error, writes) from error
            raise

    def room_bytes(self) -> int:
        """Return how much may still be accepted before new entries must be refused; none when that cannot be read."""
        try:
            pages = self._pragma("page_count") - self._pragma("freelist_count")
        except sqlite3.Error:
            return 0
        return self.limits.max_bytes - self.limits.reserve_bytes - pages * PAGE_BYTES

    def update(self, command_id: str) -> bytes:
        """Return the stored terminal update of a command; empty when there is none."""
        row = self._row("commands", command_id)
        return b"" if row is None else entry_of(row).update

    def events_after(self, seq: int, *, limit: int, limit_bytes: int) -> list[EventEntry]:
        """Return the events that follow `seq`, as many as fit both limits, but at least one."""
        found: list[EventEntry] = []
        size_bytes = 0
        for row in self._rows("events", "WHERE seq > ? ORDER BY seq LIMIT ?", (seq, limit)):
            entry = EventEntry(row[0], row[1], row[2], bool(row[3]))  # type: ignore[arg-type]  # the CRC covers the types
            size_bytes += len(entry.event)
            if found and size_bytes > limit_bytes:
                break
            found.append(entry)
        return found

    # Boundaries of one transaction, apart so that a test can end the process between any two.

    def _begin(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def _commit(self) -> None:
        self._connection.execute("COMMIT")

    def _promise(self) -> None:
        self._seal.write(self.meta.birth, self.meta.commits)

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    # Opening.

    def _connect(self) -> None:
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._connection = sqlite3.connect(self.path, isolation_level=None, timeout=0)
        for pragma in (
            f"page_size = {PAGE_BYTES}",
            # Exclusive: no shared-memory file to lose, and nobody else changes the file behind our back.
            "locking_mode = EXCLUSIVE",
            "journal_mode = WAL",
            "synchronous = FULL",
            f"wal_autocheckpoint = {self.limits.wal_bytes // PAGE_BYTES}",
            f"journal_size_limit = {self.limits.wal_bytes}",
            f"max_page_count = {self.limits.max_bytes // PAGE_BYTES}",
            "cache_size = -1024",
            "temp_store = MEMORY",
        ):
            self._connection.execute(f"PRAGMA {pragma}")

    def _create(self, *, journal_id: str, birth: bytes) -> JournalContents:
        self._connect()
        self._begin()
        self._connection.execute(f"CREATE TABLE meta (id INTEGER PRIMARY KEY, {', '.join(_META_COLUMNS)}, crc)")
        for table, columns in TABLES.items():
            # Without a row id the key and the row are one tree: no second one can disagree with it unseen.
            key = f"{columns[0]} PRIMARY KEY NOT NULL, {', '.join(columns[1:])}, crc"
            self._connection.execute(f"CREATE TABLE {table} ({key}) WITHOUT ROWID")
        self._connection.execute(f"PRAGMA user_version = {FORMAT}")
        self.meta = JournalMeta(journal_id=journal_id, birth=birth)
        self._write_meta()
        self._commit()
        self._seal.create(birth, 0)
        return JournalContents(meta=self.meta)

    def _load(self) -> JournalContents:
        promised = self._seal.read()
        # The seal is made last, and whole: what never had one was killed while it was made, or has lost it.
        sealed = self._seal.path.exists()
        if not self.path.exists() or not self.path.stat().st_size:  # SQLite would remove the log of an empty database
            only = [path for path in companions(self.path) if path.exists()] == [self.path]
            raise (JournalUnfinishedError if only else JournalDamagedError)("the database is missing or empty")
        self._connect()
        problem = self._connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise JournalDamagedError(f"SQLite's check says: {problem}")
        if not sealed and not self._pragma("schema_version"):
            raise JournalUnfinishedError("it has no tables, and never had a seal: it was killed while it was made")
        if self._pragma("user_version") != FORMAT:
            raise JournalDamagedError(f"it is of format {self._pragma('user_version')}, and this bcd reads {FORMAT}")
        if self._connection.execute(_NAMES_FOUND).fetchall() != NAMES:
            raise JournalDamagedError("its tables have other names or columns than they were made with")
        row = self._connection.execute("SELECT * FROM meta WHERE id = 1").fetchone()
        if row is None:
            raise JournalDamagedError("the meta row is missing")
        self.meta = meta = JournalMeta(*self._checked("meta", row[1:]))  # type: ignore[arg-type]  # the CRC covers them
        if promised is None and meta.commits == 0 and not sealed:
            self._seal.create(meta.birth, 0)  # ended between the two halves of `_create`: nothing was promised yet
        elif promised is None or promised[0] != meta.birth:
            raise JournalDamagedError("the seal is missing, damaged or of another journal")
        elif meta.commits < promised[1]:
            lost = promised[1] - meta.commits
            raise JournalDamagedError(f"the last {lost} commits, which were promised, are gone")
        contents = JournalContents(
            meta=meta,
            commands=tuple(without_acked_update(entry_of(row)) for row in self._rows("commands")),
            cancelled={str(row[0]): int(row[1]) for row in self._rows("cancelled")},
            processes=tuple(mark_of(row) for row in self._rows("processes")),
            documents={str(row[0]): bytes(row[1]) for row in self._rows("documents")},  # type: ignore[arg-type]  # the CRC
        )
        events = sum(1 for _ in self._rows("events"))
        *others, documents = contents.commands, contents.cancelled, contents.processes, contents.documents
        found = (*map(len, others), events, len(documents))
        expected = (meta.commands, meta.cancelled, meta.processes, meta.events, meta.documents)
        if found != expected:
            names = ", ".join(f"{name} {was} of {of}" for name, was, of in zip(TABLES, found, expected, strict=True))
            raise JournalDamagedError(f"rows are missing: {names}")
        return contents

    # Rows.

    def _rows(self, table: str, rest: str = "", parameters: tuple[int, ...] = ()) -> Iterator[tuple[Value, ...]]:
        for row in self._connection.execute(f"SELECT * FROM {table} {rest}", parameters):  # noqa: S608 - our own names
            yield self._checked(table, row)

    def _row(self, table: str, key: Value) -> tuple[Value, ...] | None:
        query = f"SELECT * FROM {table} WHERE {TABLES[table][0]} = ?"  # noqa: S608 - our own names
        row = self._connection.execute(query, (key,)).fetchone()
        return None if row is None else self._checked(table, row)

    @staticmethod
    def _checked(table: str, row: tuple[Value, ...]) -> tuple[Value, ...]:
        try:
            sound = row[-1] == row_crc(table, row[:-1])
        except TypeError:  # a column that turned into a NULL or a float
            sound = False
        if not sound:
            raise JournalDamagedError(f"a row of {table} does not match its checksum: key {row[0]!r}")
        return row[:-1]

    def _insert(self, table: str, values: tuple[Value, ...]) -> None:
        marks = ",".join("?" * (len(values) + 1))
        query = f"INSERT OR IGNORE INTO {table} VALUES ({marks})"  # noqa: S608 - our own names
        self._count(table, self._connection.execute(query, (*values, row_crc(table, values))).rowcount)

    def _change(self, table: str, key: Value, changes: dict[str, Value]) -> None:
        row = self._row(table, key)
        if row is None:
            return
        values = tuple(changes.get(column, value) for column, value in zip(TABLES[table], row, strict=True))
        marks = ",".join("?" * (len(values) + 1))
        query = f"REPLACE INTO {table} VALUES ({marks})"  # noqa: S608 - our own names
        self._connection.execute(query, (*values, row_crc(table, values)))

    def _delete(self, table: str, key: Value, *, comparison: str = "=") -> None:
        query = f"DELETE FROM {table} WHERE {TABLES[table][0]} {comparison} ?"  # noqa: S608 - our own names
        self._count(table, -self._connection.execute(query, (key,)).rowcount)

    def _count(self, table: str, change: int) -> None:
        self._counted[table] += change

    def _write_meta(self) -> None:
        values: tuple[Value, ...] = _meta_columns(self.meta)
        marks = ",".join("?" * (len(values) + 1))
        query = f"REPLACE INTO meta VALUES (1,{marks})"  # noqa: S608 - our own names
        self._connection.execute(query, (*values, row_crc("meta", values)))

    # Writes.

    def _apply_one(self, write: Write) -> None:
        match write:
            case effects.AcceptCommand(entry, command):
                self._insert("commands", entry_values(entry, command=command))
            case effects.TakeUpCommand(command_id, attempt, process_id, command):
                taken: dict[str, Value] = {"attempt": attempt, "process_id": process_id, "command": command}
                self._change("commands", command_id, taken)
            case effects.StartCommand(command_id, boot_id, role, daemon_version):
                started: dict[str, Value] = {"state": int(CommandState.RUNNING), "started": 1}
                started |= {"start_boot_id": boot_id, "start_role": role, "start_version": daemon_version}
                self._change("commands", command_id, started)
            case effects.FinishCommand(command_id, state, update, done_mark_ms):
                done: dict[str, Value] = {"state": int(state), "terminal_update": update, "done_mark_ms": done_mark_ms}
                self._change("commands", command_id, done | {"command": b""})
            case effects.AckCommands(command_ids):
                for command_id in command_ids:
                    self._change("commands", command_id, {"acked": 1})
            case effects.ForgetCommands(command_ids):
                for command_id in command_ids:
                    self._delete("commands", command_id)
                    self._delete("cancelled", command_id)
            case effects.RememberCancelled(command_id, mark_ms):
                self._insert("cancelled", (command_id, mark_ms))
            case records.NoteProcess(mark):
                self._delete("processes", mark.process_group)  # the kernel gave a reaped group's id out again
                self._insert("processes", (mark.process_group, mark.command_id, mark.start_ticks, mark.boot_id))
            case records.DropProcess(process_group):
                self._delete("processes", process_group)
            case effects.CountUnbatched(unbatched):
                self._apply_one(records.PutDocument(records.UNBATCHED_DOCUMENT, records.unbatched_body(unbatched)))
            case records.PutDocument(name, body):
                self._delete("documents", name)
                if body:
                    self._insert("documents", (name, body))
            case _:
                self._apply_cursor(write)

    def _apply_cursor(self, write: Write) -> None:
        meta = self.meta
        match write:
            case records.AppendEvents(events):
                for event in events:
                    self._insert("events", (event.seq, event.event_id, event.event, int(event.recovered)))
                last_seq = max((event.seq for event in events), default=0)
                self.meta = replace(self.meta, last_event_seq=max(meta.last_event_seq, last_seq))
            case effects.AckEvents(seq):
                self._delete("events", seq, comparison="<=")
                self.meta = replace(self.meta, acked_event_seq=max(meta.acked_event_seq, seq))
            case effects.StoreNonces(hello_nonce, previous):
                self.meta = replace(meta, hello_nonce=hello_nonce, previous_hello_nonce=previous)
            case effects.StoreEpoch(last_epoch):
                self.meta = replace(meta, last_epoch=last_epoch)
            case effects.StoreTime(mark_ms, confirmed_ms):
                self.meta = replace(meta, time_mark_ms=mark_ms, confirmed_ms=confirmed_ms or 0)
            case records.RenewJournal(journal_id):
                kept = list(self._rows("events", "ORDER BY seq"))
                self._delete("events", 0, comparison=">=")
                for seq, row in enumerate(kept, start=1):
                    self._insert("events", (seq, row[1], row[2], 1))
                self.meta = replace(self.meta, journal_id=journal_id, last_event_seq=len(kept), acked_event_seq=0)
            case _:
                raise AssertionError(f"unknown write {write!r}")

    # Faults.

    def _pragma(self, name: str) -> int:
        return int(self._connection.execute(f"PRAGMA {name}").fetchone()[0])

    def judged(self, error: Exception, writes: Sequence[Write] = ()) -> Exception:
        """Return what an error of a write, or of a read, means."""
        if isinstance(error, OSError):
            return JournalFullError(f"the seal of {self.path} cannot be written: {error.strerror}", disk=True)
        code = faults.code_of(error)
        if faults.is_unwritable(code):
            # SQLite says the same of its page bound and of the disk: judge by what the writes could have needed.
            with contextlib.suppress(sqlite3.Error):  # what cannot be read either is the disk's fault
                needed_bytes = (self._pragma("page_count") + 16) * PAGE_BYTES + 2 * sum(map(weight_bytes, writes))
                if faults.is_full(code) and needed_bytes >= self.limits.max_bytes:
                    return JournalFullError.at_bound(self.path, self.limits)
            return JournalFullError(f"{self.path} cannot be written: {str(error) or 'out of memory'}", disk=True)
        damaged = faults.is_damage_in_use(code) or (code is None and isinstance(error, sqlite3.OperationalError))
        return JournalDamagedError(f"SQLite says: {error}") if damaged else error

    def _unavailable(self, error: Exception) -> Unavailable:
        cure = (
            faults.cure_of_errno(error.errno) if isinstance(error, OSError) else faults.cure_of(faults.code_of(error))
        )
        message = f"the journal {self.path} cannot be opened: {str(error) or 'out of memory'}: {cure}"
        return Unavailable(message, reason="journal-unwritable")
