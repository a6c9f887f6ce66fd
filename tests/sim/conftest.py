"""One run of a scenario, on a database of its own, with what it takes to see a failing one again."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bettercompute.testing import postgres
from bettercompute.testing.sim import scenario, simulation
from bettercompute.testing.sim.scenario import Scenario
from bettercompute.testing.sim.simulation import Outcome
from tests.sim import totals

Run = Callable[..., Outcome]


@pytest.fixture
def simulate(postgres_server: postgres.TestServer, record_property: Callable[[str, object], None]) -> Run:
    """Run a scenario, by name or as it is, and note what it amounted to."""

    def run(wanted: str | Scenario, seed: int) -> Outcome:
        dsn = postgres_server.create_database()
        try:
            chosen = scenario.load(wanted) if isinstance(wanted, str) else wanted
            outcome = simulation.run(replace(chosen), seed=seed, dsn=dsn)
            record_property(totals.SIMULATED, totals.noted(outcome))
            return outcome
        finally:
            postgres_server.drop_database(dsn)

    return run


def explain(outcome: Outcome) -> str:
    """Return what broke, and how to see it again."""
    broken = "\n".join(f"  {violation.rule}: {violation.text}" for violation in outcome.violations)
    story = "\n".join(f"  {line}" for line in outcome.story[-20:])
    again = f"make sim SEED={outcome.seed} SCENARIO={outcome.scenario} at commit {commit()}"
    return f"{again}\n{broken}\nbefore it:\n{story}"


def until_noticed(simulate: Run, scenario: Scenario, broken: str, *, seeds: int) -> str:
    """Return by which of these seeds it is noticed that a rule is broken, and by which check; fail if by none."""
    for seed in range(1, seeds + 1):
        outcome = simulate(scenario, seed)
        if outcome.violations:
            return f"{broken}, by seed {seed}: {outcome.violations[0].rule}"
    pytest.fail(f"{broken} went unnoticed through {seeds} seeds")


def commit() -> str:
    """Return the commit that is checked out."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


# A simulated day is nine minutes of one core, and more where others share it.
LONG_TIMEOUT_S = 3_600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the long simulations of this folder their time."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("long") is not None:
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))
