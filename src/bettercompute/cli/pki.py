"""`better-compute pki`: the control plane's keys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bettercompute.cli import output
from bettercompute.cli.options import Json

if TYPE_CHECKING:
    from bettercompute.pki.keyfiles import KeyFolder

app = typer.Typer(no_args_is_help=True, help="The control plane's keys and the gateways' certificates.")

ConfigFile = Annotated[Path | None, typer.Option("--config", help="The control plane's configuration file.")]
KeyDir = Annotated[Path | None, typer.Option("--dir", help="The key folder. Default: the configuration's.")]


@app.command()
def init(config: ConfigFile = None, folder: KeyDir = None, json: Json = False) -> None:
    """Make every CA and key of an installation. Never replaces any: joined nodes would be locked out."""
    from bettercompute.services import pki_setup
    from bettercompute.system import system_world

    keys = output.run(lambda: _folder(config, folder))
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

    keys = output.run(lambda: _folder(config, folder))
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


def _folder(config: Path | None, folder: Path | None) -> KeyFolder:
    from bettercompute.pki.keyfiles import KeyFolder
    from bettercompute.server.config import load

    return KeyFolder(folder or load(config).pki_path)
