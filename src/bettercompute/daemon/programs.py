"""Programs that a handler starts: never outside the journal, never outliving their command or the daemon.

Each runs in a session and process group of its own. The child first waits behind a *gate*, a shell that reads one line
from a pipe, until the group's id and start time are durable in the journal; only then may the program begin. If the
daemon dies in between, the pipe closes and the child ends by itself; if it dies later, the next process finds the group
by its mark and ends it before anything runs again. See docs/delivery.md, "At the daemon"; decisions 0082 and 0104.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bettercompute.daemon.handlers import HandlerCancelled, ProgramOutcome
from bettercompute.daemon.journal_records import DropProcess, NoteProcess, ProcessMark, Write

# How long a program may take to end after TERM before it is killed.
TERM_GRACE_S = 10.0

# `read` fails at the end of the pipe, so that a dead daemon's child never becomes the program.
_GATE = 'read -r _ && exec "$@" </dev/null'

# How often a group that was told to end is looked at, and a killed one that hangs in the kernel.
_POLL_S = 0.02
_POLL_STUCK_S = 1.0

# How long the rest of the output is read once the group has ended; something that left the group may hold it open.
_OUTPUT_GRACE_S = 1.0

_PROC = Path("/proc")


def process_space(boot_id: str) -> str:
    """Return the name of the space in which process ids mean what they say: this boot and this pid namespace."""
    try:
        namespace = str((_PROC / "self/ns/pid").readlink())
    except OSError:
        namespace = "pid:[?]"
    return f"{boot_id}/{namespace}"


@dataclass(slots=True)
class Programs:
    """Starts the programs of one command: a `ProgramRunner`."""

    command_id: str
    space: str
    write: Callable[[Write], Coroutine[None, None, None]]
    """Makes a journal write durable."""
    cancelled: asyncio.Event
    interruptible: bool
    """Whether a cancel ends a running program; a destructive kind stops only between its actions."""
    grace_s: float = TERM_GRACE_S

    async def __call__(
        self, argv: Sequence[str], *, environment: Mapping[str, str], timeout_ms: int, limit_bytes: int
    ) -> ProgramOutcome:
        """Run a program to the end of its whole group, and return how it ended."""
        if self.cancelled.is_set():
            raise HandlerCancelled
        program = _found(argv[0], environment)
        transport, child = await asyncio.get_running_loop().subprocess_exec(
            lambda: _Child(limit_bytes),
            *("/bin/sh", "-c", _GATE, "sh", program, *argv[1:]),
            env=dict(environment),
            start_new_session=True,
            cwd="/",
        )
        group = _Group(transport, child, grace_s=self.grace_s)
        try:
            mark = ProcessMark(self.command_id, group.number, start_ticks(group.number) or 0, self.space)
            await self.write(NoteProcess(mark))
            return await self._run(group, timeout_s=timeout_ms / 1000)
        finally:
            try:
                await group.end()
            finally:
                await asyncio.shield(self.write(DropProcess(group.number)))

    async def _run(self, group: _Group, *, timeout_s: float) -> ProgramOutcome:
        exited = asyncio.ensure_future(group.child.exited.wait())
        stopped = asyncio.ensure_future(self.cancelled.wait() if self.interruptible else asyncio.Event().wait())
        try:
            group.open_gate()
            await asyncio.wait({exited, stopped}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            exited.cancel()
            stopped.cancel()
        still_running = not group.child.exited.is_set()
        cut = still_running and self.interruptible and self.cancelled.is_set()
        await group.end()
        if cut:
            raise HandlerCancelled
        exit_code = group.transport.get_returncode()
        assert exit_code is not None
        stdout, stderr = group.child.kept[1], group.child.kept[2]
        return ProgramOutcome(
            exit_code=exit_code,
            stdout=bytes(stdout.data),
            stderr=bytes(stderr.data),
            timed_out=still_running,
            truncated=stdout.truncated or stderr.truncated,
        )


@dataclass(slots=True)
class _Kept:
    """The first bytes of an output stream; the rest is read and dropped, so that the program never blocks."""

    limit_bytes: int
    data: bytearray = field(default_factory=bytearray)
    truncated: bool = False

    def add(self, piece: bytes) -> None:
        room = self.limit_bytes - len(self.data)
        self.data += piece[:room]
        self.truncated = self.truncated or len(piece) > room


class _Child(asyncio.SubprocessProtocol):
    """What a child's pipes and its end tell. `exited` is the leader's own end, whoever still holds its output open."""

    def __init__(self, limit_bytes: int) -> None:
        self.kept = {1: _Kept(limit_bytes), 2: _Kept(limit_bytes)}
        self.exited = asyncio.Event()
        self.finished = asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.kept[fd].add(data)

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the name is asyncio's
        self.finished.set()


@dataclass(slots=True)
class _Group:
    """A child and its process group, which are ended and reaped exactly once: afterwards the id may be another's."""

    transport: asyncio.SubprocessTransport
    child: _Child
    grace_s: float
    ending: asyncio.Task[None] | None = None

    @property
    def number(self) -> int:
        """The group's id, which is the leader's process id."""
        return self.transport.get_pid()

    def open_gate(self) -> None:
        """Let the program begin."""
        gate = self.transport.get_pipe_transport(0)
        assert isinstance(gate, asyncio.WriteTransport)
        gate.write(b"\n")
        gate.close()

    async def end(self) -> None:
        """Return when the group has ended and the child is reaped, however often this is interrupted."""
        self.ending = self.ending or asyncio.create_task(self._end_and_reap())
        interrupted: asyncio.CancelledError | None = None
        while not self.ending.done():
            try:
                await asyncio.shield(self.ending)
            except asyncio.CancelledError as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted

    async def _end_and_reap(self) -> None:
        if not self.child.exited.is_set() or group_lives(self.number):
            await end_group(self.number, grace_s=self.grace_s)
        await self.child.exited.wait()
        gate = self.transport.get_pipe_transport(0)
        if gate is not None:
            gate.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_OUTPUT_GRACE_S):
                await self.child.finished.wait()
        self.transport.close()


async def end_left_running(
    marks: Iterable[ProcessMark], *, space: str, grace_s: float = TERM_GRACE_S
) -> tuple[ProcessMark, ...]:
    """End the groups that an earlier process of the daemon left running, all at once; return those that were alive."""
    alive = tuple(mark for mark in marks if mark.boot_id == space and _is_ours(mark))
    await asyncio.gather(*(end_group(mark.process_group, grace_s=grace_s) for mark in alive))
    return alive


async def end_group(process_group: int, *, grace_s: float = TERM_GRACE_S) -> None:
    """Return when no member of the group lives: TERM, then KILL. A member that hangs in the kernel is waited for."""
    _signal(process_group, signal.SIGTERM)
    loop = asyncio.get_running_loop()
    kill_at = loop.time() + grace_s
    killed = False
    while group_lives(process_group):
        if not killed and loop.time() >= kill_at:
            _signal(process_group, signal.SIGKILL)
            killed = True
        await asyncio.sleep(_POLL_STUCK_S if killed and loop.time() > kill_at + grace_s else _POLL_S)


def group_lives(process_group: int) -> bool:
    """Return whether any member of the group lives; one that has ended and waits for its parent does not."""
    try:
        os.killpg(process_group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return bool(_live_members(process_group))


def start_ticks(process_id: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None when there is none of that id."""
    fields = _stat(process_id)
    return None if fields is None else int(fields[19])


def _is_ours(mark: ProcessMark) -> bool:
    ticks = start_ticks(mark.process_group)
    if ticks is not None:
        return ticks == mark.start_ticks
    # The leader has ended. The kernel gives no id out again while a group or session of that number lives.
    return any(fields[3] == str(mark.process_group) for fields in _live_members(mark.process_group))


def _live_members(process_group: int) -> list[list[str]]:
    with os.scandir(_PROC) as entries:
        processes = [_stat(int(entry.name)) for entry in entries if entry.name.isdigit()]
    return [
        fields
        for fields in processes
        if fields is not None and fields[2] == str(process_group) and fields[0] not in "ZX"
    ]


def _stat(process_id: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the third on (state, parent, group, session, ...); None without one."""
    try:
        text = (_PROC / str(process_id) / "stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _signal(process_group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process_group, number)


def _found(program: str, environment: Mapping[str, str]) -> str:
    """Return the program's path, or raise the OSError that exec would: behind the gate it would be an exit code."""
    path = shutil.which(program, path=environment.get("PATH", os.defpath))
    if path is not None:
        return path
    code = errno.EACCES if os.sep in program and Path(program).exists() else errno.ENOENT
    raise OSError(code, os.strerror(code), program)
