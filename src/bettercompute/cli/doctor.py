"""`better-compute doctor`: is the installation well, and what to do where it is not."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bettercompute.cli import output
from bettercompute.cli.client import ApiClient
from bettercompute.cli.options import Api, Json

NODES_SHOWN = 10


def doctor(
    checks: Annotated[
        list[str] | None, typer.Argument(metavar="[CHECK...]", help="Only these checks. Default: all of them.")
    ] = None,
    api: Api = None,
    json: Json = False,
) -> None:
    """Check database, gateways, keys and nodes. Exit code 0: all is well, 4: warnings only, 1: something failed."""
    found = output.run(lambda: ApiClient.from_environment(api).get("/v1/doctor", check=checks or None))
    if json:
        output.print_json(found)
    else:
        output.print_table(
            ("check", "level", "what"),
            [(check["name"], check["level"], check["sentence"]) for check in found["checks"]],
            empty="no checks",
        )
        for check in found["checks"]:
            if check["level"] != "ok":
                _print_cure(check)
    if found["exit_code"]:
        raise typer.Exit(found["exit_code"])


def _print_cure(check: dict[str, Any]) -> None:
    """Print to standard error: what is piped is the table."""
    output.note(f"{check['name']}: {check['sentence']}")
    output.note(f"  cure: {check['cure']}")
    nodes = check["nodes"]
    for node in nodes[:NODES_SHOWN]:
        output.note(f"  {node['node_id']}" + (f": {node['about']}" if node["about"] else ""))
    if len(nodes) > NODES_SHOWN:
        output.note(f"  and {len(nodes) - NODES_SHOWN} more: --json names up to a hundred")
