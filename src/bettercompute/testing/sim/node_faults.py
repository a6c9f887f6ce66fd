"""Faults of nodes: their processes, disks, identities, and copies of them."""

from __future__ import annotations

import asyncio

from bettercompute.errors import BetterComputeError
from bettercompute.store import certificates, nodes
from bettercompute.testing.sim.node import Node
from bettercompute.testing.sim.stage import Stage


async def node_crash(stage: Stage, for_s: float) -> None:
    """Kill a node's daemon; its journal brings it back."""
    del for_s
    node = stage.rng.choice(stage.nodes)
    reboot = stage.rng.random() < 0.5
    stage.tell(f"{node.node_id} is killed and started again" + (", after a boot" if reboot else ""))
    node.restart(reboot=reboot)


async def node_pause(stage: Stage, for_s: float) -> None:
    """SIGSTOP a node's daemon."""
    node = stage.rng.choice(stage.nodes)
    process = node.process
    if process is None or process.paused:
        return
    stage.tell(f"{node.node_id} is paused, for {for_s:.1f} s")
    process.pause()
    stage.network.refresh()
    await asyncio.sleep(for_s)
    process.go_on()
    stage.network.refresh()


async def journal_lost(stage: Stage, for_s: float) -> None:
    """Lose a node's journal."""
    del for_s
    node = stage.rng.choice(stage.nodes)
    stage.tell(f"{node.node_id} loses its journal")
    stage.frames.journal_gone(node.node_id)
    node.lose_journal()


async def journal_rollback(stage: Stage, for_s: float) -> None:
    """Restore a node's disk as it was a while before."""
    node = _with_disk(stage)
    if node is None:
        return
    node.remember()
    await asyncio.sleep(for_s)
    stage.tell(f"{node.node_id} is rolled back to its disk of {for_s:.1f} s ago")
    stage.frames.copied_disk(node.node_id)
    node.roll_back()


async def disk_full(stage: Stage, for_s: float) -> None:
    """Fill a node's disk."""
    node = _with_disk(stage)
    if node is None:
        return
    stage.tell(f"the disk of {node.node_id} is full, for {for_s:.1f} s")
    node.fill_disk(True)
    await asyncio.sleep(for_s)
    node.fill_disk(False)


async def clone(stage: Stage, for_s: float) -> None:
    """Run a copy of a node's disk beside it; whoever is revoked joins anew."""
    node = _with_disk(stage)
    if node is None:
        return
    stage.tell(f"{node.node_id} is cloned, for {for_s:.1f} s")
    twin = node.clone(f"{node.node_id}-clone{stage.faults['clone']}")
    stage.frames.copied_disk(node.node_id)
    await asyncio.sleep(for_s)
    twin.end()
    stage.frames.copied_disk(node.node_id)
    await stage.mend(node)


async def revocation(stage: Stage, for_s: float) -> None:
    """Revoke a node's certificate; it joins anew later."""
    node = stage.rng.choice(stage.nodes)
    row = stage.ledger.row("nodes", node.node_id)
    if row is None:
        return
    stage.tell(f"{node.node_id} is revoked, and joins anew after {for_s:.1f} s")
    try:
        await _revoke_certificates(stage, node.node_id, generation=row["identity_generation"])
    except BetterComputeError:
        return
    await asyncio.sleep(for_s)
    await stage.mend(node)


async def _revoke_certificates(stage: Stage, node_id: str, *, generation: int) -> None:
    """Revoke the certificates of a node's identity generation."""
    async with stage.operator.transaction() as transaction:
        await nodes.lock_session(transaction, node_id=node_id)
        await certificates.revoke_generation(
            transaction, node_id=node_id, identity_generation=generation, reason="operator"
        )


async def journal_damage(stage: Stage, for_s: float) -> None:
    """Flip bits of a node's journal while it is down."""
    del for_s
    node = _with_disk(stage)
    if node is None:
        return
    stage.tell(f"bits of the journal of {node.node_id} are flipped")
    stage.frames.journal_gone(node.node_id)
    node.damage_journal()


async def services_away(stage: Stage, for_s: float) -> None:
    """Let nobody renew or join for a while: whose certificate ends meanwhile is shut out."""
    if stage.registrar.away:
        return
    stage.tell(f"the services behind the gateways are away, for {for_s:.1f} s")
    stage.registrar.away = True
    await asyncio.sleep(for_s)
    stage.registrar.away = False


async def second_daemon(stage: Stage, for_s: float) -> None:
    """Run a second daemon on a node's state folder: only one of the two may be a node at a time."""
    node = _with_disk(stage)
    if node is None:
        return
    stage.tell(f"a second daemon is started on the state folder of {node.node_id}, for {for_s:.1f} s")
    end = node.second_daemon(f"{node.node_id}-second{stage.faults['second-daemon']}")
    await asyncio.sleep(for_s)
    end()


def _with_disk(stage: Stage) -> Node | None:
    """Draw a node whose journal is on a disk."""
    having = [node for node in stage.nodes if node.has_disk]
    return stage.rng.choice(having) if having else None
