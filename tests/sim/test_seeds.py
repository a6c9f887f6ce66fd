"""The simulator over seeds: no promise broken, and everything settled after the last fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.conftest import Run, explain

KEPT = [
    (scenario, int(seed))
    for line in (Path(__file__).parent / "seeds.txt").read_text().splitlines()
    if line.strip() and not line.startswith("#")
    for scenario, seed in [line.split()]
]


@pytest.mark.parametrize("seed", range(2, 4))
def test_a_sample_of_every_fault(simulate: Run, seed: int) -> None:
    outcome = simulate("short", seed)
    assert not outcome.violations, explain(outcome)
    assert outcome.faults_total > 50
    assert outcome.commands > 5


@pytest.mark.parametrize(("scenario", "seed"), KEPT, ids=[f"{scenario}-{seed}" for scenario, seed in KEPT])
def test_what_was_found_once_stays_mended(simulate: Run, scenario: str, seed: int) -> None:
    outcome = simulate(scenario, seed)
    assert not outcome.violations, explain(outcome)


def test_equal_seeds_are_equal_runs(simulate: Run) -> None:
    first, again = simulate("short", 6), simulate("short", 6)
    assert first.trace == again.trace
    assert first.story == again.story
    assert not first.violations, explain(first)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 201))
def test_every_fault_for_a_while(simulate: Run, seed: int) -> None:
    outcome = simulate("all", seed)
    assert not outcome.violations, explain(outcome)
    if seed % 20 == 0:
        assert simulate("all", seed).trace == outcome.trace, f"seed {seed} is not the same run twice"
