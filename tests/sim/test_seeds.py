"""The simulator over seeds: no promise broken, and everything settled after the last fault.

See docs/simulator.md, "The database".
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bettercompute.testing.sim import scenario as scenarios
from bettercompute.testing.sim.faults import FAULTS
from bettercompute.testing.sim.scenario import Scenario
from bettercompute.testing.sim.unchanged import Unchanged
from tests.sim.conftest import Run, explain

ALL_SEEDS = range(1, 201)
DAYS_SEEDS = range(1, 8)
# Those of `all` that its own range runs are not run twice.
KEPT = [
    (scenario, int(seed))
    for line in (Path(__file__).parent / "seeds.txt").read_text().splitlines()
    if line.strip() and not line.startswith("#")
    for scenario, seed in [line.split()]
    if scenario != "all" or int(seed) not in ALL_SEEDS
]
TWICE = 2  # run and judged by the comparison of two runs
DAILY = (1, 3)
SAMPLE = [
    seed if seed in DAILY else pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 21) if seed != TWICE
]
SAMPLE_FAULTS_S = 40
HOURS_WANTED, FAULTS_WANTED = 200, 10_000


def sample() -> Scenario:
    """Every fault there is, within less than a minute: what a few seeds in each run of the tests can be."""
    short = scenarios.load("short")
    return replace(short, name="sample", phases=replace(short.phases, calm_s=10, faults_s=SAMPLE_FAULTS_S))


def faults_expected(scenario: Scenario) -> float:
    """Return how many faults befall a run on the average, if each is over at once."""
    return sum(scenario.phases.faults_s / plan.every_s for plan in scenario.faults)


@pytest.mark.parametrize("seed", SAMPLE)
def test_a_sample_of_every_fault(simulate: Run, seed: int) -> None:
    outcome = simulate(sample(), seed)
    assert not outcome.violations, explain(outcome)
    assert outcome.faults_total > 10
    assert outcome.commands + outcome.events > 5


@pytest.mark.long
@pytest.mark.parametrize(("scenario", "seed"), KEPT, ids=[f"{scenario}-{seed}" for scenario, seed in KEPT])
def test_what_was_found_once_stays_mended(simulate: Run, scenario: str, seed: int) -> None:
    outcome = simulate(scenario, seed)
    assert not outcome.violations, explain(outcome)


def test_equal_seeds_are_equal_runs(simulate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if PostgreSQL is asked each time, instead of only when its answer may be another one."""
    first = simulate(sample(), TWICE)
    monkeypatch.setattr(Unchanged, "answer", lambda *_: None)
    again = simulate(sample(), TWICE)
    assert first.faults_total > 5
    assert first.commands + first.events > 5
    assert first.trace == again.trace
    assert first.story == again.story
    assert not first.violations, explain(first)


@pytest.mark.parametrize("name", ["all", "short"])
def test_every_fault_there_is_befalls_the_shipped_scenarios(name: str) -> None:
    """But a worker that stands still, which says something only where another one goes on: `outages` has two."""
    needs_two_workers = {"worker-pause"}
    assert {plan.kind for plan in scenarios.load(name).faults} == set(FAULTS) - needs_two_workers
    assert {plan.kind for plan in scenarios.load("outages").faults} >= needs_two_workers


def test_the_long_runs_last_as_long_as_promised() -> None:
    """What `make test-long` amounts to is printed at its end; this is what it is at least."""
    runs = [(scenarios.load("all"), len(ALL_SEEDS)), (scenarios.load("days"), len(DAYS_SEEDS))]
    hours = sum(count * (run.phases.calm_s + run.phases.faults_s) / 3600 for run, count in runs)
    assert hours > HOURS_WANTED
    assert sum(count * faults_expected(run) for run, count in runs) > 2 * FAULTS_WANTED


@pytest.mark.long
@pytest.mark.parametrize("seed", ALL_SEEDS)
def test_every_fault_for_a_while(simulate: Run, seed: int) -> None:
    outcome = simulate("all", seed)
    assert not outcome.violations, explain(outcome)
    if seed % 20 == 0:
        assert simulate("all", seed).trace == outcome.trace, f"seed {seed} is not the same run twice"


@pytest.mark.long
@pytest.mark.parametrize("seed", DAYS_SEEDS)
def test_a_day_with_a_fault_now_and_then(simulate: Run, seed: int) -> None:
    outcome = simulate("days", seed)
    assert not outcome.violations, explain(outcome)
    assert outcome.virtual_s > 86_400
