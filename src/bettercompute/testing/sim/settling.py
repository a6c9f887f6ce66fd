"""What must have come true some time after the last fault: everybody connected, everything ended, nothing owed.

Liveness is judged apart from safety: while faults go on nobody is promised anything by a certain time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from bettercompute.store.waiting import ABANDONED_REASON
from bettercompute.testing.sim.invariants import TERMINAL_FROM
from bettercompute.testing.sim.stage import Stage

LOOK_EVERY_S = 5.0


async def settle(stage: Stage, *, after: str) -> float | None:
    """Wait until everything has come true, and return how long that took; None: a promise was broken.

    `after` says what it was that everybody recovers from.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    left: list[tuple[str, str]] = []
    while loop.time() - began_s < stage.scenario.phases.settle_s:
        await asyncio.sleep(LOOK_EVERY_S)
        if stage.verdict.violations:
            return None
        left = unsettled(stage)
        if not left:
            return loop.time() - began_s
    for rule, text in left:
        stage.verdict.broken(rule, f"{text}, {stage.scenario.phases.settle_s:g} s after {after}")
    return None


def unsettled(stage: Stage) -> list[tuple[str, str]]:
    """Return what has not come true yet, as a rule and a sentence."""
    return [*_nodes(stage), *_commands(stage), *_events(stage), *_sessions(stage)]


def _nodes(stage: Stage) -> Iterator[tuple[str, str]]:
    for node in stage.nodes:
        row = stage.ledger.row("node_sessions", node.node_id)
        state = stage.ledger.row("nodes", node.node_id)
        if not node.live or row is None or row["gateway_id"] is None:
            yield "every reachable node is connected", f"{node.node_id} is not ({row}; {node.why})"
        elif state is None or state["state"] != "connected":
            yield "every reachable node is connected", f"{node.node_id} has a session, and its state is {state}"
        elif state["applied_generation"] < state["spec_generation"]:
            yield "every node comes to what is desired", f"{node.node_id}: {state}"
        if not node.idle:
            yield "nothing is owed", f"{node.node_id} waits for acks: {node.owed}"


def _commands(stage: Stage) -> Iterator[tuple[str, str]]:
    for (command_id,), row in sorted(stage.ledger.rows["commands"].items()):
        if row["state"] < TERMINAL_FROM:
            yield "every command ends", f"{command_id}: {row}"
        elif row["reason"] != ABANDONED_REASON:
            said = stage.frames.lost_end(command_id, row["node_id"], state=row["state"])
            if said is not None:
                yield "what a node said of an end is stored", f"{command_id}: {said}, the row says {row}"


def _events(stage: Stage) -> Iterator[tuple[str, str]]:
    """What a journal holds is stored: under its seq, or, when the journal was rolled back, under an earlier one."""
    stored: dict[tuple[str, str], set[int]] = {}
    ids: set[tuple[str, str]] = set()
    for (node_id, journal_id, seq), row in stage.ledger.rows["node_events"].items():
        stored.setdefault((node_id, journal_id), set()).add(seq)
        ids.add((node_id, row["event_id"]))
    for (node_id, journal_id, first), row in stage.ledger.rows["node_event_gaps"].items():
        stored.setdefault((node_id, journal_id), set()).update(range(first, row["last_seq"] + 1))
    for node in stage.nodes:
        journal_id, last = node.journal
        told = stage.frames.told_events.get((node.node_id, journal_id), {})
        missing = [
            seq
            for seq in sorted(set(range(1, last + 1)) - stored.get((node.node_id, journal_id), set()))
            if (node.node_id, told.get(seq)) not in ids
        ]
        if missing:
            yield "the server's events are the journal's", f"{node.node_id} {journal_id}: {missing} of {last}"


def _sessions(stage: Stage) -> Iterator[tuple[str, str]]:
    for host in stage.gateways:
        life = None if host.gateway is None else host.gateway.life
        for session in () if life is None else life.registry:
            row = stage.ledger.row("node_sessions", session.node_id)
            if row is None or row["session_id"] != session.state.session_id:
                yield "no stream without a row", f"{host.name} holds {session.state.session_id}, the row says {row}"
