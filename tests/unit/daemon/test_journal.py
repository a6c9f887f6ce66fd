"""The journal's database: every write, what it promises, and that no damage is ever taken for truth."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bettercompute.daemon.journal_files import companions
from bettercompute.daemon.journal_records import (
    TABLES,
    AppendEvents,
    DropProcess,
    EventEntry,
    JournalContents,
    JournalDamagedError,
    JournalFullError,
    NoteProcess,
    ProcessMark,
    PutDocument,
    RenewJournal,
    row_crc,
)
from bettercompute.delivery.commands import CommandState
from bettercompute.delivery.journal_rules import JournalEntry
from bettercompute.errors import Unavailable
from bettercompute.session.effects import (
    AckCommands,
    AckEvents,
    FinishCommand,
    ForgetCommands,
    RememberCancelled,
    StartCommand,
    StoreEpoch,
    StoreNonces,
    StoreTime,
    TakeUpCommand,
)
from tests.forks import FORKS
from tests.unit.daemon.journal_samples import PROMISED, SMALL, accept, entry, event, open_journal, story, write_story


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: thousands of copies, none of which needs to survive a power cut."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bcd-journal-") as folder:
        yield Path(folder)


def state_of(folder: Path):
    """Everything a journal says, independent of its counters of commits."""
    database, contents = open_journal(folder)
    updates = {command.command_id: database.update(command.command_id) for command in contents.commands}
    events = database.events_after(0, limit=10_000, limit_bytes=1 << 30)
    database.close()
    meta = replace(contents.meta, commits=0, birth=b"", journal_id="")
    return meta, contents.commands, contents.cancelled, contents.processes, contents.documents, updates, events


def test_a_command_is_kept_through_its_life(tmp_path: Path) -> None:
    database, contents = open_journal(tmp_path)
    assert contents.set_aside == ""
    assert contents.commands == ()
    database.apply([accept("a"), accept("a", b"another body")])
    database.apply([TakeUpCommand("a", 2, "process-2", b"signed anew")])
    database.apply([StartCommand("a", "boot-1", 1, "0.1.0")])
    database.close()
    database, contents = open_journal(tmp_path)
    started = entry("a", attempt=2, process_id="process-2", state=CommandState.RUNNING, started=True)
    started = replace(started, start_boot_id="boot-1", start_role=1, start_version="0.1.0", command=b"signed anew")
    assert contents.commands == (started,)
    database.apply([FinishCommand("a", CommandState.SUCCEEDED, b"the update", 9_000)])
    database.close()
    database, contents = open_journal(tmp_path)
    done = replace(started, command=b"", state=CommandState.SUCCEEDED, update=b"the update", done_mark_ms=9_000)
    assert contents.commands == (done,)
    database.apply([AckCommands(("a", "unknown"))])
    database.close()
    database, contents = open_journal(tmp_path)
    assert contents.commands == (replace(done, acked=True, update=b""),)
    assert database.update("a") == b"the update"
    assert database.update("unknown") == b""
    database.apply([ForgetCommands(("a", "unknown"))])
    assert database.meta.commands == 0
    database.close()
    assert open_journal(tmp_path)[1].commands == ()


def test_cursors_documents_processes_and_cancelled_ids_are_kept(tmp_path: Path) -> None:
    database, _ = open_journal(tmp_path)
    database.apply([StoreEpoch(7), StoreTime(55, None), StoreNonces(b"new", b"old")])
    database.apply([PutDocument("spec", b"one"), PutDocument("spec", b"two"), PutDocument("gone", b"x")])
    database.apply([PutDocument("gone", b"")])
    database.apply([NoteProcess(ProcessMark("a", 10, 1, "b")), NoteProcess(ProcessMark("c", 10, 2, "b"))])
    database.apply([NoteProcess(ProcessMark("d", 11, 3, "b")), DropProcess(11)])
    database.apply([RememberCancelled("x", 5), RememberCancelled("y", 6), ForgetCommands(("y",))])
    database.close()
    database, contents = open_journal(tmp_path)
    assert (contents.meta.last_epoch, contents.meta.time_mark_ms, contents.meta.confirmed_ms) == (7, 55, 0)
    assert (contents.meta.hello_nonce, contents.meta.previous_hello_nonce) == (b"new", b"old")
    assert contents.documents == {"spec": b"two"}
    assert contents.processes == (ProcessMark("c", 10, 2, "b"),)
    assert contents.cancelled == {"x": 5}
    database.apply([StoreTime(60, 59)])
    assert database.meta.confirmed_ms == 59
    database.close()


def test_events_are_given_out_in_order_within_both_limits(tmp_path: Path) -> None:
    database, _ = open_journal(tmp_path)
    database.apply([AppendEvents(tuple(event(seq, b"e" * 100) for seq in range(1, 11)))])
    database.apply([AppendEvents((event(10, b"a repeat after an unknown outcome"),))])
    assert [item.seq for item in database.events_after(0, limit=3, limit_bytes=1 << 20)] == [1, 2, 3]
    assert [item.seq for item in database.events_after(3, limit=100, limit_bytes=250)] == [4, 5]
    assert [item.seq for item in database.events_after(9, limit=100, limit_bytes=1)] == [10]
    database.apply([AckEvents(8), AckEvents(2)])
    assert (database.meta.acked_event_seq, database.meta.last_event_seq, database.meta.events) == (8, 10, 2)
    database.close()
    assert open_journal(tmp_path)[0].meta.last_event_seq == 10


def test_a_new_journal_id_keeps_entries_and_marks_events_recovered(tmp_path: Path) -> None:
    database, _ = open_journal(tmp_path)
    database.apply([accept("a"), AppendEvents(tuple(event(seq) for seq in range(1, 6))), AckEvents(3)])
    database.apply([RenewJournal("journal-new")])
    database.close()
    database, contents = open_journal(tmp_path)
    assert contents.meta.journal_id == "journal-new"
    assert [command.command_id for command in contents.commands] == ["a"]
    kept = database.events_after(0, limit=10, limit_bytes=1 << 20)
    assert [(item.seq, item.event_id, item.recovered) for item in kept] == [(1, "event-4", True), (2, "event-5", True)]
    assert (contents.meta.last_event_seq, contents.meta.acked_event_seq) == (2, 0)
    database.close()


def test_files_are_private(tmp_path: Path) -> None:
    database, _ = open_journal(tmp_path)
    database.apply([accept("a")])
    for path in companions(database.path):
        if path.exists():
            assert path.stat().st_mode & 0o777 == 0o600, path
    database.close()


def test_a_group_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    database, _ = open_journal(tmp_path)
    with pytest.raises(AssertionError, match="unknown write"):
        database.apply([accept("a"), "not a write"])
    assert database.meta.commands == 0
    database.apply([accept("b")])
    database.close()
    assert [command.command_id for command in open_journal(tmp_path)[1].commands] == ["b"]


def boundaries() -> int:
    """How many boundaries the child's whole story has: begin, begun, each write, commit, committed, promised."""
    return 2 + 2 + sum(5 + len(writes) for writes in story(8))


def kill_at(folder: Path, boundary: int) -> int:
    """Run the child until it dies at `boundary`; return how many steps it was promised."""
    child = FORKS.Process(target=write_story, args=(folder, boundary))
    child.start()
    child.join(60)
    assert child.exitcode in (0, -signal.SIGKILL), child.exitcode
    promised = folder / PROMISED
    return promised.stat().st_size if promised.exists() else 0


def expected_states(parent: Path) -> list[object]:
    """The journal's state after each prefix of the story."""
    states = []
    for count in range(len(story(8)) + 1):
        folder = parent / f"expected-{count}"
        database, _ = open_journal(folder)
        for writes in story(8)[:count]:
            database.apply(writes)
        database.close()
        states.append(state_of(folder))
    return states


def check_kills(parent: Path, chosen: list[int]) -> None:
    states = expected_states(parent)
    for boundary in chosen:
        folder = parent / f"killed-{boundary}"
        promised = kill_at(folder, boundary)
        database, contents = open_journal(folder)
        database.close()
        assert contents.set_aside == "", boundary
        # The promised steps are there; one more may have become durable without anybody having been told.
        assert state_of(folder) in states[promised : promised + 2], boundary


def test_kill_9_loses_nothing_that_was_promised(memory_folder: Path) -> None:
    dice = random.Random(7)
    check_kills(memory_folder, [1, 2, 3, 4, 5, *sorted(dice.sample(range(6, boundaries()), 8)), boundaries() + 50])


@pytest.mark.long
def test_kill_9_at_every_boundary(memory_folder: Path) -> None:
    check_kills(memory_folder, list(range(1, boundaries() + 2)))


class Watched(sqlite3.Connection):
    """A connection that tells of each statement before it runs."""

    before: ClassVar[Callable[[], None]]

    def execute(self, sql: str, parameters: tuple[Any, ...] = ()) -> sqlite3.Cursor:  # type: ignore[override]  # ours
        type(self).before()
        return super().execute(sql, parameters)


def test_a_journal_killed_while_it_was_made_is_made_anew(memory_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []

    def snapshot() -> None:
        seen.append(memory_folder / f"killed-{len(seen):02}")
        shutil.copytree(memory_folder / "live", seen[-1])

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: object) -> Any:
            snapshot()
            return call(*args)

        return called

    (memory_folder / "live").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(Watched, "before", snapshot, raising=False)
        patched.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Watched))
        patched.setattr(os, "pwrite", watched(os.pwrite))
        patched.setattr(os, "fsync", watched(os.fsync))
        open_journal(memory_folder / "live")[0].close()
    for size in range(0, (seen[-1] / "journal.db-wal").stat().st_size, 1999):  # a log that was written in part
        seen.append(memory_folder / f"cut-{size}")
        shutil.copytree(seen[-2], seen[-1])
        (seen[-1] / "journal.db-seal").unlink(missing_ok=True)
        os.truncate(seen[-1] / "journal.db-wal", size)
    assert len(seen) > 25
    for folder in seen:
        database, contents = open_journal(folder)
        assert contents.set_aside == "", folder
        database.apply([accept("a")])
        database.close()
        again, contents = open_journal(folder)
        again.close()
        assert [command.command_id for command in contents.commands] == ["a"]
        assert not list(folder.glob("*damaged*"))


def crashed(folder: Path, *, steps: int) -> tuple[Path, object]:
    """A journal as a crash leaves it, half of it in the database and half in the write-ahead log; and what it says."""
    database, _ = open_journal(folder / "live", limits=replace(SMALL, wal_bytes=SMALL.max_bytes))
    told = story(12)[:steps]
    for number, writes in enumerate(told):
        if number == len(told) // 2:
            database._connection.execute("PRAGMA wal_checkpoint")
        database.apply(writes)
    shutil.copytree(folder / "live", folder / "crashed")
    database.close()
    shutil.copytree(folder / "crashed", folder / "sound")
    return folder / "crashed", state_of(folder / "sound")


@pytest.fixture
def written(memory_folder: Path) -> tuple[Path, object]:
    return crashed(memory_folder, steps=64)


def check_damage(folder: Path, expected: object) -> bool:
    """Open the damaged copy: it is whole, or it is set aside and stays usable. Return whether it was set aside."""
    database, contents = open_journal(folder)
    database.apply([StoreEpoch(contents.meta.last_epoch)])
    database.close()
    if not contents.set_aside:
        assert state_of(folder) == expected
        return False
    check_set_aside(folder, contents)
    again, fresh = open_journal(folder)
    again.close()
    assert fresh.set_aside == ""
    assert fresh.meta.journal_id == contents.meta.journal_id
    return True


def check_set_aside(folder: Path, contents: JournalContents) -> None:
    assert contents.commands == ()
    assert list(folder.glob("*.damaged-*")) or contents.set_aside.endswith("nothing")


def truncate_everywhere(written: tuple[Path, object], *, step: int) -> None:
    source, expected = written
    folder = source.parent / "damaged"
    for path in companions(source / "journal.db"):
        if not path.exists():
            continue
        for size in range(0, path.stat().st_size, step):
            shutil.copytree(source, folder)
            os.truncate(folder / path.name, size)
            check_damage(folder, expected)
            shutil.rmtree(folder)


def test_truncation_is_noticed(written: tuple[Path, object]) -> None:
    truncate_everywhere(written, step=4_001)


@pytest.mark.long
@pytest.mark.timeout(900)  # 200 s of one core: more than the limit of a test when others share it
def test_truncation_at_every_byte_is_noticed(memory_folder: Path) -> None:
    source, _ = crashed(memory_folder, steps=2)
    folder = memory_folder / "damaged"
    database, whole = open_journal(Path(shutil.copytree(source, memory_folder / "whole")))
    database.close()
    for path in companions(source / "journal.db"):
        for size in range(path.stat().st_size if path.exists() else 0):
            shutil.copytree(source, folder)
            os.truncate(folder / path.name, size)
            database, contents = open_journal(folder)
            database.close()
            if contents.set_aside:
                check_set_aside(folder, contents)
            else:
                assert contents == whole, (path.name, size)
            shutil.rmtree(folder)


def flip_bits(written: tuple[Path, object], *, count: int, seed: int) -> None:
    source, expected = written
    folder = source.parent / "damaged"
    dice = random.Random(seed)
    names = [path.name for path in companions(source / "journal.db") if path.exists()]
    aside = 0
    for _ in range(count):
        shutil.copytree(source, folder)
        path = folder / dice.choice(names)
        data = bytearray(path.read_bytes())
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
        aside += check_damage(folder, expected)
        shutil.rmtree(folder)
    assert aside > count // 20, "flips in live rows must be noticed"


def test_flipped_bits_are_noticed(written: tuple[Path, object]) -> None:
    flip_bits(written, count=60, seed=1)


@pytest.mark.long
def test_a_thousand_flipped_bits_are_noticed(written: tuple[Path, object]) -> None:
    flip_bits(written, count=1_000, seed=2)


@pytest.mark.parametrize("bit", [0, 7], ids=["another letter", "no text"])
@pytest.mark.parametrize("name", [b"commands", b"terminal_update", b"mark_ms", b"last_epoch", b"body"])
def test_a_flipped_bit_in_a_name_is_noticed(tmp_path: Path, name: bytes, bit: int) -> None:
    """SQLite takes it for another name; every statement of a daemon would fail, again after each start."""
    database, _ = open_journal(tmp_path)
    database.close()
    path = tmp_path / "journal.db"
    data = bytearray(path.read_bytes())
    data[data.index(name)] ^= 1 << bit
    path.write_bytes(data)
    database, contents = open_journal(tmp_path)
    assert contents.set_aside
    database.apply([PutDocument("after", b"it goes on")])
    database.close()


@pytest.mark.parametrize("name", ["journal.db", "journal.db-wal", "journal.db-seal"])
def test_a_lost_or_zeroed_file_is_noticed(written: tuple[Path, object], tmp_path: Path, name: str) -> None:
    source, expected = written
    for damage in ("lost", "zeroed"):
        folder = tmp_path / damage
        shutil.copytree(source, folder)
        path = folder / name
        if damage == "lost":
            path.unlink()
        else:
            path.write_bytes(bytes(path.stat().st_size))
        assert check_damage(folder, expected), f"{name} {damage}"


def test_a_foreign_file_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "journal.db").write_bytes(b"this is no database" * 1000)
    database, contents = open_journal(tmp_path)
    assert "not a database" in contents.set_aside
    database.close()


def test_a_row_moved_between_tables_or_vanished_is_noticed(tmp_path: Path) -> None:
    database, _ = open_journal(tmp_path)
    database.apply([accept("a"), accept("b")])
    database.close()
    connection = sqlite3.connect(tmp_path / "journal.db")
    connection.execute("DELETE FROM commands WHERE command_id = 'b'")
    connection.commit()
    connection.close()
    _, contents = open_journal(tmp_path)
    assert "rows are missing: commands 1 of 2" in contents.set_aside


def test_a_journal_of_another_format_is_set_aside(tmp_path: Path) -> None:
    open_journal(tmp_path)[0].close()
    connection = sqlite3.connect(tmp_path / "journal.db")
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    assert "it is of format 2, and this bcd reads 1" in open_journal(tmp_path)[1].set_aside


def test_set_aside_journals_do_not_fill_the_disk(tmp_path: Path) -> None:
    for _ in range(5):
        (tmp_path / "journal.db").write_bytes(b"rubbish" * 1000)
        open_journal(tmp_path)[0].close()
    assert len(list(tmp_path.glob("journal.db.damaged-*"))) == 2


def test_the_bound_is_kept_and_leaves_room_for_results(tmp_path: Path) -> None:
    database, _ = open_journal(tmp_path)
    accepted = 0
    while database.room_bytes() > 60_000:
        database.apply([accept(f"c{accepted}", b"x" * 50_000)])
        accepted += 1
    for number in range(5):
        database.apply([FinishCommand(f"c{number}", CommandState.SUCCEEDED, b"r" * 60_000, 1)])
    beyond = [accept(f"c{number}", b"x" * 50_000) for number in range(accepted, accepted + 100)]
    with pytest.raises(JournalFullError, match="reached its bound of 2097152 bytes") as caught:
        database.apply(beyond)
    assert not caught.value.disk
    assert database.path.stat().st_size <= SMALL.max_bytes
    database.apply([ForgetCommands(tuple(f"c{number}" for number in range(accepted)))])
    assert database.room_bytes() > 1_000_000
    database.close()
    assert open_journal(tmp_path)[1].set_aside == ""


def test_a_full_disk_is_told_apart_and_rolled_back(tmp_path: Path) -> None:
    database, _ = open_journal(tmp_path)
    database.apply([accept("a")])
    wal = database.path.with_name("journal.db-wal")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (wal.stat().st_size, hard))
    try:
        with pytest.raises(JournalFullError) as caught:
            database.apply([accept("b", b"x" * 100_000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert caught.value.disk
    assert database.meta.commands == 1
    database.apply([accept("c")])
    database.close()
    assert [command.command_id for command in open_journal(tmp_path)[1].commands] == ["a", "c"]


def test_damage_found_while_in_use_is_an_error_of_its_own(tmp_path: Path) -> None:
    database, _ = open_journal(tmp_path)
    database.apply([AppendEvents((event(1),))])
    database._connection.execute("UPDATE events SET event = x'00'")
    with pytest.raises(JournalDamagedError, match="a row of events does not match its checksum: key 1"):
        database.events_after(0, limit=1, limit_bytes=1)
    assert database.set_aside("now").startswith("set aside as journal.db.damaged-now")
    assert open_journal(tmp_path)[1].set_aside == ""


def test_a_journal_in_use_elsewhere_is_not_taken_for_damaged(tmp_path: Path) -> None:
    database, _ = open_journal(tmp_path)
    database.apply([accept("a")])
    with pytest.raises(Unavailable, match="database is locked"):
        open_journal(tmp_path)
    database.close()
    assert len(open_journal(tmp_path)[1].commands) == 1


def test_the_checksum_tells_types_lengths_and_tables_apart() -> None:
    assert row_crc("events", (1, "1")) != row_crc("events", ("1", 1))
    assert row_crc("events", ("ab", "c")) != row_crc("events", ("a", "bc"))
    assert row_crc("events", (b"a",)) != row_crc("events", ("a",))
    assert row_crc("events", (1,)) != row_crc("commands", (1,))


def test_columns_are_those_of_the_entries() -> None:
    columns = [column.name for column in fields(JournalEntry)]
    columns[columns.index("update")] = "terminal_update"
    assert TABLES["commands"] == tuple(columns)
    assert TABLES["events"] == tuple(column.name for column in fields(EventEntry))
