"""The processes that are killed: real `bcd node` and `better-compute serve`, which end themselves at a chosen point.

They are forked from a server that has imported everything, so that a thousand of them are affordable. Nothing of the
product knows of this: the points are set in the forked process alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import threading
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bettercompute.cli import bcd, serve
from bettercompute.daemon import agent, maintenance, node_round
from bettercompute.daemon.handlers import REGISTRY, gpu_reset, logs_collect
from bettercompute.daemon.journal import JournalDatabase
from bettercompute.daemon.journal_records import AppendEvents, Write
from bettercompute.gateway import ingest
from bettercompute.gateway.hello import HelloTransactions
from bettercompute.protocol import messages
from bettercompute.server import app, postgres
from bettercompute.session.effects import FinishCommand
from bettercompute.store import delivery
from tests.kills.plan import GatewayKill, Life
from tests.unit.daemon.inventory.recorded_nvml import RecordedGpu
from tests.unit.daemon.test_gpu_handlers import Diagnosed

IMPORTED = (agent, maintenance, node_round, app, postgres)
PR_SET_PDEATHSIG = 1
PROMISED = "promised.jsonl"
PROCESS_ID = "pid"
PASSED = "passed"


class AnyGpu(Diagnosed):
    """Knows every GPU that is asked for, idle."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> RecordedGpu:  # noqa: N802 - NVML's name
        return RecordedGpu(uuid=uuid)


# The daemon.


def run_bcd(folder: Path, life: Life) -> None:
    """Run `bcd node` of `folder` until it dies as `life` says, or is told to stop."""
    _log_to(folder / "bcd.log")
    (folder / PROCESS_ID).write_text(str(os.getpid()))
    path = {"PATH": f"{folder / 'programs'}:/usr/bin:/bin"}
    gpu_reset._ENVIRONMENT.update(path)
    logs_collect._ENVIRONMENT.update(path)
    for kind in ("gpu.reset", "diag.nvml"):
        REGISTRY[kind]._load = lambda: AnyGpu(RecordedGpu())  # type: ignore[attr-defined]
    passed = _make_mortal(life.boundary, told=os.open(folder / PROMISED, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    code = bcd.run(["node", "--config", str(folder / "bcd.toml")])
    (folder / PASSED).write_text(str(passed.count))
    os._exit(code)


class _Passed:
    """Counts the boundaries that this life has passed."""

    count = 0


def _make_mortal(boundary: int, *, told: int) -> _Passed:
    """Count the boundaries between the steps of the journal's transactions, and die at the n-th; 0: never.

    What was promised is written down beside the journal before the next boundary: a second opinion that no fault of the
    journal can change.
    """
    lived = _Passed()
    written: list[Write] = []

    def passed() -> None:
        lived.count += 1
        if lived.count == boundary:
            os.kill(os.getpid(), signal.SIGKILL)

    begin, commit = JournalDatabase._begin, JournalDatabase._commit
    apply_one, promise = JournalDatabase._apply_one, JournalDatabase._promise

    def mortal_begin(self: JournalDatabase) -> None:
        written.clear()
        passed()
        begin(self)
        passed()

    def mortal_apply(self: JournalDatabase, write: Write) -> None:
        apply_one(self, write)
        written.append(write)
        passed()

    def mortal_commit(self: JournalDatabase) -> None:
        passed()
        commit(self)
        passed()

    def mortal_promise(self: JournalDatabase) -> None:
        promise(self)
        lines = b"".join(line for write in written for line in _promised(write))
        if lines:
            os.write(told, lines)
        passed()

    for name, mortal in (
        ("_begin", mortal_begin),
        ("_apply_one", mortal_apply),
        ("_commit", mortal_commit),
        ("_promise", mortal_promise),
    ):
        setattr(JournalDatabase, name, mortal)
    return lived


def _promised(write: Write) -> list[bytes]:
    match write:
        case FinishCommand(command_id, state, update, _):
            result = messages.CommandUpdate.FromString(update).result.hex()
            said = [{"finished": command_id, "state": int(state), "result": result}]
        case AppendEvents(events):
            said = [{"event": event.event_id, "seq": event.seq} for event in events]
        case _:
            said = []
    return [json.dumps(line).encode() + b"\n" for line in said]


# The control plane.


def run_serve(config: Path, log: Path, roles: tuple[str, ...], arms: Path) -> None:
    """Run `better-compute serve` until it is told to stop, or a kill that is laid down as the file `arms` has come."""
    _log_to(log)
    _set_points(arms)
    serve.serve(config=config, role=list(roles), log_level="info")
    os._exit(0)


def arm(arms: Path, kill: GatewayKill, *, postmaster: int) -> None:
    """Lay down a kill for the process that watches `arms`; it counts the passages from now on."""
    laid = arms.with_suffix(".new")
    laid.write_text(json.dumps({**asdict(kill), "postmaster": postmaster}))
    laid.rename(arms)


def struck(arms: Path) -> Path:
    """Return the file that has a line for each kill that came."""
    return arms.with_suffix(".struck")


class _Armed:
    """The kill that was laid down last, and how many passages are left until it comes."""

    def __init__(self, arms: Path) -> None:
        self._arms = arms
        self._kill: GatewayKill | None = None
        self._left = self._postmaster = 0

    def passed(self, point: str) -> None:
        if self._arms.exists():
            laid = json.loads(self._arms.read_text())
            self._arms.unlink()
            self._postmaster = laid.pop("postmaster")
            self._kill = GatewayKill(**laid)
            self._left = self._kill.passage
        if self._kill is None or point != self._kill.point:
            return
        self._left -= 1
        if self._left == 0:
            with struck(self._arms).open("a") as told:
                told.write(f"{self._kill.victim} at {point}\n")
            _strike(self._kill, postmaster=self._postmaster)


def _set_points(arms: Path) -> None:
    passed = _Armed(arms).passed
    _around(HelloTransactions, "run", passed, before="hello-received", after="hello-committed")
    _around(delivery, "dispatch", passed, before="dispatch-chosen", after="dispatch-committed")
    _around(ingest.Ingest, "_write", passed, before="facts-received", after="facts-committed")
    _around(delivery, "store_events", passed, after="events-committed")
    _around(delivery, "store_statuses", passed, after="statuses-committed")
    _around(delivery, "store_command_news", passed, after="commands-committed")
    committed = ingest._committed

    def acked(*arguments: Any) -> Any:
        passed("facts-acked")
        return committed(*arguments)

    ingest._committed = acked  # type: ignore[assignment]


def _around(owner: Any, name: str, passed: Callable[[str], None], *, before: str = "", after: str = "") -> None:
    """Pass a point before and after each call of an asynchronous function."""
    inner: Callable[..., Coroutine[Any, Any, Any]] = getattr(owner, name)

    async def around(*arguments: Any, **named: Any) -> Any:
        passed(before)
        result = await inner(*arguments, **named)
        passed(after)
        return result

    setattr(owner, name, around)


def _strike(kill: GatewayKill, *, postmaster: int) -> None:
    if kill.victim == "gateway":
        os.kill(os.getpid(), signal.SIGKILL)
    victim = postmaster if kill.victim == "postgres" else random.choice(_children(postmaster))
    if kill.delay_ms:
        threading.Timer(kill.delay_ms / 1000, os.kill, (victim, signal.SIGKILL)).start()
    else:
        os.kill(victim, signal.SIGKILL)


def _children(parent: int) -> list[int]:
    task = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in task]


def _log_to(path: Path) -> None:
    # Nothing that was forked outlives the tests, however those end.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
