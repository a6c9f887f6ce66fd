"""One handler under the real executor, with real programs: what a test of a kind starts it with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import Message

from bettercompute.daemon.config import Config
from bettercompute.daemon.executor import Executor, ExecutorParts, Told
from bettercompute.daemon.group_commit import Journal
from bettercompute.daemon.handlers import Handler
from bettercompute.daemon.inventory.facts import FactSettings
from bettercompute.daemon.inventory_held import HeldInventory
from bettercompute.daemon.process_groups import process_space
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import pack_payload
from bettercompute.session.inputs import HandlerFinished, HandlerProgressed
from bettercompute.system import system_world
from tests.unit.daemon.journal_samples import SMALL

TIMEOUT_S = 30


@dataclass
class Settings:
    """A `HandlerConfig`."""

    value: Config
    facts: FactSettings = field(default_factory=FactSettings)


@dataclass
class HandlerBench:
    """An executor and what it told."""

    executor: Executor
    settings: Settings
    told: asyncio.Queue[Told]
    progressed: list[HandlerProgressed] = field(default_factory=list)

    def start(self, kind: str, payload: Message, *, command_id: str = "c1", timeout_ms: int = 30_000) -> None:
        """Begin a command."""
        body = messages.CommandBody(command_id=command_id, kind=kind, timeout_ms=timeout_ms)
        body.payload.CopyFrom(pack_payload(payload))
        self.executor.start(command_id, attempt=1, body=body)

    async def ending(self) -> HandlerFinished:
        """Return the next ending."""
        async with asyncio.timeout(TIMEOUT_S):
            while not isinstance(told := await self.told.get(), HandlerFinished):
                self.progressed.append(told)
            return told

    async def run(self, kind: str, payload: Message, *, timeout_ms: int = 30_000) -> HandlerFinished:
        """Run one command to its end."""
        self.start(kind, payload, timeout_ms=timeout_ms)
        return await self.ending()


@contextlib.asynccontextmanager
async def handler_bench(folder: Path, config: Config, *handlers: Handler) -> AsyncIterator[HandlerBench]:
    """Give a bench with these handlers, and end what still runs."""
    world = system_world()
    journal = await Journal.open(folder / "state", world=world, limits=SMALL)
    told: asyncio.Queue[Told] = asyncio.Queue()
    settings = Settings(config)
    parts = ExecutorParts(
        world=world,
        journal=journal,
        config=settings,
        state_dir=folder,
        space=process_space("boot-1"),
        inventory=HeldInventory(state_dir=folder),
        sign=lambda *_: None,
        tell=told.put_nowait,
    )
    executor = Executor(parts, {handler.kind: handler for handler in handlers})
    try:
        yield HandlerBench(executor, settings, told)
    finally:
        await executor.close()
        await journal.close()
