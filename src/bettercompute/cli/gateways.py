"""`better-compute gateway`: the gateways by their leases, and giving away what one holds before it is stopped."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bettercompute.cli import output
from bettercompute.cli.client import ApiClient, path_of
from bettercompute.cli.durations import parse_duration_ms
from bettercompute.cli.options import Api, Json

app = typer.Typer(no_args_is_help=True, help="The gateways that hold the nodes' sessions.")

POLL_S = 0.5
# A line of progress where there is no terminal to draw a bar on.
LINE_EVERY_S = 5.0
NAMED_MAX = 20


@app.command("list")
def list_gateways(api: Api = None, json: Json = False) -> None:
    """List gateways with how many sessions they hold."""
    gateways = output.run(lambda: ApiClient.from_environment(api).get("/v1/gateways"))["items"]
    if json:
        for gateway in gateways:
            output.print_json(gateway)
        return
    output.print_table(
        ("gateway", "live", "draining", "sessions", "address", "version", "started"),
        [
            (
                item["gateway_id"],
                "yes" if item["live"] else "no",
                "yes" if item["draining"] else "no",
                f"{item['sessions']}/{item['sessions_max']}",
                item["advertise_url"],
                item["version"],
                item["started_at"],
            )
            for item in gateways
        ],
        empty="no gateways: start one with `better-compute serve`",
    )


@app.command()
def drain(
    gateway_id: Annotated[str, typer.Argument(help="The gateway's id, as `gateway list` shows it.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it take sessions again, and do not wait.")] = False,
    timeout: Annotated[str, typer.Option(help="How long to wait until it holds no session.")] = "10m",
    api: Api = None,
    json: Json = False,
) -> None:
    """Send a gateway's sessions to the others and wait until it holds none. Exit code 1 if some remain.

    It takes no new session from now on, until it is stopped or the drain is undone. Running commands go on.
    """
    timeout_s = parse_duration_ms(timeout) / 1000
    client = output.run(lambda: ApiClient.from_environment(api))
    if undo:
        gateway = output.run(lambda: client.delete(path_of("gateways", gateway_id, "drain")))
        _say(gateway, "undone", f"{gateway_id} takes sessions again", json=json)
        return
    gateway = output.run(lambda: client.post(path_of("gateways", gateway_id, "drain"), {}))
    if not output.run(lambda: _others_take_over(client, gateway_id)):
        output.note("no other gateway takes sessions: these nodes are without one until another starts")
    try:
        gateway = output.run(lambda: _wait_until_empty(client, gateway, timeout_s=timeout_s, json=json))
    except typer.Exit as stopped:
        if stopped.exit_code == 130:
            output.note(f"stopped waiting; the drain goes on: better-compute gateway drain {gateway_id} --undo ends it")
        raise
    if not _empty(gateway):
        _say(gateway, "remains", _who_remains(gateway, timeout=timeout), json=json)
        raise typer.Exit(output.EXIT_FAILED)
    _say(gateway, "drained", f"{gateway_id} holds no session: it may be stopped", json=json)


def _empty(gateway: dict[str, Any]) -> bool:
    """Say whether it holds nobody and lets nobody in; an ended one whose nodes have all moved on as well."""
    return not gateway["nodes"] and bool(gateway["refuses"] or gateway["retired_at"])


def _others_take_over(client: ApiClient, gateway_id: str) -> bool:
    return any(
        item["live"] and not item["draining"] and item["gateway_id"] != gateway_id
        for item in client.get("/v1/gateways")["items"]
    )


def _wait_until_empty(client: ApiClient, gateway: dict[str, Any], *, timeout_s: float, json: bool) -> dict[str, Any]:
    """Return the gateway once no node's row names it, or as it is when the time is over or it has ended."""
    deadline = time.monotonic() + timeout_s
    with _Progress(gateway, json=json) as show:
        while not _empty(gateway) and gateway["retired_at"] is None and time.monotonic() < deadline:
            time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
            gateway = client.get(path_of("gateways", gateway["gateway_id"]))
            show(gateway)
    return gateway


def _who_remains(gateway: dict[str, Any], *, timeout: str) -> str:
    """Return the sentence about a drain that is not complete."""
    if not gateway["nodes"]:
        return f"{gateway['gateway_id']} has not seen the drain after {timeout}: it does not answer the database"
    named = ", ".join(gateway["node_ids"][:NAMED_MAX]) + (", ..." if gateway["nodes"] > NAMED_MAX else "")
    if gateway["retired_at"] is not None:
        return f"{gateway['gateway_id']} has ended while it held {gateway['nodes']} sessions, which reconnect: {named}"
    sentence = f"{gateway['gateway_id']} still holds {gateway['nodes']} sessions after {timeout}: {named}"
    if not gateway["live"]:
        return f"{sentence} (its lease has expired: it does not answer the database)"
    return sentence


def _say(gateway: dict[str, Any], event: str, sentence: str, *, json: bool) -> None:
    if json:
        output.print_json({"event": event, **gateway})
    elif event == "remains":
        output.console.print(sentence, style="red", markup=False)
    else:
        output.console.print(sentence, markup=False)


class _Progress:
    """A bar on a terminal, a line every few seconds elsewhere, JSON lines for programs."""

    def __init__(self, gateway: dict[str, Any], *, json: bool) -> None:
        self._json = json
        self._total: int = gateway["nodes"]
        self._told = (time.monotonic(), self._total)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} sessions have left"),
            TimeElapsedColumn(),
            console=output.error_console,
            disable=json or not sys.stderr.isatty(),
            transient=True,
        )
        self._task = self._bar.add_task(f"draining {gateway['gateway_id']}", total=self._total)

    def __enter__(self) -> Callable[[dict[str, Any]], None]:
        self._bar.start()
        return self._show

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _show(self, gateway: dict[str, Any]) -> None:
        # A Hello that was under way when the drain began may add to what was there.
        self._total = max(self._total, gateway["nodes"])
        left = self._total - gateway["nodes"]
        self._bar.update(self._task, completed=left, total=self._total)
        at, before = self._told
        if gateway["nodes"] == before:
            return
        if self._json:
            output.print_json({"event": "progress", "nodes": gateway["nodes"], "of": self._total})
        elif not self._bar.disable or time.monotonic() - at < LINE_EVERY_S:
            return
        else:
            output.note(f"{left} of {self._total} sessions have left {gateway['gateway_id']}")
        self._told = (time.monotonic(), gateway["nodes"])
