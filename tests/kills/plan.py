"""What a seed kills, and when: the same seed always means the same run."""

from __future__ import annotations

import random
from dataclasses import dataclass

from bettercompute.protocol.kinds import KINDS

KIND_NAMES = tuple(sorted(KINDS))
"""Every kind of the table; one without a handler is rejected, which takes no journal write and ends it all the same."""

JOURNAL_BOUNDARIES = 75
"""More than a life of one command has: the sweep's last seeds find the process alive at its end."""

SWEEP = len(KIND_NAMES) * JOURNAL_BOUNDARIES

GATEWAY_POINTS = (
    "hello-received",
    "hello-committed",
    "dispatch-chosen",
    "dispatch-committed",
    "facts-received",
    "events-committed",
    "statuses-committed",
    "commands-committed",
    "facts-committed",
    "facts-acked",
)
"""Where a gateway stands: between receive and commit, between two commits, between commit and ack or send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """How one process of the daemon ends: at the n-th journal boundary, or by its own program, or not at all."""

    boundary: int = 0
    program: str = ""
    """`begin` or `end`: the program that it started kills it there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonRun:
    """One command on one node, whose daemon dies as often as there are lives, and is started again each time."""

    seed: int
    kind: str
    lives: tuple[Life, ...]
    cancelled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayKill:
    """At the n-th passage of a point, the gateway, PostgreSQL's first process or one of its backends is killed."""

    point: str
    passage: int
    victim: str = "gateway"
    delay_ms: int = 0
    """From the passage to the kill of PostgreSQL, so that it also comes in the middle of a statement or a commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayRun:
    """Commands of some kinds on the nodes of one gateway, in the middle of which the kill comes."""

    seed: int
    kill: GatewayKill
    kinds: tuple[tuple[str, ...], ...]
    """By node."""


def daemon_run(seed: int) -> DaemonRun:
    """Return a run of the sweep over every boundary and kind; beyond it, of several kills at random."""
    if seed < SWEEP:
        kind = KIND_NAMES[seed % len(KIND_NAMES)]
        return DaemonRun(seed=seed, kind=kind, lives=(Life(boundary=1 + seed // len(KIND_NAMES)),))
    dice = random.Random(seed)
    lives = [
        Life(program=dice.choice(("begin", "end")))
        if dice.random() < 0.3
        else Life(boundary=dice.randint(1, JOURNAL_BOUNDARIES))
        for _ in range(dice.randint(1, 3))
    ]
    return DaemonRun(seed=seed, kind=dice.choice(KIND_NAMES), lives=tuple(lives), cancelled=dice.random() < 0.2)


def gateway_run(seed: int, *, nodes: int, victims: tuple[str, ...] = ("gateway",)) -> GatewayRun:
    """Return a run in which a gateway or its database is killed."""
    dice = random.Random(seed)
    victim = dice.choice(victims)
    kill = GatewayKill(
        point=GATEWAY_POINTS[seed % len(GATEWAY_POINTS)],
        passage=dice.choice((1, 1, 2, 3, 5, 8)),
        victim=victim,
        delay_ms=0 if victim == "gateway" else dice.choice((0, 0, 1, 2, 3)),
    )
    kinds = tuple(tuple(dice.sample(KIND_NAMES, k=3)) for _ in range(nodes))
    return GatewayRun(seed=seed, kill=kill, kinds=kinds)
