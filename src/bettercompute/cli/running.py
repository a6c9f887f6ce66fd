"""`better-compute run`: have something done on nodes, all at once or a few at a time, and wait for every end.

A rolling run is driven from here, not by the control plane: it goes on only while somebody looks at it, and Ctrl-C is
its brake. The nodes are chosen once, at its beginning; `rolling` takes the steps.
"""

from __future__ import annotations

import json as json_module
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bettercompute.cli import output
from bettercompute.cli.client import ApiClient, path_of
from bettercompute.cli.durations import format_age, parse_duration_ms
from bettercompute.cli.live import LiveOutput, Progress
from bettercompute.cli.options import Api, Json
from bettercompute.cli.rolling import (
    RESTART_S,
    STOP_S,
    TERMINAL,
    Rolling,
    Run,
    patiently,
    resumed,
    share_of,
    stop_rest,
    take_step,
)

PAYLOAD_BYTES_MAX = 1 << 20
# How long one request lets the API wait for news; with live output, how old that may be.
WAIT_MS = 10_000
LIVE_WAIT_MS = 500
# While people are to approve the run, how often it is asked whether they have.
APPROVAL_WAIT_MS = 2_000
NAMED_MAX = 10


def run(
    kind: Annotated[str, typer.Argument(help="The kind of command, e.g. inventory.refresh.")],
    node: Annotated[list[str] | None, typer.Option("--node", help="A node's id; may be repeated.")] = None,
    selector: Annotated[
        str | None, typer.Option(help="The nodes with these labels: gpu=h100,site!=x; also in (a,b), notin, key, !key.")
    ] = None,
    all_nodes: Annotated[bool, typer.Option("--all", help="Every node of the fleet.")] = False,
    payload: Annotated[str, typer.Option(help="The payload as JSON, or @FILE.")] = "{}",
    timeout: Annotated[str | None, typer.Option(help="How long it may run on the node. Default: the kind's.")] = None,
    not_before: Annotated[
        str | None, typer.Option(help="Send it no sooner than so long from now, e.g. 8h; less than --not-after.")
    ] = None,
    not_after: Annotated[str, typer.Option(help="How long it may wait to be delivered and begun, at most 7d.")] = "24h",
    max_concurrency: Annotated[
        str | None, typer.Option(metavar="N|P%", help="At most so many nodes at once. Default: all.")
    ] = None,
    max_failures: Annotated[
        str | None,
        typer.Option(metavar="N|P%", help="Ask no further nodes when more have failed. Needs --max-concurrency."),
    ] = None,
    unbatched: Annotated[
        bool,
        typer.Option("--unbatched", help="Destructive: use the few an hour that pass without the approvers' word."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say which nodes would be asked, and ask none.")] = False,
    detach: Annotated[bool, typer.Option(help="Print the ids and do not wait.")] = False,
    api: Api = None,
    json: Json = False,
) -> None:
    """Run a command on nodes and wait for every end. Exit code 0 only if all succeeded."""
    if [bool(node), selector is not None, all_nodes].count(True) != 1:
        output.fail(
            "name the nodes: --node ID (may be repeated), --selector LABELS or --all; one of the three",
            code=output.EXIT_USAGE,
        )
    if max_failures is not None and max_concurrency is None:
        output.fail("--max-failures needs --max-concurrency: else all nodes are asked at once", code=output.EXIT_USAGE)
    if detach and max_concurrency is not None:
        output.fail(
            "--max-concurrency does not go with --detach: a rolling run is led from here", code=output.EXIT_USAGE
        )
    body: dict[str, Any] = {"kind": kind, "payload": _payload(payload), "not_after_ms": parse_duration_ms(not_after)}
    if timeout is not None:
        body["timeout_ms"] = parse_duration_ms(timeout)
    if not_before is not None:
        body["not_before_ms"] = parse_duration_ms(not_before)
    if unbatched:
        body["unbatched"] = True
    body |= {"all": True} if all_nodes else {"nodes": node} if node else {"selector": selector}
    client = output.run(lambda: ApiClient.from_environment(api))
    if dry_run:
        _print_preview(output.run(lambda: client.post("/v1/commands/preview", body)), json=json)
        return
    rolling: Rolling | None = None
    nodes: list[str] = []
    if max_concurrency is not None:
        preview = output.run(lambda: client.post("/v1/commands/preview", body))
        nodes = [item["node_id"] for item in preview["nodes"]]
        rolling = Rolling(
            at_once=max(1, share_of(max_concurrency, len(nodes), option="--max-concurrency")),
            failures_max=share_of(max_failures or "0", len(nodes), option="--max-failures"),
        )
        body = {name: value for name, value in body.items() if name not in {"all", "selector", "nodes"}}
        if preview["approvals_required"]:
            body["stepwise"] = True
    _run_and_tell(client, body, nodes=nodes, rolling=rolling, not_after=not_after, detach=detach, json=json)


def _run_and_tell(
    client: ApiClient,
    body: dict[str, Any],
    *,
    nodes: list[str],
    rolling: Rolling | None,
    not_after: str,
    detach: bool,
    json: bool,
) -> None:
    state = Run(kind=body["kind"], not_asked=list(nodes))
    if body.get("not_before_ms"):
        output.note(_later_sentence(body["not_before_ms"]))
    if rolling is not None and not body.get("stepwise"):
        # Each step is asked anew, and what is left of the time with it.
        state.sends_from = time.monotonic() + body.pop("not_before_ms", 0) / 1000
    if body.get("stepwise"):
        # Approvers sign a whole: all its commands are made now, and released step by step.
        made = output.run(lambda: client.post("/v1/commands", body | {"nodes": nodes}))
        state.hold(made)
        output.note(_approval_sentence(made, not_after=not_after))
    elif rolling is None:
        made = output.run(lambda: client.post("/v1/commands", body))
        state.add(made)
        if made["approvals_required"]:
            output.note(_approval_sentence(made, not_after=not_after))
        if made["without_session"]:
            output.note(_waiting_sentence(made["without_session"], not_after=not_after, batch_id=made["batch_id"]))
        if detach:
            _print_made(made, json=json)
            return
    _lead(client, body, state, rolling=rolling, json=json)


def resume(
    batch: Annotated[str, typer.Argument(help="The batch of a rolling run that approvers must sign, or have signed.")],
    max_concurrency: Annotated[str, typer.Option(metavar="N|P%", help="At most so many nodes at once.")],
    max_failures: Annotated[
        str, typer.Option(metavar="N|P%", help="Ask no further nodes when more have failed, those of before included.")
    ] = "0",
    api: Api = None,
    json: Json = False,
) -> None:
    """Lead on a rolling run whose command line was lost, as with its terminal. Exit code 0 only if all succeeded."""
    client = output.run(lambda: ApiClient.from_environment(api))
    commands = output.run(lambda: list(client.pages("/v1/commands", batch_id=batch)))
    state = resumed(batch, commands)
    if not state.held:
        output.fail(f"batch {batch} holds no command back: there is nothing to lead on", code=output.EXIT_USAGE)
    rolling = Rolling(
        at_once=max(1, share_of(max_concurrency, len(commands), option="--max-concurrency")),
        failures_max=share_of(max_failures, len(commands), option="--max-failures"),
    )
    _lead(client, {}, state, rolling=rolling, json=json)


def _lead(client: ApiClient, body: dict[str, Any], state: Run, *, rolling: Rolling | None, json: bool) -> None:
    """Proceed to the end of a run, or as far as it goes, and tell how it ended."""
    try:
        commands = output.run(lambda: _proceed(client, body, state, rolling=rolling, quiet=json))
    except typer.Exit:
        # Whatever ended the wait, the commands go on, and there is a way back to them.
        if state.batch_id:
            rest = stop_rest(client, state, within_s=STOP_S)
            output.note(
                f"stopped waiting; the commands go on: better-compute commands list --batch {state.batch_id}"
                + (f"; {len(state.not_asked)} nodes were not asked" if state.not_asked else "")
                + (f"; {rest}" if rest else "")
            )
        raise
    unasked = {state.held[node] for node in state.not_asked if node in state.held}
    commands = [command for command in commands if command["id"] not in unasked]
    if json:
        for command in commands:
            output.print_json(command)
    else:
        _print_outcome(commands)
    if state.not_asked:
        output.note(
            f"{state.failed} failed and {len(state.waiting)} did not answer: {len(state.not_asked)} nodes were not "
            f"asked: {_some(state.not_asked)}"
        )
        rest = stop_rest(client, state)
        if rest:
            output.note(rest)
    if state.not_asked or any(command["state"] != "succeeded" for command in commands):
        raise typer.Exit(output.EXIT_FAILED)


def wait_for_batch(client: ApiClient, made: dict[str, Any], *, quiet: bool) -> list[dict[str, Any]]:
    """Return each command as it ended, or as it stands when its deadlines have passed and the node did not answer."""
    state = Run(kind=made["kind"])
    state.add(made)
    return _proceed(client, {}, state, rolling=None, quiet=quiet)


def _proceed(
    client: ApiClient, body: dict[str, Any], state: Run, *, rolling: Rolling | None, quiet: bool
) -> list[dict[str, Any]]:
    live = None if quiet else LiveOutput(client)
    total = state.size if state.held else state.size + len(state.not_asked)
    with Progress(total, kind=state.kind, quiet=quiet) as progress:
        while True:
            if rolling is not None:
                take_step(client, body, state, rolling)
            left_s = state.gives_up_at - time.monotonic()
            unapproved = state.approval == "waiting" and bool(state.not_asked)
            if not (state.waiting or unapproved) or left_s <= 0:
                break
            often_ms = APPROVAL_WAIT_MS if unapproved else LIVE_WAIT_MS if live is not None else WAIT_MS
            wait_ms = max(0, min(often_ms, int(left_s * 1000)))
            path = path_of("batches", state.batch_id)
            batch = patiently(
                lambda path=path, wait_ms=wait_ms: client.get(  # type: ignore[misc]
                    path, wait_ms=wait_ms, since=state.cursor, size=state.size
                ),
                until=state.gives_up_at,
            )
            state.cursor = batch["cursor"]
            if live is not None:
                live.show(state.batch_id, state.waiting)
            for command in batch["items"]:
                if command["state"] not in TERMINAL:
                    continue
                if state.drop_held(command):
                    progress(command["node_id"], command["state"])
                elif command["id"] in state.waiting:
                    if live is not None:
                        live.end(command["id"])
                    state.failed += command["state"] != "succeeded"
                    progress(state.waiting.pop(command["id"]), command["state"])
    return patiently(
        lambda: list(client.pages("/v1/commands", batch_id=state.batch_id)), until=time.monotonic() + RESTART_S
    )


def _some(node_ids: Sequence[str]) -> str:
    more = f" and {len(node_ids) - NAMED_MAX} more" if len(node_ids) > NAMED_MAX else ""
    return ", ".join(node_ids[:NAMED_MAX]) + more


def _waiting_sentence(node_ids: list[str], *, not_after: str, batch_id: str) -> str:
    """Return what somebody must know who would else wait for nodes that are away."""
    return (
        f"not connected: {_some(node_ids)}; the commands wait for these nodes for up to {not_after}. Ctrl-C stops "
        f"waiting here (see `better-compute commands list --batch {batch_id}`), `commands cancel` ends a command, and "
        "--not-after bounds the next run"
    )


def _later_sentence(not_before_ms: int) -> str:
    """Return what somebody must know who would else wonder why nothing happens."""
    return (
        f"nothing is sent before {format_age(not_before_ms)} from now; --detach does not wait, and `better-compute "
        "commands cancel` ends what was not sent"
    )


def _approval_sentence(made: dict[str, Any], *, not_after: str) -> str:
    """Return what somebody must know whose run waits for other people."""
    return (
        f"APPROVAL_REQUIRED: {made['kind']} is destructive, and {made['approvals_required']} approvers must sign the "
        f"batch before any of it is sent, within {not_after}: better-compute approve {made['batch_id']}"
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
    except OSError as error:
        output.fail(f"--payload: {text[1:]} cannot be read: {error.strerror}", code=output.EXIT_USAGE)
    except (ValueError, RecursionError) as error:
        output.fail(f"--payload: {error}: write a JSON object, or @FILE", code=output.EXIT_USAGE)
    if not isinstance(value, dict):
        output.fail(f"--payload: a JSON object is needed, this is {type(value).__name__}", code=output.EXIT_USAGE)
    return value


def _print_preview(preview: dict[str, Any], *, json: bool) -> None:
    if json:
        for node in preview["nodes"]:
            output.print_json(node)
        return
    output.print_table(
        ("node", "state"), [(node["node_id"], node["state"]) for node in preview["nodes"]], empty="no nodes"
    )
    approvals = f"; {preview['approvals_required']} approvers would have to sign" * bool(preview["approvals_required"])
    output.note(f"{preview['kind']} would be asked of {len(preview['nodes'])} nodes; none was asked{approvals}")


def _print_made(made: dict[str, Any], *, json: bool) -> None:
    if json:
        output.print_json(made)
        return
    for command in made["commands"]:
        output.console.print(f"{command['id']}  {command['node_id']}", markup=False)


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
