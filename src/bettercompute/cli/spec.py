"""`better-compute spec`: what is desired of a node, how far the node is, and what changed from when to when.

See docs/desired-state.md, "Setting one".
"""

from __future__ import annotations

import json as json_module
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from bettercompute.cli import output
from bettercompute.cli.client import ApiClient, path_of
from bettercompute.cli.durations import parse_duration_ms
from bettercompute.cli.options import Api, Json
from bettercompute.cli.spec_diff import Change, differences, print_differences

app = typer.Typer(no_args_is_help=True, help="What is desired of a node.")

SPEC_BYTES_MAX = 2 << 20
POLL_S = 0.5
SETTLED = frozenset({"applied", "parked", "replaced"})

Generation = Annotated[int | None, typer.Option(min=1, help="An older generation. Default: the newest.")]


@app.command("get")
def get(node_id: str, generation: Generation = None, api: Api = None, json: Json = False) -> None:
    """Show what is desired of a node, and how each section stands there."""
    shown = output.run(lambda: ApiClient.from_environment(api).get(_path(node_id), generation=generation))
    if json:
        output.print_json(shown)
        return
    _print_standing(shown)
    output.console.print_json(data=shown["spec"], indent=2)


@app.command("set")
def set_spec(
    node_id: str,
    spec: Annotated[
        str, typer.Argument(help="JSON, @FILE, or - for standard input. With --section: null takes it out.")
    ],
    section: Annotated[str | None, typer.Option(help="Set this section alone; the others stay as they are.")] = None,
    expect: Annotated[
        int | None, typer.Option(min=0, help="Refuse unless the node is at this generation. Default: as it is now.")
    ] = None,
    why: Annotated[str, typer.Option(help="The reason, for the audit log and the history.")] = "",
    dry_run: Annotated[bool, typer.Option(help="Check it and show what would change; set nothing.")] = False,
    wait: Annotated[
        str | None, typer.Option(help="Wait up to this long, e.g. 30s, until the node has applied it.")
    ] = None,
    api: Api = None,
    json: Json = False,
) -> None:
    """Desire something of a node: all of its spec, or with --section one part of it."""
    value = _value(spec)
    wait_ms = None if wait is None else parse_duration_ms(wait)
    client = output.run(lambda: ApiClient.from_environment(api))
    before = output.run(lambda: client.get(_path(node_id)))
    body = {"expected_generation": before["generation"] if expect is None else expect, "why": why, "dry_run": dry_run}
    if section is not None:
        made = output.run(lambda: client.patch(_path(node_id), {**body, "sections": {section: value}}))
    else:
        made = output.run(lambda: client.put(_path(node_id), {**body, "spec": value}))
    standing = None
    if wait_ms is not None and not dry_run:
        standing = output.run(lambda: _wait(client, node_id, made["generation"], timeout_s=wait_ms / 1000))
    if json:
        output.print_json(
            made if standing is None else {**made, "state": standing["state"], "sections": standing["sections"]}
        )
    else:
        _print_made(made, differences(before["spec"], made["spec"]))
        if standing is not None:
            _print_standing(standing)
    if standing is not None and (standing["generation"], standing["state"]) != (made["generation"], "applied"):
        output.fail(_why_not(standing, made["generation"], waited=wait or ""))


@app.command("diff")
def diff(
    node_id: str,
    from_generation: Annotated[
        int | None, typer.Option("--from", min=1, help="Default: the one before the newest.")
    ] = None,
    to_generation: Annotated[int | None, typer.Option("--to", min=1, help="Default: the newest.")] = None,
    against: Annotated[
        str | None, typer.Option(help="A whole spec that is not set yet: JSON, @FILE or -, in place of --to.")
    ] = None,
    api: Api = None,
    json: Json = False,
) -> None:
    """Show what differs between two generations, or between the newest and a spec that is not set yet."""
    if against is not None and to_generation is not None:
        output.fail("give --to or --against, not both", code=output.EXIT_USAGE)
    other = None if against is None else _value(against)
    client = output.run(lambda: ApiClient.from_environment(api))
    before, after = output.run(
        lambda: _compared(client, node_id, from_generation=from_generation, to_generation=to_generation, other=other)
    )
    changes = differences(before["spec"], after["spec"])
    if json:
        output.print_json(
            {
                "node_id": node_id,
                "from": before["generation"],
                "to": after["generation"],
                "changes": [change.as_json() for change in changes],
            }
        )
        return
    print_differences(changes, title=f"{_named(before)} -> {_named(after)}")


@app.command("history")
def history(node_id: str, api: Api = None, json: Json = False) -> None:
    """List the generations that are kept, newest first."""
    items = output.run(lambda: _history(ApiClient.from_environment(api), node_id))
    if json:
        for item in items:
            output.print_json(item)
        return
    output.print_table(
        ("generation", "set", "by", "changed", "why"),
        [
            (item["generation"], item["issued_at"], item["issued_by"], output.cell(item["changed"]), item["why"])
            for item in items
        ],
        empty=f"nothing was ever desired of {node_id}: `better-compute spec set` does it",
    )


def _path(node_id: str) -> str:
    return f"{path_of('nodes', node_id)}/spec"


def _history(client: ApiClient, node_id: str) -> list[Any]:
    found: list[Any] = []
    before: int | None = None
    while True:
        page = client.get(f"{_path(node_id)}/history", before=before)
        found += page["items"]
        before = page["next"]
        if before is None:
            return found


def _compared(
    client: ApiClient,
    node_id: str,
    *,
    from_generation: int | None,
    to_generation: int | None,
    other: dict[str, Any] | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    nothing: dict[str, Any] = {"generation": 0, "spec": {}}
    after = client.get(_path(node_id), generation=to_generation)
    if other is not None:
        before = after if from_generation is None else client.get(_path(node_id), generation=from_generation)
        judged = client.put(_path(node_id), {"spec": other, "dry_run": True})
        return before, {"generation": None, "spec": judged["spec"]}
    if from_generation is None:
        older = client.get(f"{_path(node_id)}/history", before=max(1, after["generation"]), limit=1)["items"]
        if not older:
            return nothing, after
        from_generation = older[0]["generation"]
    return client.get(_path(node_id), generation=from_generation), after


def _named(side: dict[str, Any]) -> str:
    if side["generation"] is None:
        return "not set yet"
    return f"generation {side['generation']}" if side["generation"] else "nothing"


def _value(text: str) -> Any:
    try:
        if text == "-":
            text = sys.stdin.read(SPEC_BYTES_MAX + 1)
        elif text.startswith("@"):
            with Path(text[1:]).open(encoding="utf-8") as file:
                text = file.read(SPEC_BYTES_MAX + 1)
        if len(text) > SPEC_BYTES_MAX:
            raise ValueError(f"it is larger than {SPEC_BYTES_MAX} bytes")
        value = json_module.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        output.fail(f"the spec: {error}", code=output.EXIT_USAGE)
    if value is not None and not isinstance(value, dict):
        output.fail(f"the spec: a JSON object is needed, this is {type(value).__name__}", code=output.EXIT_USAGE)
    return value


def _wait(client: ApiClient, node_id: str, generation: int, *, timeout_s: float) -> dict[str, Any]:
    """Return how the node stands once this generation is settled there, or when the time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        shown: dict[str, Any] = client.get(_path(node_id))
        if shown["generation"] != generation or shown["state"] in SETTLED or time.monotonic() >= deadline:
            return shown
        time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))


def _why_not(standing: dict[str, Any], generation: int, *, waited: str) -> str:
    node_id = standing["node_id"]
    if standing["generation"] != generation:
        return f"generation {generation} of {node_id} was replaced by {standing['generation']} meanwhile"
    if standing["state"] == "parked":
        stuck = [
            f"{item['section'] or item['field_number']}: {item['message'] or item['reason']}"
            for item in standing["sections"]
            if item["convergence"] != "converged"
        ]
        return f"{node_id} cannot apply generation {generation}: {'; '.join(stuck)}"
    return (
        f"{node_id} has not applied generation {generation} within {waited}, it is {standing['state']}; it stays set: "
        f"`better-compute nodes show {node_id}` says whether the node is connected"
    )


def _print_made(made: dict[str, Any], changes: list[Change]) -> None:
    if not made["changed"] and made["generation"]:
        output.console.print(
            f"{made['node_id']}: nothing to change, generation {made['generation']} is this", markup=False
        )
        return
    title = f"{made['node_id']}: generation {made['before_generation']} -> {made['generation']}"
    if made["dry_run"]:
        title = f"{made['node_id']}: would change generation {made['before_generation']}; nothing was set"
    print_differences(changes, title=title)


def _print_standing(shown: dict[str, Any]) -> None:
    output.print_facts(
        {
            "node": shown["node_id"],
            "generation": shown["generation"] or "none",
            "state": shown["state"],
            "observed": shown["observed_generation"],
            "applied": shown["applied_generation"],
            "set": f"{shown['issued_at']} by {shown['issued_by']}" if shown["issued_by"] else shown["issued_at"],
            "why": shown["why"],
        }
    )
    for item in shown["sections"]:
        name = item["section"] or f"section {item['field_number']}"
        told = " ".join(part for part in (item["reason"], item["message"]) if part)
        output.console.print(f"  {name:<10} {item['convergence']}  {told}".rstrip(), markup=False)
