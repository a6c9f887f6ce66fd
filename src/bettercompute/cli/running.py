"""`better-compute run`: have something done on nodes, all at once or a few at a time, and wait for every end.

A rolling run is driven from here, not by the control plane: it goes on only while somebody looks at it, and Ctrl-C is
its brake. The nodes are chosen once, at its beginning; each step adds commands to the one batch of the run.
"""

from __future__ import annotations

import json as json_module
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from bettercompute.cli import output
from bettercompute.cli.client import ApiClient, path_of
from bettercompute.cli.durations import parse_duration_ms
from bettercompute.cli.live import LiveOutput, Progress
from bettercompute.cli.options import Api, Json
from bettercompute.errors import Unavailable
from bettercompute.system import system_world

PAYLOAD_BYTES_MAX = 1 << 20
# How long one request lets the API wait for news; with live output, how old that may be.
WAIT_MS = 10_000
LIVE_WAIT_MS = 500
# After a deadline passed, what a node may still take to tell its end.
GRACE_S = 15.0
# A restarting API is back within this, or the wait ends; the commands go on without it.
RESTART_S = 120.0
RETRY_S_MIN = 0.25
RETRY_S_MAX = 5.0
NAMED_MAX = 10
TERMINAL = frozenset({"succeeded", "failed", "cancelled", "expired"})

_SHARE = re.compile(r"(\d{1,6})(%?)", re.ASCII)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rolling:
    """How a run proceeds: so many nodes at once, and none any more when more than `failures_max` have failed."""

    at_once: int
    failures_max: int


@dataclass(slots=True, kw_only=True)
class _Run:
    """A run as far as it has come."""

    kind: str
    batch_id: str = ""
    waiting: dict[str, str] = field(default_factory=dict)
    """The node of each command that has not ended."""
    size: int = 0
    failed: int = 0
    cursor: str | None = None
    gives_up_at: float = 0.0
    not_asked: list[str] = field(default_factory=list)

    def add(self, made: dict[str, Any]) -> None:
        self.batch_id = made["batch_id"]
        self.waiting |= {command["id"]: command["node_id"] for command in made["commands"]}
        self.size += len(made["commands"])
        self.gives_up_at = time.monotonic() + made["gives_up_after_ms"] / 1000 + GRACE_S


def run(
    kind: Annotated[str, typer.Argument(help="The kind of command, e.g. inventory.refresh.")],
    node: Annotated[list[str] | None, typer.Option("--node", help="A node's id; may be repeated.")] = None,
    selector: Annotated[
        str | None, typer.Option(help="The nodes with these labels: gpu=h100,site!=x; also in (a,b), notin, key, !key.")
    ] = None,
    all_nodes: Annotated[bool, typer.Option("--all", help="Every node of the fleet.")] = False,
    payload: Annotated[str, typer.Option(help="The payload as JSON, or @FILE.")] = "{}",
    timeout: Annotated[str | None, typer.Option(help="How long it may run on the node. Default: the kind's.")] = None,
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
        if preview["approvals_required"]:
            output.fail(
                f"APPROVAL_REQUIRED: {preview['approvals_required']} approvers must sign a run of {kind}, and "
                "they sign it as a whole: run it without --max-concurrency",
                code=output.EXIT_USAGE,
            )
        nodes = [item["node_id"] for item in preview["nodes"]]
        rolling = Rolling(
            at_once=max(1, share_of(max_concurrency, len(nodes), option="--max-concurrency")),
            failures_max=share_of(max_failures or "0", len(nodes), option="--max-failures"),
        )
        body = {name: value for name, value in body.items() if name not in {"all", "selector", "nodes"}}
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
    state = _Run(kind=body["kind"], not_asked=list(nodes))
    if rolling is None:
        made = output.run(lambda: client.post("/v1/commands", body))
        state.add(made)
        if made["approvals_required"]:
            output.note(_approval_sentence(made, not_after=not_after))
        if made["without_session"]:
            output.note(_waiting_sentence(made["without_session"], not_after=not_after, batch_id=made["batch_id"]))
        if detach:
            _print_made(made, json=json)
            return
    try:
        commands = output.run(lambda: _proceed(client, body, state, rolling=rolling, quiet=json))
    except typer.Exit:
        # Whatever ended the wait, the commands go on, and there is a way back to them.
        if state.batch_id:
            output.note(
                f"stopped waiting; the commands go on: better-compute commands list --batch {state.batch_id}"
                + (f"; {len(state.not_asked)} nodes were not asked" if state.not_asked else "")
            )
        raise
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
    if state.not_asked or any(command["state"] != "succeeded" for command in commands):
        raise typer.Exit(output.EXIT_FAILED)


def share_of(text: str, total: int, *, option: str) -> int:
    """Return `N` as it is, and `P%` of `total`, rounded down."""
    found = _SHARE.fullmatch(text.strip())
    if found is None or (found[2] and int(found[1]) > 100):
        output.fail(f"{option} {text!r}: write a number, as 10, or a share, as 25%", code=output.EXIT_USAGE)
    return int(found[1]) * total // 100 if found[2] else int(found[1])


def wait_for_batch(client: ApiClient, made: dict[str, Any], *, quiet: bool) -> list[dict[str, Any]]:
    """Return each command as it ended, or as it stands when its deadlines have passed and the node did not answer."""
    state = _Run(kind=made["kind"])
    state.add(made)
    return _proceed(client, {}, state, rolling=None, quiet=quiet)


def _proceed(
    client: ApiClient, body: dict[str, Any], state: _Run, *, rolling: Rolling | None, quiet: bool
) -> list[dict[str, Any]]:
    live = None if quiet else LiveOutput(client)
    with Progress(state.size + len(state.not_asked), kind=state.kind, quiet=quiet) as progress:
        while True:
            if rolling is not None:
                _take_step(client, body, state, rolling)
            left_s = state.gives_up_at - time.monotonic()
            if not state.waiting or left_s <= 0:
                break
            wait_ms = max(0, min(LIVE_WAIT_MS if live is not None else WAIT_MS, int(left_s * 1000)))
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
                if command["id"] in state.waiting and command["state"] in TERMINAL:
                    if live is not None:
                        live.end(command["id"])
                    state.failed += command["state"] != "succeeded"
                    progress(state.waiting.pop(command["id"]), command["state"])
    return patiently(
        lambda: list(client.pages("/v1/commands", batch_id=state.batch_id)), until=time.monotonic() + RESTART_S
    )


def _take_step(client: ApiClient, body: dict[str, Any], state: _Run, rolling: Rolling) -> None:
    """Ask as many further nodes as there is room for, unless too many have failed."""
    room = rolling.at_once - len(state.waiting)
    if room <= 0 or not state.not_asked or state.failed > rolling.failures_max:
        return
    nodes = state.not_asked[:room]
    step = body | {"nodes": nodes} | ({"batch_id": state.batch_id} if state.batch_id else {})
    # Asked again under the same key, so that an answer that was lost does not run anything twice.
    key = system_world().ids.uuid7()
    state.add(
        patiently(lambda: client.post("/v1/commands", step, idempotency_key=key), until=time.monotonic() + RESTART_S)
    )
    state.not_asked = state.not_asked[len(nodes) :]


def patiently(action: Callable[[], T], *, until: float) -> T:
    """Return what `action` returns, asking again, ever more slowly, while the API is away as for a restart."""
    gives_up_at = min(until, time.monotonic() + RESTART_S)
    retry_s = RETRY_S_MIN
    while True:
        try:
            return action()
        except Unavailable:
            if time.monotonic() + retry_s > gives_up_at:
                raise
        time.sleep(retry_s)
        retry_s = min(2 * retry_s, RETRY_S_MAX)


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
