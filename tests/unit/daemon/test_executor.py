"""The executor: every ending of a command is told once, with its reason, after its processes are gone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from bettercompute.daemon import executor as executor_module
from bettercompute.daemon.config import Config as DaemonConfig
from bettercompute.daemon.executor import Executor, ExecutorParts, Told
from bettercompute.daemon.group_commit import Journal
from bettercompute.daemon.handlers import HandlerContext, HandlerFailed
from bettercompute.daemon.inventory.canonical import section_of_body
from bettercompute.daemon.inventory.facts import FactSettings
from bettercompute.daemon.inventory_held import HeldInventory
from bettercompute.daemon.process_groups import group_lives, process_space
from bettercompute.delivery.commands import CommandState
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import pack_payload
from bettercompute.session.inputs import HandlerFinished, HandlerProgressed
from bettercompute.system import system_world
from tests.unit.daemon.journal_samples import SMALL


@dataclass
class Config:
    facts: FactSettings = field(default_factory=FactSettings)
    value: DaemonConfig = field(default_factory=DaemonConfig)


class Scripted:
    """A handler that does what a test says."""

    kind = "inventory.refresh"

    def __init__(self) -> None:
        self.action: Callable[[HandlerContext], Awaitable[bytes]] | None = None
        self.began = asyncio.Event()
        self.contexts: list[HandlerContext] = []

    async def run(self, context: HandlerContext) -> bytes:
        self.contexts.append(context)
        self.began.set()
        assert self.action is not None
        return await self.action(context)


@dataclass
class Bench:
    executor: Executor
    handler: Scripted
    told: asyncio.Queue[Told]
    inventory: HeldInventory
    journal: Journal

    def start(self, action, *, timeout_ms: int = 30_000, kind: str = "inventory.refresh", payload=None) -> None:
        self.handler.action = action
        body = messages.CommandBody(command_id="c1", kind=kind, timeout_ms=timeout_ms)
        if payload is not None:
            body.payload.CopyFrom(pack_payload(payload))
        self.executor.start("c1", attempt=2, body=body)

    async def ending(self) -> HandlerFinished:
        async with asyncio.timeout(30):
            while True:
                told = await self.told.get()
                if isinstance(told, HandlerFinished):
                    return told


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    world = system_world()
    journal = await Journal.open(tmp_path / "state", world=world, limits=SMALL)
    told: asyncio.Queue[Told] = asyncio.Queue()
    inventory = HeldInventory(state_dir=tmp_path)
    handler = Scripted()
    parts = ExecutorParts(
        world=world,
        journal=journal,
        config=Config(),
        state_dir=tmp_path,
        space=process_space("boot-1"),
        inventory=inventory,
        sign=lambda kind, command_id, state, _: messages.Signature(kid=f"{kind.name} {command_id} {state}"),
        tell=told.put_nowait,
    )
    executor = Executor(parts, {"inventory.refresh": handler, "gpu.reset": handler})
    yield Bench(executor, handler, told, inventory, journal)
    await executor.close()
    await journal.close()


async def test_a_result_is_told_with_its_signature(bench: Bench) -> None:
    async def act(context: HandlerContext) -> bytes:
        assert (context.command_id, context.kind, context.attempt) == ("c1", "inventory.refresh", 2)
        assert isinstance(context.payload, messages.InventoryRefreshPayload)
        assert list(context.payload.sections) == ["cpu"]
        assert bench.executor.running_ids == ("c1",)
        return b"result"

    bench.start(act, payload=messages.InventoryRefreshPayload(sections=["cpu"]))
    ending = await bench.ending()
    assert (ending.command_id, ending.state, ending.result) == ("c1", CommandState.SUCCEEDED, b"result")
    assert ending.signature is not None
    assert ending.signature.kid == "inventory.refresh c1 5"
    assert bench.executor.running_ids == ()


async def test_a_handlers_own_failure_keeps_its_reason(bench: Bench) -> None:
    async def act(context: HandlerContext) -> bytes:
        raise HandlerFailed("no-driver", "there is no driver")

    bench.start(act)
    ending = await bench.ending()
    assert (ending.state, ending.reason, ending.message) == (CommandState.FAILED, "no-driver", "there is no driver")


async def test_a_handlers_fault_costs_one_command(bench: Bench) -> None:
    async def act(context: HandlerContext) -> bytes:
        raise ZeroDivisionError("by design")

    bench.start(act)
    ending = await bench.ending()
    assert (ending.reason, ending.message) == ("handler-fault", "ZeroDivisionError: by design")


async def test_an_end_that_cannot_be_signed_is_an_end_all_the_same(bench: Bench) -> None:
    async def act(context: HandlerContext) -> bytes:
        return b"result"

    def cannot_sign(*_: object) -> messages.Signature:
        raise OSError("the key is gone")

    bench.executor._parts = replace(bench.executor._parts, sign=cannot_sign)
    bench.start(act)
    ending = await bench.ending()
    assert (ending.state, ending.reason, ending.message) == (
        CommandState.FAILED,
        "handler-fault",
        "OSError: the key is gone",
    )
    assert ending.signature is None
    assert bench.executor.running_ids == ()


async def test_bad_deliveries_fail_with_a_reason(bench: Bench) -> None:
    bench.start(None, payload=messages.NodeRebootPayload())
    assert (await bench.ending()).reason == "invalid-payload"
    bench.start(None, kind="logs.collect")
    assert (await bench.ending()).reason == "unsupported"


async def test_a_result_over_its_bound_is_a_failure(bench: Bench) -> None:
    async def act(context: HandlerContext) -> bytes:
        return bytes(1024 * 1024 + 1)

    bench.start(act)
    assert (await bench.ending()).reason == "result-too-large"


async def test_a_timeout_ends_the_programs_first(bench: Bench) -> None:
    async def act(context: HandlerContext) -> bytes:
        await context.run_program(
            ["sleep", "600"], environment={"PATH": os.defpath}, timeout_ms=600_000, limit_bytes=10
        )
        return b""

    bench.start(act, timeout_ms=100)
    ending = await bench.ending()
    assert (ending.state, ending.reason) == (CommandState.FAILED, "timeout")
    assert "100 ms" in ending.message


async def test_a_cancel_is_told_as_cancelled_or_with_the_real_outcome(bench: Bench) -> None:
    async def sleeps(context: HandlerContext) -> bytes:
        await context.run_program(
            ["sleep", "600"], environment={"PATH": os.defpath}, timeout_ms=600_000, limit_bytes=10
        )
        return b""

    bench.start(sleeps)
    await bench.handler.began.wait()
    bench.executor.stop("c1", "changed my mind")
    bench.executor.stop("unknown", "")
    assert (await bench.ending()).state is CommandState.CANCELLED

    async def too_late(context: HandlerContext) -> bytes:
        await context.cancelled.wait()
        return b"done already"

    bench.handler.began.clear()
    bench.start(too_late)
    await bench.handler.began.wait()
    bench.executor.stop("c1", "too late")
    assert (await bench.ending()).result == b"done already"


async def test_a_stopping_daemon_ends_processes_and_tells_nothing(bench: Bench) -> None:
    async def act(context: HandlerContext) -> bytes:
        await context.run_program(
            ["sh", "-c", "sleep 600 & sleep 600"], environment={"PATH": os.defpath}, timeout_ms=600_000, limit_bytes=10
        )
        return b""

    bench.start(act)
    await bench.handler.began.wait()
    await bench.executor.close()
    assert bench.told.empty()
    assert bench.executor.running_ids == ("c1",)


async def test_a_program_is_heard_while_it_runs(bench: Bench, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    async def act(context: HandlerContext) -> bytes:
        script = f"echo begun; read -r _ < {gate}; echo oops >&2; head -c 100000 /dev/zero"
        outcome = await context.run_program(
            ["sh", "-c", script], environment={"PATH": os.defpath}, timeout_ms=60_000, limit_bytes=5, live=True
        )
        assert (outcome.stdout, outcome.truncated) == (b"begun", True)
        await context.run_program(
            ["echo", "a value"], environment={"PATH": os.defpath}, timeout_ms=60_000, limit_bytes=5
        )
        return b""

    bench.start(act)
    heard = await asyncio.wait_for(bench.told.get(), 30)
    assert isinstance(heard, HandlerProgressed)
    assert heard.output == messages.CommandOutput(offset=0, data=b"begun\n")
    await asyncio.to_thread(gate.write_text, "go\n")
    pieces: list[messages.CommandOutput] = []
    while isinstance(told := await asyncio.wait_for(bench.told.get(), 30), HandlerProgressed):
        assert told.output is not None
        pieces.append(told.output)
    assert sum(len(piece.data) + piece.dropped_bytes for piece in pieces) == len(b"oops\n") + 100_000
    assert max(len(piece.data) for piece in pieces) <= 65_536
    assert not any(b"value" in piece.data for piece in pieces)


async def test_news_are_joined_and_the_last_output_is_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "PROGRESS_INTERVAL_S", 0.01)
    seen = asyncio.Event()

    async def act(context: HandlerContext) -> bytes:
        await context.progress("first", 10)
        await context.output(b"hello ")
        await context.output(b"world")
        await asyncio.wait_for(seen.wait(), 30)
        await context.output(b"x" * 100_000)
        await context.progress("last", 200)
        return b""

    bench.start(act)
    first = await asyncio.wait_for(bench.told.get(), 30)
    seen.set()
    second = await asyncio.wait_for(bench.told.get(), 30)
    assert isinstance(first, HandlerProgressed)
    assert first.progress == messages.CommandProgress(stage="first", done=10, total=100, unit="percent")
    assert first.output == messages.CommandOutput(offset=0, data=b"hello world")
    assert isinstance(second, HandlerProgressed)
    assert second.progress is not None
    assert (second.progress.stage, second.progress.done) == ("last", 100)
    assert second.output is not None
    assert len(second.output.data) == 65_536
    assert (second.output.offset, second.output.dropped_bytes) == (11 + 100_000 - 65_536, 100_000 - 65_536)
    assert isinstance(await bench.told.get(), HandlerFinished)


async def test_news_wait_while_whoever_takes_them_has_much_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "PROGRESS_INTERVAL_S", 0.001)
    told: asyncio.Queue[Told] = asyncio.Queue()
    looks: list[bool] = []

    def crowded() -> bool:
        looks.append(told.empty())
        news.add_output(b"x" * 40_000)
        return len(looks) < 4

    news = executor_module._News("c1", told.put_nowait, crowded=crowded)
    news.add_output(b"begin")
    news.due()
    first = await asyncio.wait_for(told.get(), 30)
    assert looks == [True] * 4
    assert isinstance(first, HandlerProgressed)
    assert first.output is not None
    assert (len(first.output.data), first.output.dropped_bytes) == (65_536, 5 + 4 * 40_000 - 65_536)


async def test_sections_that_a_handler_hands_on_are_held(bench: Bench) -> None:
    changes: list[tuple[str, ...]] = []
    bench.inventory.on_change = changes.append

    async def act(context: HandlerContext) -> bytes:
        assert context.held_sections() == {}
        await context.send_sections({"cpu": section_of_body("cpu", b"cores")})
        await context.send_sections({})
        return b""

    bench.start(act)
    await bench.ending()
    assert changes == [("cpu",)]
    frames = bench.inventory.frames(["memory", "cpu"], now_ms=7)
    assert [frame.inventory.name for frame in frames] == ["cpu"]
    assert frames[0].inventory.sha256 == bench.inventory.hashes["cpu"]
    assert not group_lives(2**22 - 1)
