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
