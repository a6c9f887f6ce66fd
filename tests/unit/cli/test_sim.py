"""`better-compute sim`: what an operator asks, reads and gets wrong. Simulations here are small ones."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bettercompute.cli import sim
from bettercompute.testing import postgres
from bettercompute.testing.sim import simulation
from bettercompute.testing.sim.invariants import Violation
from bettercompute.testing.sim.simulation import Outcome

RUNNER = CliRunner()
TINY = """
[fleet]
nodes = 1
[phases]
calm_s = 5
faults_s = 10
[[fault]]
kind = "connection-loss"
every_s = 3
"""


@pytest.fixture
def server(postgres_server: postgres.TestServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of this test process in the place of one that is begun with the command."""

    @contextlib.contextmanager
    def running() -> Iterator[postgres.TestServer]:
        yield postgres_server

    monkeypatch.setattr(sim, "_server", running)


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    file = tmp_path / "tiny.toml"
    file.write_text(TINY)
    return str(file)


@pytest.mark.usefixtures("server")
def test_a_herd_is_told_and_drawn(tmp_path: Path) -> None:
    drawing = tmp_path / "herd.svg"
    arguments = ["herd", "--nodes", "12", "--rate", "3", "--gateways", "1", "--svg", str(drawing)]
    told = RUNNER.invoke(sim.app, arguments)
    assert told.exit_code == 0, told.output
    assert "n_over_rate_s" in told.output
    assert "connected" in told.output
    assert "handshakes" in told.output
    assert drawing.read_text().startswith("<svg")
    row = json.loads(RUNNER.invoke(sim.app, [*arguments, "--json"]).output)
    assert (row["nodes"], row["n_over_rate_s"], row["bugs"]) == (12, 4.0, [])
    assert row["all_connected_s"] > 0


@pytest.mark.usefixtures("server")
def test_who_finds_no_room_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bettercompute.testing.sim.herd.GIVE_UP_S", 60.0)
    told = RUNNER.invoke(sim.app, ["herd", "--nodes", "5", "--gateways", "1", "--max-streams", "3"])
    assert told.exit_code == 1
    assert "2 of 5 nodes had no session after an hour: raise max_streams" in told.output


@pytest.mark.usefixtures("server")
def test_a_range_of_seeds_each_has_its_line(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, outcomes = simulation.run, list[Outcome]()

    def once(*arguments: object, seed: int, **named: object) -> Outcome:
        if not outcomes:
            outcomes.append(real(*arguments, seed=seed, **named))  # type: ignore[arg-type]  # passed on as they came
        return replace(outcomes[0], seed=seed)

    monkeypatch.setattr(simulation, "run", once)
    told = RUNNER.invoke(sim.app, ["run", "--seed", "3..4", "--scenario", tiny])
    assert told.exit_code == 0, told.output
    assert [line.split(";")[0] for line in told.output.splitlines()] == ["seed 3: sound", "seed 4: sound"]
    row = json.loads(RUNNER.invoke(sim.app, ["run", "--seed", "3", "--scenario", tiny, "--json"]).output)
    assert (row["scenario"], row["seed"], row["violations"]) == ("tiny", 3, [])


@pytest.mark.usefixtures("server")
def test_a_broken_promise_says_how_to_see_it_again(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = simulation.run

    def broken(*arguments: object, **named: object) -> Outcome:
        outcome = real(*arguments, **named)  # type: ignore[arg-type]  # passed on as they came
        return replace(outcome, violations=(Violation("epochs rise", "n1: 3 after 4", 5),))

    monkeypatch.setattr(simulation, "run", broken)
    told = RUNNER.invoke(sim.app, ["run", "--seed", "7", "--scenario", tiny])
    assert told.exit_code == 1
    assert "BROKEN epochs rise: n1: 3 after 4" in told.output
    assert "no more faults" in told.output
    assert "promises were broken by seed 7" in told.output
    assert "make sim SEED=7" in told.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--seed", "seven"], "'seven' is no seed"),
        (["run", "--seed", "9..3"], "has no seed in it"),
        (["run", "--seed", "9.."], "'9..' is no seed"),
        (["run", "--scenario", "earthquake"], "no scenario 'earthquake'"),
        (["run", "--scenario", "/none/at.toml"], "cannot be read"),
        (["herd", "--story", "siege"], "no story 'siege'"),
        (["herd", "--nodes", "3", "--svg", "/none/herd.svg"], "/none/herd.svg"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim, "_server", None)
    told = RUNNER.invoke(sim.app, arguments)
    assert told.exit_code == 2, told.output
    assert says in told.output
