"""Clocks, dice and ids of a simulated machine: all of it from the seed and the virtual time."""

from __future__ import annotations

import asyncio
import random
import uuid

from bettercompute.world import Onward, World

# A Sunday; far enough from today that a real clock read by mistake shows.
EPOCH_MS = 1_893_456_000_000


class SimulatedClock:
    """The clocks of one host. Anybody may set the wall's; the monotonic one is the simulation's, unless it leaps."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.wall_offset_ms = 0
        self.leapt_ms = 0
        """By how much the monotonic clock has leapt."""
        self._loop = loop

    def now_ms(self) -> int:
        """Return what the host takes for Unix milliseconds."""
        return EPOCH_MS + int(self._loop.time() * 1000) + self.wall_offset_ms

    def monotonic_ms(self) -> int:
        """Return milliseconds since boot, suspended time included."""
        return int(self._loop.time() * 1000) + self.leapt_ms


class OnwardClock:
    """The clocks of a host as one process reads them, whose monotonic one is kept from stepping back."""

    def __init__(self, host: SimulatedClock) -> None:
        self._host = host
        self._onward = Onward()

    def now_ms(self) -> int:
        """Return what the host takes for Unix milliseconds."""
        return self._host.now_ms()

    def monotonic_ms(self) -> int:
        """Return milliseconds that do not step back while this process lives."""
        return self._onward.read(self._host.monotonic_ms())


class SeededDice:
    """Draws that depend on the seed alone. A clone draws as its twin does, until the next reseed."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a simulation

    def uniform(self, low: float, high: float) -> float:
        """Return a number drawn evenly from [low, high]."""
        return self._random.uniform(low, high)

    def reseed(self) -> None:
        """Do nothing: the kernel's entropy is the seed's as well."""


class SeededIds:
    """Ids and random bytes from the seed; later ids sort later, by the host's clock."""

    def __init__(self, seed: str, clock: SimulatedClock) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a simulation
        self._clock = clock
        self._last = 0

    def uuid7(self) -> str:
        """Return a new UUIDv7."""
        self._last = stamp = max(self._clock.now_ms() << 12, self._last + 1)
        value = (stamp >> 12) << 80 | 0x7 << 76 | (stamp & 0xFFF) << 64
        return str(uuid.UUID(int=value | 0b10 << 62 | self._random.getrandbits(62)))

    def random_bytes(self, count: int) -> bytes:
        """Return `count` bytes."""
        return self._random.randbytes(count)


def make_world(seed: str, *, clock: SimulatedClock) -> World:
    """Return the world of one process on a host with this clock."""
    return World(clock=OnwardClock(clock), dice=SeededDice(f"{seed} dice"), ids=SeededIds(f"{seed} ids", clock))
