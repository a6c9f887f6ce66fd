"""`better-compute pki`: the control plane's keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bettercompute.cli import approvers, output, rotation
from bettercompute.cli.key_folder import ConfigFile, KeyDir, key_folder
from bettercompute.cli.options import Json

app = typer.Typer(no_args_is_help=True, help="The control plane's keys and the gateways' certificates.")

app.command("rotate-command-root")(rotation.rotate_command_root)
app.command("rotate-join-keys")(rotation.rotate_join_keys)
app.command("rotate-serving-ca")(rotation.rotate_serving_ca)
app.command("rotate-node-ca")(rotation.rotate_node_ca)
app.command("trust-version")(rotation.trust_version)
app.add_typer(approvers.app, name="approvers")


@app.command()
def init(config: ConfigFile = None, folder: KeyDir = None, json: Json = False) -> None:
    """Make every CA and key of an installation. Never replaces any: joined nodes would be locked out."""
    from bettercompute.services import pki_setup
    from bettercompute.system import system_world

    keys = output.run(lambda: key_folder(config, folder))
    names = output.run(lambda: pki_setup.initialise(keys, world=system_world()))
    if json:
        output.print_json({"dir": str(keys.folder), "keys": list(names)})
        return
    output.console.print(f"made {', '.join(names)} in {keys.folder}", markup=False)
    output.note("keep a copy of this folder offline; next: better-compute pki issue-gateway --san NAME")


@app.command("issue-gateway")
def issue_gateway(
    san: Annotated[list[str], typer.Option("--san", help="A DNS name or address that nodes dial; may be repeated.")],
    config: ConfigFile = None,
    folder: KeyDir = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="A folder for a gateway on another host: all files that it needs, no CA's key."),
    ] = None,
    json: Json = False,
) -> None:
    """Make a serving key and certificate. A gateway that runs takes them up at its next connection."""
    from bettercompute.pki import certificates
    from bettercompute.pki.keyfiles import KeyFolder
    from bettercompute.services import pki_setup
    from bettercompute.system import system_world

    keys = output.run(lambda: key_folder(config, folder))
    bundle = None if out is None else KeyFolder(out.absolute())
    leaf = output.run(lambda: pki_setup.issue_gateway(keys, names=san, world=system_world(), out=bundle))
    facts = {
        "file": str((bundle or keys).path(f"{pki_setup.GATEWAY}.pem")),
        "serial": certificates.serial_text(leaf),
        "names": san,
        "not_after": leaf.not_valid_after_utc.isoformat(),
    }
    if json:
        output.print_json(facts)
    else:
        output.print_facts({**facts, "names": ", ".join(san)})
    if bundle is not None:
        output.note(f"copy {bundle.folder} to the gateway's host as its key folder ([pki] dir)")
