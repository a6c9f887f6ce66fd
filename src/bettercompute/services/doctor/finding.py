"""What a check finds: how bad it is, in a sentence, what to do about it, and which nodes are concerned.

See docs/operations.md, "Doctor"; decisions 0127.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from cryptography import x509

from bettercompute.store.database import Database
from bettercompute.store.doctor import NAMED_MAX, Named
from bettercompute.world import World


class Level(IntEnum):
    """How bad it is; the worst of all counts."""

    OK = 0
    WARNING = 1
    """It works, and will not for long, or not for everybody."""
    FAILED = 2
    """Something does not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check has found. `cure` is empty when all is well."""

    level: Level
    sentence: str
    cure: str = ""
    nodes: tuple[Named, ...] = ()
    """Those concerned, the first `NAMED_MAX` of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A file system."""

    path: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What checks may ask."""

    database: Database
    dsn: str
    world: World
    authorities: Callable[[], Mapping[str, x509.Certificate]]
    """The certificates that others stand on, by the names of their files, as they are on disk now."""
    disk: Callable[[], Disk]
    """Where this process keeps its state."""


@dataclass(frozen=True, slots=True)
class Check:
    """One question, by a name that stays: `area.subject`."""

    name: str
    run: Callable[[Surroundings], Awaitable[Finding]]


def ok(sentence: str) -> Finding:
    """All is well."""
    return Finding(level=Level.OK, sentence=sentence)


def warning(sentence: str, *, cure: str, nodes: Sequence[Named] = ()) -> Finding:
    """It works still."""
    return Finding(level=Level.WARNING, sentence=sentence, cure=cure, nodes=tuple(nodes[:NAMED_MAX]))


def failed(sentence: str, *, cure: str, nodes: Sequence[Named] = ()) -> Finding:
    """It does not work."""
    return Finding(level=Level.FAILED, sentence=sentence, cure=cure, nodes=tuple(nodes[:NAMED_MAX]))


def count_of(named: Sequence[Named]) -> str:
    """Return how many nodes were found, in words: not more than `NAMED_MAX` are counted."""
    if len(named) > NAMED_MAX:
        return f"more than {NAMED_MAX} nodes"
    return "1 node" if len(named) == 1 else f"{len(named)} nodes"
