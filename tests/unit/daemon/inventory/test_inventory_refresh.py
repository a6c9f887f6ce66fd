"""`inventory.refresh` as its handler: which sections, what is handed on, how it stops, and fact programs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bettercompute.daemon.config import Config as DaemonConfig
from bettercompute.daemon.handlers import REGISTRY, HandlerCancelled, HandlerContext, HandlerFailed, ProgramOutcome
from bettercompute.daemon.handlers.inventory_refresh import HANDLER, InventoryRefresh
from bettercompute.daemon.inventory.canonical import SECTION_NAMES, CanonicalSection
from bettercompute.daemon.inventory.collection import collect_all, collect_without_programs
from bettercompute.daemon.inventory.facts import MAX_FACT_OUTPUT_BYTES, FactSettings, kept_facts
from bettercompute.daemon.inventory.host import HostRoot
from bettercompute.daemon.journal_records import Write
from bettercompute.daemon.programs import Programs
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import KINDS
from bettercompute.system import system_world
from bettercompute.world import World
from tests.unit.daemon.inventory.recorded import recorded_host


@dataclass
class Config:
    facts: FactSettings = field(default_factory=FactSettings)
    value: DaemonConfig = field(default_factory=DaemonConfig)


@dataclass
class FakeContext:
    """What the executor gives a handler, noting down what the handler does."""

    state_dir: Path
    sections: Sequence[str] = ()
    config: Config = field(default_factory=Config)
    held: dict[str, CanonicalSection] = field(default_factory=dict)
    sent: dict[str, CanonicalSection] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    ran: list[tuple[list[str], Mapping[str, str], int]] = field(default_factory=list)
    outcome: ProgramOutcome | Exception = field(default_factory=lambda: ProgramOutcome(0, b"row=1\n", b""))
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    world: World = field(default_factory=system_world)
    command_id: str = "018f3c1e-0000-7000-8000-000000000001"
    kind: str = "inventory.refresh"
    attempt: int = 1

    @property
    def payload(self) -> messages.InventoryRefreshPayload:
        return messages.InventoryRefreshPayload(sections=self.sections)

    async def progress(self, message: str, percent: int | None = None) -> None:
        self.said.append(f"{percent} {message}")

    async def output(self, data: bytes) -> None:
        raise AssertionError(f"nothing is printed, not {data!r}")

    async def run_program(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        timeout_ms: int,
        limit_bytes: int,
        live: bool = False,
    ) -> ProgramOutcome:
        assert not live, "what a fact prints is its value, not news"
        assert limit_bytes == MAX_FACT_OUTPUT_BYTES
        self.ran.append((list(argv), environment, timeout_ms))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def held_sections(self) -> Mapping[str, CanonicalSection]:
        return self.held

    def unrepeatable_running(self) -> Sequence[str]:
        return ()

    async def send_sections(self, changed: Mapping[str, CanonicalSection]) -> None:
        self.sent.update(changed)


@pytest.fixture
def host(tmp_path: Path) -> HostRoot:
    return recorded_host(tmp_path / "host", "gpu_server")


@pytest.fixture
def context(tmp_path: Path) -> FakeContext:
    (tmp_path / "state").mkdir()
    return FakeContext(state_dir=tmp_path / "state")


async def refresh(context: FakeContext, host: HostRoot) -> messages.InventoryRefreshResult:
    checked: HandlerContext = context
    result = await InventoryRefresh(root=lambda: host).run(checked)
    return messages.InventoryRefreshResult.FromString(result)


def fact_folder(context: FakeContext, tmp_path: Path) -> Path:
    folder = tmp_path / "facts.d"
    folder.mkdir(mode=0o755)
    (folder / "rack").write_text("#!/bin/sh\n")
    (folder / "rack").chmod(0o755)
    context.config = Config(facts=FactSettings(facts_dir=folder, fact_timeout_ms=1234))
    return folder


def test_handlers_are_found_by_their_kind() -> None:
    assert REGISTRY["inventory.refresh"] is HANDLER
    assert REGISTRY.keys() <= KINDS.keys()


async def test_all_sections_are_collected_and_all_are_new(context: FakeContext, host: HostRoot) -> None:
    result = await refresh(context, host)
    expected = collect_all(host)
    assert [section.name for section in result.sections] == list(expected)
    assert all(section.changed for section in result.sections)
    assert context.sent == expected
    for section in result.sections:
        assert section.sha256 == expected[section.name].sha256
        assert section.size_bytes == len(expected[section.name].body)
    assert context.said[0] == "0 collecting system"
    assert not context.ran


async def test_only_what_changed_is_handed_on(context: FakeContext, host: HostRoot) -> None:
    context.held = collect_all(host)
    (host.folder / "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages").write_text("4096")
    result = await refresh(context, host)
    assert [section.name for section in result.sections if section.changed] == ["memory"]
    assert context.sent.keys() == {"memory"}


async def test_gaps_are_told_in_the_result(context: FakeContext, host: HostRoot) -> None:
    context.sections = ["gpus"]
    result = await refresh(context, host)
    assert [(gap.what, gap.reason[:9]) for gap in result.sections[0].unreadable] == [("nvml", "no-driver")]


async def test_named_sections_come_in_the_inventorys_order(context: FakeContext, host: HostRoot) -> None:
    context.sections = ["pci", "cpu", "pci"]
    result = await refresh(context, host)
    assert [section.name for section in result.sections] == ["cpu", "pci"]
    assert context.sent.keys() == {"cpu", "pci"}


async def test_an_unknown_section_fails_and_names_those_that_exist(context: FakeContext, host: HostRoot) -> None:
    context.sections = ["cpu", "gpu"]
    with pytest.raises(HandlerFailed, match="section 'gpu' does not exist; the sections are system, cpu") as caught:
        await refresh(context, host)
    assert caught.value.reason == "unknown-section"
    assert not context.sent


async def test_facts_without_a_folder_fail_with_the_key_to_set(context: FakeContext, host: HostRoot) -> None:
    context.sections = ["facts"]
    with pytest.raises(HandlerFailed, match="facts_dir") as caught:
        await refresh(context, host)
    assert caught.value.reason == "no-facts"


async def test_it_stops_between_two_sections(context: FakeContext, host: HostRoot) -> None:
    class CancelledAfterOne(FakeContext):
        async def progress(self, message: str, percent: int | None = None) -> None:
            await FakeContext.progress(self, message, percent)
            self.cancelled.set()

    stopping = CancelledAfterOne(state_dir=context.state_dir)
    with pytest.raises(HandlerCancelled):
        await refresh(stopping, host)
    assert stopping.said == ["0 collecting system"]
    assert not stopping.sent


async def test_fact_programs_run_by_the_executor(context: FakeContext, host: HostRoot, tmp_path: Path) -> None:
    folder = fact_folder(context, tmp_path)
    result = await refresh(context, host)
    assert [section.name for section in result.sections] == list(SECTION_NAMES)
    argv, environment, timeout_ms = context.ran[0]
    assert argv == [str(folder / "rack")]
    assert environment.keys() == {"PATH", "LANG"}
    assert timeout_ms == 1234
    facts = messages.FactsInventory.FromString(context.sent["facts"].body)
    assert [(fact.name, fact.value, fact.source) for fact in facts.facts] == [("row", "1", "rack")]
    assert kept_facts(context.state_dir) == context.sent["facts"]


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (ProgramOutcome(-15, b"", b"", timed_out=True), "timed-out: ended after 1234 ms, see fact_timeout_ms"),
        (ProgramOutcome(3, b"row=1", b"no rack\0\n"), "program-failed: exit code 3, no rack"),
        (ProgramOutcome(1, b"", b""), "program-failed: exit code 1"),
        (ProgramOutcome(0, b"row=1", b"", truncated=True), "too-large: printed more than 65536 bytes"),
        (PermissionError(13, "Permission denied"), "permission-denied"),
        (OSError(8, "Exec format error"), "read-failed: ENOEXEC"),
    ],
)
async def test_a_fact_program_that_fails_is_stated(
    context: FakeContext, host: HostRoot, tmp_path: Path, outcome: ProgramOutcome | Exception, reason: str
) -> None:
    fact_folder(context, tmp_path)
    context.sections, context.outcome = ["facts"], outcome
    result = await refresh(context, host)
    assert [(gap.what, gap.reason) for gap in result.sections[0].unreadable] == [("rack", reason)]


async def test_a_cancelled_fact_program_cancels_the_command(
    context: FakeContext, host: HostRoot, tmp_path: Path
) -> None:
    fact_folder(context, tmp_path)
    context.sections, context.outcome = ["facts"], HandlerCancelled()
    with pytest.raises(HandlerCancelled):
        await refresh(context, host)


async def test_facts_that_cannot_be_kept_are_sent_all_the_same(
    context: FakeContext, host: HostRoot, tmp_path: Path
) -> None:
    fact_folder(context, tmp_path)
    context.sections, context.state_dir = ["facts"], tmp_path / "gone"
    await refresh(context, host)
    assert context.sent.keys() == {"facts"}


async def test_the_next_start_holds_the_facts_without_running_anything(
    context: FakeContext, host: HostRoot, tmp_path: Path
) -> None:
    fact_folder(context, tmp_path)
    await refresh(context, host)
    started = collect_without_programs(host, facts=context.config.facts, state_dir=context.state_dir)
    assert started == context.sent
    assert len(context.ran) == 1
    without_facts = collect_without_programs(host, facts=FactSettings(), state_dir=context.state_dir)
    assert "facts" not in without_facts, "a folder that is no longer configured leaves nothing behind"


@pytest.fixture
def programs(context: FakeContext) -> list[Write]:
    """Have the executor's own runner start programs; returns what it journals."""
    journaled: list[Write] = []

    async def write(entry: Write) -> None:
        journaled.append(entry)

    runner = Programs(context.command_id, "boot/pid:[1]", write, context.cancelled, interruptible=True)
    context.run_program = runner  # type: ignore[method-assign]  # the context's runner is a value like this one
    return journaled


def holding_fact(context: FakeContext, tmp_path: Path) -> Path:
    """A fact program that waits for a line from a named pipe and states it; returns the pipe."""
    folder = fact_folder(context, tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (folder / "rack").write_text(f"#!/bin/sh\nread -r row < {pipe}\necho row=$row\n")
    context.config = Config(facts=FactSettings(facts_dir=folder, fact_timeout_ms=60_000))
    context.sections = ["facts"]
    return pipe


async def test_a_fact_program_holds_the_command_until_it_ends(
    context: FakeContext, host: HostRoot, tmp_path: Path, programs: list[Write]
) -> None:
    pipe = holding_fact(context, tmp_path)
    running = asyncio.create_task(refresh(context, host))
    # Opening the pipe waits for the program's own end of it.
    await asyncio.to_thread(pipe.write_text, "12\n")
    await running
    facts = messages.FactsInventory.FromString(context.sent["facts"].body)
    assert [(fact.name, fact.value) for fact in facts.facts] == [("row", "12")]
    assert len(programs) == 2, "its process group was noted before it began and dropped after it ended"


async def test_cancelling_ends_a_fact_program_that_holds(
    context: FakeContext, host: HostRoot, tmp_path: Path, programs: list[Write]
) -> None:
    pipe = holding_fact(context, tmp_path)
    running = asyncio.create_task(refresh(context, host))
    descriptor = await asyncio.to_thread(os.open, pipe, os.O_WRONLY)
    try:
        context.cancelled.set()
        with pytest.raises(HandlerCancelled):
            await running
    finally:
        os.close(descriptor)
    assert not context.sent
    assert len(programs) == 2
