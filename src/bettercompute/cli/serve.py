"""`better-compute serve`: run the control plane, all of it or some roles."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bettercompute.cli import output

if TYPE_CHECKING:
    from bettercompute.server.app import Role
    from bettercompute.server.config import Config


def serve(
    config: Annotated[
        Path | None, typer.Option("--config", help="The configuration file. Default: the defaults.")
    ] = None,
    role: Annotated[
        list[str] | None, typer.Option("--role", help="api, gateway or worker; may be repeated. Default: all.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run the control plane until it is told to stop (SIGTERM, Ctrl-C)."""
    output.run(lambda: _serve(config, role, log_level=log_level))


def _serve(config_path: Path | None, names: list[str] | None, *, log_level: str) -> None:
    import uvloop

    from bettercompute.server.app import ALL_ROLES, Role
    from bettercompute.server.config import load
    from bettercompute.server.logs import configure
    from bettercompute.server.postgres import database

    if log_level not in {"debug", "info", "warning", "error"}:
        output.fail(f"--log-level {log_level}: one of debug, info, warning, error", code=output.EXIT_USAGE)
    unknown = sorted(set(names or ()) - {role.value for role in Role})
    if unknown:
        output.fail(f"--role {unknown[0]}: one of {', '.join(role.value for role in Role)}", code=output.EXIT_USAGE)
    roles = frozenset(Role(name) for name in names) if names else ALL_ROLES
    config = load(config_path)
    configure(level=log_level)
    with database(config) as dsn:
        uvloop.run(_run(config, dsn=dsn, roles=roles))


async def _run(config: Config, *, dsn: str, roles: frozenset[Role]) -> None:
    from bettercompute.server.app import control_plane
    from bettercompute.store import migrations
    from bettercompute.system import system_world
    from bettercompute.transport.streams import tune_collector

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    if not config.database.dsn:
        # An embedded database has no administrator of its own.
        await migrations.migrate(dsn)
    async with control_plane(config, dsn=dsn, roles=roles, world=system_world()):
        tune_collector()
        await stop.wait()
