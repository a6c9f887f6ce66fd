"""Turn "run this kind on these nodes" into commands: bodies and places in the order, in one transaction."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bettercompute.api import payloads, quorums
from bettercompute.api.context import ApiContext
from bettercompute.api.invalid import shown
from bettercompute.api.targets import Targets, choose
from bettercompute.pki.intent import IntentSigner
from bettercompute.protocol import messages
from bettercompute.protocol.frames import encode_message
from bettercompute.protocol.kinds import KINDS, CommandKind, pack_payload
from bettercompute.protocol.limits import MAX_COMMAND_BODY_BYTES
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import commands, controller_runs, idempotency
from bettercompute.store.database import Transaction
from bettercompute.store.signing import signer_of

BATCH_BYTES_MAX = 256 << 20
CONNECTED = "connected"
INSERT_ROWS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A run as asked for. With `batch_id` it adds to a batch that the same caller began."""

    kind: str
    payload: Mapping[str, Any]
    targets: Targets
    timeout_ms: int | None
    not_after_in_ms: int
    not_before_in_ms: int = 0
    """Not sent before so long from now; 0: at once."""
    asked_by: str
    idempotency_key: str | None
    batch_id: str | None = None
    unbatched: bool = False
    """Use the few an hour that pass without the approvers' word."""
    stepwise: bool = False
    """Once it is approved, have its commands sent as the caller releases them."""


async def enqueue(context: ApiContext, wanted: Wanted) -> dict[str, Any]:
    """Store the commands and return the fields of a `RunAnswer`.

    Raises `Refused` for an unknown kind, a payload that the kind does not take, an unknown node, or a node whose role
    cannot run the kind.
    """
    kind = kind_named(wanted.kind)
    payload = payloads.read(kind, wanted.payload)
    targets = await choose(context.database, kind, wanted.targets)
    check_times(not_before_in_ms=wanted.not_before_in_ms, not_after_in_ms=wanted.not_after_in_ms)
    node_ids = [node.node_id for node in targets]
    _check_size(payload, nodes_count=len(node_ids))
    timeout_ms = wanted.timeout_ms or kind.timeout_ms
    async with context.database.transaction() as transaction:
        if wanted.idempotency_key is not None:
            before = await idempotency.claim(
                transaction, principal=wanted.asked_by, key=wanted.idempotency_key, request_sha256=_digest(wanted)
            )
            if before is not None:
                return dict(before)
        now_ms = await controller_runs.now_ms(transaction)
        seqs = await commands.draw_seqs(transaction, count=len(node_ids))
        approvers = await quorums.approvers_for(transaction, kind, unbatched=wanted.unbatched)
        if wanted.batch_id is not None:
            await _check_batch(transaction, kind, wanted, wanted.batch_id)
            await quorums.refuse_adding(transaction, batch_id=wanted.batch_id, approvers=approvers)
        signer = await signer_of(context.signing, transaction)
        batch_id = wanted.batch_id or context.world.ids.uuid7()
        made = [
            _command(
                context,
                kind,
                payload,
                wanted,
                node_id=node_id,
                seq=seq,
                batch_id=batch_id,
                now_ms=now_ms,
                timeout_ms=timeout_ms,
                signer=signer,
            )
            for node_id, seq in zip(node_ids, seqs, strict=True)
        ]
        if wanted.stepwise:
            quorums.check_stepwise(kind, approvers=approvers)
        if approvers is not None:
            made, root = quorums.scoped(made)
            await quorums.open_batch(
                transaction,
                made,
                batch_id=batch_id,
                root=root,
                trust_domain=context.trust_domain,
                stepwise=wanted.stepwise,
            )
        for start in range(0, len(made), INSERT_ROWS):
            await commands.enqueue(transaction, made[start : start + INSERT_ROWS])
        await context.record(
            transaction,
            actor=wanted.asked_by,
            action="command.run",
            target=f"batch/{batch_id}",
            details={"kind": kind.name, "nodes": len(made), "approvals": approvers.threshold if approvers else 0},
        )
        answer = {
            "batch_id": batch_id,
            "kind": kind.name,
            "gives_up_after_ms": wanted.not_after_in_ms + timeout_ms,
            "commands": [{"id": command.command_id, "node_id": command.node_id} for command in made],
            "without_session": [node.node_id for node in targets if node.state != CONNECTED],
            "approvals_required": approvers.threshold if approvers else 0,
        }
        if wanted.idempotency_key is not None:
            await idempotency.complete(
                transaction, principal=wanted.asked_by, key=wanted.idempotency_key, response=answer
            )
    return answer


def kind_named(name: str) -> CommandKind:
    """Return the kind, or refuse a name that no kind has."""
    kind = KINDS.get(name)
    if kind is None:
        raise refuse(Reason.BAD_REQUEST, f"kind {shown(name)} is not known; there are {', '.join(sorted(KINDS))}")
    return kind


def check_times(*, not_before_in_ms: int, not_after_in_ms: int) -> None:
    """Refuse a run that could not be sent any more once it may be."""
    if not_before_in_ms >= not_after_in_ms:
        raise refuse(
            Reason.BAD_REQUEST,
            f"not_before_ms {not_before_in_ms} leaves no time before not_after_ms {not_after_in_ms}: both count from "
            "now, so let not_after_ms be the greater one",
        )


def _check_size(payload: messages.ProtoMessage, *, nodes_count: int) -> None:
    batch_bytes = payload.ByteSize() * nodes_count
    if batch_bytes > BATCH_BYTES_MAX:
        raise refuse(
            Reason.BAD_REQUEST,
            f"a payload of {payload.ByteSize()} bytes for {nodes_count} nodes is {batch_bytes} bytes: one run takes at "
            f"most {BATCH_BYTES_MAX}; name the nodes in several runs",
        )


async def _check_batch(transaction: Transaction, kind: CommandKind, wanted: Wanted, batch_id: str) -> None:
    """Refuse to add to a batch that is not there, is another's, or is of another kind."""
    begun = await commands.list_batch(transaction, batch_id=batch_id, page_size=1)
    if not begun:
        raise refuse(Reason.NOT_FOUND, f"no batch {shown(batch_id)} to add to: begin one without batch_id")
    if (begun[0].created_by, begun[0].kind) != (wanted.asked_by, kind.name):
        raise refuse(
            Reason.CONFLICT,
            f"batch {batch_id} is {begun[0].kind} of {begun[0].created_by}: only its maker adds to it, and that kind",
        )


def _command(
    context: ApiContext,
    kind: CommandKind,
    payload: messages.ProtoMessage,
    wanted: Wanted,
    *,
    node_id: str,
    seq: int,
    batch_id: str,
    now_ms: int,
    timeout_ms: int,
    signer: IntentSigner | None,
) -> commands.NewCommand:
    command_id = context.world.ids.uuid7()
    not_after_ms = now_ms + wanted.not_after_in_ms
    not_before_ms = now_ms + wanted.not_before_in_ms if wanted.not_before_in_ms else None
    body = messages.CommandBody(
        command_id=command_id,
        node_id=node_id,
        kind=kind.name,
        lane=kind.lane,
        payload=pack_payload(payload),
        not_before_ms=not_before_ms or 0,
        not_after_ms=not_after_ms,
        timeout_ms=timeout_ms,
        seq=seq,
        issued_at_ms=now_ms,
        trust_domain=context.trust_domain,
        issued_by=wanted.asked_by,
    )
    encoded = encode_message(body, limit=MAX_COMMAND_BODY_BYTES)
    return commands.NewCommand(
        command_id=command_id,
        node_id=node_id,
        kind=kind.name,
        lane=int(kind.lane),
        seq=seq,
        body=encoded,
        signature=signer.sign_command(encoded) if signer else None,
        signed_under=signer.root_sha256 if signer else None,
        created_by=wanted.asked_by,
        not_before_ms=not_before_ms,
        asked_not_before_ms=not_before_ms,
        not_after_ms=not_after_ms,
        timeout_ms=timeout_ms,
        payload=wanted.payload,
        batch_id=batch_id,
        attested=kind.attested,
    )


def _digest(wanted: Wanted) -> bytes:
    request = [
        wanted.kind,
        dict(wanted.payload),
        None if wanted.targets.node_ids is None else sorted(set(wanted.targets.node_ids)),
        [repr(requirement) for requirement in wanted.targets.requirements],
        wanted.batch_id,
        wanted.timeout_ms,
        wanted.not_after_in_ms,
        wanted.unbatched,
        wanted.stepwise,
        # Only where it is set: a request of before there was such a thing is still the same one.
        *([wanted.not_before_in_ms] if wanted.not_before_in_ms else ()),
    ]
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).digest()
