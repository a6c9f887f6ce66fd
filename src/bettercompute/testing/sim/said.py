"""Judges what nodes say by what is on their disks: nothing before it is durable, one end of a command, no older spec.

Disks tell here what was committed to them, so a frame or an effect that came too early shows even where no crash falls
into the moment between. Nodes without a disk are judged by their words alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bettercompute.daemon.journal_records import AppendEvents, Write
from bettercompute.protocol import messages
from bettercompute.session.effects import FinishCommand, StartCommand
from bettercompute.testing.sim.invariants import TERMINAL_FROM, Verdict
from bettercompute.testing.sim.ledger import Ledger

ENDS = frozenset({messages.COMMAND_STATE_SUCCEEDED, messages.COMMAND_STATE_FAILED, messages.COMMAND_STATE_CANCELLED})


@dataclass(slots=True)
class _Durable:
    """What was ever committed to one disk."""

    started: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    event_ids: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class End:
    """How a command ended, as its node has said it."""

    machine: str
    state: int
    at_ms: int
    late: bool
    """It had ended for the control plane before."""
    reason: str


class SaidRules:
    """Judges the words of all nodes."""

    def __init__(self, ledger: Ledger, verdict: Verdict, *, monotonic_ms: Callable[[], int]) -> None:
        self._ends: dict[str, list[End]] = {}
        """What was said of each command's end."""
        self._ledger = ledger
        self._verdict = verdict
        self._monotonic_ms = monotonic_ms
        self._disks: dict[str, _Durable] = {}
        self._disk_of: dict[str, str] = {}
        """By machine."""
        self._memory_gone: dict[str, int] = {}
        """When a node's journal was lost, or another machine had a copy of it, last."""
        self._generations: dict[str, tuple[int, int]] = {}
        """Observed and applied, as each machine has said them last."""

    # Disks

    def runs_on(self, machine: str, *, disk: str) -> None:
        """Note on which disk a machine's daemon keeps its journal."""
        self._disk_of[machine] = disk
        self._disks.setdefault(disk, _Durable())

    def copied(self, disk: str, *, of: str) -> None:
        """Note that a disk begins as the copy of another one."""
        known = self._disks.setdefault(of, _Durable())
        self._disks[disk] = _Durable(set(known.started), set(known.ended), set(known.event_ids))

    def wrote(self, disk: str, writes: Sequence[Write]) -> None:
        """Note what was committed to a disk."""
        durable = self._disks.setdefault(disk, _Durable())
        for write in writes:
            match write:
                case StartCommand(command_id):
                    durable.started.add(command_id)
                case FinishCommand(command_id):
                    durable.ended.add(command_id)
                case AppendEvents(events):
                    durable.event_ids.update(event.event_id for event in events)

    def memory_gone(self, node_id: str) -> None:
        """Note that a node may not remember what it did or read, from now on."""
        self._memory_gone[node_id] = self._monotonic_ms()
        for machine in [key for key in self._generations if key == node_id or key not in self._disk_of]:
            self._generations.pop(machine)

    # Words

    def began(self, machine: str, command_id: str) -> None:
        """Judge the begin of an effect."""
        durable = self._durable(machine)
        if durable is not None and command_id not in durable.started:
            self._verdict.broken("no effect before it is durable", f"{command_id} began at {machine}")

    def sent(self, node_id: str, frame: messages.AgentFrame, *, machine: str) -> None:
        """Judge what a machine says."""
        match frame.WhichOneof("frame"):
            case "hello":
                for update in frame.hello.done_results:
                    self._update(node_id, update, machine=machine)
                self._generation(
                    machine, observed=frame.hello.observed_generation, applied=frame.hello.applied_generation
                )
            case "status":
                self._generation(
                    machine, observed=frame.status.observed_generation, applied=frame.status.applied_generation
                )
            case "update":
                self._update(node_id, frame.update, machine=machine)
            case "updates":
                for update in frame.updates.updates:
                    self._update(node_id, update, machine=machine)
            case "events":
                durable = self._durable(machine)
                said = {event.event_id for event in frame.events.events}
                if durable is not None and not said <= durable.event_ids:
                    text = f"{machine} sent {sorted(said - durable.event_ids)}"
                    self._verdict.broken("nothing is said before it is durable", text)

    def _durable(self, machine: str) -> _Durable | None:
        disk = self._disk_of.get(machine)
        return None if disk is None else self._disks[disk]

    def _update(self, node_id: str, update: messages.CommandUpdate, *, machine: str) -> None:
        command_id, state = update.command_id, update.state
        durable = self._durable(machine)
        if durable is not None:
            early = (state == messages.COMMAND_STATE_RUNNING and command_id not in durable.started) or (
                state == messages.COMMAND_STATE_SUCCEEDED and command_id not in durable.ended
            )
            if early:
                text = f"{machine} said of {command_id} {messages.CommandState.Name(state)}"
                self._verdict.broken("nothing is said before it is durable", text)
        if state not in ENDS:
            return
        said = self._ends.setdefault(command_id, [])
        row = self._ledger.row("commands", command_id)
        late = row is None or row["state"] >= TERMINAL_FROM
        end = End(machine, state, self._monotonic_ms(), late, update.reason)
        for before in said:
            remembered = before.machine == machine and self._memory_gone.get(node_id, -1) < before.at_ms
            if remembered and before.state != state:
                self._verdict.broken("a command has one end at its node", f"{command_id}: {before}, and then {end}")
        said.append(end)

    def _generation(self, machine: str, *, observed: int, applied: int) -> None:
        before = self._generations.get(machine, (0, 0))
        if observed < before[0] or applied < before[1]:
            text = f"{machine} said {before} (observed, applied), and then {(observed, applied)}"
            self._verdict.broken("a node takes no older spec", text)
        self._generations[machine] = (observed, applied)

    # What became of it

    def lost_end(self, command_id: str, node_id: str, *, state: int, since_ms: int) -> End | None:
        """Return the end that a node has said of a command, if it is stored with another one. What was said before the
        node has lost its memory, or before `since_ms`, or of what had ended already, counts for nothing.
        """
        ends = self._ends.get(command_id, [])
        if any(end.state == state for end in ends):
            return None
        since_ms = max(since_ms, self._memory_gone.get(node_id, -1))
        return next((end for end in ends if not end.late and end.at_ms > since_ms), None)
