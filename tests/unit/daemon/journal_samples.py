"""Entries for the journal's tests, and a child process that writes them until it is ended with kill -9."""

from __future__ import annotations

import io
import os
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from bettercompute.cli import bcd
from bettercompute.daemon import maintenance
from bettercompute.daemon.journal import JournalDatabase
from bettercompute.daemon.journal_records import (
    AppendEvents,
    EventEntry,
    JournalLimits,
    NoteProcess,
    ProcessMark,
    Write,
)
from bettercompute.delivery.commands import CommandState
from bettercompute.delivery.journal_rules import JournalEntry
from bettercompute.errors import BetterComputeError
from bettercompute.session.effects import (
    AcceptCommand,
    AckCommands,
    AckEvents,
    FinishCommand,
    ForgetCommands,
    StartCommand,
)

PROMISED = "promised"

SMALL = JournalLimits(
    max_bytes=2 * 1024 * 1024, reserve_bytes=512 * 1024, ballast_bytes=256 * 1024, wal_bytes=64 * 1024
)


def entry(command_id: str, **changes: object) -> JournalEntry:
    values: dict[str, object] = {
        "command_id": command_id,
        "kind": "inventory.refresh",
        "lane": 1,
        "attempt": 1,
        "state": CommandState.ACKED,
        "not_after_ms": 1_000,
        "process_id": "process-1",
    }
    return JournalEntry(**(values | changes))  # type: ignore[arg-type]


def accept(command_id: str, command: bytes = b"body") -> AcceptCommand:
    return AcceptCommand(entry(command_id), command)


def event(seq: int, body: bytes = b"event") -> EventEntry:
    return EventEntry(seq=seq, event_id=f"event-{seq}", event=body, recovered=False)


def story(count: int) -> list[tuple[Write, ...]]:
    """The writes of `count` commands from their acceptance to their result, two of three acked and forgotten."""
    steps: list[tuple[Write, ...]] = []
    for number in range(count):
        name = f"command-{number:04}"
        steps += [
            (accept(name, b"c" * (number % 7) * 500),),
            (StartCommand(name, "boot-1", 1, "0.1.0"), AppendEvents((event(2 * number + 1),))),
            (NoteProcess(ProcessMark(name, 1000 + number, 77, "boot-1")),),
            (
                FinishCommand(name, CommandState.SUCCEEDED, b"r" * (number % 5) * 700, 5_000),
                AppendEvents((event(2 * number + 2),)),
            ),
        ]
        if number % 3:
            steps += [(AckCommands((name,)), AckEvents(2 * number)), (ForgetCommands((name,)),)]
    return steps


def open_journal(folder: Path, kind: type[JournalDatabase] = JournalDatabase, limits: JournalLimits = SMALL):
    """Open a journal as the daemon's thread does; return it and its contents."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    database = kind(folder, limits=limits)
    contents = database.open(
        new_journal_id=lambda: f"journal-{os.urandom(4).hex()}",
        new_birth=lambda: os.urandom(16),
        stamp=os.urandom(4).hex(),
    )
    return database, contents


class MortalJournal(JournalDatabase):
    """Ends the whole process, without any goodbye, at the n-th boundary between two steps of a write."""

    lives = 0

    def _boundary(self) -> None:
        type(self).lives -= 1
        if type(self).lives <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def _begin(self) -> None:
        self._boundary()
        super()._begin()
        self._boundary()

    def _apply_one(self, write: Write) -> None:
        super()._apply_one(write)
        self._boundary()

    def _commit(self) -> None:
        self._boundary()
        super()._commit()
        self._boundary()

    def _promise(self) -> None:
        super()._promise()
        self._boundary()


def write_story(folder: Path, boundary: int) -> None:
    """Write the story into `folder`, dying at `boundary`; one byte in the file `PROMISED` for each step promised."""
    MortalJournal.lives = boundary
    database, _ = open_journal(folder, MortalJournal)
    told = os.open(folder / PROMISED, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for writes in story(8):
        database.apply(writes)
        os.write(told, b".")
    database.close()


def write_and_die(folder: Path) -> None:
    """Write the story, half of it in the database and half in its log, and end without closing anything."""
    database, _ = open_journal(folder, limits=replace(SMALL, wal_bytes=SMALL.max_bytes))
    steps = story(4)
    for number, writes in enumerate(steps):
        if number == len(steps) // 2:
            database._connection.execute("PRAGMA wal_checkpoint")
        database.apply(writes)
    os.kill(os.getpid(), signal.SIGKILL)


def open_as(user_id: int, folder: Path, told: Connection) -> None:
    """Open the journal as another user; tell what was set aside, or the refusal."""
    _become(user_id)
    try:
        database, contents = open_journal(folder)
        database.close()
        told.send(("opened", contents.set_aside))
    except BetterComputeError as error:
        told.send((error.reason, error.message))


def check_as(user_id: int, config_file: Path, told: Connection) -> None:
    """Run `bcd journal check` as another user; tell its exit code and what it wrote."""
    _become(user_id)
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        code = bcd.run(["journal", "check", "--config", str(config_file)])
    told.send((code, out.getvalue()))


def _become(user_id: int) -> None:
    assert maintenance.__name__ in sys.modules, "imported before: that user may not reach Python's own files"
    os.setgroups([])
    os.setgid(user_id)
    os.setuid(user_id)
