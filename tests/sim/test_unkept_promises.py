"""Rules that faults of clocks, operators and the database are about, each broken on purpose: the simulator must notice.

Each has a scenario of its own, of the faults that it is about, so that few seeds are enough. That a monotonic clock may
step back is not among them: believed, it shows only in what the next dial or the database's own predicates put right.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bettercompute.daemon.journal_files import FolderLock
from bettercompute.gateway.life import GatewayLife
from bettercompute.session import authority, clock, standing
from bettercompute.testing.sim import scenario as scenarios
from bettercompute.testing.sim.scenario import FaultPlan, Fleet, Phases, Scenario, Work
from tests.sim import totals
from tests.sim.conftest import Run, until_noticed
from tests.sim.test_broken_rules import rewrite_sql

SEEDS = 20
Patch = pytest.MonkeyPatch


def about(*kinds: str, every_s: float, for_s: tuple[float, float] = (5, 20), faults_s: float = 60) -> Scenario:
    """A small fleet that only these faults befall."""
    return Scenario(
        name="about " + ", ".join(kinds),
        fleet=Fleet(nodes=1, daemons=1, gateways=2, workers=1, signing=True),
        phases=Phases(calm_s=15, faults_s=faults_s, settle_s=300),
        work=Work(command_every_s=2, event_every_s=2),
        faults=tuple(FaultPlan(kind=kind, every_s=every_s, for_s=for_s) for kind in kinds),
    )


def promotions_unnoticed(patch: Patch) -> Scenario:
    patch.setattr(GatewayLife, "_same_database", lambda _life, _timeline: True)
    return about("database-failover", every_s=20, for_s=(0.2, 2))


def locks_ignored(patch: Patch) -> Scenario:
    patch.setattr(standing, "in_force", lambda *_args, **_named: None)
    return about("node-locked", "connection-loss", every_s=15)


def signatures_unchecked(patch: Patch) -> Scenario:
    patch.setattr(authority, "judge_signature", lambda *_args, **_named: None)
    return about("unsigned-intent", every_s=5)


def folder_unlocked(patch: Patch) -> Scenario:
    def take(folder: Path) -> FolderLock:
        return FolderLock(os.open(folder, os.O_RDONLY))

    patch.setattr(FolderLock, "take", take)
    return about("second-daemon", every_s=20)


def unseen_time_counts(patch: Patch) -> Scenario:
    patch.setattr(clock, "looked", lambda held, *, now_ms: (replace(held, looked_at_ms=now_ms), 0))
    return about("host-clock-leap", every_s=30)


def not_before_ignored(patch: Patch) -> Scenario:
    rewrite_sql(patch, r"AND c\.not_before <= compute_now\(\) AND c\.not_before > '-infinity'", "")
    return about("connection-loss", every_s=20)


@pytest.mark.long
@pytest.mark.parametrize(
    "breaking",
    [
        promotions_unnoticed,
        locks_ignored,
        signatures_unchecked,
        folder_unlocked,
        unseen_time_counts,
        not_before_ignored,
    ],
    ids=lambda value: str(value.__name__),
)
def test_a_promise_that_is_not_kept_is_noticed(
    simulate: Run,
    monkeypatch: Patch,
    record_property: Callable[[str, object], None],
    breaking: Callable[[Patch], Scenario],
) -> None:
    with monkeypatch.context() as sound:
        wanted = breaking(sound)
    outcome = simulate(wanted, 1)
    assert not outcome.violations, "it is broken by something else"
    breaking(monkeypatch)
    record_property(totals.FOUND, until_noticed(simulate, wanted, breaking.__name__, seeds=SEEDS))


MET = {"second-daemon-refused", "unsigned-intent-refused", "forgotten", "commits-lost-with-the-database"}


@pytest.mark.long
def test_what_the_faults_are_about_is_met(simulate: Run) -> None:
    met: set[str] = set()
    for seed in range(1, SEEDS + 1):
        outcome = simulate(scenarios.load("short"), seed)
        met |= set(outcome.met)
        if met >= MET:
            return
    pytest.fail(f"{MET - met} was not met by {SEEDS} seeds")
