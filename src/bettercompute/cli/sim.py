"""`better-compute sim`: what would happen, on virtual time, before it happens to a fleet.

`sim herd` asks what becomes of N nodes that want in at once under one's own limits; `sim run` runs the product's own
simulations, by seed, with faults, and judges them. Both use the production gateway on a real PostgreSQL that is begun
and ended with the command. See docs/simulator.md.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import bettercompute
from bettercompute.cli import output
from bettercompute.protocol.statuses import Reason, refuse

if TYPE_CHECKING:
    from bettercompute.testing.postgres import TestServer
    from bettercompute.testing.sim.herd import HerdOutcome
    from bettercompute.testing.sim.simulation import Outcome

app = typer.Typer(help="Simulate: what would happen, on virtual time.", no_args_is_help=True)

STORY_LINES = 30
NODES_MAX = 100_000


@app.command()
def herd(
    nodes: Annotated[int, typer.Option(min=1, max=NODES_MAX, help="How many nodes want in.")] = 1_000,
    gateways: Annotated[int, typer.Option(min=1, max=64, help="How many gateways there are.")] = 2,
    rate: Annotated[float, typer.Option(min=0.1, help="handshakes_per_s of each gateway.")] = 200.0,
    max_streams: Annotated[int, typer.Option(min=1, help="max_streams of each gateway.")] = 5_000,
    story: Annotated[
        str, typer.Option(help="power-on, gateway-loss, all-restart, rolling-restart or database-outage.")
    ] = "power-on",
    seed: Annotated[int, typer.Option(min=0, help="Another seed draws other latencies and jitter.")] = 1,
    svg: Annotated[Path | None, typer.Option(help="Write the picture to this file as well.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON line.")] = False,
) -> None:
    """Say how long a herd takes with these limits, how often nodes try, and draw it."""
    outcome = output.run(
        lambda: _herd(
            nodes=nodes, gateways=gateways, rate=rate, max_streams=max_streams, story=story, seed=seed, svg=svg
        )
    )
    facts = _facts(outcome)
    if json:
        output.print_json({**facts, "refusals": dict(outcome.reasons), "bugs": list(outcome.bugs)})
    else:
        from bettercompute.testing.sim import picture

        output.print_facts(facts)
        output.print_table(("refused or failed because", "times"), outcome.reasons.items(), empty="nobody was refused")
        output.console.print(picture.text(outcome), markup=False)
    if outcome.bugs:
        output.fail(f"a fault of ours was logged: {outcome.bugs[0]}", code=output.EXIT_SOFTWARE)
    if outcome.all_connected_s is None:
        left = nodes - outcome.samples[-1].connected
        output.fail(
            f"{left} of {nodes} nodes had no session after an hour: raise max_streams or the number of gateways"
        )


def _herd(
    *, nodes: int, gateways: int, rate: float, max_streams: int, story: str, seed: int, svg: Path | None
) -> HerdOutcome:
    from bettercompute.testing.sim import herd as herds
    from bettercompute.testing.sim import picture, virtual_loop

    if story not in herds.STORIES:
        raise refuse(Reason.BAD_REQUEST, f"no story {story!r}: {', '.join(herds.STORIES)}")
    wanted = herds.Herd(
        story=story,
        nodes=nodes,
        gateways=gateways,
        handshakes_per_s=rate,
        streams_max=max_streams,
        seed=seed,
    )
    if svg is not None:
        svg.touch()  # where it cannot be written, that is told now and not after minutes
    with _server() as server, virtual_loop.interruptible():
        outcome = herds.run(wanted, dsn=server.create_database())
    if svg is not None:
        svg.write_text(picture.svg(outcome))
    return outcome


def _facts(outcome: HerdOutcome) -> dict[str, object]:
    return {
        **asdict(outcome.herd),
        "n_over_rate_s": round(outcome.herd.least_s, 1),
        "all_connected_s": None if outcome.all_connected_s is None else round(outcome.all_connected_s, 1),
        "ratio_to_n_over_rate": None if outcome.ratio is None else round(outcome.ratio, 3),
        "attempts_mean": round(outcome.attempts_mean, 2),
        "attempts_max": outcome.attempts_max,
        "refusals_max": outcome.refusals_max,
        "pending_hellos_max": outcome.pending_hellos_max,
        "statements_per_s": round(outcome.statements_per_s),
        "real_s": round(outcome.real_s, 1),
    }


@app.command()
def run(
    seed: Annotated[str, typer.Option(help="A seed, or a range of them: 1..200.")] = "1",
    scenario: Annotated[
        str, typer.Option(help="A .toml file, or one that is shipped: all, short, outages, days.")
    ] = "all",
    json: Annotated[bool, typer.Option("--json", help="One JSON line for each seed.")] = False,
) -> None:
    """Run a simulation with faults and judge it; a seed that breaks a promise fails, and says how to repeat it."""
    failed = output.run(lambda: _run(seed, scenario=scenario, json=json))
    if failed:
        seeds = ", ".join(str(number) for number in failed)
        output.fail(f"promises were broken by seed {seeds} of {scenario}, at {_commit()}: `make sim SEED={failed[0]}`")


def _run(seed: str, *, scenario: str, json: bool) -> list[int]:
    from bettercompute.testing.sim import scenario as scenarios
    from bettercompute.testing.sim import simulation, virtual_loop

    chosen, seeds = scenarios.load(scenario), _seeds(seed)
    failed: list[int] = []
    with _server() as server, virtual_loop.interruptible():
        for number in seeds:
            dsn = server.create_database()
            outcome = simulation.run(chosen, seed=number, dsn=dsn)
            server.drop_database(dsn)
            _show(outcome, json=json)
            if outcome.violations:
                failed.append(number)
    return failed


def _show(outcome: Outcome, *, json: bool) -> None:
    if json:
        output.print_json(asdict(outcome))
        return
    settled = "never" if outcome.settled_s is None else f"{outcome.settled_s:.0f} s after the last fault"
    output.console.print(
        f"seed {outcome.seed}: {'broken' if outcome.violations else 'sound'}; {outcome.virtual_s:.0f} virtual s, "
        f"{outcome.faults_total} faults, {outcome.commands} commands, {outcome.events} events, "
        f"{outcome.frames} frames, {outcome.statements} statements; settled {settled}; "
        f"trace {outcome.trace[:16]}; {outcome.real_s:.1f} s",
        markup=False,
    )
    if outcome.violations:
        for line in outcome.story[-STORY_LINES:]:
            output.console.print(f"  {line}", markup=False)
    for violation in outcome.violations:
        output.console.print(f"  BROKEN {violation.rule}: {violation.text}", markup=False)


def _seeds(text: str) -> range:
    first, dots, last = text.partition("..")
    try:
        seeds = range(int(first), int(last if dots else first) + 1)
    except ValueError:
        raise refuse(Reason.BAD_REQUEST, f"{text!r} is no seed: a number, or a range like 1..200") from None
    if not seeds:
        raise refuse(Reason.BAD_REQUEST, f"{text!r} has no seed in it: the lower one comes first")
    return seeds


@contextlib.contextmanager
def _server() -> Iterator[TestServer]:
    from bettercompute.testing import postgres

    folder = Path(tempfile.mkdtemp(prefix="bc-sim-"))
    try:
        with postgres.scratch(folder) as data_dir, postgres.serve(data_dir) as server:
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _commit() -> str:
    """Return the commit that is run, or the version where it is no checkout."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return f"version {bettercompute.__version__}"
    return f"commit {done.stdout.strip()}"
