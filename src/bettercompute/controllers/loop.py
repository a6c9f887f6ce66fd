"""The one loop that every controller runs in: level-triggered, run periodically and when poked, with the same bounds.

A controller takes no input: it reads what is, decides (a pure function), and writes with guards, so that a run too
many changes nothing and a missed poke costs at most one interval. Several workers may run the same controller at
once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import structlog

from bettercompute.errors import BetterComputeError
from bettercompute.world import World

log = structlog.get_logger("bettercompute.controllers")

FIRST_BACKOFF_MS = 500
LAST_BACKOFF_MS = 30_000
# A controller that always has more to do must still leave the database to others between its batches.
PAUSE_BETWEEN_BATCHES_MS = 10
# One run is a few bounded statements; one that takes longer hangs on a lock or a dead connection.
RUN_TIMEOUT_MS = 60_000


class Controller(Protocol):
    """One thing that is kept true."""

    @property
    def name(self) -> str:
        """Return the name in logs and metrics."""
        ...

    @property
    def interval_ms(self) -> int:
        """Return how often it runs when nobody pokes it."""
        ...

    async def reconcile(self) -> bool:
        """Look, decide, write; return whether a full batch was done, so that more may be waiting."""
        ...


class ControllerLoop:
    """Runs one controller until cancelled; `poke` asks for a run soon."""

    def __init__(self, controller: Controller, *, world: World) -> None:
        self.controller = controller
        self.runs = 0
        self.failures = 0
        self.last_error: str | None = None
        self._world = world
        self._poked = asyncio.Event()
        self._backoff_ms = 0

    def poke(self) -> None:
        """Run again as soon as the present run has ended."""
        self._poked.set()

    async def run(self) -> None:
        """Run for ever; a failure is logged, counted and backed off from, never fatal."""
        while True:
            self._poked.clear()
            more = await self.once()
            await self._pause(more=more)

    async def once(self) -> bool:
        """Run the controller once; return whether it should run again at once."""
        self.runs += 1
        try:
            async with asyncio.timeout(RUN_TIMEOUT_MS / 1000):
                more = await self.controller.reconcile()
        except (BetterComputeError, OSError, TimeoutError) as error:
            self._fail(str(error) or type(error).__name__)
            return False
        except Exception as error:
            log.exception("controller failed", controller=self.controller.name)
            self._fail(repr(error))
            return False
        self.last_error = None
        self._backoff_ms = 0
        return more

    def _fail(self, error: str) -> None:
        self.failures += 1
        self.last_error = error
        self._backoff_ms = min(LAST_BACKOFF_MS, max(FIRST_BACKOFF_MS, self._backoff_ms * 2))
        log.warning("controller run failed", controller=self.controller.name, error=error, backoff_ms=self._backoff_ms)

    async def _pause(self, *, more: bool) -> None:
        if self._backoff_ms:
            # Full jitter: the workers of a cluster do not return to a tired database in step; pokes wait as well.
            await asyncio.sleep(self._world.dice.uniform(self._backoff_ms / 2, self._backoff_ms) / 1000)
            return
        pause_ms = PAUSE_BETWEEN_BATCHES_MS if more else self.controller.interval_ms
        try:
            async with asyncio.timeout(pause_ms / 1000):
                await self._poked.wait()
        except TimeoutError:
            return


class Controllers:
    """The controllers of one worker, each in a task of its own."""

    def __init__(self, controllers: Sequence[Controller], *, world: World) -> None:
        self.loops = {controller.name: ControllerLoop(controller, world=world) for controller in controllers}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start every loop."""
        self._tasks = [asyncio.create_task(loop.run(), name=f"controller-{name}") for name, loop in self.loops.items()]

    async def stop(self) -> None:
        """End every loop; a run in progress is cancelled and its transaction rolled back."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def poke(self, name: str) -> None:
        """Ask one controller for a run; an unknown name is ignored, since a NOTIFY is only a hint."""
        loop = self.loops.get(name)
        if loop is not None:
            loop.poke()
