"""The real world: the only module that reads the clock, the kernel's entropy and the environment."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping

from bettercompute.world import Onward, World


class SystemClock:
    """The host's clocks; `CLOCK_BOOTTIME` where there is one, because a suspended laptop's leases still expire."""

    _boottime = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

    def __init__(self) -> None:
        self._onward = Onward()

    def now_ms(self) -> int:
        """Return the wall clock in Unix milliseconds."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """Return milliseconds since boot, suspended time included."""
        return self._onward.read(time.clock_gettime_ns(self._boottime) // 1_000_000)


class SystemDice:
    """A generator of its own, seeded from the kernel."""

    def __init__(self) -> None:
        self._random = random.Random(os.urandom(32))  # noqa: S311 - jitter, not secrets

    def uniform(self, low: float, high: float) -> float:
        """Return a number drawn evenly from [low, high]."""
        return self._random.uniform(low, high)

    def reseed(self) -> None:
        """Seed anew from the kernel."""
        self._random.seed(os.urandom(32))


class SystemIds:
    """UUIDv7 (RFC 9562) by the wall clock and kernel randomness, strictly rising within a process."""

    def __init__(self) -> None:
        self._last = 0

    def uuid7(self) -> str:
        """Return a new UUIDv7; a second one within a millisecond, or after a clock step back, still sorts later."""
        drawn = int.from_bytes(os.urandom(10), "big")
        stamp = (time.time_ns() // 1_000_000 << 12) | (drawn >> 64 & 0x7FF)
        self._last = stamp = max(stamp, self._last + 1)
        value = (stamp >> 12) << 80 | 0x7 << 76 | (stamp & 0xFFF) << 64 | 0b10 << 62 | (drawn & (1 << 62) - 1)
        # Written out: `uuid.UUID` costs four times as much, and each event and command has an id.
        digits = f"{value:032x}"
        return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"

    def random_bytes(self, count: int) -> bytes:
        """Return `count` bytes from the kernel."""
        return os.urandom(count)


def system_world() -> World:
    """Return the world that production code is given."""
    return World(clock=SystemClock(), dice=SystemDice(), ids=SystemIds())


def environment() -> Mapping[str, str]:
    """Return the process's environment: proxies, XDG folders, the command line's defaults."""
    return os.environ
