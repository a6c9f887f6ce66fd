"""What a fleet must do when it is asked and nothing befalls it: put to the proof once, after everything has settled.

That all has settled shows only that nothing is open, and a command ends also if nobody ever sends it. So each node is
then left alone for a while, asked for work, a cancel, a spec and an event, and some lose their session by an operator's
word: what the faults have left broken without a trace shows here. See docs/simulator.md, "What is judged".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from bettercompute.delivery.commands import CommandState
from bettercompute.store import leases
from bettercompute.testing.sim import operator_faults, settling, work
from bettercompute.testing.sim.cluster import GatewayHost
from bettercompute.testing.sim.process import SimulatedProcess
from bettercompute.testing.sim.stage import Stage

# Three lives of a lease, and more than three silent intervals of a heartbeat.
QUIET_S = 50.0
# What takes longest is played for 25 s, and cancelled while it runs.
DONE_WITHIN_S = 60.0
# The revocation feed is read every 5 s, whoever is notified sooner.
GONE_WITHIN_S = 10.0
# A gateway learns of its drain with its next renewal, and waits 10 s for those who stay.
DRAINED_WITHIN_S = 30.0
# Three intervals of a heartbeat, a look every half of one, and the database's time.
SILENT_WITHIN_S = 45.0
# A minute of silence, a dial that is not answered, and the back-off after it.
ELSEWHERE_WITHIN_S = 120.0
LOOK_EVERY_S = 0.5

DONE, CANCELLED = "diag.nvml", "logs.collect"
# Beyond what a session that began while the database's clock was wrong may take for the time.
DEADLINE_MS = (900_000, 900_000)
# More than a lane has credits for.
BURST = 12


@dataclass(slots=True)
class _Asked:
    """What was asked of the nodes."""

    done: list[str] = field(default_factory=list)
    """Commands that must succeed."""
    cancelled: dict[str, bool] = field(default_factory=dict)
    """Commands that are cancelled once they run; whether that was said yet."""


async def prove(stage: Stage) -> None:
    """Ask for everything once; what does not come is a broken promise."""
    for node in stage.nodes:
        await stage.mend(node)  # a copied disk may have been found out only now
    await operator_faults.undo_drains(stage)  # a gateway that began anew may have brought an old one with it
    await _settle(stage)
    for part in (_is_quiet, _works, _gateway_drains, _gateway_stands_still, _nodes_lose_sessions):
        if not stage.verdict.violations:
            await part(stage)


async def _is_quiet(stage: Stage) -> None:
    """Leave everybody alone: no session ends, but where a daemon shows a new certificate, or for a cause of before.

    Each such reason ends one session.
    """
    before = {node.node_id: stage.ledger.row("node_sessions", node.node_id) for node in stage.nodes}
    ends = stage.frames.ends_with_a_reason.copy()
    await asyncio.sleep(QUIET_S)
    for node_id, old in before.items():
        new = stage.ledger.row("node_sessions", node_id)
        assert old is not None, "everything has settled"
        reasons = stage.frames.ends_with_a_reason[node_id] - ends[node_id]
        if new is not None and new["cert_serial"] != old["cert_serial"]:
            reasons += 1
        if new is None or new["session_epoch"] - old["session_epoch"] > reasons:
            stage.verdict.broken("no session ends without a reason", f"{node_id}: {old} -> {new}")


async def _works(stage: Stage) -> None:
    """Ask every node for work, and have it done."""
    asked = _Asked()
    for node in stage.nodes:
        for _ in range(BURST if node is stage.nodes[0] else 1):
            asked.done.append(await _enqueue(stage, node.node_id, kind=DONE))
        asked.cancelled[await _enqueue(stage, node.node_id, kind=CANCELLED)] = False
        await work.desire(stage, node_id=node.node_id)
        node.record_event("{}")
    left = await _until(stage, lambda: _undone(stage, asked), within_s=DONE_WITHIN_S, asked=asked)
    for rule, text in left:
        stage.verdict.broken(rule, f"{text}, {DONE_WITHIN_S:g} s after it was asked of a fleet that nothing befell")


async def _enqueue(stage: Stage, node_id: str, *, kind: str) -> str:
    command_id = stage.world.ids.uuid7()
    await work.enqueue(stage, node_id, command_id, kind=kind, within_ms=DEADLINE_MS)
    return command_id


def _undone(stage: Stage, asked: _Asked) -> list[tuple[str, str]]:
    wanted = {
        **dict.fromkeys(asked.done, CommandState.SUCCEEDED),
        **dict.fromkeys(asked.cancelled, CommandState.CANCELLED),
    }
    rows = {command_id: stage.ledger.row("commands", command_id) for command_id in wanted}
    missing = [
        ("who is asked answers", f"{command_id} is not {wanted[command_id].name}: {row}")
        for command_id, row in rows.items()
        if row is None or row["state"] != wanted[command_id]
    ]
    return [*missing, *settling.unsettled(stage)]


async def _until(
    stage: Stage,
    left: Callable[[], list[tuple[str, str]]],
    *,
    within_s: float,
    asked: _Asked | None = None,
) -> list[tuple[str, str]]:
    """Wait until nothing is left, or the time is over, and return what is left then."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + within_s
    while found := left():
        if loop.time() >= until_s or stage.verdict.violations:
            return found
        for command_id, said in ({} if asked is None else asked.cancelled).items():
            row = stage.ledger.row("commands", command_id)
            if asked is not None and not said and row is not None and row["state"] == CommandState.RUNNING:
                asked.cancelled[command_id] = True
                await work.cancel(stage, command_id)
        await asyncio.sleep(LOOK_EVERY_S)
    return []


async def _nodes_lose_sessions(stage: Stage) -> None:
    """Lock a node, revoke another one, stop a third: their sessions end, and all come back.

    The node is revoked and not a certificate: of that a database that came back may know nothing.
    """
    locked, revoked = stage.nodes[0], stage.nodes[-1]
    silent = stage.nodes[1].process if len(stage.nodes) > 2 else None
    stage.tell(f"{locked.node_id} is locked and {revoked.node_id} revoked, for the proof")
    going = {revoked.node_id: "a revocation ends the session"}
    await operator_faults.revoke(stage, revoked)
    if locked is not revoked:
        going[locked.node_id] = "a lock ends the session"
        await operator_faults.lock(stage, locked, ttl_ms=None)
    await _gone(stage, going, within_s=GONE_WITHIN_S)
    if silent is not None and not stage.verdict.violations:
        _stop(stage, silent)
        await _gone(stage, {stage.nodes[1].node_id: "a silent session ends"}, within_s=SILENT_WITHIN_S)
        silent.go_on()
        stage.network.refresh()
    await operator_faults.unlock_all(stage)
    await stage.mend(revoked)
    await _settle(stage)


async def _settle(stage: Stage) -> None:
    if not stage.verdict.violations:
        await settling.settle(stage, after="the proof")


def _stop(stage: Stage, process: SimulatedProcess) -> None:
    stage.tell(f"{process.name} is paused, for the proof")
    process.pause()
    stage.network.refresh()


async def _gone(stage: Stage, going: dict[str, str], *, within_s: float) -> None:
    """Wait until these nodes have no session; each with the rule that is broken if it has."""
    for rule, text in await _until(stage, lambda: _still_here(stage, going), within_s=within_s):
        stage.verdict.broken(rule, f"{text}, {within_s:g} s after it was said")


def _still_here(stage: Stage, going: dict[str, str]) -> list[tuple[str, str]]:
    rows = {node_id: stage.ledger.row("node_sessions", node_id) for node_id in going}
    return [
        (going[node_id], f"{node_id}: {row}")
        for node_id, row in rows.items()
        if row is not None and row["gateway_id"] is not None
    ]


async def _gateway_drains(stage: Stage) -> None:
    """Drain the gateway with the most sessions: it gives all of them away."""
    if len(stage.gateways) == 1:
        return
    gateway_id = _gateway_id(_fullest(stage))
    stage.tell(f"{gateway_id} is to drain, for the proof")
    await leases.request_drain(stage.operator, name=gateway_id, requested_by="operator")
    await _emptied(stage, gateway_id, rule="a drain gives every session away", within_s=DRAINED_WITHIN_S)
    await leases.undo_drain(stage.operator, name=gateway_id)
    await _settle(stage)


async def _gateway_stands_still(stage: Stage) -> None:
    """Stop the gateway with the most sessions: who hears nothing of it goes elsewhere."""
    if len(stage.gateways) == 1:
        return
    host = _fullest(stage)
    assert host.process is not None, "everything has settled"
    _stop(stage, host.process)
    rule = "who hears nothing goes elsewhere"
    await _emptied(stage, _gateway_id(host), rule=rule, within_s=ELSEWHERE_WITHIN_S)
    host.process.go_on()
    stage.network.refresh()
    await _settle(stage)


async def _emptied(stage: Stage, gateway_id: str, *, rule: str, within_s: float) -> None:
    def left() -> list[tuple[str, str]]:
        there = [node for node in stage.nodes if _is_at(stage, node.node_id, gateway_id)]
        return [(rule, f"{node.node_id} has a session at {gateway_id} ({node.why})") for node in there]

    for broken, text in await _until(stage, left, within_s=within_s):
        stage.verdict.broken(broken, f"{text}, {within_s:g} s after it was said")


def _fullest(stage: Stage) -> GatewayHost:
    return max(stage.gateways, key=lambda host: _sessions_of(stage, _gateway_id(host)))


def _gateway_id(host: GatewayHost) -> str:
    return "" if host.gateway is None else host.gateway.gateway_id


def _is_at(stage: Stage, node_id: str, gateway_id: str) -> bool:
    row = stage.ledger.row("node_sessions", node_id)
    return row is not None and row["gateway_id"] == gateway_id


def _sessions_of(stage: Stage, gateway_id: str) -> int:
    return sum(_is_at(stage, node.node_id, gateway_id) for node in stage.nodes)
