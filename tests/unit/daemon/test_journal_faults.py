"""What is damage and what is not: nothing but damage sets a journal aside, and damage is kept as it was found."""

from __future__ import annotations

import errno
import os
import pwd
import shutil
import signal
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bettercompute.cli import bcd
from bettercompute.daemon import journal_faults as faults
from bettercompute.daemon import journal_files, maintenance
from bettercompute.daemon.config import Config
from bettercompute.daemon.identity import IdentityStore
from bettercompute.daemon.journal import JournalDatabase
from bettercompute.daemon.journal_files import companions
from bettercompute.daemon.journal_records import JournalDamagedError, JournalFullError
from bettercompute.errors import Refused, Unavailable
from bettercompute.system import system_world
from tests.forks import FORKS
from tests.unit.daemon.fake_gateway import join
from tests.unit.daemon.journal_samples import accept, check_as, open_as, open_journal, write_and_die
from tests.unit.daemon.test_journal import state_of

# Every result code that this Python knows, by name; the others named so are actions and limits.
CODES = {
    name: getattr(sqlite3, name)
    for name in dir(sqlite3)
    if name.startswith("SQLITE_")
    and not name.startswith(("SQLITE_LIMIT_", "SQLITE_CREATE_", "SQLITE_DROP_", "SQLITE_ALTER_", "SQLITE_DBCONFIG_"))
    and name.removeprefix("SQLITE_").split("_")[0]
    in {
        *("ABORT", "AUTH", "BUSY", "CANTOPEN", "CONSTRAINT", "CORRUPT", "ERROR", "FULL", "INTERNAL", "INTERRUPT"),
        *("IOERR", "LOCKED", "MISUSE", "NOLFS", "NOMEM", "NOTADB", "PERM", "PROTOCOL", "READONLY", "TOOBIG"),
    }
}
DAMAGE = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR", "SQLITE_TOOBIG")


@pytest.mark.parametrize("name", sorted(CODES))
def test_every_code_is_damage_or_a_refusal_with_a_cure(name: str) -> None:
    damage = name.startswith(DAMAGE)
    assert faults.is_damage_at_open(CODES[name]) == damage
    assert faults.is_damage_in_use(CODES[name]) == name.startswith(DAMAGE[:2])
    assert faults.cure_of(CODES[name])
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH")):
        assert "writable" in faults.cure_of(CODES[name])
        assert faults.is_unwritable(CODES[name])


def test_the_numbers_are_those_of_sqlite() -> None:
    for name in ("PERM", "BUSY", "LOCKED", "NOMEM", "READONLY", "IOERR", "CORRUPT", "FULL", "CANTOPEN", "TOOBIG"):
        assert getattr(faults, f"_{name}") == getattr(sqlite3, f"SQLITE_{name}")
    for name in ("AUTH", "NOTADB", "ERROR"):
        assert getattr(faults, f"_{name}") == getattr(sqlite3, f"SQLITE_{name}")


def test_errors_of_the_system_have_their_cures() -> None:
    assert faults.cure_of_errno(errno.ENOSPC) == "free space on its disk"
    assert "writable" in faults.cure_of_errno(errno.EROFS)
    assert "look at the disk" in faults.cure_of_errno(errno.EIO)
    assert "look at the disk" in faults.cure_of_errno(None)
    assert "look at the disk" in faults.cure_of(None)


class _Fault(sqlite3.OperationalError):
    def __init__(self, code: int) -> None:
        super().__init__("as SQLite says it")
        self.sqlite_errorcode = code


@pytest.mark.parametrize("fault", [_Fault(sqlite3.SQLITE_IOERR_READ), _Fault(sqlite3.SQLITE_IOERR), MemoryError()])
def test_what_the_host_cannot_do_now_leaves_the_journal_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    database, _ = open_journal(tmp_path)
    database.apply([accept("a")])
    database.close()
    before = contents_of(tmp_path)

    def fail(_: object) -> None:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(type(database), "_connect", fail)
        with pytest.raises(Unavailable, match="cannot be opened"):
            open_journal(tmp_path)
    assert contents_of(tmp_path) == before
    assert len(open_journal(tmp_path)[1].commands) == 1


def test_a_disk_that_fails_reads_as_well_is_no_fault_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database, _ = open_journal(tmp_path)

    def fail(*_: object) -> None:
        raise _Fault(sqlite3.SQLITE_IOERR_WRITE)

    with monkeypatch.context() as patch:
        patch.setattr(database, "_begin", fail)
        patch.setattr(database, "_pragma", fail)
        with pytest.raises(JournalFullError, match="cannot be written: as SQLite says it") as raised:
            database.apply([accept("a")])
    assert raised.value.disk
    database.apply([accept("a")])
    database.close()


# As an ordinary user: root may write everywhere.


@pytest.fixture
def nobody() -> int:
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")
    return pwd.getpwnam("nobody").pw_uid


@pytest.fixture
def their_folder(nobody: int) -> Iterator[Path]:
    """A journal of that user's, in a folder that they reach; it holds one command."""
    with tempfile.TemporaryDirectory(prefix="bcd-test-") as name:
        top = Path(name)
        folder = top / "state"
        database, _ = open_journal(folder)
        database.apply([accept("a")])
        database.close()
        (folder / "lock").touch(0o600)
        (top / "config.toml").write_text(f'state_dir = "{folder}"\n')
        for path in (top, *top.iterdir(), *folder.iterdir()):
            os.chown(path, nobody, nobody)
        yield folder


def told_by(target: Callable[..., None], *arguments: object) -> tuple[object, str]:
    receiving, sending = FORKS.Pipe(duplex=False)
    child = FORKS.Process(target=target, args=(*arguments, sending))
    child.start()
    sending.close()
    try:
        assert receiving.poll(60), "the child said nothing"
        told: tuple[object, str] = receiving.recv()
    finally:
        receiving.close()
        child.join(60)
    return told


@pytest.mark.parametrize(("folder_mode", "file_mode"), [(0o500, 0o600), (0o500, 0o400), (0o700, 0o400)])
def test_a_read_only_journal_is_no_damaged_one(
    nobody: int, their_folder: Path, folder_mode: int, file_mode: int
) -> None:
    files = [path for path in companions(their_folder / "journal.db") if path.exists()]
    for path in files:
        path.chmod(file_mode)
    their_folder.chmod(folder_mode)
    before = contents_of(their_folder)
    reason, message = told_by(open_as, nobody, their_folder)
    assert reason == "journal-unwritable"
    assert "make the folder and the files in it writable for bcd's user" in message
    assert contents_of(their_folder) == before
    code, said = told_by(check_as, nobody, their_folder.parent / "config.toml")
    assert (code, said.split()[:2]) == (0, ["sound", "True"])
    assert contents_of(their_folder) == before
    their_folder.chmod(0o700)
    for path in files:
        path.chmod(0o600)
    assert told_by(open_as, nobody, their_folder) == ("opened", "")


def test_an_unreadable_journal_cannot_be_checked_and_that_is_said(nobody: int, their_folder: Path) -> None:
    (their_folder / "journal.db").chmod(0)
    code, said = told_by(check_as, nobody, their_folder.parent / "config.toml")
    assert code == 3
    assert "is checked as a copy, which cannot be made: " in said
    assert "readable for this user" in said


# Damage is evidence.


def contents_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("journal.db*")}


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The journal of a writer that was ended by kill -9: a half of it is in its log only."""
    folder = tmp_path / "state"
    child = FORKS.Process(target=write_and_die, args=(folder,))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert (folder / "journal.db-wal").stat().st_size > 0
    (tmp_path / "config.toml").write_text(f'state_dir = "{folder}"\n')
    return folder


def flip_log(folder: Path) -> None:
    """Flip a bit in the first page of the log: SQLite then believes none of it."""
    log = folder / "journal.db-wal"
    data = bytearray(log.read_bytes())
    data[32 + 24 + 100] ^= 1
    log.write_bytes(data)


def test_a_check_changes_nothing(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(killed.parent / "config.toml")
    before = contents_of(killed)
    assert bcd.run(["journal", "check", "--config", config]) == 0
    assert contents_of(killed) == before
    flip_log(killed)
    before = contents_of(killed)
    assert bcd.run(["journal", "check", "--config", config]) == 1
    assert "commits, which were promised, are gone" in capsys.readouterr().out
    assert contents_of(killed) == before
    (killed / "journal.db").unlink()
    before = contents_of(killed)
    assert bcd.run(["journal", "check", "--config", config]) == 1
    assert "the database is missing or empty" in capsys.readouterr().out
    assert contents_of(killed) == before


def test_a_refused_reset_of_the_clock_changes_nothing(killed: Path) -> None:
    join(Config(state_dir=killed))
    flip_log(killed)
    before = contents_of(killed)
    with pytest.raises(Refused, match="is damaged"):
        maintenance.reset_clock(killed, world=system_world())
    assert contents_of(killed) == before
    assert IdentityStore(killed).load() is not None


def kept(folder: Path) -> dict[str, bytes]:
    """The files that were set aside, under the names they had."""
    return {name.partition(".damaged-")[0]: data for name, data in contents_of(folder).items() if ".damaged-" in name}


@pytest.mark.parametrize("lost", ["", "journal.db", "journal.db-seal"])
def test_a_damaged_journal_is_set_aside_as_it_was(killed: Path, lost: str) -> None:
    flip_log(killed)
    if lost:
        (killed / lost).unlink()
    before = contents_of(killed)
    database, contents = open_journal(killed)
    database.apply([accept("new")])
    database.close()
    assert contents.set_aside
    assert kept(killed) == before
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in killed.glob("*.damaged-*"))
    assert [command.command_id for command in open_journal(killed)[1].commands] == ["new"]


def test_an_emptied_database_keeps_its_log(killed: Path) -> None:
    os.truncate(killed / "journal.db", 0)
    before = contents_of(killed)
    database, contents = open_journal(killed)
    database.close()
    assert contents.set_aside.startswith("the database is missing or empty")
    assert kept(killed) == before


def test_a_journal_damaged_in_use_keeps_its_log(killed: Path) -> None:
    database, _ = open_journal(killed)
    before = contents_of(killed)
    database.set_aside("now")
    assert kept(killed) == before
    assert not (killed / "journal.db").exists()


def test_without_room_for_a_copy_the_log_still_holds_it_all(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip_log(killed)
    before = contents_of(killed)

    def full(_: Path, target: Path) -> None:
        target.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(journal_files, "_copy", full)
    database, _ = open_journal(killed)
    database.close()
    aside = kept(killed)
    assert aside.keys() == before.keys()
    assert aside["journal.db-wal"] == before["journal.db-wal"]


def test_evidence_with_its_log_mended_is_the_journal_again(killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed, tmp_path / "whole")
    whole = state_of(tmp_path / "whole")
    flip_log(killed)
    database, _ = open_journal(killed)
    database.close()
    mended = tmp_path / "mended"
    mended.mkdir()
    for name, data in kept(killed).items():
        (mended / name).write_bytes(data)
    flip_log(mended)
    assert state_of(mended) == whole


def test_a_journal_beyond_its_bound_is_not_copied(killed: Path) -> None:
    os.truncate(killed / "journal.db-wal", maintenance.COPY_BYTES_MAX)  # a hole: it takes no room
    with pytest.raises(Refused, match="which no journal has"):
        maintenance.check_journal(killed)


def test_a_copy_that_cannot_be_made_is_said(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(killed / "nowhere"))
    with pytest.raises(Unavailable, match="or set TMPDIR elsewhere"):
        maintenance.check_journal(killed)


def test_a_schema_that_is_another_is_damage(tmp_path: Path) -> None:
    database, _ = open_journal(tmp_path)
    database.close()
    connection = sqlite3.connect(tmp_path / "journal.db")
    connection.execute("DROP TABLE events")
    connection.close()
    again = JournalDatabase(tmp_path)
    with pytest.raises(JournalDamagedError, match="other names or columns"):
        again.check()
    again.close()
    assert "other names or columns" in open_journal(tmp_path)[1].set_aside
