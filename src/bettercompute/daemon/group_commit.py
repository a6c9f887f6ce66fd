"""The journal as the daemon uses it: a thread that commits in groups, and what happens while the disk is full.

Everybody who writes while a commit is under way shares the next one (490 entries/s alone, 36,000/s with 64 waiting). On
a full disk or at the bound, new commands and events are refused, the ballast is freed for what was already promised,
and the rest waits; room is looked for every second. The log's own space is taken beforehand, so that cursors and
results can be written when others have filled the disk. See docs/delivery.md, "The journal"; decisions 0083 and 0115.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from bettercompute.daemon.journal import JournalDatabase
from bettercompute.daemon.journal_files import Ballast, FolderLock, companions, occupied_bytes, prepare_folder, reserve
from bettercompute.daemon.journal_records import (
    LIMITS,
    REFUSABLE,
    EventEntry,
    JournalContents,
    JournalDamagedError,
    JournalFullError,
    JournalHealth,
    JournalLimits,
    Write,
    weight_bytes,
)
from bettercompute.errors import Unavailable
from bettercompute.world import World

# A group larger than this waits for the next commit, so that one fsync never carries more than the log's bound.
GROUP_MAX_WRITES = 1_024
GROUP_MAX_BYTES = 4 * 1024 * 1024
# How often a journal without room looks for some.
RECOVERY_INTERVAL_S = 1.0
# Room that must be free again before new entries are taken, so that the condition does not flap.
_HYSTERESIS_BYTES = 1024 * 1024
# With less left of the disk nothing new is begun: its result would need room, and others write as well.
DISK_ROOM_MIN_BYTES = 1024 * 1024

T = TypeVar("T")


@dataclass(slots=True)
class _Submission:
    writes: Sequence[Write]
    size_bytes: int
    future: asyncio.Future[None]

    @property
    def refusable(self) -> bool:
        return any(isinstance(write, REFUSABLE) for write in self.writes)


@dataclass(slots=True)
class _Read:
    action: Callable[[], Any]
    future: asyncio.Future[Any]


_Item: TypeAlias = _Submission | _Read | None


class Journal:
    """An open journal of a locked state folder. Made by `open`; all methods belong to the event loop's thread."""

    def __init__(self, folder: Path, *, world: World, database: JournalDatabase) -> None:
        self.health = JournalHealth()
        self.contents: JournalContents
        self.damaged = asyncio.Event()
        """Set when the journal was found damaged, and set aside, or its thread failed: the daemon must start anew."""
        self.damage = ""
        self.failure: Exception | None = None
        self.on_health: Callable[[JournalHealth], None] = lambda _: None
        self._database = database
        self._ballast = Ballast(folder / "ballast", database.limits.ballast_bytes)
        self._world = world
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._waiting: list[_Submission] = []
        self._with_ballast = False  # on a disk that never had room for one nobody waits for it
        self._accepting = True
        self._patient = True
        self._recover_at_ms = 0
        self._gate = threading.Lock()
        self._ended = False
        self._opened: asyncio.Future[JournalContents] = self._loop.create_future()
        self._thread: threading.Thread | None = None
        self._task: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._lock: FolderLock | None = None

    @classmethod
    async def open(
        cls,
        folder: Path,
        *,
        world: World,
        limits: JournalLimits = LIMITS,
        database: Callable[..., JournalDatabase] = JournalDatabase,
        in_thread: bool = True,
    ) -> Journal:
        """Lock `folder` and open its journal; raise `Refused` or `Unavailable` where that cannot be.

        `in_thread` is False only where there are no threads: on virtual time.
        """
        prepare_folder(folder)
        lock = FolderLock.take(folder)
        journal = cls(folder, world=world, database=database(folder, limits=limits))
        journal._lock = lock
        journal._start(in_thread=in_thread)
        try:
            journal.contents = await journal._opened
        except BaseException:
            journal._put(None)
            lock.release()
            raise
        return journal

    async def write(self, *writes: Write) -> None:
        """Return when `writes` are durable, together or not at all.

        New commands and events raise `Unavailable` (`journal-full`) when there is no room; others wait for it.
        """
        future: asyncio.Future[None] = self._loop.create_future()
        self._enqueue(_Submission(writes, sum(weight_bytes(write) for write in writes), future))
        await future

    async def update(self, command_id: str) -> bytes:
        """Return the stored terminal `CommandUpdate` of a command, serialized; empty when there is none."""
        return await self._read(lambda: self._database.update(command_id))

    async def events_after(self, seq: int, *, limit: int, limit_bytes: int) -> list[EventEntry]:
        """Return the next journaled events after `seq`, at least one if there is any."""
        return await self._read(lambda: self._database.events_after(seq, limit=limit, limit_bytes=limit_bytes))

    async def last_event_seq(self) -> int:
        """Return the highest event seq under the present journal id."""
        return await self._read(lambda: self._database.meta.last_event_seq)

    def disk_bytes(self) -> int:
        """Return what the journal occupies on disk, log included."""
        return occupied_bytes(self._database.path)

    def wait_no_longer(self) -> None:
        """Refuse from now on also what would wait for room: a daemon that stops has nobody who makes any."""
        self._patient = False

    async def close(self) -> None:
        """End the thread after what is queued, close the files, give up the lock."""
        self._put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        if self._task is not None:
            await self._task
        if self._lock is not None:
            self._lock.release()

    async def _read(self, action: Callable[[], T]) -> T:
        future: asyncio.Future[T] = self._loop.create_future()
        self._enqueue(_Read(action, future))
        return await future

    def _enqueue(self, item: _Submission | _Read) -> None:
        with self._gate:
            if self._ended:
                raise self._closed_error()
            self._put(item)

    def _put(self, item: _Item) -> None:
        self._queue.put(item)
        self._woken.set()

    def _start(self, *, in_thread: bool) -> None:
        if in_thread:
            self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
            self._thread.start()
        else:
            self._task = asyncio.create_task(self._run_in_turns(), name="journal")

    async def _run_in_turns(self) -> None:
        """Do the thread's work in turns of the loop."""
        going_on = self._begin()
        while going_on:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if self._accepting else RECOVERY_INTERVAL_S):
                    await self._woken.wait()
            self._woken.clear()
            going_on = await asyncio.to_thread(self._turn, block=False)

    def _closed_error(self) -> Exception:
        if self.damage and self.failure is None:
            return JournalDamagedError(self.damage)
        return Unavailable(self.damage or "the journal is closed", reason="closed")

    # From here on: the journal's thread.

    def _run(self) -> None:
        going_on = self._begin()
        while going_on:
            going_on = self._turn(block=True)

    def _begin(self) -> bool:
        """Open the database and tell its contents; return whether there is one."""
        try:
            contents = self._database.open(
                new_journal_id=self._world.ids.uuid7,
                new_birth=lambda: self._world.ids.random_bytes(16),
                stamp=str(self._world.clock.now_ms()),
            )
            self._with_ballast = self._ballast.take()
            reserve(companions(self._database.path)[1], self._database.limits.wal_bytes)
        except Exception as error:  # noqa: BLE001 - told to whoever opens the journal
            self._settle(self._opened, error=error)
            return False
        self._settle(self._opened, contents)
        return True

    def _turn(self, *, block: bool) -> bool:
        """Commit one group and answer the reads behind it; return whether there is more to come."""
        submissions, reads, ended = self._gather(block=block)
        waited = self._waiting + submissions
        try:
            self._serve(submissions, reads)
        except Exception as error:  # noqa: BLE001 - whoever waits for the journal would wait for good
            self.failure = error
            self.damage = f"the journal's thread failed: {error!r}"
            for future in [item.future for item in waited] + [item.future for item in reads]:
                self._settle(future, error=self._closed_error())
            self._loop.call_soon_threadsafe(self.damaged.set)
        if not ended and not self.damage:
            return True
        self._end()
        return False

    def _serve(self, submissions: list[_Submission], reads: list[_Read]) -> None:
        if not self._accepting and self._world.clock.monotonic_ms() >= self._recover_at_ms:
            self._recover()
        admitted = self._admitted(submissions)
        if admitted:
            group, self._waiting = self._waiting + admitted, []
            self._commit(group)
        if not self._patient:
            waiting, self._waiting = self._waiting, []
            self._refuse(waiting)
        for read in reads:
            self._answer(read)

    def _gather(self, *, block: bool) -> tuple[list[_Submission], list[_Read], bool]:
        submissions: list[_Submission] = []
        reads: list[_Read] = []
        size_bytes = 0
        try:
            item = self._queue.get(block=block, timeout=None if self._accepting else RECOVERY_INTERVAL_S)
            while item is not None:
                if isinstance(item, _Read):
                    reads.append(item)
                else:
                    submissions.append(item)
                    size_bytes += item.size_bytes
                if len(submissions) >= GROUP_MAX_WRITES or size_bytes >= GROUP_MAX_BYTES:
                    return submissions, reads, False
                item = self._queue.get_nowait()
        except queue.Empty:
            return submissions, reads, False
        return submissions, reads, True

    def _commit(self, group: list[_Submission]) -> None:
        while group:
            try:
                self._database.apply([write for submission in group for write in submission.writes])
            except JournalFullError as error:
                self._degrade(error)
                refusable = [submission for submission in group if submission.refusable]
                self._refuse(refusable)
                group = [submission for submission in group if not submission.refusable]
                if not refusable and not self._ballast.free():
                    self._waiting += group
                    return
            except JournalDamagedError as error:
                self._give_up(group, error)
                return
            except Exception as error:  # noqa: BLE001 - one caller's mistake must not cost the others their commit
                if len(group) == 1:
                    self._settle(group[0].future, error=error)
                    return
                for submission in group:
                    self._commit([submission])
                return
            else:
                self._loop.call_soon_threadsafe(_resolve_all, group)
                return

    def _admitted(self, submissions: list[_Submission]) -> list[_Submission]:
        """Refuse what there is no room for; return the rest."""
        if not any(submission.refusable for submission in submissions):
            return submissions
        admitted: list[_Submission] = []
        room_bytes = self._database.room_bytes()
        if self._ballast.room_bytes() < DISK_ROOM_MIN_BYTES:
            self._degrade(JournalFullError(f"the disk of {self._database.path} is full", disk=True))
        for submission in submissions:
            if submission.refusable and room_bytes < submission.size_bytes:
                self._degrade(JournalFullError.at_bound(self._database.path, self._database.limits))
            if submission.refusable and not self._accepting:
                self._refuse([submission])
                continue
            room_bytes -= submission.size_bytes
            admitted.append(submission)
        return admitted

    def _recover(self) -> None:
        """Look for room: retry what waits, take the ballast back, and accept again when both worked."""
        self._recover_at_ms = self._world.clock.monotonic_ms() + int(RECOVERY_INTERVAL_S * 1000)
        waiting, self._waiting = self._waiting, []
        self._commit(waiting)
        if self._waiting or self.damage:
            return
        try:
            self._database.apply([])
        except (JournalFullError, JournalDamagedError):
            return
        room_bytes = min(self._database.room_bytes(), self._ballast.room_bytes() - DISK_ROOM_MIN_BYTES)
        if room_bytes >= _HYSTERESIS_BYTES and (not self._with_ballast or self._ballast.held() or self._ballast.take()):
            self._accepting = True
            self._tell(JournalHealth())

    def _degrade(self, error: JournalFullError) -> None:
        if not self._accepting:
            return
        self._accepting = False
        self._recover_at_ms = self._world.clock.monotonic_ms() + int(RECOVERY_INTERVAL_S * 1000)
        self._tell(JournalHealth.without_room(error))

    def _refuse(self, submissions: list[_Submission]) -> None:
        for submission in submissions:
            self._settle(submission.future, error=Unavailable("the journal has no room", reason="journal-full"))

    def _give_up(self, group: list[_Submission], error: JournalDamagedError) -> None:
        """Set the journal aside at once, so that the next start cannot find it sound enough to fail again."""
        try:
            aside = self._database.set_aside(str(self._world.clock.now_ms()))
        except Unavailable as failure:
            aside = f"left where it is ({failure.message})"
        self.damage = f"the journal is damaged ({error}) and was {aside}"
        for submission in group:
            self._settle(submission.future, error=JournalDamagedError(self.damage))
        self._loop.call_soon_threadsafe(self.damaged.set)

    def _answer(self, read: _Read) -> None:
        try:
            self._settle(read.future, read.action())
        except Exception as error:  # noqa: BLE001 - told to whoever asked
            judged = self._database.judged(error)
            if isinstance(judged, JournalDamagedError):
                self._give_up([], judged)
            elif isinstance(judged, JournalFullError):
                judged = Unavailable(f"the journal cannot be read: {error}", reason="journal-unreadable")
            self._settle(read.future, error=judged)

    def _end(self) -> None:
        with self._gate:
            self._ended = True
        left: list[_Item] = [*self._waiting]
        while not self._queue.empty():
            left.append(self._queue.get_nowait())
        for item in left:
            if item is not None:
                self._settle(item.future, error=self._closed_error())
        self._database.close()

    def _tell(self, health: JournalHealth) -> None:
        def told() -> None:
            self.health = health
            self.on_health(health)

        self._loop.call_soon_threadsafe(told)

    def _settle(self, future: asyncio.Future[Any], value: object = None, *, error: Exception | None = None) -> None:
        self._loop.call_soon_threadsafe(_settle, future, value, error)


def _resolve_all(group: list[_Submission]) -> None:
    for submission in group:
        _settle(submission.future, None, None)


def _settle(future: asyncio.Future[Any], value: object, error: Exception | None) -> None:
    if future.done():
        return  # whoever waited has gone; what was written stays written
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
