"""`better-compute run` and `better-compute commands`: have something done on nodes, and see what became of it."""

from __future__ import annotations

import base64
import json as json_module
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bettercompute.cli import output
from bettercompute.cli.client import ApiClient, path_of
from bettercompute.cli.durations import format_age, parse_duration_ms
from bettercompute.cli.options import Api, Json

app = typer.Typer(no_args_is_help=True, help="Commands and what became of them.")

PAYLOAD_BYTES_MAX = 1 << 20
# How long one request lets the API wait for news.
WAIT_MS = 10_000
# After a deadline passed, what a node may still take to tell its end.
GRACE_S = 15.0
NAMED_MAX = 10
TERMINAL = frozenset({"succeeded", "failed", "cancelled", "expired"})


def run(
    kind: Annotated[str, typer.Argument(help="The kind of command, e.g. inventory.refresh.")],
    node: Annotated[list[str] | None, typer.Option("--node", help="A node's id; may be repeated.")] = None,
    all_nodes: Annotated[bool, typer.Option("--all", help="Every node of the fleet.")] = False,
    payload: Annotated[str, typer.Option(help="The payload as JSON, or @FILE.")] = "{}",
    timeout: Annotated[str | None, typer.Option(help="How long it may run on the node. Default: the kind's.")] = None,
    not_after: Annotated[str, typer.Option(help="How long it may wait to be delivered and begun, at most 7d.")] = "24h",
    detach: Annotated[bool, typer.Option(help="Print the ids and do not wait.")] = False,
    api: Api = None,
    json: Json = False,
) -> None:
    """Run a command on nodes and wait for every end. Exit code 0 only if all succeeded."""
    if bool(node) == all_nodes:
        output.fail("name the nodes: --node ID (may be repeated) or --all", code=output.EXIT_USAGE)
    body: dict[str, Any] = {"kind": kind, "payload": _payload(payload), "not_after_ms": parse_duration_ms(not_after)}
    if timeout is not None:
        body["timeout_ms"] = parse_duration_ms(timeout)
    body |= {"all": True} if all_nodes else {"nodes": node}
    client = output.run(lambda: ApiClient.from_environment(api))
    made = output.run(lambda: client.post("/v1/commands", body))
    if made["without_session"]:
        output.note(_waiting_sentence(made["without_session"], not_after=not_after, batch_id=made["batch_id"]))
    if detach:
        _print_made(made, json=json)
        return
    try:
        commands = output.run(lambda: wait_for_batch(client, made, quiet=json))
    except typer.Exit as stopped:
        if stopped.exit_code == 130:
            output.note(f"stopped waiting; the commands go on: better-compute commands list --batch {made['batch_id']}")
        raise
    if json:
        for command in commands:
            output.print_json(command)
    else:
        _print_outcome(commands)
    if any(command["state"] != "succeeded" for command in commands):
        raise typer.Exit(output.EXIT_FAILED)


def _waiting_sentence(node_ids: list[str], *, not_after: str, batch_id: str) -> str:
    """Return what somebody must know who would else wait for nodes that are away."""
    named = ", ".join(node_ids[:NAMED_MAX]) + (f" and {len(node_ids) - NAMED_MAX} more" if node_ids[NAMED_MAX:] else "")
    return (
        f"not connected: {named}; the commands wait for these nodes for up to {not_after}. Ctrl-C stops waiting here "
        f"(see `better-compute commands list --batch {batch_id}`), `commands cancel` ends a command, and --not-after "
        "bounds the next run"
    )


def _payload(text: str) -> dict[str, Any]:
    try:
        if text.startswith("@"):
            with Path(text[1:]).open("rb") as file:
                content = file.read(PAYLOAD_BYTES_MAX + 1)
            if len(content) > PAYLOAD_BYTES_MAX:
                raise ValueError(f"{text[1:]} is larger than {PAYLOAD_BYTES_MAX} bytes")
            text = content.decode()
        value = json_module.loads(text)
    except (OSError, ValueError) as error:
        output.fail(f"--payload: {error}", code=output.EXIT_USAGE)
    if not isinstance(value, dict):
        output.fail(f"--payload: a JSON object is needed, this is {type(value).__name__}", code=output.EXIT_USAGE)
    return value


def _print_made(made: dict[str, Any], *, json: bool) -> None:
    if json:
        output.print_json(made)
        return
    for command in made["commands"]:
        output.console.print(f"{command['id']}  {command['node_id']}", markup=False)


def wait_for_batch(client: ApiClient, made: dict[str, Any], *, quiet: bool) -> list[dict[str, Any]]:
    """Return each command as it ended, or as it stands when its deadlines have passed and the node did not answer."""
    waiting = {command["id"]: command["node_id"] for command in made["commands"]}
    give_up_at = time.monotonic() + made["gives_up_after_ms"] / 1000 + GRACE_S
    cursor = None
    with _Progress(len(waiting), kind=made["kind"], quiet=quiet) as advance:
        while waiting and (left_s := give_up_at - time.monotonic()) > 0:
            wait_ms = max(0, min(WAIT_MS, int(left_s * 1000)))
            batch = client.get(path_of("batches", made["batch_id"]), wait_ms=wait_ms, since=cursor)
            cursor = batch["cursor"]
            for command in batch["items"]:
                if command["id"] in waiting and command["state"] in TERMINAL:
                    advance(waiting.pop(command["id"]), command["state"])
    return list(client.pages("/v1/commands", batch_id=made["batch_id"]))


class _Progress:
    """A bar on a terminal, a line per node elsewhere, nothing when the output is for programs."""

    def __init__(self, total: int, *, kind: str, quiet: bool) -> None:
        self._quiet = quiet
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            console=output.error_console,
            disable=quiet or not sys.stderr.isatty(),
            transient=True,
        )
        self._task = self._bar.add_task(kind, total=total)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, node_id: str, state: str) -> None:
        self._bar.advance(self._task)
        if not self._quiet and self._bar.disable:
            output.note(f"{node_id}: {state}")


def _print_outcome(commands: list[dict[str, Any]]) -> None:
    failed = [command for command in commands if command["state"] != "succeeded"]
    output.console.print(f"{len(commands) - len(failed)} of {len(commands)} succeeded", markup=False)
    for command in sorted(failed, key=lambda item: str(item["node_id"])):
        if command["state"] in TERMINAL:
            why = ": ".join(part for part in (command["reason"], command["message"]) if part)
            sentence = f"{command['node_id']}: {command['state']}" + (f" ({why})" if why else "")
        else:
            sentence = (
                f"{command['node_id']}: did not answer, the command is still {command['state']} ({command['id']})"
            )
        output.console.print(sentence, style="red", markup=False)


@app.command("list")
def list_commands(
    node: Annotated[str | None, typer.Option(help="Only commands of this node.")] = None,
    state: Annotated[str | None, typer.Option(help="Only commands in this state.")] = None,
    batch: Annotated[str | None, typer.Option(help="Only commands of this run.")] = None,
    limit: Annotated[int, typer.Option(help="How many, newest first.", min=1)] = 50,
    all_commands: Annotated[bool, typer.Option("--all", help="All there are.")] = False,
    api: Api = None,
    json: Json = False,
) -> None:
    """List commands, the newest first."""
    client = output.run(lambda: ApiClient.from_environment(api))
    found = client.pages("/v1/commands", node_id=node, state=state, batch_id=batch)
    commands = output.run(lambda: list(found if all_commands else islice(found, limit)))
    if json:
        for command in commands:
            output.print_json(command)
        return
    output.print_table(
        ("command", "node", "kind", "state", "reason", "age"),
        [
            (item["id"], item["node_id"], item["kind"], item["state"], item["reason"], format_age(item["age_ms"]))
            for item in commands
        ],
        empty="no commands",
    )


@app.command()
def show(command_id: str, api: Api = None, json: Json = False) -> None:
    """Show one command: its payload, every step of its life and its result."""
    client = output.run(lambda: ApiClient.from_environment(api))
    command = output.run(lambda: client.get(path_of("commands", command_id)))
    if json:
        output.print_json(command)
        return
    output.print_facts(
        {
            "command": command["id"],
            "node": command["node_id"],
            "kind": command["kind"],
            "lane": command["lane"],
            "state": command["state"] + (" (overdue)" if command["overdue"] else ""),
            "reason": command["reason"],
            "message": command["message"],
            "attempt": command["attempt"],
            "created": f"{command['created_at']} by {command['created_by']}",
            "not after": command["not_after"],
            "dispatched": command["dispatched_at"],
            "acked": command["acked_at"],
            "running": command["running_at"],
            "finished": command["finished_at"],
            "progress": json_module.dumps(command["progress"]) if command["progress"] else None,
            "payload": json_module.dumps(command["payload"], ensure_ascii=False) if command["payload"] else None,
        }
    )
    if command["result"] is not None:
        output.console.print_json(data=command["result"])
    for piece in output.run(lambda: client.get(path_of("commands", command_id, "output")))["items"]:
        if piece["dropped_bytes"]:
            output.note(f"[{piece['dropped_bytes']} bytes of output were dropped here]")
        output.console.print(base64.b64decode(piece["data_base64"]).decode("utf-8", "replace"), end="", markup=False)


@app.command()
def cancel(
    command_id: str,
    reason: Annotated[str, typer.Option(help="Why, for the node's log and the audit log.")] = "",
    api: Api = None,
    json: Json = False,
) -> None:
    """Ask for a command's end. Exit code 1 when it came too late."""
    answer = output.run(
        lambda: ApiClient.from_environment(api).post(path_of("commands", command_id, "cancel"), {"reason": reason})
    )
    if json:
        output.print_json(answer)
    else:
        sentences = {
            "cancelled": "cancelled before it was sent",
            "requested": "asked for its end; the node stops between actions, or tells the result that came first",
            "too-late": f"too late, it has {answer['state']}",
        }
        output.console.print(f"{command_id}: {sentences[answer['outcome']]}", markup=False)
    if answer["outcome"] == "too-late":
        raise typer.Exit(output.EXIT_FAILED)


@app.command()
def why(command_id: str, api: Api = None, json: Json = False) -> None:
    """Say what exactly a command waits for, the decisive reason first."""
    answer = output.run(lambda: ApiClient.from_environment(api).get(path_of("commands", command_id, "why")))
    if json:
        output.print_json(answer)
        return
    for reason in answer["reasons"]:
        output.console.print(f"{reason['code']}: {reason['sentence']}", markup=False)


@app.command()
def abandon(
    command_id: str,
    reason: Annotated[str, typer.Option(help="Why nobody waits for it any more, for the audit log.")],
    api: Api = None,
    json: Json = False,
) -> None:
    """End a command in flight as failed without its node's word. What the node did with it stays unknown."""
    answer = output.run(
        lambda: ApiClient.from_environment(api).post(path_of("commands", command_id, "abandon"), {"reason": reason})
    )
    if json:
        output.print_json(answer)
    else:
        output.console.print(f"{command_id}: failed (abandoned)", markup=False)
