"""Nodes whose `bcd` is killed and started again, and what their programs leave behind outside of everything killed."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from bettercompute.daemon.journal import JournalDatabase
from bettercompute.daemon.journal_records import JournalContents
from bettercompute.daemon.status import ask
from bettercompute.errors import Unavailable
from tests.forks import FORKS
from tests.kills.plan import Life
from tests.kills.victims import PROCESS_ID, PROMISED, run_bcd

END_S = 30.0
HOLD_S = 0.05
POLL_S = 0.05

# What stands for nvidia-smi, journalctl, the operator's facts and the reboot: it tells a file that no kill reaches that
# it runs, and whether another one ran beside it, whose lock the kernel lets go with its last process.
PROGRAM = """#!/bin/sh
echo "{name} $BC_COMMAND_ID$* begin" >> {folder}/runs
exec 9>> {folder}/alone-{name}
flock -n 9 || echo "{name} $BC_COMMAND_ID$* beside" >> {folder}/runs
rm {folder}/kill-begin 2> {folder}/null && kill -9 $(cat {folder}/{process_id})
sleep {hold_s}
rm {folder}/kill-end 2> {folder}/null && kill -9 $(cat {folder}/{process_id})
echo "{name} $BC_COMMAND_ID$* end" >> {folder}/runs
{last}
"""
LAST = {
    "nvidia-smi": "",
    "journalctl": "echo a line",
    "fact": "echo '{\"held\": 1}'",
    # The machine goes down with the daemon, and comes up under another boot id.
    "reboot": 'echo "boot-$BC_COMMAND_ID" > {folder}/boot_id; kill -9 $(cat {folder}/{process_id})',
}


async def ended(process: ForkServerProcess) -> int:
    """Wait for a process's end and return its exit code."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    loop.add_reader(process.sentinel, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(process.sentinel)
    process.join()
    code = process.exitcode
    assert code is not None
    return code


@dataclass
class Promises:
    """What the daemon's journal has promised in all of its lives."""

    finished: dict[str, tuple[int, str]] = field(default_factory=dict)
    """State and result, by command."""
    events: dict[int, str] = field(default_factory=dict)
    """The event's id, by seq."""


@dataclass
class Node:
    """One node's folder, and the process that runs there now."""

    node_id: str
    folder: Path
    process: ForkServerProcess | None = None
    deaths: int = 0
    known_events: int = 0
    """Promised before its present life, which begins with one."""
    unborn: int = 0
    """Deaths before the journal had promised anything: half made, it is set aside."""

    def prepare(self, *, gateway_url: str) -> None:
        """Write its configuration and its programs; `identity` is there already."""
        folder = self.folder
        programs, facts = folder / "programs", folder / "facts"
        programs.mkdir()
        facts.mkdir()
        for name, last in LAST.items():
            path = facts / name if name == "fact" else programs / name
            terms: dict[str, Any] = {"folder": folder, "process_id": PROCESS_ID}
            terms["last"] = last.replace("{folder}", str(folder)).replace("{process_id}", PROCESS_ID)
            path.write_text(PROGRAM.format(name=name, hold_s=HOLD_S, **terms))
            path.chmod(0o755)
        (folder / "boot_id").write_text("boot-0\n")
        (folder / "bcd.toml").write_text(
            f'state_dir = "{folder / "state"}"\nidentity_import = "{folder / "identity"}"\n'
            f'gateway_url = ["{gateway_url}"]\n'
            f'[inventory]\nfacts_dir = "{facts}"\n'
            f'[reboot]\ncommand = ["{programs / "reboot"}"]\nboot_id_file = "{folder / "boot_id"}"\n'
            '[logs]\nallow_http = true\nallow_networks = ["127.0.0.1/32"]\n'
        )

    def start(self, life: Life) -> None:
        """Begin a life of its daemon."""
        self.known_events = len(self.promises().events)
        for moment in ("begin", "end"):
            (self.folder / f"kill-{moment}").unlink(missing_ok=True)
        if life.program:
            (self.folder / f"kill-{life.program}").touch()
        process = FORKS.Process(target=run_bcd, args=(self.folder, life), daemon=True)
        process.start()
        self.process = process

    async def live(self, lives: list[Life]) -> None:
        """Live one life after the other, and then without an end of its own, for ever; whatever kills it."""
        while True:
            self.start(lives.pop(0) if lives else Life())
            assert self.process is not None
            code = await ended(self.process)
            assert code == -signal.SIGKILL, f"bcd of {self.node_id} ended with {code}: {self.log()}"
            self.deaths += 1
            self.unborn += not (self.folder / PROMISED).stat().st_size

    def signal(self, number: signal.Signals) -> None:
        """Send its daemon a signal, if there is one."""
        if self.process is not None and self.process.is_alive():
            assert self.process.pid is not None
            os.kill(self.process.pid, number)

    async def stop(self) -> bool:
        """End its daemon in order; return whether it came to that, and was not killed on the way."""
        assert self.process is not None
        self.signal(signal.SIGTERM)
        async with asyncio.timeout(END_S):
            code = await ended(self.process)
        # The signal may meet a life that has only just begun and has promised nothing.
        assert code in (0, -signal.SIGTERM, -signal.SIGKILL), f"bcd of {self.node_id} ended with {code}: {self.log()}"
        self.deaths += code == -signal.SIGKILL
        return code != -signal.SIGKILL

    async def until_settled(self) -> None:
        """Wait until its daemon has been heard and nothing it owed is unacknowledged. The caller bounds the wait."""
        while True:
            with contextlib.suppress(Unavailable):
                status = await asyncio.to_thread(ask, self.folder / "state")
                heard = len(self.promises().events) > self.known_events
                if status.connected and heard and not (status.unacked_results or status.unacked_events):
                    return
            await asyncio.sleep(POLL_S)

    def journal(self) -> tuple[JournalContents, bool]:
        """Return what its journal holds, and whether that owes anything. Its daemon is stopped."""
        database = JournalDatabase(self.folder / "state")
        contents = database.check()
        database.close()
        return contents, bool(contents.meta.events) or any(not entry.acked for entry in contents.commands)

    def log(self) -> str:
        """Return the end of its log."""
        return (self.folder / "bcd.log").read_text()[-3_000:]

    def promises(self) -> Promises:
        """Return what was promised so far."""
        found = Promises()
        path = self.folder / PROMISED
        for line in path.read_text().splitlines() if path.exists() else ():
            match json.loads(line):
                case {"finished": command_id, "state": state, "result": result}:
                    found.finished[command_id] = (state, result)
                case {"event": event_id, "seq": seq}:
                    found.events[seq] = event_id
        return found

    def runs(self) -> Counter[tuple[str, str, str]]:
        """Return how often each program said what, by its name, its arguments and its word."""
        path = self.folder / "runs"
        lines = path.read_text().splitlines() if path.exists() else []
        return Counter(
            (name, argument.strip(), word)
            for name, argument, word in (
                (line.split()[0], " ".join(line.split()[1:-1]), line.split()[-1]) for line in lines
            )
        )

    def programs_left(self) -> list[str]:
        """Return the programs of which a process still lives."""
        left = []
        for path in self.folder.glob("alone-*"):
            with path.open("a") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    left.append(path.name)
        return left
