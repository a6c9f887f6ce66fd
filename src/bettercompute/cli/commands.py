"""`better-compute commands`: what was asked of nodes, and what became of it."""

from __future__ import annotations

import base64
import codecs
import json as json_module
from functools import partial
from itertools import islice
from typing import Annotated

import typer

from bettercompute.cli import output
from bettercompute.cli.client import ApiClient, path_of
from bettercompute.cli.durations import format_age
from bettercompute.cli.options import Api, Json

app = typer.Typer(no_args_is_help=True, help="Commands and what became of them.")


@app.command("list")
def list_commands(
    node: Annotated[str | None, typer.Option(help="Only commands of this node.")] = None,
    state: Annotated[str | None, typer.Option(help="Only commands in this state.")] = None,
    batch: Annotated[str | None, typer.Option(help="Only commands of this run.")] = None,
    selector: Annotated[str | None, typer.Option(help="Only commands of nodes with these labels.")] = None,
    limit: Annotated[int, typer.Option(help="How many, newest first.", min=1)] = 50,
    all_commands: Annotated[bool, typer.Option("--all", help="All there are.")] = False,
    api: Api = None,
    json: Json = False,
) -> None:
    """List commands, the newest first."""
    client = output.run(lambda: ApiClient.from_environment(api))
    found = client.pages("/v1/commands", node_id=node, state=state, batch_id=batch, selector=selector)
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
            "attestation": command["attestation"]
            + (f": {command['attestation_reason']}" if command["attestation_reason"] else "")
            if command["attestation"] != "none"
            else None,
            "message": command["message"],
            "attempt": command["attempt"],
            "created": f"{command['created_at']} by {command['created_by']}",
            "not before": command["asked_not_before"],
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
    _print_output(client, command_id)


def _print_output(client: ApiClient, command_id: str) -> None:
    """Print what is kept of a command's output, to its end as it is now."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a piece may end within a character
    path, offset = path_of("commands", command_id, "output"), 0
    while (answer := output.run(partial(client.get, path, from_offset=offset)))["items"]:
        for piece in answer["items"]:
            if piece["dropped_bytes"]:
                output.note(f"[{piece['dropped_bytes']} bytes of output were dropped here]")
            output.print_output(decoder.decode(base64.b64decode(piece["data_base64"])))
        offset = answer["next_offset"]
    output.print_output(decoder.decode(b"", final=True))


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
