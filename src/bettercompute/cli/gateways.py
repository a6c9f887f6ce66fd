"""`better-compute gateway`: the gateways by their leases."""

from __future__ import annotations

import typer

from bettercompute.cli import output
from bettercompute.cli.client import ApiClient
from bettercompute.cli.options import Api, Json

app = typer.Typer(no_args_is_help=True, help="The gateways that hold the nodes' sessions.")


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
