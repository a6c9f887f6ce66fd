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
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bettercompute.daemon.handlers import HandlerCancelled, ProgramOutcome
from bettercompute.daemon.journal_records import DropProcess, NoteProcess, ProcessMark, Write
from bettercompute.daemon.process_groups import TERM_GRACE_S, end_group, group_lives, group_started_at, start_ticks
from bettercompute.errors import Unavailable

# `read` fails at the end of the pipe, so that a dead daemon's child never becomes the program.
_GATE = 'read -r _ && exec "$@" </dev/null'

# How long the rest of the output is read once the group has ended; something that left the group may hold it open.
_OUTPUT_GRACE_S = 1.0


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
    tell: Callable[[bytes], None] = lambda _: None
    """Takes what a program prints while it runs, in the order in which it came."""
    grace_s: float = TERM_GRACE_S

    async def __call__(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        timeout_ms: int,
        limit_bytes: int,
        live: bool = False,
    ) -> ProgramOutcome:
        """Run a program to the end of its whole group, and return how it ended."""
        if self.cancelled.is_set():
            raise HandlerCancelled
        program = _found(argv[0], environment)
        transport, child = await asyncio.get_running_loop().subprocess_exec(
            lambda: _Child(limit_bytes, tell=self.tell if live else None),
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
                # Refused when the daemon stops without room: the next one finds that the group has ended.
                with contextlib.suppress(Unavailable):
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

    def __init__(self, limit_bytes: int, *, tell: Callable[[bytes], None] | None) -> None:
        self._tell = tell
        self.kept = {1: _Kept(limit_bytes), 2: _Kept(limit_bytes)}
        self.exited = asyncio.Event()
        self.finished = asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.kept[fd].add(data)
        if self._tell is not None:
            self._tell(data)

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
    alive = tuple(
        mark for mark in marks if mark.boot_id == space and group_started_at(mark.process_group, mark.start_ticks)
    )
    await asyncio.gather(*(end_group(mark.process_group, grace_s=grace_s) for mark in alive))
    return alive


def _found(program: str, environment: Mapping[str, str]) -> str:
    """Return the program's path, or raise the OSError that exec would: behind the gate it would be an exit code."""
    path = shutil.which(program, path=environment.get("PATH", os.defpath))
    if path is not None:
        return path
    code = errno.EACCES if os.sep in program and Path(program).exists() else errno.ENOENT
    raise OSError(code, os.strerror(code), program)
