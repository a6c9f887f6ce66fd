"""What a daemon says of its commands, and what it remembers of them: updates, results that are owed, acks, credits.

A result is journaled before it is sent, and kept until it was acked and long enough that a late delivery cannot run it
again. See docs/delivery.md, "At the daemon"; decisions 0104 and 0105.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from bettercompute.delivery import lanes
from bettercompute.delivery.commands import CommandState
from bettercompute.delivery.journal_rules import JournalEntry
from bettercompute.protocol import messages
from bettercompute.session import clock, resume
from bettercompute.session.changes import changed
from bettercompute.session.daemon_state import DaemonSession, Phase
from bettercompute.session.effects import DaemonEffect, FinishCommand, ResendResult, SendAgentFrame


def journal_end(
    state: DaemonSession, entry: JournalEntry, update: messages.CommandUpdate
) -> tuple[DaemonSession, FinishCommand]:
    """Return the state in which a command is done, and the write of its terminal update."""
    serialized = update.SerializeToString()
    ended = CommandState(update.state)
    mark_ms = state.clock.mark_ms
    done = replace(entry, state=ended, update=serialized, done_mark_ms=mark_ms, command=b"")
    state = let_go(changed(state, entries={**state.entries, entry.command_id: done}), entry)
    return state, FinishCommand(entry.command_id, ended, serialized, mark_ms)


def owed_results(state: DaemonSession) -> tuple[DaemonEffect, ...]:
    """Return the results that did not ride in this stream's Hello, oldest first: those past 1 MiB, and newer ones."""
    owed = sorted(
        (
            entry
            for entry in state.entries.values()
            if entry.done and not entry.acked and entry.command_id not in state.hello_results
        ),
        key=lambda entry: entry.done_mark_ms,
    )
    return tuple(
        SendAgentFrame(messages.AgentFrame(update=messages.CommandUpdate.FromString(entry.update))) for entry in owed
    )


# Answers


def answer(state: DaemonSession, *updates: messages.CommandUpdate) -> tuple[DaemonEffect, ...]:
    """Return the frame of updates: one frame for several where the gateway reads it.

    Nothing while there is no session.
    """
    if state.phase is not Phase.LIVE or not updates:
        return ()
    if len(updates) > 1 and state.update_batches:
        batch = messages.CommandUpdateBatch(updates=updates)
        return (SendAgentFrame(messages.AgentFrame(updates=batch)),)
    return tuple(SendAgentFrame(messages.AgentFrame(update=update)) for update in updates)


def stored_result(state: DaemonSession, entry: JournalEntry) -> tuple[DaemonEffect, ...]:
    """Answer a duplicate of what is done: with its result, which the journal holds when the state does not."""
    if entry.update:
        return answer(state, messages.CommandUpdate.FromString(entry.update))
    return (ResendResult(entry.command_id),)


def update_of(
    state: DaemonSession, command_id: str, attempt: int, reached: CommandState, *, now_ms: int
) -> messages.CommandUpdate:
    """Return an update of a command, dated in confirmed server time where there is any."""
    confirmed = clock.confirmed_time(state.clock, now_ms=now_ms)
    at_ms = clock.session_time(state.clock, now_ms=now_ms) if confirmed is None else confirmed
    return messages.CommandUpdate(
        command_id=command_id,
        state=messages.CommandState.ValueType(reached),
        attempt=attempt,
        at_ms=at_ms,
    )


def end_update(
    state: DaemonSession, entry: JournalEntry, reached: CommandState, *, reason: str, message: str, now_ms: int
) -> messages.CommandUpdate:
    """Return a terminal update that this daemon's own rules make, without a handler."""
    update = update_of(state, entry.command_id, entry.attempt, reached, now_ms=now_ms)
    update.reason = reason
    update.message = message
    return update


def cancelled_update(
    state: DaemonSession, command_id: str, attempt: int, *, now_ms: int, started: bool = False
) -> messages.CommandUpdate:
    """Return the update of a command that does not run; `started`: an earlier process of the daemon had begun it."""
    update = update_of(state, command_id, attempt, CommandState.CANCELLED, now_ms=now_ms)
    update.reason = resume.CANCELLED
    update.message = "cancelled before it began"
    if started:
        update.message = "cancelled before it began again; what it did before the daemon ended is not undone"
    return update


# State


def acked(state: DaemonSession, command_ids: Iterable[str]) -> tuple[DaemonSession, tuple[str, ...]]:
    """Return the state after the gateway stored these results, and those of them that the journal knows as done."""
    known = tuple(name for name in command_ids if name in state.entries and state.entries[name].done)
    if not known:
        return state, ()
    settled = {name: replace(state.entries[name], acked=True, update=b"") for name in known}
    entries = {name: entry for name, entry in state.entries.items() if name not in settled}
    return changed(state, entries=entries, settled={**state.settled, **settled}), known


def forgotten(state: DaemonSession, command_ids: Iterable[str]) -> DaemonSession:
    """Return the state without ids that have been kept long enough."""
    gone = frozenset(command_ids)

    def keep(held: Mapping[str, JournalEntry]) -> Mapping[str, JournalEntry]:
        return {name: entry for name, entry in held.items() if name not in gone}

    cancelled_ids = {name: mark for name, mark in state.cancelled.items() if name not in gone}
    return changed(state, entries=keep(state.entries), settled=keep(state.settled), cancelled=cancelled_ids)


def let_go(state: DaemonSession, entry: JournalEntry) -> DaemonSession:
    """Return the state in which the command holds no credit."""
    lane = state.lanes.get(entry.lane)
    return state if lane is None else with_lane(state, entry.lane, lanes.let_go(lane, entry.command_id))


def with_lane(state: DaemonSession, key: int, lane: lanes.DaemonLane) -> DaemonSession:
    """Return the state with one lane changed."""
    return changed(state, lanes={**state.lanes, key: lane})
