"""Virtual time: jumps instead of waiting, the same order in every run, processes that are paused and killed."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Coroutine
from typing import Any

import pytest

from bettercompute.errors import Bug
from bettercompute.testing.sim import virtual_loop
from bettercompute.testing.sim.process import SimulatedProcess
from bettercompute.testing.sim.virtual_loop import VirtualLoop

YEAR_S = 365 * 86_400


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


def test_a_year_passes_at_once():
    async def live() -> float:
        began_s = asyncio.get_running_loop().time()
        await asyncio.sleep(YEAR_S)
        return asyncio.get_running_loop().time() - began_s

    assert run(live()) == pytest.approx(YEAR_S)


def test_timers_of_one_moment_all_run_before_the_next():
    async def live() -> list[int]:
        ran: list[int] = []

        async def tick(number: int, at_s: float) -> None:
            await asyncio.sleep(at_s)
            ran.append(number)

        async with asyncio.TaskGroup() as group:
            for number in range(100):
                group.create_task(tick(number, 1 + number // 50))
        return ran

    first = run(live())
    assert sorted(first[:50]) == list(range(50))
    assert first == run(live())


def test_tasks_are_cancelled_in_the_order_of_their_making():
    async def live() -> list[int]:
        cancelled: list[int] = []

        async def wait(number: int) -> None:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                cancelled.append(number)
                raise

        async def fail() -> None:
            await asyncio.sleep(1)
            raise ValueError

        try:
            async with asyncio.TaskGroup() as group:
                for number in range(40):
                    group.create_task(wait(number))
                group.create_task(fail())
        except* ValueError:
            pass
        return cancelled

    assert run(live()) == run(live())


def test_who_waits_for_nothing_is_told():
    async def live() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Bug, match="waits for ever"):
        run(live())


def test_who_is_busy_without_end_in_one_moment_is_told(monkeypatch: pytest.MonkeyPatch):
    async def live() -> None:
        for _ in itertools.count():
            await asyncio.sleep(0)

    monkeypatch.setattr(virtual_loop, "TURNS_MAX", 1_000)
    with pytest.raises(Bug, match="stands still"):
        run(live())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_simulation_between_two_turns(number: signal.Signals):
    turns: list[str] = []

    async def live() -> None:
        await asyncio.sleep(1)
        signal.raise_signal(number)
        turns.append("this one comes to its end")
        await asyncio.sleep(1)
        turns.append("none after it")

    before = signal.getsignal(number)
    with virtual_loop.interruptible(), pytest.raises(KeyboardInterrupt):
        run(live())
    assert turns == ["this one comes to its end"]
    assert signal.getsignal(number) is before


def test_a_thread_takes_what_a_disk_takes():
    async def live() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.disk_latency_s = lambda: 3.0
        began_s = loop.time()
        assert await asyncio.to_thread(lambda: 42) == 42
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return loop.time() - began_s

    assert run(live()) == pytest.approx(6)


async def _beat(beats: list[float]) -> None:
    try:
        while True:
            await asyncio.sleep(1)
            beats.append(asyncio.get_running_loop().time())
    finally:
        beats.append(-1)


def test_a_paused_process_stands_still_and_goes_on():
    async def live() -> list[float]:
        beats: list[float] = []
        process = SimulatedProcess("p")
        process.spawn(_beat(beats))
        began_s = asyncio.get_running_loop().time()
        await asyncio.sleep(2.5)
        process.pause()
        await asyncio.sleep(10)
        process.go_on()
        await asyncio.sleep(1.6)
        await asyncio.gather(*process.bury(), return_exceptions=True)
        return [round(beat - began_s, 3) for beat in beats if beat > 0]

    assert run(live()) == [1, 2, 12.5, 13.5]


def test_a_timer_that_is_cancelled_while_its_process_is_paused_does_not_run():
    async def live() -> list[str]:
        ran: list[str] = []
        process = SimulatedProcess("p")
        loop = asyncio.get_running_loop()
        handles = [process.run(loop.call_later, 1, ran.append, name) for name in ("kept", "cancelled")]
        process.pause()
        await asyncio.sleep(5)
        handles[1].cancel()
        process.go_on()
        await asyncio.sleep(1)
        return ran

    assert run(live()) == ["kept"]


def test_a_killed_process_says_no_farewell_until_it_is_buried():
    async def live() -> None:
        beats: list[float] = []
        process = SimulatedProcess("p")
        process.spawn(_beat(beats))
        await asyncio.sleep(2.5)
        process.kill()
        await asyncio.sleep(10)
        assert len(beats) == 2
        await asyncio.gather(*process.bury(), return_exceptions=True)
        assert beats[2:] == [-1]

    run(live())
