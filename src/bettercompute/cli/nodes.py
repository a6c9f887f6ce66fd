"""`better-compute nodes`: the fleet as the control plane sees it, and identities made for it."""

from __future__ import annotations

import json as json_module
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from bettercompute.cli import output
from bettercompute.cli.client import ApiClient, path_of
from bettercompute.cli.durations import format_age, parse_duration_ms
from bettercompute.cli.options import Api, Json

CERTIFICATES_SHOWN = 3

app = typer.Typer(no_args_is_help=True, help="The fleet's nodes.")


@app.command("list")
def list_nodes(
    api: Api = None,
    json: Json = False,
    state: Annotated[str | None, typer.Option(help="Only nodes in this state.")] = None,
    site: Annotated[str | None, typer.Option(help="Only nodes of this site.")] = None,
    selector: Annotated[
        str | None,
        typer.Option(help="Only nodes with these labels: gpu=h100,site!=x; also in (a,b), notin, key, !key."),
    ] = None,
) -> None:
    """List nodes with their state, their gateway and how long ago they were heard."""
    wanted = {"state": state, "site": site, "selector": selector}
    nodes = output.run(lambda: list(ApiClient.from_environment(api).pages("/v1/nodes", **wanted)))
    if json:
        for node in nodes:
            output.print_json(node)
        return
    output.print_table(
        ("node", "state", "standing", "site", "role", "daemon", "gateway", "epoch", "seen"),
        [
            (
                node["node_id"],
                node["state"],
                standing_of(node),
                node["site"],
                node["role"],
                output.cell(node["session"]["daemon_version"]),
                output.cell(node["session"]["gateway_id"]),
                node["session"]["epoch"],
                format_age(node["session"]["last_seen_age_ms"]),
            )
            for node in nodes
        ],
        empty="no such nodes: `nodes list` without options shows all"
        if any(wanted.values())
        else "no nodes: create a join token with `better-compute token create`, then run `bcd join` on a machine",
    )


@app.command()
def show(node_id: str, api: Api = None, json: Json = False) -> None:
    """Show one node: its session, certificates, labels and inventory."""
    client = output.run(lambda: ApiClient.from_environment(api))
    node = output.run(lambda: client.get(path_of("nodes", node_id)))
    held = output.run(lambda: client.get(path_of("nodes", node_id, "certificates")))
    node |= {"identity_generation": held["identity_generation"], "certificates": held["items"]}
    if json:
        output.print_json(node)
        return
    session = node["session"]
    output.print_facts(
        {
            "node": node["node_id"],
            "state": node["state"] + (f" ({node['state_reason']})" if node["state_reason"] else ""),
            **standing_facts(node),
            "attested": node["attestation"]
            + (f" ({node['attestation_reason']})" if node["attestation_reason"] else "")
            + (f", newest statement {node['attested_at']}" if node["attested_at"] else ""),
            "site": node["site"],
            "role": node["role"],
            "joined": node["joined_at"],
            "gateway": session["gateway_id"],
            "epoch": session["epoch"],
            "boot": session["boot_id"],
            "journal": session["journal_id"],
            "daemon": session["daemon_version"],
            "seen": format_age(session["last_seen_age_ms"]) + " ago"
            if session["last_seen_age_ms"] is not None
            else None,
            "capabilities": ", ".join(session["capabilities"]),
            "labels": ", ".join(f"{label['key']}={label['value']}" for label in node["labels"]),
            "generation": f"{node['spec_generation']} (applied {node['applied_generation']})"
            if node["spec_generation"]
            else None,
        }
    )
    for certificate in node["certificates"][:CERTIFICATES_SHOWN]:
        why = f" ({certificate['reason']})" if certificate["reason"] else ""
        output.console.print(
            f"certificate  {certificate['serial']}  {certificate['state']}{why}, generation "
            f"{certificate['identity_generation']}, until {certificate['not_after']}",
            markup=False,
        )
    for condition in node["conditions"]:
        output.console.print(
            f"condition  {condition['type']}={condition['status']}  {condition['message']}", markup=False
        )
    print_refusals(node["refusals"])
    print_inventory(node["inventory"])


@app.command()
def events(
    node_id: str,
    limit: Annotated[int, typer.Option(min=1, help="How many, counted from the newest.")] = 50,
    api: Api = None,
    json: Json = False,
) -> None:
    """Show what a node told of itself, the newest last; what the fleet makes of its nodes is in `events`."""
    client = output.run(lambda: ApiClient.from_environment(api))
    items: list[dict[str, Any]] = []
    gaps: list[dict[str, Any]] = []
    before: str | None = None
    while len(items) < limit:
        query = {"limit": min(limit - len(items), 500), "before": before}
        page = output.run(partial(client.get, path_of("nodes", node_id, "events"), **query))
        items += page["items"]
        gaps, before = page["gaps"], page["next"]
        if before is None:
            break
    for gap in reversed(gaps):
        lost = f"events {gap['first_seq']} to {gap['last_seq']} of journal {gap['journal_id']} are lost"
        output.note(f"{lost}: the node dropped them before it could send them (noticed {gap['noticed_at']})")
    for event in reversed(items):
        if json:
            output.print_json(event)
            continue
        again = "  (recovered)" if event["recovered"] else ""
        payload = json_module.dumps(event["payload"], ensure_ascii=False)
        output.console.print(f"{event['at']}  {event['seq']}  {event['type']}{again}  {payload}", markup=False)


@app.command()
def label(
    node_id: str,
    changes: Annotated[list[str], typer.Argument(metavar="KEY=VALUE|KEY-...", help="Set a label, or remove it.")],
    api: Api = None,
    json: Json = False,
) -> None:
    """Set and remove labels of a node, by which selectors find it."""
    wanted = dict(change.split("=", 1) for change in changes if "=" in change)
    removed = [change.removesuffix("-") for change in changes if "=" not in change]
    wrong = [change for change in changes if "=" not in change and not change.endswith("-")]
    if wrong:
        output.fail(f"{wrong[0]!r}: write KEY=VALUE to set a label, KEY- to remove it", code=output.EXIT_USAGE)
    answer = output.run(
        lambda: ApiClient.from_environment(api).patch(
            path_of("nodes", node_id, "labels"), {"set": wanted, "remove": removed}
        )
    )
    if json:
        output.print_json(answer)
        return
    labels = ", ".join(f"{item['key']}={item['value']}" for item in answer["labels"])
    output.console.print(f"{node_id}: {labels or 'no labels'}", markup=False)


def standing_of(node: dict[str, Any]) -> str:
    """Return in a word whether a node may have sessions: a dash when nothing bars it."""
    barred = [name for name in ("revoked", "quarantined") if node[name]]
    if node["lock"]:
        barred.append("locked")
    return ",".join(barred) or "-"


def standing_facts(node: dict[str, Any]) -> dict[str, str]:
    """Return what bars a node, in words."""
    facts = {}
    if lock := node["lock"]:
        end = f"until {lock['until']}" if lock["until"] else "until it is unlocked"
        facts["locked"] = f"{end}, by {lock['by']}" + (f": {lock['reason']}" if lock["reason"] else "")
    if revoked := node["revoked"]:
        facts["revoked"] = f"{revoked['at']}, by {revoked['by']}" + (
            f": {revoked['reason']}" if revoked["reason"] else ""
        )
    if quarantined := node["quarantined"]:
        facts["quarantined"] = f"{quarantined['at']}: {quarantined['reason']}"
    return facts


def print_refusals(refusals: list[dict[str, Any]]) -> None:
    """Print what the node refused of what gateways relayed: an honest gateway gives it little reason to."""
    for item in refusals:
        output.console.print(f"refused    {item['what']}  {item['reason']}  {item['count']} times", markup=False)


def print_inventory(inventory: dict[str, Any]) -> None:
    """Print what people look for first: the CPU's model, memory, disks, network, GPUs."""
    facts: dict[str, object] = {}
    cpu = inventory.get("cpu", {})
    if cpu:
        facts["cpu"] = describe_cpu(cpu)
    if inventory.get("memory"):
        facts["memory"] = describe_bytes(inventory["memory"].get("total_bytes", 0))
    if "disks" in inventory:
        facts["disks"] = ", ".join(describe_disk(disk) for disk in inventory["disks"].get("disks", ())) or "none"
    if inventory.get("network"):
        facts["network"] = ", ".join(item["name"] for item in inventory["network"].get("interfaces", ()))
    if inventory.get("gpus"):
        facts["gpus"] = ", ".join(gpu.get("name", "?") for gpu in inventory["gpus"].get("gpus", ())) or "none"
    output.print_facts(facts)


def describe_cpu(cpu: dict[str, Any]) -> str:
    """Return the processors in a few words: how many sockets of which model, and how many threads."""
    sockets = cpu.get("sockets", ())
    model = sockets[0].get("model_name", "unknown model") if sockets else "unknown model"
    times = f"{len(sockets)} x " if len(sockets) > 1 else ""
    return f"{times}{model}, {cpu.get('online', '?')} threads"


def describe_disk(disk: dict[str, Any]) -> str:
    """Return a disk in a few words: its name and size."""
    return f"{disk.get('name', '?')} {describe_bytes(disk.get('size_bytes', 0))}"


def describe_bytes(count: int | str) -> str:
    """Return a size in binary units; protobuf's JSON writes 64-bit numbers as text."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} PiB"


@app.command()
def provision(
    node_id: str,
    out: Annotated[Path, typer.Option(help="The folder to write the identity into; made when missing, must be empty.")],
    site: Annotated[str | None, typer.Option(help="The node's site. Default: the installation's.")] = None,
    role: Annotated[str, typer.Option(help="node, site or ramdisk.")] = "node",
    replace: Annotated[
        bool, typer.Option(help="Take over the id of a node that there is: its certificates are revoked.")
    ] = False,
    api: Api = None,
    json: Json = False,
) -> None:
    """Write a joined identity to disk, for an image or a test: `bcd node` imports the folder. The key is made here."""
    from bettercompute.cli.provisioning import write_identity

    written = output.run(
        lambda: write_identity(
            ApiClient.from_environment(api), node_id=node_id, site=site, role=role, replace=replace, out=out
        )
    )
    if json:
        output.print_json(written)
    else:
        output.console.print(f"{node_id}: identity written to {out}", markup=False)


@app.command()
def lock(
    node_id: str,
    ttl: Annotated[str | None, typer.Option(help="For how long: 30m, 24h, 7d. Default: until `nodes unlock`.")] = None,
    reason: Annotated[str, typer.Option(help="Why, for the node's log and the audit log.")] = "",
    api: Api = None,
    json: Json = False,
) -> None:
    """End a node's session at once and let none begin. Its certificates stay good, its commands wait."""
    body = {"ttl_ms": None if ttl is None else parse_duration_ms(ttl), "reason": reason}
    node = output.run(lambda: ApiClient.from_environment(api).post(path_of("nodes", node_id, "lock"), body))
    _print_standing(node, json=json)


@app.command()
def unlock(node_id: str, api: Api = None, json: Json = False) -> None:
    """Let a locked node come back; its daemon asks again within a minute."""
    node = output.run(lambda: ApiClient.from_environment(api).delete(path_of("nodes", node_id, "lock")))
    _print_standing(node, json=json)


@app.command()
def revoke(
    node_id: str,
    reason: Annotated[str, typer.Option(help="Why, for the node's log and the audit log.")] = "",
    api: Api = None,
    json: Json = False,
) -> None:
    """End a node's identity: session, certificates, and commands not sent yet. Only a new join token brings it back."""
    ended = output.run(
        lambda: ApiClient.from_environment(api).post(path_of("nodes", node_id, "revoke"), {"reason": reason})
    )
    _print_ended(ended, "revoked", json=json)


@app.command()
def forget(
    node_id: str,
    reason: Annotated[str, typer.Option(help="Why, for the audit log.")] = "",
    api: Api = None,
    json: Json = False,
) -> None:
    """Remove a node that is gone for good; one that still has a session is refused. Its commands end."""
    ended = output.run(lambda: ApiClient.from_environment(api).delete(path_of("nodes", node_id), reason=reason))
    _print_ended(ended, "forgotten", json=json)


def _print_standing(node: dict[str, Any], *, json: bool) -> None:
    if json:
        output.print_json(node)
        return
    facts = "; ".join(f"{name} {words}" for name, words in standing_facts(node).items())
    output.console.print(f"{node['node_id']}: {facts or 'nothing bars it'}", markup=False)


def _print_ended(ended: dict[str, Any], what: str, *, json: bool) -> None:
    if json:
        output.print_json(ended)
        return
    counts = {
        "certificates revoked": len(ended["revoked_serials"]),
        "commands cancelled": ended["commands_cancelled"],
        "commands failed": ended["commands_failed"],
    }
    words = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    output.console.print(f"{ended['node_id']}: {what}" + (f"; {words}" if words else ""), markup=False)
