"""Process groups: which process is which, who of a group lives, and how all of it is ended.

Nothing here is asked again and again: /proc is read once for a group's members, the kernel tells the end of each by its
pidfd, and only then is it read again, for what those may have started meanwhile. A group's number is signalled only
while a member of it is known to live, because afterwards it may be another's. See docs/delivery.md, "At the daemon";
decisions 0082 and 0150.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# How long a program may take to end after TERM before it is killed.
TERM_GRACE_S = 10.0

# How often a group is looked at on a kernel without pidfds (before Linux 5.3).
_POLL_S = 0.1

_PROC = Path("/proc")


def process_space(boot_id: str) -> str:
    """Return the name of the space in which process ids mean what they say: this boot and this pid namespace."""
    try:
        namespace = str((_PROC / "self/ns/pid").readlink())
    except OSError:
        namespace = "pid:[?]"
    return f"{boot_id}/{namespace}"


def start_ticks(process_id: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None when there is none of that id."""
    fields = _stat(process_id)
    return None if fields is None else int(fields[19])


def group_lives(process_group: int) -> bool:
    """Return whether any member of the group lives; one that has ended and waits for its parent does not."""
    try:
        os.killpg(process_group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return bool(_live_members(process_group))


def group_started_at(process_group: int, ticks: int) -> bool:
    """Return whether the group is the one whose leader started at `ticks`; it may have ended."""
    found = start_ticks(process_group)
    if found is not None:
        return found == ticks
    # The leader has ended. The kernel gives no id out again while a group or session of that number lives.
    return any(member.session == process_group for member in _live_members(process_group))


async def end_group(process_group: int, *, grace_s: float = TERM_GRACE_S) -> None:
    """Return when no member of the group lives: TERM, then KILL. A member that hangs in the kernel is waited for.

    The caller knows that the group is its own: its leader has not been reaped, or its mark fits.
    """
    _signal(process_group, signal.SIGTERM)
    try:
        async with asyncio.timeout(grace_s):
            while members := await asyncio.to_thread(_live_members, process_group):
                await _ended(process_group, members)
    except TimeoutError:
        while members := await asyncio.to_thread(_live_members, process_group):
            _signal(process_group, signal.SIGKILL)
            await _ended(process_group, members)


@dataclass(frozen=True, slots=True)
class _Member:
    process_id: int
    session: int


async def _ended(process_group: int, members: Sequence[_Member]) -> None:
    """Return when all of these have ended; where the kernel does not tell, after a moment."""
    for member in members:
        try:
            descriptor = os.pidfd_open(member.process_id)
        except ProcessLookupError:
            continue
        except OSError:
            await asyncio.sleep(_POLL_S)
            return
        try:
            # The id may have become another's before it was opened.
            if member in _live_members(process_group, among=(member.process_id,)):
                await _readable(descriptor)
        finally:
            os.close(descriptor)


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)


def _live_members(process_group: int, *, among: Sequence[int] | None = None) -> list[_Member]:
    if among is None:
        with os.scandir(_PROC) as entries:
            among = [int(entry.name) for entry in entries if entry.name.isdigit()]
    found = []
    for process_id in among:
        fields = _stat(process_id)
        if fields is not None and fields[2] == str(process_group) and fields[0] not in "ZX":
            found.append(_Member(process_id, int(fields[3])))
    return found


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
