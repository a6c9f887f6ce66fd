"""`better-compute approve BATCH`: read what a batch would do, in words, and sign it.

Everything shown is computed here, from the bytes that the nodes will get; the API could not show one thing and have
another signed. See docs/security.md, "Approvers".
"""

from __future__ import annotations

import base64
import json as json_module
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bettercompute.cli import approver_keys, output
from bettercompute.cli.approver_keys import KeyFile
from bettercompute.cli.client import ApiClient, path_of
from bettercompute.cli.options import Api, Json
from bettercompute.cli.tiers import WORDS

if TYPE_CHECKING:
    from bettercompute.pki.review import Review

NODES_SHOWN_MAX = 50
PAYLOADS_SHOWN_MAX = 5


def approve(
    batch: Annotated[str | None, typer.Argument(help="The batch; without it those that wait are listed.")] = None,
    key: KeyFile = None,
    refuse: Annotated[bool, typer.Option("--refuse", help="End the batch: none of it will run.")] = False,
    reason: Annotated[str, typer.Option(help="Why it is refused.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Show every node and every payload.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Sign without asking again.")] = False,
    api: Api = None,
    json: Json = False,
) -> None:
    """Show what a batch of destructive commands would do, and sign it with your approver key."""
    client = output.run(lambda: ApiClient.from_environment(api))
    if batch is None:
        _list(client, json=json)
        return
    if refuse:
        if not reason:
            output.fail("--refuse needs --reason: it is told to whoever asked for the run", code=output.EXIT_USAGE)
        refused = output.run(lambda: client.post(path_of("approvals", batch, "refusal"), {"reason": reason}))
        output.print_json(refused) if json else output.note(f"batch {batch} is refused: none of it will run")
        return
    offered = output.run(lambda: client.get(path_of("approvals", batch)))
    if offered["state"] != "waiting":
        output.fail(f"batch {batch} is {offered['state']}: there is nothing to approve", code=output.EXIT_USAGE)
    own = approver_keys.read(key)
    review = output.run(lambda: _reviewed(client, offered))
    _print_review(review, offered, everything=everything)
    if len(review.payloads) > PAYLOADS_SHOWN_MAX and not everything:
        output.fail(f"the batch has {len(review.payloads)} payloads: read them all, with --all", code=output.EXIT_USAGE)
    approver_keys.confirm("Approve exactly this?", yes=yes)
    approved = output.run(lambda: client.post(path_of("approvals", batch, "signatures"), _signature(review, own)))
    if json:
        output.print_json(approved)
        return
    given, required = len(approved["approved_by"]), approved["approvals_required"]
    if approved["state"] == "approved":
        output.note(f"approved: {given} of {required} have signed, the commands are released")
    else:
        output.note(f"signed: {given} of {required}; the commands wait for {required - given} more")


def _list(client: ApiClient, *, json: bool) -> None:
    waiting = output.run(lambda: client.get("/v1/approvals"))
    if json:
        for item in waiting:
            output.print_json(item)
        return
    output.print_table(
        ("batch", "kind", "commands", "asked by", "expires", "approved by", "of"),
        [
            (
                item["batch_id"],
                item["kind"],
                item["scope_size"],
                item["asked_by"],
                item["not_after"],
                output.cell(item["approved_by"]),
                item["approvals_required"],
            )
            for item in waiting
        ],
        empty="no batch waits for approvals",
    )


def _reviewed(client: ApiClient, offered: dict[str, Any]) -> Review:
    from bettercompute.pki.review import OfferedCommand, review

    commands = [
        OfferedCommand(
            command_id=item["command_id"],
            node_id=item["node_id"],
            kind=item["kind"],
            body=base64.b64decode(item["body"]),
        )
        for item in client.pages(path_of("approvals", offered["batch_id"], "scope"))
    ]
    return review(
        batch_id=offered["batch_id"],
        scope_root=bytes.fromhex(offered["scope_root"]),
        not_after_ms=offered["not_after_ms"],
        commands=commands,
    )


def _signature(review: Review, key: Any) -> dict[str, str]:
    from bettercompute.pki import signatures
    from bettercompute.protocol.envelopes import batch_approval_input

    signature = signatures.sign(key, batch_approval_input(review.approval, trust_domain=review.trust_domain))
    return {"signature": base64.b64encode(signature.SerializeToString()).decode()}


def _print_review(review: Review, offered: dict[str, Any], *, everything: bool) -> None:
    """Say what is approved. On standard error: it is what the question below it is about."""
    from bettercompute.cli.durations import format_age

    approval, shown = review.approval, partial(output.printable, keep="")  # a line break in a name is no line of ours
    nodes_shown = len(review.node_ids) if everything else NODES_SHOWN_MAX
    payloads_shown = len(review.payloads) if everything else PAYLOADS_SHOWN_MAX
    names = shown(", ".join(review.node_ids[:nodes_shown]))
    more = len(review.node_ids) - nodes_shown
    output.note(f"You are asked to approve batch {shown(approval.batch_id)}.")
    output.note(f"  kind       {review.kind.name}: {WORDS.get(int(review.kind.destructive_tier), 'destructive')}")
    output.note(f"  commands   {approval.scope_size}, on {len(review.node_ids)} nodes of {shown(review.trust_domain)}")
    output.note(f"  nodes      {names}" + (f" and {more} more: --all names them" if more > 0 else ""))
    for payload, count in review.payloads[:payloads_shown]:
        output.note(f"  payload    {_payload(payload)}" + (f"  ({count} of them)" if len(review.payloads) > 1 else ""))
    if len(review.payloads) > payloads_shown:
        output.note(f"  payload    and {len(review.payloads) - payloads_shown} different ones more: --all shows them")
    output.note(f"  asked by   {shown(', '.join(review.issued_by))}, at {_moment(review.issued_at_ms)}")
    begins = f"not before {_moment(review.not_before_ms)}, and " if review.not_before_ms > 0 else ""
    output.note(f"  begins     {begins}until {_moment(approval.not_after_ms)}, nothing of it after that")
    output.note(f"  may run    {format_age(review.timeout_ms)} on each node")
    given = shown(", ".join(offered["approved_by"])) or "nobody yet"
    if offered["stepwise"]:
        output.note(f"  sent       in steps, as {shown(offered['asked_by'])} leads them; nodes do not judge that")
    output.note(f"  approved   by {given}; it takes {offered['approvals_required']}")
    output.note(f"  scope root {approval.scope_root.hex()}")


def _payload(payload: Any) -> str:
    from google.protobuf.json_format import MessageToDict

    shown = MessageToDict(payload, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return json_module.dumps(shown, ensure_ascii=True)


def _moment(time_ms: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
