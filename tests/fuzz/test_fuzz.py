"""A little of each fuzz target: its seeds pass, and what is mutated from them is answered, not crashed on."""

from __future__ import annotations

import os
import random

import pytest

from bettercompute.errors import Refused
from tests.fuzz.targets import TARGETS

INPUTS = int(os.environ.get("BC_FUZZ_INPUTS", "300"))
# Of what touches a disk.
SLOW_SHARE = 0.1


def mutated(seed: bytes, dice: random.Random) -> bytes:
    """Flip, cut, repeat or insert a few bytes."""
    data = bytearray(seed)
    for _ in range(dice.randint(1, 4)):
        at, length = dice.randrange(len(data) + 1), dice.randint(1, 8)
        match dice.randrange(4):
            case 0 if data:
                data[min(at, len(data) - 1)] ^= 1 << dice.randrange(8)
            case 1:
                del data[at : at + length]
            case 2:
                data[at:at] = data[at : at + length]
            case _:
                data[at:at] = dice.randbytes(length)
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_what_strangers_send_is_answered(name: str) -> None:
    target = TARGETS[name]
    dice = random.Random(name)
    seeds = list(target.seeds())
    for data in seeds:
        target.run(data)
    for _ in range(int(INPUTS * SLOW_SHARE) if target.slow else INPUTS):
        data = mutated(dice.choice(seeds), dice)
        try:
            target.run(data)
        except Refused:
            continue
        except Exception as error:
            raise AssertionError(f"{name} raised {type(error).__name__} for {data.hex()}") from error


@pytest.mark.parametrize("name", TARGETS)
def test_random_bytes_are_answered(name: str) -> None:
    dice = random.Random(f"random {name}")
    for size in (0, 1, 2, 5, 9, 64, 1000):
        for _ in range(1 if TARGETS[name].slow else 10):
            data = dice.randbytes(size)
            try:
                TARGETS[name].run(data)
            except Refused:
                continue
