"""Decide what is kept of approvers: their sets, and the batches that wait for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bettercompute.pki.quorum import EPOCH_STEP_MAX, ApproverSet
from bettercompute.store import json_columns
from bettercompute.store.commands import poke_dispatch
from bettercompute.store.database import Queries, Row, Transaction

SETS_SHOWN_MAX = 50
BATCHES_SHOWN_MAX = 500
STRANGERS_NAMED_MAX = 5

PROPOSED = "proposed"
CURRENT = "current"
WITHDRAWN = "withdrawn"

WAITING = "waiting"
APPROVED = "approved"
REFUSED = "refused"
EXPIRED = "expired"
"""Waiting past its end: not stored, for nothing has to happen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSet:
    """An approver set: in force, proposed, or replaced."""

    approvers: ApproverSet
    names: Mapping[str, str]
    """What people call the keys, by `kid`."""
    signatures: tuple[bytes, ...]
    """Serialized Signatures over the set."""
    state: str
    proposed_at_ms: int
    proposed_by: str
    why: str
    decided_at_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalBatch:
    """A run that approvers must agree to."""

    batch_id: str
    kind: str
    scope_root: bytes
    scope_size: int
    not_after_ms: int
    trust_domain: str
    state: str
    asked_by: str
    asked_at_ms: int
    signatures: tuple[bytes, ...]
    decided_at_ms: int | None
    decided_by: str | None
    why: str
    stepwise: bool
    """Its commands are sent in steps, as its maker releases them."""
    now_ms: int

    @property
    def shown_state(self) -> str:
        """Return its state as people see it."""
        return EXPIRED if self.state == WAITING and self.now_ms >= self.not_after_ms else self.state


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopedCommand:
    """One command of a batch, as its leaf is made of it."""

    command_id: str
    node_id: str
    kind: str
    body: bytes


async def current(queries: Queries) -> StoredSet | None:
    """Return the set in force; None: there never was one."""
    return await _in_state(queries, CURRENT)


async def proposed(queries: Queries) -> StoredSet | None:
    """Return the set that waits for signatures."""
    return await _in_state(queries, PROPOSED)


async def sets(queries: Queries) -> list[StoredSet]:
    """Return the sets, the newest first, without those that were withdrawn."""
    return [_set(row) for row in await queries.fetch("approvers.sets", sets_max=SETS_SHOWN_MAX)]


async def next_epoch(transaction: Transaction) -> int:
    """Return the epoch of a set that every node can still take: above what the database and the nodes know."""
    newest = await transaction.fetch_one("approvers.highest_epoch", believed_max=0)
    known = 0 if newest is None else newest["epoch"]
    row = await transaction.fetch_one("approvers.highest_epoch", believed_max=known + EPOCH_STEP_MAX)
    return (known if row is None else int(row["epoch"])) + 1


async def propose(
    transaction: Transaction, approvers: ApproverSet, *, names: Mapping[str, str], proposed_by: str, why: str
) -> None:
    """Record a set that is to come, under `store.trust.lock`."""
    await transaction.execute(
        "approvers.propose",
        epoch=approvers.epoch,
        approver_keys=list(approvers.keys),
        threshold=approvers.threshold,
        tiers=list(approvers.tiers),
        unbatched_per_hour=approvers.unbatched_per_hour,
        names=json_columns.encode(names),
        proposed_by=proposed_by,
        why=why,
    )


async def sign(transaction: Transaction, *, epoch: int, signature: bytes) -> None:
    """Add a signature to a set."""
    await transaction.execute("approvers.sign", epoch=epoch, signature=signature)


async def put_in_force(transaction: Transaction, *, epoch: int) -> None:
    """Put the proposed set in force in place of the one before."""
    await transaction.execute("approvers.replace")
    await transaction.execute("approvers.decide", epoch=epoch, state=CURRENT)


async def withdraw(transaction: Transaction, *, epoch: int) -> None:
    """Give up a proposal."""
    await transaction.execute("approvers.decide", epoch=epoch, state=WITHDRAWN)


async def insert_batch(
    transaction: Transaction,
    *,
    batch_id: str,
    kind: str,
    scope_root: bytes,
    scope_size: int,
    not_after_ms: int,
    trust_domain: str,
    asked_by: str,
    stepwise: bool = False,
) -> None:
    """Record that a batch waits for approvals."""
    await transaction.execute(
        "approvers.insert_batch",
        batch_id=batch_id,
        kind=kind,
        scope_root=scope_root,
        scope_size=scope_size,
        not_after_ms=not_after_ms,
        trust_domain=trust_domain,
        asked_by=asked_by,
        stepwise=stepwise,
    )


async def batch(queries: Queries, *, batch_id: str) -> ApprovalBatch | None:
    """Return one batch; None: there is none, or it needs no approval."""
    row = await queries.fetch_one("approvers.batch", batch_id=batch_id)
    return None if row is None else _batch(row)


async def lock_batch(transaction: Transaction, *, batch_id: str) -> ApprovalBatch | None:
    """Return one batch, locked."""
    await transaction.fetch("approvers.lock_batch", batch_id=batch_id)
    return await batch(transaction, batch_id=batch_id)


async def waiting_batches(queries: Queries) -> list[ApprovalBatch]:
    """Return the batches that wait, the soonest to expire first."""
    return [_batch(row) for row in await queries.fetch("approvers.waiting_batches", batches_max=BATCHES_SHOWN_MAX)]


async def sign_batch(transaction: Transaction, *, batch_id: str, signatures: Sequence[bytes]) -> None:
    """Keep the signatures of a batch, all of them."""
    await transaction.execute("approvers.sign_batch", batch_id=batch_id, signatures=list(signatures))


async def decide_batch(transaction: Transaction, *, batch_id: str, state: str, decided_by: str, why: str = "") -> None:
    """Note that a batch was approved or refused."""
    await transaction.execute("approvers.decide_batch", batch_id=batch_id, state=state, decided_by=decided_by, why=why)


async def release(transaction: Transaction, *, batch_id: str, approval: bytes, stepwise: bool) -> int:
    """Give the pending commands of an approved batch their approval, and let them be sent unless that is for a later
    step; return how many may be sent.
    """
    rows = await transaction.fetch("approvers.release", batch_id=batch_id, batch_approval=approval, stepwise=stepwise)
    if stepwise:
        return 0
    await poke_dispatch(transaction, node_ids=[row["node_id"] for row in rows])
    return len(rows)


async def release_step(transaction: Transaction, *, batch_id: str, command_ids: Sequence[str]) -> int:
    """Let these commands of an approved batch be sent; return how many could not before."""
    rows = await transaction.fetch("approvers.release_step", batch_id=batch_id, command_ids=list(command_ids))
    await poke_dispatch(transaction, node_ids=[row["node_id"] for row in rows])
    return len(rows)


async def not_of_batch(queries: Queries, *, batch_id: str, command_ids: Sequence[str]) -> list[str]:
    """Return the first of those commands that are none of the batch's."""
    rows = await queries.fetch(
        "approvers.not_of_batch", batch_id=batch_id, command_ids=list(command_ids), named_max=STRANGERS_NAMED_MAX
    )
    return [row["command_id"] for row in rows]


async def held_of(queries: Queries, *, batch_id: str) -> list[str]:
    """Return the commands of a batch that were not released yet."""
    return [row["command_id"] for row in await queries.fetch("approvers.held_commands", batch_id=batch_id)]


async def pending_of(queries: Queries, *, batch_id: str) -> list[str]:
    """Return the commands of a batch that are pending."""
    return [row["command_id"] for row in await queries.fetch("approvers.open_commands", batch_id=batch_id)]


async def scope(queries: Queries, *, batch_id: str, after: str, page_size: int) -> list[ScopedCommand]:
    """Return the next commands of a batch in the order of its leaves."""
    rows = await queries.fetch("approvers.scope", batch_id=batch_id, after=after, page_size=page_size)
    return [ScopedCommand(**{name: row[name] for name in ScopedCommand.__dataclass_fields__}) for row in rows]


async def _in_state(queries: Queries, state: str) -> StoredSet | None:
    row = await queries.fetch_one("approvers.set_in_state", state=state)
    return None if row is None else _set(row)


def _set(row: Row) -> StoredSet:
    names: Any = json_columns.decode(row["names"])
    return StoredSet(
        approvers=ApproverSet(
            epoch=row["epoch"],
            keys=tuple(row["approver_keys"]),
            threshold=row["threshold"],
            tiers=tuple(row["tiers"]),
            unbatched_per_hour=row["unbatched_per_hour"],
        ),
        names=names,
        signatures=tuple(row["signatures"]),
        state=row["state"],
        proposed_at_ms=row["proposed_at_ms"],
        proposed_by=row["proposed_by"],
        why=row["why"],
        decided_at_ms=row["decided_at_ms"],
    )


def _batch(row: Row) -> ApprovalBatch:
    plain = {name: row[name] for name in ApprovalBatch.__dataclass_fields__ if name != "signatures"}
    return ApprovalBatch(**plain, signatures=tuple(row["signatures"]))
