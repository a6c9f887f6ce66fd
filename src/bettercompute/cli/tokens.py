"""`better-compute token`: join tokens, each good for one node."""

from __future__ import annotations

from typing import Annotated

import typer

from bettercompute.cli import output
from bettercompute.cli.client import ApiClient, path_of
from bettercompute.cli.durations import parse_duration_ms
from bettercompute.cli.options import Api, Json

app = typer.Typer(no_args_is_help=True, help="Join tokens: each lets one node join once.")


@app.command()
def create(
    site: Annotated[
        str | None, typer.Option(help="The site of the node that joins. Default: the installation's.")
    ] = None,
    role: Annotated[str, typer.Option(help="node, site or ramdisk.")] = "node",
    node_id: Annotated[str | None, typer.Option(help="The id that the node gets. Default: one is made.")] = None,
    attestor: Annotated[
        str, typer.Option(help="join-token, or provisioned: a credential that is good on one machine only.")
    ] = "join-token",
    machine_uuid: Annotated[
        str | None, typer.Option(help="With provisioned: the UUID that the machine's firmware tells.")
    ] = None,
    machine_serial: Annotated[str | None, typer.Option(help="With provisioned: the machine's serial number.")] = None,
    machine_mac: Annotated[
        list[str] | None, typer.Option(help="With provisioned: an address of its network cards; may be repeated.")
    ] = None,
    ttl: Annotated[str, typer.Option(help="How long it may be used: 30m, 24h, 7d.")] = "24h",
    api: Api = None,
    json: Json = False,
) -> None:
    """Print a new token: one string that holds the secret, where to dial and whom to trust. It is not shown again."""
    machine = {"dmi_uuid": machine_uuid, "serial": machine_serial, "mac_addresses": machine_mac}
    named = {name: value for name, value in machine.items() if value}
    body = {
        "site": site,
        "role": role,
        "node_id": node_id,
        "ttl_ms": parse_duration_ms(ttl),
        "attestor": None if attestor == "join-token" else attestor,
        "machine": named or None,
    }
    made = output.run(
        lambda: ApiClient.from_environment(api).post("/v1/tokens", {k: v for k, v in body.items() if v is not None})
    )
    if json:
        output.print_json(made)
    else:
        output.console.print(made["token"], markup=False)
        output.note(f"token {made['token_id']}, for one {made['role']}, until {made['expires_at']}")


@app.command("list")
def list_tokens(api: Api = None, json: Json = False) -> None:
    """List tokens with what became of them; secrets are never shown."""
    tokens = output.run(lambda: list(ApiClient.from_environment(api).pages("/v1/tokens")))
    if json:
        for token in tokens:
            output.print_json(token)
        return
    output.print_table(
        ("token", "state", "role", "site", "node", "expires", "created by"),
        [
            (
                token["token_id"],
                token["state"],
                token["role"],
                token["site"],
                output.cell(token["used_node_id"] or token["node_id"]),
                token["expires_at"],
                token["created_by"],
            )
            for token in tokens
        ],
        empty="no join tokens",
    )


@app.command()
def revoke(token_id: str, api: Api = None) -> None:
    """Make a token unusable. Nodes that joined by it stay."""
    output.run(lambda: ApiClient.from_environment(api).delete(path_of("tokens", token_id)))
    output.console.print(f"{token_id}: revoked", markup=False)
