"""What must hold of a node after any kills: nothing acknowledged is lost, nothing ran twice, nothing is left over."""

from __future__ import annotations

from dataclasses import dataclass

from bettercompute.delivery.commands import CommandState
from bettercompute.protocol.kinds import KINDS
from tests.kills.nodes import Node
from tests.kills.plane import Plane

# What a command may end with when only processes died, beside success. Its reason says what was not certain.
UNCERTAIN = {
    "gpu.reset": {"interrupted"},
    "node.reboot": {"no-effect", "not-proven", "interrupted", "inhibited"},
    "daemon.upgrade": {"unsupported", "no-effect"},
}
ONCE = {"gpu.reset": "nvidia-smi", "node.reboot": "reboot"}
"""The kinds that never run twice, and the program that each runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A command of a run."""

    seed: int
    command_id: str
    kind: str
    name: str
    """What its program was told."""
    cancelled: bool = False


async def check_node(plane: Plane, node: Node, asked: list[Asked]) -> None:
    """Compare what the daemon promised, what its programs did and what the database holds. Its daemon is stopped."""
    rows = await plane.rows([one.command_id for one in asked])
    promises, runs = node.promises(), node.runs()
    for one in asked:
        row, story = rows[one.command_id], f"seed {one.seed}, {one.kind} {one.command_id} of {node.node_id}"
        check_end(one, state=row["state"], reason=row["reason"], story=story)
        promised = promises.finished.get(one.command_id)
        if promised is not None:
            stored = (row["state"], (row["result"] or b"").hex())
            assert stored == promised, f"{story}: the journal promised {promised}, stored is {stored}"
        program = ONCE.get(one.kind)
        if program is not None:
            argument = f"--gpu-reset --id={one.name}" if program == "nvidia-smi" else one.command_id
            begun = runs[program, argument, "begin"]
            assert begun <= 1, f"{story}: ran {begun} times"
            assert begun == 1 or row["state"] != CommandState.SUCCEEDED, f"{story}: succeeded without having run"
            assert one.kind != "gpu.reset" or row["state"] != CommandState.SUCCEEDED or runs[program, argument, "end"]
    beside = [key for key in runs if key[2] == "beside"]
    assert not beside, f"{node.node_id}: {beside} ran beside a program that a killed daemon had left"
    assert not node.programs_left(), f"{node.node_id}: left running: {node.programs_left()}"
    await check_events(plane, node)
    check_journal(node, asked)
    ends = await plane.query(
        "SELECT payload ->> 'commandId' AS id, count(*) AS times FROM outbox WHERE type = 'command.finished'"
        " AND payload ->> 'commandId' = ANY ($1::text[]) GROUP BY 1",
        [one.command_id for one in asked],
    )
    assert {row["id"]: row["times"] for row in ends} == dict.fromkeys(rows, 1), node.node_id


def check_end(one: Asked, *, state: int, reason: str, story: str) -> None:
    """A command succeeded, or says why it is not certain that it would have."""
    if state == CommandState.SUCCEEDED:
        assert one.kind != "daemon.upgrade", story
    elif state == CommandState.CANCELLED:
        assert one.cancelled, f"{story}: cancelled by nobody: {reason}"
    else:
        assert state == CommandState.FAILED, f"{story}: {state} {reason}"
        assert reason in UNCERTAIN.get(one.kind, set()), f"{story}: failed {reason}"
        assert not KINDS[one.kind].retry_safe or KINDS[one.kind].self_terminating, story


async def check_events(plane: Plane, node: Node) -> None:
    """The events stored are those promised: none lost, none twice, in order, under one journal id."""
    rows = await plane.query(
        "SELECT seq, event_id, journal_id FROM node_events WHERE node_id = $1 ORDER BY seq", node.node_id
    )
    stored = {row["seq"]: row["event_id"] for row in rows}
    promised = node.promises().events
    assert len({row["journal_id"] for row in rows}) == 1, node.node_id
    assert list(stored) == list(range(1, len(rows) + 1)), f"{node.node_id}: gaps among {list(stored)}"
    # An event whose transaction was committed without anybody having been told is stored as well.
    assert stored.items() >= promised.items(), f"{node.node_id}: {promised} promised, {stored} stored"


def check_journal(node: Node, asked: list[Asked]) -> None:
    """The journal is whole, was not set aside once it had promised anything, and agrees that everything has ended."""
    folder = node.folder / "state"
    aside = {path.name.rpartition(".damaged-")[2] for path in folder.glob("*.damaged-*")}
    assert len(aside) <= node.unborn, f"{node.node_id}: a journal was set aside: {aside}"
    contents, owes = node.journal()
    assert not owes, node.node_id
    assert not contents.processes, node.node_id
    open_ = [entry.command_id for entry in contents.commands if entry.state < CommandState.SUCCEEDED]
    assert not open_, f"{node.node_id}: {open_} never ended, of {[one.command_id for one in asked]}"
