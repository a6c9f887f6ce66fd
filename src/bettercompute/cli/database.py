"""`better-compute db`: the schema, and who may do what with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from bettercompute.cli import output
from bettercompute.cli.options import Json

app = typer.Typer(no_args_is_help=True, help="The database's schema and roles.")

ConfigFile = Annotated[Path | None, typer.Option("--config", help="The control plane's configuration file.")]
T = TypeVar("T")


@app.command()
def migrate(
    config: ConfigFile = None,
    contract: Annotated[bool, typer.Option(help="Also apply what only the newest release may rely on.")] = False,
    json: Json = False,
) -> None:
    """Bring the schema up to this release. Safe to run twice, and beside a running release."""
    from bettercompute.store import migrations

    applied = output.run(lambda: _with_dsn(config, lambda dsn: migrations.migrate(dsn, contract=contract), make=True))
    if json:
        output.print_json({"applied": [migration.name for migration in applied]})
    elif applied:
        output.console.print("applied " + ", ".join(migration.name for migration in applied), markup=False)
    else:
        output.console.print("the schema is current", markup=False)


@app.command()
def status(config: ConfigFile = None, json: Json = False) -> None:
    """Show which migrations are applied and which are pending. Exit code 1 when the schema is not current."""
    from bettercompute.store import migrations

    found = output.run(lambda: _with_dsn(config, migrations.status))
    pending = [migration.name for migration in found.pending]
    if json:
        output.print_json({"applied": [item.name for item in found.applied], "pending": pending})
    else:
        output.print_facts(
            {
                "applied": ", ".join(item.name for item in found.applied) or "none",
                "pending": ", ".join(pending) or "none",
            }
        )
    if pending:
        raise typer.Exit(output.EXIT_FAILED)


@app.command()
def roles(
    config: ConfigFile = None,
    show: Annotated[bool, typer.Option("--print", help="Print the statements, and run none.")] = False,
) -> None:
    """Make the database role under which gateways cannot make or alter commands, nor read keys and tokens.

    Give each gateway a login that is a member of it. Migrations keep its privileges in step.
    """
    from bettercompute.store import roles as store_roles

    if show:
        typer.echo(store_roles.script(), nl=False)
        return
    output.run(lambda: _with_dsn(config, store_roles.grant))
    output.console.print(
        f"role {store_roles.GATEWAY} may do what a gateway needs; for each gateway: CREATE ROLE name LOGIN PASSWORD "
        f"'...' IN ROLE {store_roles.GATEWAY}",
        markup=False,
    )


def _with_dsn(config: Path | None, work: Callable[[str], Awaitable[T]], *, make: bool = False) -> T:
    """Run `work` on the configured database; the embedded one is started when it does not run yet."""
    from bettercompute.server.config import load
    from bettercompute.server.postgres import database

    async def bound(dsn: str) -> T:
        return await work(dsn)

    with database(load(config), make=make) as dsn:
        return asyncio.run(bound(dsn))
