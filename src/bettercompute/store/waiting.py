"""What dispatch asks of one command, and the end that an administrator gives it."""

from __future__ import annotations

from collections.abc import Iterable

from bettercompute.delivery.commands import CommandState
from bettercompute.delivery.waiting import Approvals, Holder, WaitingFacts
from bettercompute.protocol import messages
from bettercompute.store import approvers, channels, commands
from bettercompute.store.database import Queries, Transaction

ABANDONED_REASON = "abandoned"
# A lane has at most eight credits; a session with fewer than before may owe some.
HOLDERS_MAX = 32
# Beyond this the exact place says nothing more.
AHEAD_MAX = 10_000


async def facts(queries: Queries, *, command_id: str) -> WaitingFacts | None:
    """Return everything that decides why a command waits; None: there is no such command."""
    row = await queries.fetch_one("waiting.facts", command_id=command_id, holders_max=HOLDERS_MAX, ahead_max=AHEAD_MAX)
    if row is None:
        return None
    decoded = {"state", "capabilities", "allowed_kinds", "holders", "abandoned", "approval"}
    allowed = row["allowed_kinds"]
    return WaitingFacts(
        **{name: row[name] for name in WaitingFacts.__dataclass_fields__ if name not in decoded},
        state=CommandState(row["state"]),
        capabilities=frozenset(row["capabilities"]),
        allowed_kinds=None if allowed is None else frozenset(allowed),
        holders=_holders(row["holders"]),
        abandoned=_holders(row["abandoned"]),
        approval=await _approvals(queries, row["approval_batch_id"]),
    )


def _holders(rows: Iterable[tuple[str, str, int]]) -> tuple[Holder, ...]:
    return tuple(
        Holder(command_id=command_id, kind=kind, state=CommandState(state)) for command_id, kind, state in rows
    )


async def _approvals(queries: Queries, batch_id: str | None) -> Approvals | None:
    """Return how a batch that waits for approvals stands."""
    if batch_id is None:
        return None
    batch, held = await approvers.batch(queries, batch_id=batch_id), await approvers.current(queries)
    if batch is None or batch.state != approvers.WAITING:
        return None
    kids = [messages.Signature.FromString(signature).kid for signature in batch.signatures]
    return Approvals(
        batch_id=batch_id,
        approved_by=tuple((held.names.get(kid) if held else None) or kid for kid in kids),
        required=held.approvers.threshold if held else 0,
    )


async def abandon(
    transaction: Transaction, *, command_id: str, abandoned_by: str, why: str, outbox_id: str, event_type: str
) -> bool:
    """End a command in flight as failed, publish it, and have it stopped where it runs. False: it is not in flight."""
    row = await transaction.fetch_one(
        "waiting.abandon",
        command_id=command_id,
        reason=ABANDONED_REASON,
        message=f"abandoned by {abandoned_by}: {why}; what the node did with it is not known",
        outbox_id=outbox_id,
        event_type=event_type,
    )
    if row is None:
        return False
    await commands.tell_finished(transaction, command_ids=[command_id])
    await commands.poke_dispatch(transaction, node_ids=[row["node_id"]])
    await transaction.execute("outbox.notify", channel=channels.OUTBOX, payload="")
    return True
