"""`better-compute pki approvers`: who may approve destructive batches, and how that set changes.

Approvers make their keys themselves, hand out the public halves, and sign with the private ones here; only signatures
are sent. See docs/security.md, "Approvers".
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Annotated, Any

import typer

from bettercompute.cli import approver_keys, output
from bettercompute.cli.approver_keys import KeyFile
from bettercompute.cli.client import ApiClient
from bettercompute.cli.options import Api, Json
from bettercompute.cli.tiers import TIERS, tier_names

app = typer.Typer(no_args_is_help=True, help="Who may approve destructive batches.")

KID_CHARACTERS = 16

Yes = Annotated[bool, typer.Option("--yes", help="Sign without asking again.")]


@app.command()
def keygen(
    out: Annotated[Path, typer.Option("--out", help="The key file to make; FILE.pub is for the administrator.")],
    json: Json = False,
) -> None:
    """Make your approver key. It stays with you: nothing and nobody else may have it."""
    public = output.run(lambda: approver_keys.make(out))
    kid = _kid_of(approver_keys.read_public(public))
    if json:
        output.print_json({"key": str(out), "public": str(public), "kid": kid})
        return
    output.console.print(f"made {out} and {public}, key id {kid[:KID_CHARACTERS]}", markup=False)
    output.note("keep a copy offline; hand the administrator the .pub file: pki approvers propose --approver NAME=FILE")


@app.command("show")
def show(api: Api = None, json: Json = False) -> None:
    """Show the approver set in force and the one that is proposed."""
    shown = output.run(lambda: ApiClient.from_environment(api).get("/v1/approvers"))
    if json:
        output.print_json(shown)
        return
    if shown["current"] is None and shown["proposed"] is None:
        output.note("there are no approvers: no command needs an approval")
    for one in (shown["current"], shown["proposed"]):
        if one is not None:
            _print_set(one)


@app.command()
def propose(
    approver: Annotated[
        list[str] | None, typer.Option("--approver", metavar="NAME=FILE", help="An approver's .pub file; repeat it.")
    ] = None,
    threshold: Annotated[int, typer.Option(help="How many different approvers must sign.")] = 0,
    tier: Annotated[
        list[str] | None, typer.Option("--tier", help=f"What needs their approval: {', '.join(TIERS)}; repeat it.")
    ] = None,
    unbatched_per_hour: Annotated[
        int, typer.Option(help="So many destructive commands an hour a node runs without approval.")
    ] = 0,
    nobody: Annotated[bool, typer.Option("--nobody", help="Give the quorum up.")] = False,
    why: Annotated[str, typer.Option(help="For the audit log.")] = "",
    api: Api = None,
    json: Json = False,
) -> None:
    """Propose the whole new set. The first is in force at once, a later one once enough of the present set signed."""
    if nobody == bool(approver):
        output.fail("name the approvers: --approver NAME=FILE, all of the new set; or --nobody", code=2)
    body: dict[str, Any] = {
        "approvers": [_named(text) for text in approver or []],
        "threshold": threshold,
        "tiers": [] if nobody else [_tier(name) for name in tier or TIERS],
        "unbatched_per_hour": unbatched_per_hour,
        "why": why,
    }
    client = output.run(lambda: ApiClient.from_environment(api))
    shown = output.run(lambda: client.post("/v1/approvers/proposal", body))
    _tell(shown, json=json)


@app.command()
def sign(
    key: KeyFile = None,
    current: Annotated[
        bool, typer.Option("--current", help="Sign the set in force, for nodes that know you and not those after you.")
    ] = False,
    yes: Yes = False,
    api: Api = None,
    json: Json = False,
) -> None:
    """Show the proposed set in words, and sign it with your key."""
    from bettercompute.pki import signatures

    client = output.run(lambda: ApiClient.from_environment(api))
    shown = output.run(lambda: client.get("/v1/approvers"))
    target = shown["current" if current else "proposed"]
    if target is None:
        output.fail("no approver set is proposed: `pki approvers propose` proposes one", code=2)
    own = approver_keys.read(key)
    approvers = output.run(lambda: _set_of(target))
    _print_change(shown["current"], target, trust_domain=shown["trust_domain"])
    approver_keys.confirm("Sign this set?", yes=yes)
    signature = signatures.sign(own, approvers.signing_input(trust_domain=shown["trust_domain"]))
    body = {"epoch": target["epoch"], "signature": base64.b64encode(signature.SerializeToString()).decode()}
    _tell(output.run(lambda: client.post("/v1/approvers/signatures", body)), json=json)


@app.command()
def withdraw(api: Api = None, json: Json = False) -> None:
    """Give up the proposed set."""
    client = output.run(lambda: ApiClient.from_environment(api))
    _tell(output.run(lambda: client.delete("/v1/approvers/proposal")), json=json)


def _tell(shown: dict[str, Any], *, json: bool) -> None:
    if json:
        output.print_json(shown)
        return
    for one in (shown["current"], shown["proposed"]):
        if one is not None:
            _print_set(one)
    if shown["proposed"] is not None:
        output.note(
            f"{shown['proposed']['signatures_missing']} more of the approvers in force must sign it: "
            "better-compute pki approvers sign --key FILE"
        )


def _print_set(one: dict[str, Any]) -> None:
    output.print_facts(
        {
            "set": f"epoch {one['epoch']}, {one['state']}",
            "approvers": ", ".join(_name(approver) for approver in one["approvers"]) or "nobody",
            "threshold": one["threshold"] or None,
            "approve": tier_names(one["tiers"]),
            "unbatched": f"{one['unbatched_per_hour']} an hour and node" if one["approvers"] else None,
            "signed by": ", ".join(kid[:KID_CHARACTERS] for kid in one["signed_by"]),
            "proposed": f"by {one['proposed_by']} at {one['proposed_at']}",
            "why": one["why"],
        }
    )


def _print_change(before: dict[str, Any] | None, after: dict[str, Any], *, trust_domain: str) -> None:
    """Say in words what signing the set brings about."""
    had = {} if before is None else {approver["kid"]: _name(approver) for approver in before["approvers"]}
    has = {approver["kid"]: _name(approver) for approver in after["approvers"]}
    output.note(f"You are asked to sign the approver set of epoch {after['epoch']} of {trust_domain}.")
    output.note(f"  comes:   {', '.join(name for kid, name in has.items() if kid not in had) or 'nobody'}")
    output.note(f"  goes:    {', '.join(name for kid, name in had.items() if kid not in has) or 'nobody'}")
    output.note(f"  stays:   {', '.join(name for kid, name in has.items() if kid in had) or 'nobody'}")
    if not has:
        output.note("  From then on NO command needs an approval.")
        return
    output.note(f"  {after['threshold']} of {len(has)} must approve: {tier_names(after['tiers'])}")
    output.note(f"  each node runs {after['unbatched_per_hour']} an hour without an approval")


def _set_of(shown: dict[str, Any]) -> Any:
    """Return the set that the words describe: what is signed is made of what is shown, not of what the API computed."""
    from bettercompute.pki import quorum

    keys = [base64.b64decode(approver["public_key"]) for approver in shown["approvers"]]
    for approver, spki in zip(shown["approvers"], keys, strict=True):
        if _kid_of(spki) != approver["kid"]:
            output.fail(f"the key of {_name(approver)} is not the one that it is said to be", code=2)
    if not keys:
        return quorum.ApproverSet(epoch=shown["epoch"], keys=(), threshold=0, tiers=())
    return quorum.make_approver_set(
        keys,
        epoch=shown["epoch"],
        threshold=shown["threshold"],
        tiers=shown["tiers"],
        unbatched_per_hour=shown["unbatched_per_hour"],
    )


def _named(text: str) -> dict[str, str]:
    name, _, file = text.partition("=")
    if not name or not file:
        output.fail(f"--approver {text!r}: write NAME=FILE, the approver's .pub file", code=2)
    return {"name": name, "public_key": base64.b64encode(approver_keys.read_public(Path(file))).decode()}


def _tier(name: str) -> int:
    if name not in TIERS:
        output.fail(f"--tier {name!r}: there are {', '.join(TIERS)}", code=2)
    return TIERS[name]


def _name(approver: dict[str, Any]) -> str:
    kid = approver["kid"][:KID_CHARACTERS]
    name = output.printable(approver["name"], keep="")  # a line break in it is no line of ours
    return f"{name} ({kid})" if name else kid


def _kid_of(spki: bytes) -> str:
    import hashlib

    return hashlib.sha256(spki).hexdigest()
