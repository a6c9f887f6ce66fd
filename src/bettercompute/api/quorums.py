"""Which runs need the approval of people, and in what shape they get it: one batch, one scope, a proof of each command.

The control plane only collects: whether an approval counts is decided by each node for itself (`pki.quorum`), so what
is skipped here is refused there. See docs/security.md, "Approvers"; decisions 0131.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bettercompute.pki.quorum import ApproverSet, batch_leaf, batch_proofs, scope_root
from bettercompute.protocol.kinds import CommandKind
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import approvers as stored_approvers
from bettercompute.store.commands import NewCommand
from bettercompute.store.database import Queries, Transaction


async def approvers_for(queries: Queries, kind: CommandKind, *, unbatched: bool = False) -> ApproverSet | None:
    """Return the set that has to approve a run of this kind; None: nobody has to.

    `unbatched`: the caller wants to use the few an hour that a set may let pass; refused where it lets none.
    """
    if not kind.destructive:
        return None
    found = await stored_approvers.current(queries)
    if found is None or not found.approvers.keys or int(kind.destructive_tier) not in found.approvers.tiers:
        return None
    if not unbatched:
        return found.approvers
    if not found.approvers.unbatched_per_hour:
        raise refuse(
            Reason.CONFLICT,
            f"the approver set lets no {kind.name} pass without approval: run it without --unbatched and have it "
            "approved",
        )
    return None


def scoped(made: Sequence[NewCommand]) -> tuple[list[NewCommand], bytes]:
    """Return the commands in the order of their leaves, each with its proof and not to be sent yet, and the scope root.

    The order is that of their ids, by which an approver reads them again.
    """
    ordered = sorted(made, key=lambda command: command.command_id)
    leaves = [
        batch_leaf(command_id=command.command_id, node_id=command.node_id, kind=command.kind, body=command.body)
        for command in ordered
    ]
    waiting = [
        replace(command, batch_proof=proof.SerializeToString(deterministic=True), not_before_ms=command.not_after_ms)
        for command, proof in zip(ordered, batch_proofs(leaves), strict=True)
    ]
    return waiting, scope_root(leaves)


async def open_batch(
    transaction: Transaction,
    made: Sequence[NewCommand],
    *,
    batch_id: str,
    root: bytes,
    trust_domain: str,
    stepwise: bool,
) -> None:
    """Record that these commands wait for approvals; with `stepwise` for their release by who asks, after that."""
    first = made[0]
    await stored_approvers.insert_batch(
        transaction,
        batch_id=batch_id,
        kind=first.kind,
        scope_root=root,
        scope_size=len(made),
        not_after_ms=first.not_after_ms,
        trust_domain=trust_domain,
        asked_by=first.created_by,
        stepwise=stepwise,
    )


def check_stepwise(kind: CommandKind, *, approvers: ApproverSet | None) -> None:
    """Refuse to hold commands back for steps where nobody's approval binds them together."""
    if approvers is None:
        raise refuse(
            Reason.CONFLICT,
            f"a run of {kind.name} needs no approval, and `stepwise` is for runs that do: begin a batch and add to it",
        )


async def refuse_adding(queries: Queries, *, batch_id: str, approvers: ApproverSet | None) -> None:
    """Refuse to add to a batch whose scope is, or would have to be, approved: nobody approved what comes later."""
    if approvers is not None or await stored_approvers.batch(queries, batch_id=batch_id) is not None:
        raise refuse(
            Reason.CONFLICT,
            f"batch {batch_id} is approved as a whole and takes no further commands: name all nodes at its beginning, "
            "with `stepwise` to have them asked a few at a time",
        )
