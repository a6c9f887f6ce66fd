"""`better-compute pki rotate-... --stage` and `pki trust-version`: replace a key that nodes trust, without an outage.

The stage `prepare` makes the new key in the key folder; what goes to the API is public. Each stage may be asked again
after whatever interrupted it. See docs/rotation.md, "The life of a key".
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bettercompute.cli import output
from bettercompute.cli.client import ApiClient, path_of
from bettercompute.cli.key_folder import ConfigFile, KeyDir, key_folder
from bettercompute.cli.options import Api, Json

if TYPE_CHECKING:
    from bettercompute.pki.keyfiles import KeyFolder
    from bettercompute.pki.rotation import Purpose

SHOWN_CHARACTERS = 16


class StageName(StrEnum):
    """The stages, in their order."""

    PREPARE = "prepare"
    SWITCH = "switch"
    RETIRE = "retire"


Stage = Annotated[StageName, typer.Option("--stage", help="prepare, then switch, then retire.")]

Except = Annotated[
    list[str] | None,
    typer.Option(
        "--except",
        metavar="NODE",
        help="Do not wait for this node, which will not come back by itself; may be repeated. With switch and retire.",
    ),
]

_NEXT_STEP = {
    StageName.PREPARE: "see `better-compute pki trust-version` until nodes hold it, then --stage switch",
    StageName.SWITCH: "see docs/rotation.md for what is to be done before --stage retire",
    StageName.RETIRE: "the rotation is finished",
}


def rotate_command_root(
    stage: Stage,
    excepted: Except = None,
    config: ConfigFile = None,
    folder: KeyDir = None,
    api: Api = None,
    json: Json = False,
) -> None:
    """Replace the root of the worker keys, which sign commands and specs."""
    _rotate("command-root", stage, excepted, folder=output.run(lambda: key_folder(config, folder)), api=api, json=json)


def rotate_join_keys(
    stage: Stage,
    excepted: Except = None,
    config: ConfigFile = None,
    folder: KeyDir = None,
    api: Api = None,
    json: Json = False,
) -> None:
    """Replace the two keys that join tokens pin; trust bundles are signed by one of them."""
    _rotate("join-signing", stage, excepted, folder=output.run(lambda: key_folder(config, folder)), api=api, json=json)


def rotate_serving_ca(
    stage: Stage,
    excepted: Except = None,
    config: ConfigFile = None,
    folder: KeyDir = None,
    api: Api = None,
    json: Json = False,
) -> None:
    """Replace the CA of the gateways' certificates, which nodes pin."""
    _rotate("serving-ca", stage, excepted, folder=output.run(lambda: key_folder(config, folder)), api=api, json=json)


def rotate_node_ca(
    stage: Stage,
    excepted: Except = None,
    config: ConfigFile = None,
    folder: KeyDir = None,
    api: Api = None,
    json: Json = False,
) -> None:
    """Replace the CA of the nodes' certificates."""
    _rotate("node-ca", stage, excepted, folder=output.run(lambda: key_folder(config, folder)), api=api, json=json)


def trust_version(
    all_nodes: Annotated[bool, typer.Option("--all", help="List every node, not only those that are behind.")] = False,
    api: Api = None,
    json: Json = False,
) -> None:
    """Show the trust version in force, what it lists, and who does not hold it yet, or enforces other approvers."""
    client = output.run(lambda: ApiClient.from_environment(api))
    trust = output.run(lambda: client.get("/v1/pki/trust"))
    nodes = [
        node
        for node in output.run(lambda: list(client.pages("/v1/pki/trust/nodes")))
        if all_nodes or node["behind"] or node["quorum_behind"]
    ]
    if json:
        output.print_json({**trust, "nodes": nodes})
        return
    holding = [held for held in trust["holders"] if held["version"] >= trust["version"]]
    output.print_facts(
        {
            "version": trust["version"],
            "published": trust["published_at"],
            "size": f"{trust['bundle_bytes']} bytes",
            "held by": f"{sum(held['nodes'] for held in holding)} of "
            f"{sum(held['nodes'] for held in trust['holders'])} nodes",
            "approver set": f"epoch {trust['approver_set_epoch']}" if trust["approver_set_epoch"] else "none",
        }
    )
    shown = [key for key in trust["keys"] if key["stage"] != "retired"]
    output.print_table(
        ("key", "stage", "since version", "changed", "sha256"),
        [
            (
                key["purpose"],
                key["stage"],
                key["first_version"] or "-",
                key["changed_at"],
                key["key_sha256"][:SHOWN_CHARACTERS],
            )
            for key in shown
        ],
        empty="no keys",
    )
    output.print_table(
        ("node", "connected", "version", "approver epoch"),
        [
            (
                node["node_id"],
                "yes" if node["connected"] else "no",
                node["trust_version"],
                output.cell(node["approver_set_epoch"]) + (" (another set)" if node["quorum_behind"] else ""),
            )
            for node in nodes
        ],
        empty="no node is behind" if not all_nodes else "no nodes",
    )


def _rotate(
    name: str, stage: StageName, excepted: list[str] | None, *, folder: KeyFolder, api: str | None, json: bool
) -> None:
    from bettercompute.pki.rotation import Purpose

    if excepted and stage is StageName.PREPARE:
        output.fail("--except goes with the stages switch and retire: prepare waits for nobody", code=output.EXIT_USAGE)
    purpose = Purpose(name)
    client = output.run(lambda: ApiClient.from_environment(api))
    rotated = output.run(lambda: run_stage(client, folder, purpose, stage, excepted=excepted or ()))
    if json:
        output.print_json(rotated)
        return
    for key in rotated["keys"]:
        if key["stage"] != "retired":
            output.console.print(
                f"{key['purpose']} {key['key_sha256'][:SHOWN_CHARACTERS]} is {key['stage']}", markup=False
            )
    if rotated["left_behind"]:
        output.note(
            f"left behind: {', '.join(rotated['left_behind'])}; if one of these comes after all and is turned away, "
            "give it a new token (`bcd rejoin`)"
        )
    output.note(f"trust version {rotated['trust_version']} is in force; {_NEXT_STEP[stage]}")
    if stage is not StageName.RETIRE:
        output.note(f"copy the changed files of {folder.folder} to the other processes of the control plane")


def run_stage(
    client: ApiClient, folder: KeyFolder, purpose: Purpose, stage: StageName, *, excepted: Sequence[str] = ()
) -> Any:
    """Do what a stage asks of the key folder and of the API; return the API's answer."""
    match stage:
        case StageName.PREPARE:
            return _prepare(client, folder, purpose)
        case StageName.SWITCH:
            return _switch(client, folder, purpose, excepted)
        case StageName.RETIRE:
            return _retire(client, folder, purpose, excepted)


def _prepare(client: ApiClient, folder: KeyFolder, purpose: Purpose) -> Any:
    from bettercompute.services import rotation_files
    from bettercompute.system import system_world

    _catch_up(client, folder, purpose)
    new = rotation_files.prepare(folder, purpose, world=system_world())
    body = {"public_der": new.public_der.hex(), "companion_der": new.companion_der.hex()}
    return client.post(path_of("pki", "keys", purpose, "prepare"), body)


def _switch(client: ApiClient, folder: KeyFolder, purpose: Purpose, excepted: Sequence[str]) -> Any:
    from bettercompute.services import rotation_files

    key_sha256 = rotation_files.next_key_sha256(folder, purpose)
    body = {"key_sha256": key_sha256, "except_nodes": list(excepted)}
    rotated = client.post(path_of("pki", "keys", purpose, "switch"), body)
    rotation_files.put_in_place(folder, purpose)
    return rotated


def _retire(client: ApiClient, folder: KeyFolder, purpose: Purpose, excepted: Sequence[str]) -> Any:
    from bettercompute.services import rotation_files

    _catch_up(client, folder, purpose)
    rotated = client.post(path_of("pki", "keys", purpose, "retire"), {"except_nodes": list(excepted)})
    rotation_files.drop_previous(folder, purpose)
    return rotated


def _catch_up(client: ApiClient, folder: KeyFolder, purpose: Purpose) -> None:
    """Finish the renaming of a switch whose command was interrupted, or was run elsewhere."""
    from bettercompute.services import rotation_files

    prepared = rotation_files.next_key_sha256(folder, purpose)
    for key in client.get("/v1/pki/trust")["keys"]:
        if (key["purpose"], key["stage"], key["key_sha256"]) == (purpose, "current", prepared):
            rotation_files.put_in_place(folder, purpose)
