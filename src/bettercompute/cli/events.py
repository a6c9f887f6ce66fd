"""`better-compute events`: what has happened in the fleet, and what is happening."""

from __future__ import annotations

import json as json_module
from functools import partial
from typing import Annotated, Any

import typer

from bettercompute.cli import output
from bettercompute.cli.client import ApiClient
from bettercompute.cli.options import Api, Json


def events(
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with what happens from now on, until Ctrl-C.")
    ] = False,
    node: Annotated[str | None, typer.Option(help="Only events of this node.")] = None,
    since: Annotated[
        int | None, typer.Option(help="Only events after this position. Default: all there are; to follow: from now.")
    ] = None,
    api: Api = None,
    json: Json = False,
) -> None:
    """List events in their order; each has a position, after which --since goes on."""
    client = output.run(lambda: ApiClient.from_environment(api))
    if follow:
        output.run(lambda: _follow(client, node=node, since=since, json=json))
        return
    after: int | None = since or 0
    while after is not None:
        page = output.run(partial(client.get, "/v1/events", after=after, node_id=node, limit=500))
        for event in page["items"]:
            _print(event, json=json)
        after = page["next"]


def _follow(client: ApiClient, *, node: str | None, since: int | None, json: bool) -> None:
    for name, event in client.server_sent("/v1/events", after=since, node_id=node):
        if name == "gap":
            output.note(f"events before position {event['first_position']} were removed by retention")
        elif name == "dropped":
            output.note(f"dropped ({event['reason']}): {event['message']}; going on from there")
        else:
            _print(event, json=json)


def _print(event: dict[str, Any], *, json: bool) -> None:
    if json:
        output.print_json(event)
        return
    payload = json_module.dumps(event["payload"], ensure_ascii=False)
    line = f"{event['position']}  {event['at']}  {event['type']}  {event['node_id'] or '-'}  {payload}"
    output.console.print(line, markup=False)
