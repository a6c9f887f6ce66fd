"""The journal as the daemon uses it: groups, one caller's mistake, no room, damage while in use."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from bettercompute.daemon import group_commit
from bettercompute.daemon.group_commit import Journal
from bettercompute.daemon.journal import JournalDatabase
from bettercompute.daemon.journal_files import Ballast
from bettercompute.daemon.journal_records import (
    AppendEvents,
    JournalDamagedError,
    JournalFullError,
    JournalHealth,
    PutDocument,
    Write,
)
from bettercompute.delivery.commands import CommandState
from bettercompute.errors import Unavailable
from bettercompute.session.effects import FinishCommand, ForgetCommands, StoreEpoch, StoreTime
from bettercompute.system import system_world
from tests.unit.daemon.journal_samples import SMALL, accept, event


class StubbornDisk(JournalDatabase):
    """A journal whose disk can be made full or damaged, and whose commits can be held back."""

    full: Callable[[], bool] = staticmethod(lambda: False)
    pressed = True
    damaged = False
    groups: list[int]
    gate: threading.Event

    def apply(self, writes):
        assert self.gate.wait(30)
        self.groups.append(len(writes))
        if self.full():
            raise JournalFullError("the disk is full", disk=True)
        if self.damaged:
            raise JournalDamagedError("a bit has flipped")
        super().apply(writes)


@pytest.fixture
async def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Journal, StubbornDisk]]:
    monkeypatch.setattr(group_commit, "RECOVERY_INTERVAL_S", 0.01)
    made: list[StubbornDisk] = []

    def make(folder: Path, *, limits) -> StubbornDisk:
        database = StubbornDisk(folder, limits=limits)
        database.groups = []
        database.gate = threading.Event()
        database.gate.set()
        made.append(database)
        return database

    journal = await Journal.open(tmp_path / "state", world=system_world(), limits=SMALL, database=make)
    yield journal, made[0]
    made[0].gate.set()
    await journal.close()


async def write_all(journal: Journal, *writes: Write) -> list[BaseException | None]:
    """Write each on its own, at the same time; return what each raised."""
    return await asyncio.gather(*(journal.write(write) for write in writes), return_exceptions=True)


async def health_turns(journal: Journal, accepting: bool) -> JournalHealth:
    turned = asyncio.Event()

    def told(health: JournalHealth) -> None:
        if health.accepting == accepting:
            turned.set()

    journal.on_health = told
    if journal.health.accepting != accepting:
        await asyncio.wait_for(turned.wait(), 30)
    return journal.health


async def test_writes_are_durable_when_awaited_and_commits_are_shared(opened: tuple[Journal, StubbornDisk]) -> None:
    journal, disk = opened
    disk.gate.clear()
    first = asyncio.ensure_future(journal.write(accept("a")))
    rest = [asyncio.ensure_future(journal.write(accept(f"c{number}"))) for number in range(50)]
    await asyncio.sleep(0)
    assert not first.done()
    disk.gate.set()
    await asyncio.gather(first, *rest)
    assert sum(disk.groups) == 51
    assert len(disk.groups) <= 3
    assert journal.disk_bytes() > 0
    assert await journal.update("a") == b""


async def test_one_callers_mistake_costs_only_itself(opened: tuple[Journal, StubbornDisk]) -> None:
    journal, disk = opened
    disk.gate.clear()
    writes: list[Write] = [accept("a"), "nonsense", accept("b")]  # type: ignore[list-item]
    pending = [asyncio.ensure_future(journal.write(write)) for write in writes]
    await asyncio.sleep(0)
    disk.gate.set()
    outcomes = await asyncio.gather(*pending, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), AssertionError, type(None)]


async def test_a_full_disk_refuses_new_work_and_frees_the_ballast_for_what_was_promised(
    opened: tuple[Journal, StubbornDisk], tmp_path: Path
) -> None:
    journal, disk = opened
    ballast = tmp_path / "state" / "ballast"
    assert ballast.exists()
    await journal.write(accept("running"))
    disk.full = ballast.exists  # the disk is full until the ballast goes
    with pytest.raises(Unavailable, match="the journal has no room"):
        await journal.write(accept("new"))
    health = await health_turns(journal, accepting=False)
    assert health.condition == "JournalDiskFull"
    assert "BUSY" in health.message
    assert ballast.exists(), "new work is refused before the ballast is touched"
    disk.full = lambda: ballast.exists() and disk.pressed
    await journal.write(FinishCommand("running", CommandState.SUCCEEDED, b"result", 1))
    assert await journal.update("running") == b"result"
    disk.pressed = False
    assert (await health_turns(journal, accepting=True)).condition == ""
    assert ballast.exists(), "the ballast is taken back before new work is"
    await journal.write(accept("new"))


async def test_a_nearly_full_disk_begins_nothing_new_and_what_was_promised_has_its_space(
    opened: tuple[Journal, StubbornDisk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = opened
    log = (tmp_path / "state" / "journal.db-wal").stat()
    assert log.st_blocks * 512 >= SMALL.wal_bytes
    await journal.write(accept("running"))
    left = [0]
    monkeypatch.setattr(Ballast, "room_bytes", lambda _: left[0])
    with pytest.raises(Unavailable, match="the journal has no room"):
        await journal.write(accept("new"))
    assert (await health_turns(journal, accepting=False)).condition == "JournalDiskFull"
    await journal.write(FinishCommand("running", CommandState.SUCCEEDED, b"result", 1))
    left[0] = group_commit.DISK_ROOM_MIN_BYTES
    await journal.write(StoreTime(1, None))
    assert not journal.health.accepting, "at the edge it would flap"
    left[0] = 1 << 30
    await health_turns(journal, accepting=True)
    await journal.write(accept("new"))


async def test_a_disk_too_small_for_a_ballast_recovers_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "RECOVERY_INTERVAL_S", 0.01)
    left = [group_commit.DISK_ROOM_MIN_BYTES]
    monkeypatch.setattr(Ballast, "room_bytes", lambda _: left[0])
    monkeypatch.setattr(Ballast, "take", lambda _: False)
    journal = await Journal.open(tmp_path / "state", world=system_world(), limits=SMALL)
    await journal.write(accept("a"))
    left[0] = 0
    with pytest.raises(Unavailable, match="the journal has no room"):
        await journal.write(accept("b"))
    left[0] = 3 * group_commit.DISK_ROOM_MIN_BYTES
    await health_turns(journal, accepting=True)
    await journal.write(accept("b"))
    await journal.close()


async def test_what_was_promised_waits_for_room(opened: tuple[Journal, StubbornDisk]) -> None:
    journal, disk = opened
    await journal.write(accept("running"))
    room = threading.Event()
    disk.full = lambda: not room.is_set()
    finish = asyncio.ensure_future(journal.write(FinishCommand("running", CommandState.SUCCEEDED, b"result", 1)))
    later = asyncio.ensure_future(journal.write(PutDocument("spec", b"x")))
    await health_turns(journal, accepting=False)
    assert not finish.done()
    with pytest.raises(Unavailable):
        await journal.write(AppendEvents((event(1),)))
    room.set()
    await asyncio.wait_for(asyncio.gather(finish, later), 30)
    await health_turns(journal, accepting=True)


async def test_a_daemon_that_stops_waits_for_no_room(opened: tuple[Journal, StubbornDisk]) -> None:
    journal, disk = opened
    await journal.write(accept("running"))
    disk.full = lambda: True
    waiting = asyncio.ensure_future(journal.write(FinishCommand("running", CommandState.SUCCEEDED, b"result", 1)))
    await health_turns(journal, accepting=False)
    journal.wait_no_longer()
    with pytest.raises(Unavailable, match="no room"):
        await asyncio.wait_for(waiting, 30)
    with pytest.raises(Unavailable, match="no room"):
        await asyncio.wait_for(journal.write(PutDocument("spec", b"x")), 30)
    disk.full = lambda: False
    await journal.write(PutDocument("spec", b"x"))


async def test_the_bound_refuses_new_work_until_it_empties(opened: tuple[Journal, StubbornDisk]) -> None:
    journal, _ = opened
    kept: list[str] = []
    outcomes: list[BaseException] = []
    while not outcomes:
        name = f"c{len(kept)}"
        outcomes += [item for item in await write_all(journal, accept(name, b"x" * 50_000)) if item]
        kept.append(name)
    assert isinstance(outcomes[0], Unavailable)
    assert outcomes[0].reason == "journal-full"
    health = await health_turns(journal, accepting=False)
    assert health.condition == "JournalFull"
    assert "has reached its bound of 2097152 bytes" in health.message
    await journal.write(*(FinishCommand(name, CommandState.FAILED, b"r" * 40_000, 1) for name in kept[:10]))
    await journal.write(ForgetCommands(tuple(kept)))
    await health_turns(journal, accepting=True)
    await journal.write(accept("new"))


async def test_damage_while_in_use_is_set_aside_at_once_and_told(
    opened: tuple[Journal, StubbornDisk], tmp_path: Path
) -> None:
    journal, disk = opened
    await journal.write(accept("a"))
    disk.damaged = True
    with pytest.raises(JournalDamagedError, match=r"a bit has flipped.*set aside as journal.db.damaged-"):
        await journal.write(accept("b"))
    await asyncio.wait_for(journal.damaged.wait(), 30)
    with pytest.raises(JournalDamagedError):
        await journal.update("a")
    await journal.close()
    again = await Journal.open(tmp_path / "state", world=system_world(), limits=SMALL)
    assert again.contents.set_aside == ""
    assert again.contents.commands == ()
    await again.close()


def failing(code: int) -> Callable[[str], bytes]:
    def fail(_: str) -> bytes:
        error = sqlite3.OperationalError("as SQLite says it")
        error.sqlite_errorcode = code
        raise error

    return fail


async def test_damage_that_a_read_finds_is_set_aside_as_well(
    opened: tuple[Journal, StubbornDisk], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, disk = opened
    await journal.write(accept("a"))
    monkeypatch.setattr(disk, "update", failing(sqlite3.SQLITE_CORRUPT))
    with pytest.raises(JournalDamagedError, match="as SQLite says it"):
        await journal.update("a")
    await asyncio.wait_for(journal.damaged.wait(), 30)
    assert journal.failure is None
    assert "set aside as journal.db.damaged-" in journal.damage


async def test_a_read_that_the_disk_fails_is_refused_and_the_journal_goes_on(
    opened: tuple[Journal, StubbornDisk], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, disk = opened
    with monkeypatch.context() as patch:
        patch.setattr(disk, "update", failing(sqlite3.SQLITE_IOERR_READ))
        with pytest.raises(Unavailable, match="cannot be read") as raised:
            await journal.update("a")
    assert raised.value.reason == "journal-unreadable"
    await journal.write(accept("a"))
    assert await journal.update("a") == b""
    assert not journal.damaged.is_set()


async def test_a_fault_of_ours_in_the_thread_is_told_to_all_who_wait_and_changes_no_file(
    opened: tuple[Journal, StubbornDisk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, disk = opened
    await journal.write(accept("a"))

    def fail() -> int:
        raise RuntimeError("nobody thought of this")

    monkeypatch.setattr(disk, "room_bytes", fail)
    disk.gate.clear()
    pending = [asyncio.ensure_future(write) for write in (journal.write(StoreEpoch(1)), journal.write(accept("b")))]
    read = asyncio.ensure_future(journal.update("a"))
    await asyncio.sleep(0)
    disk.gate.set()
    *written, answered = await asyncio.wait_for(asyncio.gather(*pending, read, return_exceptions=True), 30)
    assert isinstance(written[-1], Unavailable)
    assert "nobody thought of this" in written[-1].message
    await asyncio.wait_for(journal.damaged.wait(), 30)
    assert isinstance(journal.failure, RuntimeError)
    assert answered == b"" or isinstance(answered, Unavailable)
    with pytest.raises(Unavailable, match="nobody thought"):
        await journal.update("a")
    await journal.close()
    again = await Journal.open(tmp_path / "state", world=system_world(), limits=SMALL)
    assert again.contents.set_aside == ""
    assert [entry.command_id for entry in again.contents.commands] == ["a"]
    await again.close()


async def test_what_waits_for_room_is_told_too_when_the_thread_fails(
    opened: tuple[Journal, StubbornDisk], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, disk = opened
    disk.full = lambda: True
    waits = asyncio.ensure_future(journal.write(StoreEpoch(1)))
    await health_turns(journal, accepting=False)

    def fail(stamp: str) -> str:
        raise RuntimeError(f"nobody thought of this at {stamp}")

    monkeypatch.setattr(disk, "set_aside", fail)
    disk.damaged, disk.full = True, lambda: False
    with pytest.raises(Unavailable, match="nobody thought of this"):
        await asyncio.wait_for(waits, 30)
    assert isinstance(journal.failure, RuntimeError)


async def test_a_write_that_cannot_be_weighed_is_its_callers_mistake(opened: tuple[Journal, StubbornDisk]) -> None:
    journal, _ = opened
    with pytest.raises(TypeError):
        await journal.write(PutDocument("a", None))  # type: ignore[arg-type] # the mistake
    await asyncio.wait_for(journal.write(StoreEpoch(1)), 30)


async def test_a_folder_in_use_is_refused_and_a_closed_one_is_free(tmp_path: Path) -> None:
    first = await Journal.open(tmp_path, world=system_world(), limits=SMALL)
    with pytest.raises(Unavailable, match="another bcd"):
        await Journal.open(tmp_path, world=system_world(), limits=SMALL)
    await first.close()
    with pytest.raises(Unavailable, match="the journal is closed"):
        await first.write(accept("a"))
    second = await Journal.open(tmp_path, world=system_world(), limits=SMALL)
    assert second.contents.meta.journal_id == first.contents.meta.journal_id
    await second.close()


async def test_a_journal_that_cannot_be_opened_says_why_and_leaves_the_folder(tmp_path: Path) -> None:
    (tmp_path / "journal.db").mkdir()
    with pytest.raises(Unavailable, match="cannot be opened"):
        await Journal.open(tmp_path, world=system_world(), limits=SMALL)
    (tmp_path / "journal.db").rmdir()
    journal = await Journal.open(tmp_path, world=system_world(), limits=SMALL)
    await journal.close()
