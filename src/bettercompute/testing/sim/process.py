"""Simulated processes: which callbacks are whose, and what pausing and killing one means.

A process is a context variable: whatever is scheduled in its context is one of its steps. A paused process runs no
step, as under SIGSTOP; what would have run waits and is run, in order, when it goes on, unless it was cancelled by
then. A killed one never runs again: no `finally`, no farewell, as after kill -9. Its tasks are kept until the
simulation is put away, or collecting them would run just those.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class SimulatedProcess:
    """One process of one host."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        self.tasks: dict[int, asyncio.Task[Any]] = {}
        """Unfinished, by number."""
        self._held: list[Step] = []
        self._context = contextvars.copy_context()
        self._context.run(PROCESS.set, self)

    def spawn(self, coroutine: Coroutine[Any, Any, T], *, name: str = "") -> asyncio.Task[T]:
        """Start a task of this process."""
        loop = asyncio.get_running_loop()
        return loop.create_task(coroutine, name=name or self.name, context=self._context.copy())

    def run(self, work: Callable[..., T], *args: Any) -> T:
        """Call something as this process does."""
        return self._context.copy().run(work, *args)

    def forget(self, task: asyncio.Task[Any]) -> None:
        """Drop a task that has ended."""
        self.tasks.pop(hash(task), None)

    def pause(self) -> None:
        """Run nothing from now on."""
        self.paused = True

    def go_on(self) -> None:
        """Run what waited, and everything after it."""
        self.paused = False
        held, self._held = self._held, []
        loop = asyncio.get_running_loop()
        for step in held:
            loop.call_soon(step.again, context=_NOBODY)

    def kill(self) -> None:
        """Run nothing ever again."""
        self.alive = False

    def hold(self, step: Step) -> None:
        """Keep a step until the process goes on, or, of a dead one, until it is buried."""
        self._held.append(step)

    def bury(self) -> list[asyncio.Task[Any]]:
        """Let a process, killed or not, run once more to the end of its tasks, which are cancelled and returned."""
        tasks = list(self.tasks.values())
        for task in tasks:
            task.cancel()
        self.alive = True
        self.go_on()
        return tasks


PROCESS: contextvars.ContextVar[SimulatedProcess | None] = contextvars.ContextVar("simulated process", default=None)
# Where what belongs to no process is scheduled: the network, the simulator itself.
_NOBODY = contextvars.Context()


class Step:
    """One callback of a process."""

    __slots__ = ("args", "callback", "context", "handle", "process")

    def __init__(
        self,
        process: SimulatedProcess,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context,
    ) -> None:
        self.process = process
        self.callback = callback
        self.args = args
        self.context = context
        self.handle: asyncio.Handle | None = None

    def __call__(self) -> None:
        """Run, unless the process is paused or dead."""
        if self.process.alive and not self.process.paused:
            self.callback(*self.args)
        else:
            self.process.hold(self)

    def again(self) -> None:
        """Run a step that was held, unless somebody has cancelled it meanwhile."""
        if self.handle is None or not self.handle.cancelled():
            self.context.run(self)
