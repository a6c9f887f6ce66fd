"""The fence: trusted for 13 s from the start of the last renewal, and latched by a lapse."""

from __future__ import annotations

from dataclasses import dataclass

from bettercompute.gateway.fence import TRUST_MS, Fence


@dataclass
class ManualClock:
    now: int = 1_000_000

    def now_ms(self) -> int:
        return self.now

    def monotonic_ms(self) -> int:
        return self.now


def test_before_the_first_lease_nothing_is_allowed():
    fence = Fence(ManualClock())
    assert not fence.trusted()
    assert not fence.admitting()
    assert not fence.holds(0)


def test_trust_is_counted_from_the_start_of_the_renewal_not_from_its_answer():
    clock = ManualClock()
    fence = Fence(clock)
    started_ms = clock.now
    clock.now += 2_900
    fence.renewed(started_ms=started_ms)
    fence.reopen(fence.opening)
    clock.now = started_ms + TRUST_MS - 1
    assert fence.admitting()
    clock.now += 1
    assert not fence.admitting()
    assert not fence.holds(fence.opening)


def test_a_renewal_in_time_keeps_the_opening():
    clock = ManualClock()
    fence = Fence(clock)
    fence.renewed(started_ms=clock.now)
    opening = fence.opening
    fence.reopen(opening)
    for _ in range(10):
        clock.now += 5_000
        fence.renewed(started_ms=clock.now)
    assert fence.opening == opening
    assert fence.holds(opening)


def test_a_lapse_latches_although_nobody_looked_while_it_lasted():
    clock = ManualClock()
    fence = Fence(clock)
    fence.renewed(started_ms=clock.now)
    before = fence.opening
    fence.reopen(before)
    clock.now += 600_000  # stopped, and continued: the lease's thread runs first
    fence.renewed(started_ms=clock.now)
    assert fence.trusted()
    assert not fence.holds(before), "what was open before the lapse stays fenced"
    assert not fence.admitting(), "nothing is admitted before the old has been dropped"
    fence.reopen(fence.opening)
    assert fence.admitting()
    assert not fence.holds(before)


def test_an_older_renewal_never_shortens_the_trust():
    clock = ManualClock()
    fence = Fence(clock)
    fence.renewed(started_ms=clock.now)
    fence.renewed(started_ms=clock.now - 5_000)
    clock.now += TRUST_MS - 1
    assert fence.trusted()


def test_retired_is_for_good():
    clock = ManualClock()
    fence = Fence(clock)
    fence.renewed(started_ms=clock.now)
    fence.reopen(fence.opening)
    fence.retire()
    fence.renewed(started_ms=clock.now)
    assert fence.retired
    assert not fence.trusted()
    assert not fence.admitting()


def test_the_view_shows_what_an_operator_asks():
    clock = ManualClock()
    fence = Fence(clock)
    fence.renewed(started_ms=clock.now)
    clock.now += 3_000
    view = fence.view()
    assert (view.trusted, view.admitting, view.retired) == (True, False, False)
    assert view.trust_left_ms == TRUST_MS - 3_000
    assert view.loop_silent_ms == 3_000
