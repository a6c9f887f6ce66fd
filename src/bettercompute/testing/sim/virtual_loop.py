"""An event loop whose clock jumps: when nothing is runnable, time goes on to the next timer, and no earlier.

Nothing else moves it. What really takes time (a statement of PostgreSQL, an fsync of SQLite) is done in place, while
virtual time stands still, so a run depends on its seed alone. The order of everything is fixed: tasks hash by a number
in the order of their making (`asyncio.wait` and task groups keep sets), threads of an executor become steps of this
loop. Every callback belongs to the simulated process in whose context it was scheduled, which can be paused and killed
between any two of them. See docs/simulator.md, "Virtual time".
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import selectors
import signal
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from concurrent.futures import Executor
from typing import Any, TypeAlias, TypeVar, TypeVarTuple

from bettercompute.errors import Bug
from bettercompute.testing.sim.process import PROCESS, Step

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

START_S = 1_000.0
# Above a float's step at a year of virtual seconds, far below a millisecond: a smaller one would loop for ever.
RESOLUTION_S = 1e-6
# Far above what ten thousand nodes do in one moment; whoever does more waits for something that only time can bring.
TURNS_MAX = 200_000

_Coroutine: TypeAlias = Coroutine[Any, Any, T] | Generator[Any, None, T]


class _Interruption:
    """Whether somebody wants every simulation of this process to end."""

    wanted = False


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Have SIGINT and SIGTERM end what is simulated in this block, between two turns of its loop.

    Python would raise anywhere: amid a task, which then looks as if its process had a fault, or amid the driver.
    """

    def want(*_: object) -> None:
        _Interruption.wanted = True

    _Interruption.wanted = False
    before = {number: signal.signal(number, want) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        _Interruption.wanted = False
        for number, handler in before.items():
            signal.signal(number, handler)


class NumberedTask(asyncio.Task[T]):
    """A task whose hash is its number, so that sets of tasks have one order in every run."""

    def __init__(
        self, coroutine: _Coroutine[T], *, loop: VirtualLoop, context: contextvars.Context | None = None
    ) -> None:
        self._number = next(loop.task_numbers)  # before the base class, which keeps tasks in a set
        super().__init__(coroutine, loop=loop, context=context)
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is not None:
            process.tasks[self._number] = self
            self.add_done_callback(process.forget)

    @property
    def number(self) -> int:
        """Return its place in the order of all tasks."""
        return self._number

    def __hash__(self) -> int:
        return self._number


class _JumpingSelector(selectors.BaseSelector):
    """Waits for nothing: where the loop would sleep, its clock jumps. Registered files are kept and never looked at."""

    def __init__(self) -> None:
        self.jump: Callable[[float | None], None] = lambda _: None
        self._turns = 0
        """Of the loop, since its clock jumped last."""
        self._files = selectors.SelectSelector()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._files.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._files.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._files.get_map()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if _Interruption.wanted:
            raise KeyboardInterrupt
        self._turns += 1
        if timeout != 0:
            self._turns = 0
            self.jump(timeout)
        elif self._turns > TURNS_MAX:
            raise Bug(f"the simulation's clock stands still: {self._turns} turns of the loop in one moment")
        return []

    def close(self) -> None:
        self._files.close()


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop of a simulation."""

    def __init__(self) -> None:
        selector = _JumpingSelector()
        super().__init__(selector)
        selector.jump = self._jump
        self._clock_resolution = RESOLUTION_S
        self._now_s = START_S
        self.task_numbers = itertools.count(1)
        self.disk_latency_s: Callable[[], float] = lambda: 0.0
        """How long what production code gives to a thread takes."""
        self.set_task_factory(_make_task)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now_s

    def _jump(self, timeout_s: float | None) -> None:
        if timeout_s is None:
            raise Bug("nothing is runnable in the simulation and no timer is set: whoever waits, waits for ever")
        self._now_s += timeout_s

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback as a step of the process that it belongs to."""
        step = _step(callback, args, context)
        if step is None:
            return super().call_soon(callback, *args, context=context)
        step.handle = super().call_soon(step, context=step.context)
        return step.handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Do the same: there are no threads."""
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedule a callback after `delay` virtual seconds."""
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedule a callback at a virtual time."""
        step = _step(callback, args, context)
        if step is None:
            return super().call_at(when, callback, *args, context=context)
        handle = super().call_at(when, step, context=step.context)
        step.handle = handle
        return handle

    def add_signal_handler(self, sig: int, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Do nothing: signals are the faults' matter."""

    def remove_signal_handler(self, sig: int) -> bool:
        """Do nothing."""
        del sig
        return False

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Do at once what a thread would do, and tell its outcome when a disk would have."""
        del executor
        future: asyncio.Future[T] = self.create_future()
        result: T | None = None
        error: Exception | None = None
        try:
            result = func(*args)
        except Exception as raised:  # noqa: BLE001 - told to whoever waits, as an executor does
            error = raised
        self.call_later(self.disk_latency_s(), _settle, future, result, error)
        return future


def _make_task(
    loop: asyncio.AbstractEventLoop, coroutine: _Coroutine[T], context: contextvars.Context | None = None
) -> asyncio.Task[T]:
    assert isinstance(loop, VirtualLoop)
    return NumberedTask(coroutine, loop=loop, context=context)


def _step(callback: Any, args: tuple[Any, ...], context: contextvars.Context | None) -> Step | None:
    if context is None:
        process = PROCESS.get()
        if process is None:
            return None
        context = contextvars.copy_context()
    else:
        process = context.get(PROCESS)
        if process is None:
            return None
    return Step(process, callback, args, context)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
