"""Something done again and again, at an interval that the desired state may change while it is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from bettercompute.world import Dice

# What an interval is stretched or shortened by at most, so that a fleet's timers do not fire together.
JITTER: Final = 0.1


class Intervals:
    """Tells whoever waits that an interval may be another one now."""

    def __init__(self, dice: Dice) -> None:
        self._dice = dice
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Look at the intervals again; one that is the same goes on."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def regularly(self, interval_s: Callable[[], float | None], act: Callable[[], Awaitable[object]]) -> None:
        """Do it after each interval, until cancelled; None: not at all, until there is one."""
        interval: float | None = None
        due_at: float | None = None
        while True:
            changed = self._changed
            if interval != (interval := interval_s()) or due_at is None:
                due_at = self._due_at(interval)
            try:
                async with asyncio.timeout_at(due_at):
                    await changed.wait()
            except TimeoutError:
                due_at = None
                await act()

    def _due_at(self, interval_s: float | None) -> float | None:
        if interval_s is None:
            return None
        return asyncio.get_running_loop().time() + interval_s * self._dice.uniform(1 - JITTER, 1 + JITTER)
