"""`better-compute dev`: the whole product on this machine, and a first round to look at."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from bettercompute.cli import output
from bettercompute.cli.client import ApiClient, path_of
from bettercompute.cli.nodes import describe_bytes, describe_cpu, describe_disk
from bettercompute.cli.options import Json
from bettercompute.cli.running import wait_for_batch
from bettercompute.errors import Unavailable

CONNECT_S = 60.0
POLL_S = 0.2


def dev(
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Keep everything here and take it up again. Default: a temporary one.")
    ] = None,
    nodes: Annotated[int, typer.Option(help="Real nodes to run on this host.", min=0, max=50)] = 0,
    once: Annotated[bool, typer.Option(help="End after the first full round.")] = False,
    json: Json = False,
) -> None:
    """Run database, control plane and nodes on this machine until Ctrl-C."""
    output.run(lambda: _dev(folder, nodes=nodes, once=once, json=json))


def _dev(folder: Path | None, *, nodes: int, once: bool, json: bool) -> None:
    import uvloop

    from bettercompute.server.dev import dev_database, dev_folder
    from bettercompute.server.logs import configure

    configure(level="warning")
    # Until the event loop listens, an end by signal must still remove what was begun.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    with dev_folder(folder) as home:
        _say("starting PostgreSQL", quiet=json)
        with dev_database(home) as dsn:
            uvloop.run(_run(home, dsn, nodes=nodes, once=once, json=json, began=began))


async def _run(home: Path, dsn: str, *, nodes: int, once: bool, json: bool, began: float) -> None:
    from bettercompute.server.dev import dev_stack
    from bettercompute.system import system_world

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    _say(f"starting the control plane and joining {nodes} nodes" if nodes else "starting the control plane", quiet=json)
    async with dev_stack(home, dsn=dsn, nodes=nodes, world=system_world()) as stack:
        running = stack.running
        client = ApiClient(address=running.api_url or "", token=running.operator_token or "")
        failure = None
        try:
            await _until_connected(client, [node.node_id for node in stack.nodes], stop)
            if json:
                output.print_json(
                    {
                        "event": "ready",
                        "api": running.api_url,
                        "gateway": running.gateway_url,
                        "websocket": None,
                        "operator_token": running.operator_token,
                        "state_dir": str(stack.folder),
                        "serving_ca": str(stack.serving_ca),
                        "serving_ca_spki_sha256": stack.serving_ca_pin,
                        "database": stack.dsn,
                    }
                )
            if stack.nodes and not stop.is_set():
                commands = await asyncio.to_thread(_round, client, quiet=json)
                if any(command["state"] != "succeeded" for command in commands):
                    failure = "inventory.refresh did not succeed on every node: " + ", ".join(
                        f"{item['node_id']} {item['state']} {item['reason']}" for item in commands
                    )
                if not json:
                    await asyncio.to_thread(_show, client, commands)
            if not json:
                _print_addresses(stack_facts=_facts(running, stack.folder, stack.dsn), began=began)
            if not once:
                _say("Ctrl-C stops everything", quiet=json)
                await stop.wait()
        except Unavailable as error:
            failure = error.message
        _say("stopping", quiet=json)
    if failure is not None:
        output.fail(failure)


async def _until_connected(client: ApiClient, node_ids: list[str], stop: asyncio.Event) -> None:
    deadline = time.monotonic() + CONNECT_S
    missing = set(node_ids)
    while missing and not stop.is_set():
        fleet = await asyncio.to_thread(lambda: list(client.pages("/v1/nodes", state="connected")))
        missing = set(node_ids) - {node["node_id"] for node in fleet}
        if missing and time.monotonic() > deadline:
            raise Unavailable(
                f"{', '.join(sorted(missing))} did not connect within {CONNECT_S:.0f} s; see nodes/*/bcd.log"
            )
        if missing:
            await asyncio.sleep(POLL_S)


def _round(client: ApiClient, *, quiet: bool) -> list[dict[str, Any]]:
    made = client.post("/v1/commands", {"kind": "inventory.refresh", "all": True, "not_after_ms": 60_000})
    return wait_for_batch(client, made, quiet=quiet)


def _show(client: ApiClient, commands: list[dict[str, Any]]) -> None:
    outcome = {command["node_id"]: command["state"] for command in commands}
    rows = []
    for listed in client.pages("/v1/nodes"):
        node = client.get(path_of("nodes", listed["node_id"]))
        inventory = node["inventory"]
        disks = ", ".join(describe_disk(disk) for disk in inventory.get("disks", {}).get("disks", ())) or "none"
        rows.append(
            (
                node["node_id"],
                node["state"],
                outcome.get(node["node_id"], "-"),
                describe_cpu(inventory.get("cpu", {})),
                describe_bytes(inventory.get("memory", {}).get("total_bytes", 0)),
                disks,
                inventory.get("software", {}).get("kernel_release", "-"),
            )
        )
    columns = ("node", "state", "inventory.refresh", "cpu", "memory", "disks", "kernel")
    output.print_table(columns, rows, empty="no nodes")


def _facts(running: Any, folder: Path, dsn: str) -> dict[str, object]:
    return {
        "api": running.api_url,
        "openapi": f"{running.api_url}/openapi.json",
        "gateway": running.gateway_url,
        "database": dsn,
        "state": folder,
        "to use it": f"export BETTER_COMPUTE_API={running.api_url} BETTER_COMPUTE_TOKEN={running.operator_token}",
        "then": "better-compute nodes list",
    }


def _print_addresses(*, stack_facts: dict[str, object], began: float) -> None:
    output.console.print()
    output.print_facts(stack_facts)
    output.console.print(f"\nready after {time.monotonic() - began:.1f} s", markup=False)


def _say(sentence: str, *, quiet: bool) -> None:
    if not quiet:
        output.note(sentence)
