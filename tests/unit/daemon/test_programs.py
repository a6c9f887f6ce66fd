"""Programs: nothing runs before its mark is durable, nothing is left when the run has returned."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from bettercompute.daemon import process_groups
from bettercompute.daemon.handlers import HandlerCancelled
from bettercompute.daemon.journal_records import DropProcess, NoteProcess, ProcessMark, Write
from bettercompute.daemon.process_groups import end_group, group_lives, process_space, start_ticks
from bettercompute.daemon.programs import Programs, end_left_running
from bettercompute.errors import Unavailable

ENVIRONMENT = {"PATH": os.defpath, "GREETING": "hello"}


class Marks:
    """A journal that only remembers, and may be told to hold a write back or to fail it."""

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self.on_note: Callable[[NoteProcess], Awaitable[None]] | None = None
        self.room_to_drop = True

    async def write(self, write: Write) -> None:
        self.writes.append(write)
        if isinstance(write, DropProcess) and not self.room_to_drop:
            raise Unavailable("the journal has no room", reason="journal-full")
        if isinstance(write, NoteProcess) and self.on_note is not None:
            await self.on_note(write)


@pytest.fixture
def marks() -> Marks:
    return Marks()


def programs(marks: Marks, *, interruptible: bool = True, grace_s: float = 10.0) -> Programs:
    return Programs(
        command_id="c1",
        space=process_space("boot-1"),
        write=marks.write,
        cancelled=asyncio.Event(),
        interruptible=interruptible,
        grace_s=grace_s,
    )


async def run(runner: Programs, *argv: str, timeout_ms: int = 30_000, limit_bytes: int = 65_536):
    return await runner(list(argv), environment=ENVIRONMENT, timeout_ms=timeout_ms, limit_bytes=limit_bytes)


def group_of(marks: Marks) -> int:
    note = marks.writes[0]
    assert isinstance(note, NoteProcess)
    return note.mark.process_group


class Line:
    """A named pipe on which a program tells how far it is."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path

    async def read(self) -> str:
        """Wait for the next line."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        # Open for both, so that there is no end before the first writer comes.
        file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
        try:
            return (await asyncio.wait_for(reader.readline(), 30)).decode().strip()
        finally:
            transport.close()


async def exited(descriptor: int) -> None:
    """Wait for the end of a process that may be nobody's child, by its pidfd."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await asyncio.wait_for(ended.wait(), 30)
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


@pytest.fixture
def line(tmp_path: Path) -> Line:
    return Line(tmp_path / "line")


async def test_a_program_runs_with_its_own_group_environment_and_no_input(marks: Marks) -> None:
    outcome = await run(
        programs(marks), "sh", "-c", 'echo "$GREETING $1 $(cat)"; echo oops >&2; exit 3', "sh", "you; $x"
    )
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (3, b"hello you; $x \n", b"oops\n")
    assert not outcome.timed_out
    assert not outcome.truncated
    group = group_of(marks)
    assert marks.writes[1:] == [DropProcess(group)]
    assert group != os.getpgid(0)
    assert not group_lives(group)


async def test_nothing_runs_before_the_mark_is_durable(marks: Marks, tmp_path: Path) -> None:
    durable = asyncio.Event()

    async def hold(note: NoteProcess) -> None:
        mark = note.mark
        assert start_ticks(mark.process_group) == mark.start_ticks
        assert not (tmp_path / "ran").exists()
        durable.set()

    marks.on_note = hold
    await run(programs(marks), "touch", str(tmp_path / "ran"))
    assert durable.is_set()
    assert (tmp_path / "ran").exists()


async def test_a_mark_that_cannot_be_kept_means_that_nothing_runs(marks: Marks, tmp_path: Path) -> None:
    async def fail(_: NoteProcess) -> None:
        raise RuntimeError("the journal is gone")

    marks.on_note = fail
    with pytest.raises(RuntimeError, match="the journal is gone"):
        await run(programs(marks), "touch", str(tmp_path / "ran"))
    assert not (tmp_path / "ran").exists()
    assert not group_lives(group_of(marks))


async def test_output_is_bounded_and_the_program_never_blocks(marks: Marks) -> None:
    outcome = await run(programs(marks), "sh", "-c", "head -c 1000000 /dev/zero; echo end >&2", limit_bytes=100)
    assert outcome.stdout == bytes(100)
    assert outcome.stderr == b"end\n"
    assert outcome.truncated
    assert outcome.exit_code == 0


async def test_a_timeout_ends_the_whole_group(marks: Marks) -> None:
    outcome = await run(programs(marks), "sh", "-c", "sleep 600 & sleep 600", timeout_ms=100)
    assert outcome.timed_out
    assert outcome.exit_code == -signal.SIGTERM
    assert not group_lives(group_of(marks))


async def test_a_child_left_behind_by_its_program_is_ended(marks: Marks) -> None:
    outcome = await run(programs(marks), "sh", "-c", "sleep 600 & echo started")
    assert outcome.stdout == b"started\n"
    assert not group_lives(group_of(marks))


async def test_what_left_the_group_does_not_hold_the_command(marks: Marks, tmp_path: Path) -> None:
    left = tmp_path / "left"
    # The program ends only once the other has left: until then it is of the group, and goes with it.
    script = f"setsid sh -c 'echo $$ > {left}; exec sleep 600' & until [ -s {left} ]; do sleep 0.01; done; echo out"
    outcome = await run(programs(marks), "sh", "-c", script)
    assert outcome.stdout == b"out\n"
    os.kill(int(left.read_text()), signal.SIGKILL)


async def test_what_ignores_term_is_killed(marks: Marks) -> None:
    runner = programs(marks, grace_s=0.1)
    # What is ignored here is ignored in what is started: a trap of the program's own might be set too late.
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        outcome = await run(runner, "sh", "-c", "sleep 600 & wait; sleep 600", timeout_ms=100)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert outcome.exit_code == -signal.SIGKILL
    assert not group_lives(group_of(marks))


async def test_a_cancel_ends_the_program(marks: Marks, line: Line) -> None:
    runner = programs(marks)
    task = asyncio.create_task(run(runner, "sh", "-c", f"echo on > {line.path}; sleep 600"))
    await line.read()
    runner.cancelled.set()
    with pytest.raises(HandlerCancelled):
        await task
    assert not group_lives(group_of(marks))
    with pytest.raises(HandlerCancelled):
        await run(runner, "true")


async def test_a_destructive_action_is_never_cut_by_a_cancel(marks: Marks, tmp_path: Path, line: Line) -> None:
    runner = programs(marks, interruptible=False)
    go = Line(tmp_path / "go").path
    task = asyncio.create_task(run(runner, "sh", "-c", f"echo on > {line.path}; read -r _ < {go}; echo whole"))
    await line.read()
    runner.cancelled.set()
    await asyncio.to_thread(go.write_text, "go\n")
    assert (await task).stdout == b"whole\n"


@pytest.mark.parametrize("room_to_drop", [True, False], ids=["room", "no-room"])
async def test_the_end_of_the_task_ends_the_group_first(marks: Marks, line: Line, room_to_drop: bool) -> None:
    marks.room_to_drop = room_to_drop
    task = asyncio.create_task(run(programs(marks), "sh", "-c", f"echo on > {line.path}; sleep 600 & sleep 600"))
    await line.read()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not group_lives(group_of(marks))
    assert marks.writes[-1] == DropProcess(group_of(marks))


@pytest.mark.parametrize(
    ("program", "error"), [("/no/such/program", FileNotFoundError), ("/etc/passwd", PermissionError)]
)
async def test_what_cannot_be_started_says_so(marks: Marks, program: str, error: type[OSError]) -> None:
    with pytest.raises(error, match=program):
        await run(programs(marks), program)
    assert marks.writes == []


CHILD = """
import asyncio, pathlib, sys
from bettercompute.daemon.programs import Programs

async def main(line):
    def tell(text):
        pathlib.Path(line).write_text(text)
    async def write(write):
        if sys.argv[2] == "gate":
            await asyncio.to_thread(tell, f"{write.mark.process_group} {write.mark.start_ticks}\\n")
            await asyncio.Event().wait()
    runner = Programs(command_id="c1", space="x", write=write, cancelled=asyncio.Event(), interruptible=True)
    script = f"sleep 600 & echo $$ $(cut -d' ' -f22 /proc/$$/stat) > {line}; sleep 600"
    await runner(["sh", "-c", script], environment={"PATH": "/bin:/usr/bin"}, timeout_ms=600000, limit_bytes=10)

asyncio.run(main(sys.argv[1]))
"""


async def killed_daemon(line: Line, where: str) -> tuple[ProcessMark, int]:
    """Start a daemon that starts a program, end it with kill -9 at `where`; return the mark and the leader's pidfd."""
    daemon = await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, str(line.path), where)
    try:
        group, ticks = (await line.read()).split()
        leader = os.pidfd_open(int(group))
    finally:
        daemon.kill()
        await daemon.wait()
    return ProcessMark("c1", int(group), int(ticks), "space"), leader


async def test_a_daemon_killed_at_the_gate_leaves_nothing(line: Line) -> None:
    mark, leader = await killed_daemon(line, "gate")
    await exited(leader)
    assert not group_lives(mark.process_group)


async def test_what_a_killed_daemon_left_running_is_ended(line: Line) -> None:
    mark, leader = await killed_daemon(line, "running")
    assert group_lives(mark.process_group)
    stranger = ProcessMark("c2", os.getpid(), 1, "space")  # an id that is somebody else's by now
    assert await end_left_running([mark, stranger], space="other space") == ()
    assert group_lives(mark.process_group)
    assert await end_left_running([mark, stranger], space="space") == (mark,)
    assert not group_lives(mark.process_group)
    await exited(leader)


async def test_a_group_whose_leader_has_ended_is_still_found(line: Line) -> None:
    mark, leader = await killed_daemon(line, "running")
    os.kill(mark.process_group, signal.SIGKILL)  # the leader alone
    await exited(leader)
    assert group_lives(mark.process_group)
    assert await end_left_running([mark], space="space") == (mark,)
    assert not group_lives(mark.process_group)


async def test_a_group_that_takes_its_time_is_awaited_and_not_asked(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc is read when something of the group has ended, however long that takes."""
    go = Line(tmp_path / "go").path
    script = f"trap 'read -r _ < {go}; exit' TERM; echo on > {line.path}; while :; do sleep 0.01; done"
    process = await asyncio.create_subprocess_exec("sh", "-c", script, start_new_session=True)
    await line.read()
    scans = 0
    inner = process_groups._live_members

    def counted(group: int, *, among: Sequence[int] | None = None) -> list[process_groups._Member]:
        nonlocal scans
        scans += among is None
        return inner(group, among=among)

    monkeypatch.setattr(process_groups, "_live_members", counted)
    ending = asyncio.create_task(end_group(process.pid))
    await asyncio.to_thread(go.write_text, "go\n")
    await ending
    assert not group_lives(process.pid)
    assert scans <= 5
    await process.wait()


async def test_ending_a_group_that_is_gone_is_nothing() -> None:
    await end_group(2**22 - 1)
