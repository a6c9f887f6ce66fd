"""`better-compute api-token`: who may ask the API."""

from __future__ import annotations

from typing import Annotated

import typer

from bettercompute.cli import output
from bettercompute.cli.client import ApiClient, path_of
from bettercompute.cli.durations import parse_duration_ms
from bettercompute.cli.options import Api, Json

app = typer.Typer(no_args_is_help=True, help="API tokens: who may ask what, about which nodes.")


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="What the audit log will show. A name is never given twice.")],
    role: Annotated[str, typer.Option(help="viewer, operator or admin; each may do what the ones before it may.")] = (
        "viewer"
    ),
    label: Annotated[
        list[str] | None, typer.Option(help="key=value: only for nodes that carry it; may be repeated.")
    ] = None,
    ttl: Annotated[
        str | None, typer.Option(help="How long it is good: 12h, 30d. Default: until it is revoked.")
    ] = None,
    api: Api = None,
    json: Json = False,
) -> None:
    """Print a new token. It is not shown again; give it to programs as BETTER_COMPUTE_TOKEN."""
    labels = {}
    for text in label or ():
        key, equals, value = text.partition("=")
        if not equals:
            output.fail(f"--label {text}: write key=value", code=output.EXIT_USAGE)
        labels[key] = value
    body: dict[str, object] = {"name": name, "role": role, "labels": labels}
    if ttl is not None:
        body["ttl_ms"] = parse_duration_ms(ttl)
    made = output.run(lambda: ApiClient.from_environment(api).post("/v1/api-tokens", body))
    if json:
        output.print_json(made)
    else:
        output.console.print(made["token"], markup=False)
        output.note(f"{made['name']}, {made['role']}, {_scope(made)}, until {made['expires_at'] or 'it is revoked'}")


@app.command("list")
def list_tokens(api: Api = None, json: Json = False) -> None:
    """List tokens by name; secrets are never shown."""
    tokens = output.run(lambda: ApiClient.from_environment(api).get("/v1/api-tokens"))
    if json:
        for token in tokens:
            output.print_json(token)
        return
    output.print_table(
        ("name", "role", "for", "created by", "expires", "revoked"),
        [
            (
                token["name"],
                token["role"],
                _scope(token),
                token["created_by"],
                output.cell(token["expires_at"]),
                output.cell(token["revoked_at"]),
            )
            for token in tokens
        ],
        empty="no API tokens",
    )


@app.command()
def revoke(name: str, api: Api = None) -> None:
    """Make a token useless from the next request on."""
    output.run(lambda: ApiClient.from_environment(api).delete(path_of("api-tokens", name)))
    output.console.print(f"{name}: revoked", markup=False)


def _scope(token: dict[str, object]) -> str:
    labels = token["labels"]
    if not isinstance(labels, dict):
        return "every node"
    return "nodes with " + ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
