"""What operators do to nodes: lock and unlock, revoke, forget; and what somebody does who is no operator."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from bettercompute import telemetry
from bettercompute.errors import BetterComputeError
from bettercompute.session import standing as standing_rules
from bettercompute.session.standing import Revocation
from bettercompute.store import leases, nodes, standing
from bettercompute.store.database import Transaction
from bettercompute.testing.sim import work
from bettercompute.testing.sim.node import DURATIONS_S, Node
from bettercompute.testing.sim.stage import Stage

OPERATOR = "operator"
# A database that does not answer is asked again.
AGAIN_S = 5.0
# How long an operator waits for the end of a session of a node that was revoked, to forget it.
GONE_WITHIN_S = 300.0


async def node_locked(stage: Stage, for_s: float) -> None:
    """Lock a node, for a time or until it is unlocked."""
    node = stage.rng.choice(stage.nodes)
    ttl_ms = int(for_s * 1000) if stage.rng.random() < 0.5 else None

    async def unlock(transaction: Transaction) -> None:
        await standing.unlock(transaction, node_id=node.node_id)

    await lock(stage, node, ttl_ms=ttl_ms)  # it may hold although nobody heard so: unlocked in any case
    stage.tell(
        f"{node.node_id} is locked, {'until it is unlocked' if ttl_ms is None else 'with an end'}: {for_s:.1f} s"
    )
    await asyncio.sleep(for_s)
    if ttl_ms is None and await _said(stage, node, unlock):
        stage.tell(f"{node.node_id} is unlocked")


async def lock(stage: Stage, node: Node, *, ttl_ms: int | None) -> bool:
    """Lock a node, and return whether that is known to have been done."""

    async def act(transaction: Transaction) -> None:
        await standing.lock(transaction, node_id=node.node_id, ttl_ms=ttl_ms, locked_by=OPERATOR, reason="a simulation")

    return await _said(stage, node, act, again=False)


async def undo_drain(stage: Stage, name: str) -> None:
    """Let a gateway take sessions again, said until it is heard."""
    while True:
        try:
            await leases.undo_drain(stage.operator, name=name)
        except BetterComputeError:
            await asyncio.sleep(AGAIN_S)
        else:
            return


async def undo_drains(stage: Stage) -> None:
    """Undo every drain: a database that came back may hold one that was undone since."""
    for (name,), row in sorted(stage.ledger.rows["leases"].items()):
        if row["retired_at"] is None:
            await undo_drain(stage, name)


async def unlock_all(stage: Stage) -> None:
    """Unlock what is locked without an end: a database that came back may hold a lock that was undone since."""

    async def unlock(transaction: Transaction) -> None:
        await standing.unlock(transaction, node_id=node.node_id)

    for node in stage.nodes:
        row = stage.ledger.row("nodes", node.node_id)
        if row is not None and row["locked_at"] is not None and row["locked_until"] is None:
            await _said(stage, node, unlock)


async def node_revoked(stage: Stage, for_s: float) -> None:
    """Revoke a node, which joins anew later."""
    node = stage.rng.choice(stage.nodes)
    if not await revoke(stage, node):
        return
    stage.tell(f"{node.node_id} is revoked as a node, and joins anew after {for_s:.1f} s")
    await asyncio.sleep(for_s)
    await stage.mend(node)


async def node_forgotten(stage: Stage, for_s: float) -> None:
    """Revoke a node and forget it once it has no session; later it joins as a new one, with the disk that it has."""
    node = stage.rng.choice(stage.nodes)
    if not await revoke(stage, node):
        return
    stage.tell(f"{node.node_id} is revoked, to be forgotten")
    notice = standing_rules.forgotten_notice(node.node_id, by=OPERATOR).SerializeToString()
    forgotten = False

    async def forget(transaction: Transaction) -> None:
        nonlocal forgotten
        if await standing.holder(transaction, node_id=node.node_id) is not None:
            return
        await standing.forget(
            transaction,
            node_id=node.node_id,
            forgotten_by=OPERATOR,
            notice=notice,
            draw_id=stage.world.ids.uuid7,
            event_type=telemetry.EVENT_COMMAND_FINISHED,
        )
        forgotten = True

    for _ in range(int(GONE_WITHIN_S / AGAIN_S)):
        await asyncio.sleep(AGAIN_S)
        row = stage.ledger.row("nodes", node.node_id)
        if row is None or row["revoked_at"] is None:
            return  # it has joined anew meanwhile
        await _said(stage, node, forget)
        if forgotten:
            stage.frames.met["forgotten"] += 1
            stage.frames.forgotten(node.node_id)
            stage.tell(f"{node.node_id} is forgotten, and joins as a new node after {for_s:.1f} s")
            break
    await asyncio.sleep(for_s)
    await stage.mend(node)


async def unsigned_intent(stage: Stage, for_s: float) -> None:
    """Put a command into the database that no worker key has signed, as a gateway that was broken into would send."""
    del for_s
    if stage.signing is None:
        return
    node = stage.rng.choice(stage.nodes)
    command_id = stage.world.ids.uuid7()
    try:
        await work.enqueue(stage, node.node_id, command_id, kind=stage.rng.choice(sorted(DURATIONS_S)), forged=True)
    except BetterComputeError:
        return
    stage.tell(f"{command_id} for {node.node_id} is signed by nobody")


async def revoke(stage: Stage, node: Node) -> bool:
    """Revoke a node, and return whether that is known to have been done."""
    notice = standing_rules.revoked_notice(node.node_id, Revocation(by=OPERATOR, reason="a simulation"))

    async def revoke(transaction: Transaction) -> None:
        await standing.revoke(
            transaction,
            node_id=node.node_id,
            revoked_by=OPERATOR,
            reason="a simulation",
            notice=notice.SerializeToString(),
            draw_id=stage.world.ids.uuid7,
            event_type=telemetry.EVENT_COMMAND_FINISHED,
        )

    return await _said(stage, node, revoke, again=False)


async def _said(stage: Stage, node: Node, act: Callable[[Transaction], Awaitable[None]], *, again: bool = True) -> bool:
    """Say something of a node under its session row's lock, again and again if need be; False: there is no such node,
    or it was not tried again.
    """
    while True:
        try:
            async with stage.operator.transaction() as transaction:
                found = await nodes.lock_session(transaction, node_id=node.node_id)
                if found:
                    await act(transaction)
        except BetterComputeError:
            if not again:
                return False
            await asyncio.sleep(AGAIN_S)
        else:
            return found
