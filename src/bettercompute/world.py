"""The world as interfaces: clocks, dice and ids. What cannot be replayed from a seed comes through here.

`system.py` is the one implementation that touches the machine; tests and the simulator bring their own. Pure code takes
plain values (`now_ms`, a drawn number) and never a `World`; shells hold one and hand the values in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Two times: the wall's, which may jump, and a monotonic one, which counts suspended time too."""

    def now_ms(self) -> int:
        """Return the host's wall clock in Unix milliseconds: for log lines and proofs, never for durations."""
        ...

    def monotonic_ms(self) -> int:
        """Return milliseconds that never step back, counting time spent suspended: for every duration and deadline."""
        ...


STEP_BACK_MS = 1_000
"""By how much a clock must step back to count as stepped: less is two threads that read it at once."""


class Onward:
    """Keeps a monotonic clock from stepping back: what is read goes on from the last value.

    The kernel promises that its own does not; a process that was checkpointed goes on under another kernel's. What
    passed between the last look and the step is lost, or a lease would be believed for as long as the step was.
    """

    def __init__(self) -> None:
        self._last_ms = 0
        self._added_ms = 0

    def read(self, raw_ms: int) -> int:
        """Return the time to go by, where the clock itself says `raw_ms`."""
        now_ms = raw_ms + self._added_ms
        if now_ms >= self._last_ms:
            self._last_ms = now_ms
            return now_ms
        if self._last_ms - now_ms >= STEP_BACK_MS:
            self._added_ms = self._last_ms - raw_ms  # and no sum: another thread may see the same step
        return self._last_ms


class Dice(Protocol):
    """Jitter. Not for secrets."""

    def uniform(self, low: float, high: float) -> float:
        """Return a number drawn evenly from [low, high]."""
        ...

    def reseed(self) -> None:
        """Draw a new seed from the kernel: a cloned virtual machine must not repeat its twin's draws."""
        ...


class Ids(Protocol):
    """Names that nobody else has, and random bytes fit for secrets."""

    def uuid7(self) -> str:
        """Return a new UUIDv7 in its canonical lower-case form; later ones sort later."""
        ...

    def random_bytes(self, count: int) -> bytes:
        """Return `count` bytes from the kernel's generator: nonces, secrets, keys' seeds."""
        ...


@dataclass(frozen=True, slots=True)
class World:
    """What a shell is given at its start."""

    clock: Clock
    dice: Dice
    ids: Ids
