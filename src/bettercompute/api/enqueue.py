"""Turn "run this kind on these nodes" into commands: bodies and places in the order, in one transaction."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bettercompute.api import payloads
from bettercompute.api.context import ApiContext
from bettercompute.api.invalid import shown
from bettercompute.pki.identity import role_of
from bettercompute.protocol import messages
from bettercompute.protocol.frames import encode_message
from bettercompute.protocol.kinds import KINDS, CommandKind, pack_payload
from bettercompute.protocol.limits import MAX_COMMAND_BODY_BYTES
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import commands, controller_runs, idempotency, nodes
from bettercompute.store.nodes import Node

# One transaction holds them all; a larger fleet is run in several batches.
BATCH_NODES_MAX = 20_000
BATCH_BYTES_MAX = 256 << 20
PAGE_ROWS = 1_000
CONNECTED = "connected"
INSERT_ROWS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A run as asked for. `node_ids` None: every node whose role can run the kind."""

    kind: str
    payload: Mapping[str, Any]
    node_ids: Sequence[str] | None
    timeout_ms: int | None
    not_after_in_ms: int
    asked_by: str
    idempotency_key: str | None


async def enqueue(context: ApiContext, wanted: Wanted) -> dict[str, Any]:
    """Store the commands and return the fields of a `RunAnswer`.

    Raises `Refused` for an unknown kind, a payload that the kind does not take, an unknown node, or a node whose role
    cannot run the kind.
    """
    kind = KINDS.get(wanted.kind)
    if kind is None:
        raise refuse(
            Reason.BAD_REQUEST, f"kind {shown(wanted.kind)} is not known; there are {', '.join(sorted(KINDS))}"
        )
    payload = payloads.read(kind, wanted.payload)
    targets = await _nodes(context, kind, wanted.node_ids)
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
        batch_id = context.world.ids.uuid7()
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
            )
            for node_id, seq in zip(node_ids, seqs, strict=True)
        ]
        for start in range(0, len(made), INSERT_ROWS):
            await commands.enqueue(transaction, made[start : start + INSERT_ROWS])
        await context.record(
            transaction,
            actor=wanted.asked_by,
            action="command.run",
            target=f"batch/{batch_id}",
            details={"kind": kind.name, "nodes": len(made)},
        )
        answer = {
            "batch_id": batch_id,
            "kind": kind.name,
            "gives_up_after_ms": wanted.not_after_in_ms + timeout_ms,
            "commands": [{"id": command.command_id, "node_id": command.node_id} for command in made],
            "without_session": [node.node_id for node in targets if node.state != CONNECTED],
        }
        if wanted.idempotency_key is not None:
            await idempotency.complete(
                transaction, principal=wanted.asked_by, key=wanted.idempotency_key, response=answer
            )
    return answer


def _check_size(payload: messages.ProtoMessage, *, nodes_count: int) -> None:
    batch_bytes = payload.ByteSize() * nodes_count
    if batch_bytes > BATCH_BYTES_MAX:
        raise refuse(
            Reason.BAD_REQUEST,
            f"a payload of {payload.ByteSize()} bytes for {nodes_count} nodes is {batch_bytes} bytes: one run takes at "
            f"most {BATCH_BYTES_MAX}; name the nodes in several runs",
        )


async def _nodes(context: ApiContext, kind: CommandKind, node_ids: Sequence[str] | None) -> list[Node]:
    if node_ids is None:
        return await _every_node(context, kind)
    wanted = sorted(set(node_ids))
    if len(wanted) > BATCH_NODES_MAX:
        raise refuse(Reason.BAD_REQUEST, f"{len(wanted)} nodes: one run takes at most {BATCH_NODES_MAX}")
    found = await nodes.get_many(context.database, node_ids=wanted)
    unknown = sorted(set(wanted) - {node.node_id for node in found})
    if unknown:
        more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
        raise refuse(
            Reason.NOT_FOUND, f"no node {', '.join(unknown[:10])}{more}: `nodes list` shows the ones there are"
        )
    roles = _roles(kind)
    for node in found:
        if node.role not in roles:
            raise refuse(
                Reason.BAD_REQUEST,
                f"{node.node_id} has the role {node.role}; {kind.name} runs on {', '.join(sorted(roles))}",
            )
    return found


def _roles(kind: CommandKind) -> set[str]:
    return {name for role in kind.roles if (name := role_of(role)) is not None}


async def _every_node(context: ApiContext, kind: CommandKind) -> list[Node]:
    roles = _roles(kind)
    found: list[Node] = []
    after = ""
    while True:
        page = await nodes.list_page(context.database, after=after, page_size=PAGE_ROWS)
        found += [node for node in page if node.role in roles]
        if len(found) > BATCH_NODES_MAX:
            raise refuse(
                Reason.BAD_REQUEST, f"the fleet has more than {BATCH_NODES_MAX} nodes: name them in several runs"
            )
        if len(page) < PAGE_ROWS:
            break
        after = page[-1].node_id
    if not found:
        raise refuse(Reason.NOT_FOUND, "there is no node to run it on")
    return found


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
) -> commands.NewCommand:
    command_id = context.world.ids.uuid7()
    not_after_ms = now_ms + wanted.not_after_in_ms
    body = messages.CommandBody(
        command_id=command_id,
        node_id=node_id,
        kind=kind.name,
        lane=kind.lane,
        payload=pack_payload(payload),
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
        signature=context.signer.sign_command(encoded) if context.signer else None,
        created_by=wanted.asked_by,
        not_after_ms=not_after_ms,
        timeout_ms=timeout_ms,
        payload=wanted.payload,
        batch_id=batch_id,
    )


def _digest(wanted: Wanted) -> bytes:
    request = [
        wanted.kind,
        dict(wanted.payload),
        None if wanted.node_ids is None else sorted(set(wanted.node_ids)),
        wanted.timeout_ms,
        wanted.not_after_in_ms,
    ]
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).digest()
