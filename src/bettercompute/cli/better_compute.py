"""`better-compute`: the operators' command and the control plane's own."""

from __future__ import annotations

from typing import Annotated

import typer

import bettercompute
from bettercompute.cli import (
    api_tokens,
    approving,
    commands,
    database,
    events,
    gateways,
    nodes,
    output,
    pki,
    running,
    sim,
    spec,
    tokens,
)
from bettercompute.cli.dev import dev
from bettercompute.cli.doctor import doctor
from bettercompute.cli.serve import serve

app = typer.Typer(
    name="better-compute",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="The control plane of a fleet: run it, join nodes, run commands on them.",
)
app.command("run")(running.run)
app.command("resume")(running.resume)
app.command("events")(events.events)
app.command("approve")(approving.approve)
app.add_typer(nodes.app, name="nodes")
app.add_typer(commands.app, name="commands")
app.add_typer(spec.app, name="spec")
app.add_typer(tokens.app, name="token")
app.add_typer(api_tokens.app, name="api-token")
app.add_typer(gateways.app, name="gateway")
app.command("doctor")(doctor)
app.command("dev")(dev)
app.command("serve")(serve)
app.add_typer(database.app, name="db")
app.add_typer(pki.app, name="pki")
app.add_typer(sim.app, name="sim")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(bettercompute.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The control plane of a fleet: run it, join nodes, run commands on them."""


def main() -> None:
    """Run the command line."""
    output.guard(app)


if __name__ == "__main__":
    main()
