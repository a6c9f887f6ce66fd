"""The controllers' loop: runs when poked or when its time has come, backs off, and never ends by a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from bettercompute.controllers.loop import LAST_BACKOFF_MS, ControllerLoop, Controllers
from bettercompute.errors import Unavailable
from bettercompute.system import SystemClock, SystemIds
from bettercompute.world import World


class LowDice:
    """Always the shortest wait."""

    def uniform(self, low: float, high: float) -> float:
        return min(0.0, low, high)

    def reseed(self) -> None:
        return


WORLD = World(clock=SystemClock(), dice=LowDice(), ids=SystemIds())


@dataclass
class Scripted:
    name: str = "scripted"
    interval_ms: int = 60_000
    outcomes: list[bool | BaseException] = field(default_factory=list)
    on_run: Callable[[int], object] = lambda _: None
    runs: int = 0

    async def reconcile(self) -> bool:
        self.runs += 1
        self.on_run(self.runs)
        outcome = self.outcomes.pop(0) if self.outcomes else False
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


async def runs_of(controller: Scripted, *, count: int, loop: ControllerLoop, poke_until: int = 0) -> None:
    reached = asyncio.Event()

    def note(run: int) -> None:
        if run < poke_until:
            loop.poke()
        if run >= count:
            reached.set()

    controller.on_run = note
    task = asyncio.create_task(loop.run())
    await asyncio.wait_for(reached.wait(), 30)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_it_runs_at_once_and_again_when_poked():
    controller = Scripted()
    await runs_of(controller, count=3, loop=ControllerLoop(controller, world=WORLD), poke_until=3)
    assert controller.runs == 3


async def test_it_runs_again_when_its_interval_has_passed():
    controller = Scripted(interval_ms=1)
    await runs_of(controller, count=4, loop=ControllerLoop(controller, world=WORLD))


async def test_a_full_batch_is_followed_by_another():
    controller = Scripted(outcomes=[True, True, False])
    await runs_of(controller, count=3, loop=ControllerLoop(controller, world=WORLD))


async def test_a_failure_is_counted_and_forgotten_after_a_success():
    controller = Scripted(outcomes=[Unavailable("the database is away"), ValueError("a bug"), False])
    loop = ControllerLoop(controller, world=WORLD)
    assert not await loop.once()
    assert loop.last_error == "the database is away"
    assert not await loop.once()
    assert loop.failures == 2
    assert not await loop.once()
    assert loop.last_error is None


async def test_the_backoff_is_bounded():
    controller = Scripted(outcomes=[Unavailable("away") for _ in range(20)])
    loop = ControllerLoop(controller, world=WORLD)
    for _ in range(20):
        await loop.once()
    assert loop._backoff_ms == LAST_BACKOFF_MS


async def test_several_controllers_start_and_stop_together():
    ran = {"one": asyncio.Event(), "two": asyncio.Event()}

    def noting(event: asyncio.Event) -> Callable[[int], object]:
        return lambda _: event.set()

    controllers = Controllers([Scripted(name=n, on_run=noting(event)) for n, event in ran.items()], world=WORLD)
    controllers.start()
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in ran.values())), 30)
    controllers.poke("nobody")
    await asyncio.wait_for(controllers.stop(), 30)
