"""A monotonic clock that steps back is kept from doing so, and what runs by it goes on."""

from __future__ import annotations

import threading

from bettercompute.world import STEP_BACK_MS, Onward

DAY_MS = 86_400_000


def test_it_reads_what_the_clock_says_while_that_goes_on() -> None:
    onward = Onward()
    assert [onward.read(raw_ms) for raw_ms in (5, 5, 900, 900_000)] == [5, 5, 900, 900_000]


def test_after_a_step_back_it_goes_on_from_the_last_value() -> None:
    onward = Onward()
    onward.read(2 * DAY_MS)
    assert onward.read(DAY_MS) == 2 * DAY_MS
    assert onward.read(DAY_MS + 7) == 2 * DAY_MS + 7
    assert onward.read(5) == 2 * DAY_MS + 7
    assert onward.read(6) == 2 * DAY_MS + 8


def test_a_reading_that_another_thread_has_overtaken_is_no_step() -> None:
    onward = Onward()
    onward.read(10_000)
    assert onward.read(10_000 - STEP_BACK_MS + 1) == 10_000
    assert onward.read(10_001) == 10_001


def test_threads_that_see_one_step_together_count_it_once() -> None:
    onward, together = Onward(), threading.Barrier(4)
    read: list[int] = []
    onward.read(DAY_MS)

    def look() -> None:
        together.wait(timeout=30)
        read.extend(onward.read(raw_ms) for raw_ms in range(100))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert min(read) >= DAY_MS
    assert onward.read(100) <= DAY_MS + 200
