"""Drives the session's rules: inputs in, effects obeyed, in the one order that keeps the promises.

`session.daemon_side` decides; this loop takes one input after the other, makes the step's journal writes durable before
anything else of the step, and obeys the rest in order. It ticks when the rules want to know the time. See
docs/daemon.md, "How it is made"; decisions 0083.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from bettercompute.daemon.group_commit import Journal
from bettercompute.daemon.journal_records import AppendEvents, EventEntry, JournalDamagedError, RenewJournal, Write
from bettercompute.errors import Unavailable
from bettercompute.protocol import messages
from bettercompute.protocol.limits import MAX_EVENT_BATCH_BYTES, MAX_EVENTS_PER_BATCH
from bettercompute.protocol.statuses import Reason
from bettercompute.session import clock, daemon_side, effects
from bettercompute.session.authority import Authority
from bettercompute.session.daemon_state import Advertised, DaemonSession
from bettercompute.session.effects import DaemonEffect, JournalWrite
from bettercompute.session.inputs import (
    DaemonInput,
    DaemonTick,
    EventsJournaled,
    EventsSent,
    JournalRefused,
    JournalRenewed,
    JournalRoom,
    ServerFrameReceived,
)
from bettercompute.world import World

log = structlog.get_logger("bcd.session")

# Frames of the gateway that wait for the rules; more stay in the transport, which then takes no more from the wire.
QUEUED_INPUTS_MAX = 256
# From so many on commands keep what they print to themselves: a piece may be 64 KiB.
CROWDED_INPUTS = 32

# Tells how many events found no room since the daemon began, once there is some.
EVENTS_DROPPED = "journal.events-dropped"

# What seq, flags and framing add to each event of a batch, at most.
_EVENT_FRAMING_BYTES = 32


class Shell(Protocol):
    """What the driver cannot do by itself: the stream, handlers, sections, trust, conditions, dialing."""

    async def obey(self, effect: DaemonEffect) -> None:
        """Obey one effect that is neither a journal write nor about events or results."""
        ...

    def send(self, frame: messages.AgentFrame) -> None:
        """Queue a frame on the stream; dropped without one."""
        ...

    def tick(self) -> DaemonTick:
        """Return the host's time, load and what was heard."""
        ...


@dataclass(frozen=True, slots=True)
class _NewEvent:
    type: str
    payload_json: str


class Driver:
    """The one writer of the session's state."""

    def __init__(self, state: DaemonSession, *, world: World, journal: Journal, shell: Shell) -> None:
        self.state = state
        self.on_step: Callable[[DaemonInput], None] = lambda _: None
        """Called after each step, with its input."""
        self.dropped_events = 0
        """Events that found no room in the journal."""
        self._dropped_told = 0
        self._world = world
        self._journal = journal
        self._shell = shell
        self._inputs: asyncio.Queue[DaemonInput | _NewEvent] = asyncio.Queue()
        self._first: deque[DaemonInput] = deque()
        self._room = asyncio.Event()
        self._event_seq = state.last_event_seq

    def give(self, given: DaemonInput) -> None:
        """Queue an input."""
        self._inputs.put_nowait(given)

    def crowded(self) -> bool:
        """Return whether so much waits to be taken that what can wait should."""
        return self._inputs.qsize() >= CROWDED_INPUTS

    def advertise(self, advertised: Advertised, authority: Authority) -> None:
        """Replace what the next Hello claims, and whom its session may obey; only between two streams.

        The bundle on disk may be newer than the last one that a Welcome brought: a renewal or a re-join brings one too.
        """
        self.state = replace(self.state, advertised=advertised, authority=authority)

    def confirm_time(self, server_time_ms: int) -> None:
        """Anchor the clock: JoinService has told the time, for a join of this node."""
        now_ms = self._world.clock.monotonic_ms()
        self.state = replace(
            self.state, clock=clock.joined(self.state.clock, server_time_ms=server_time_ms, now_ms=now_ms)
        )

    def give_first(self, given: DaemonInput) -> None:
        """Have an input taken before those that are queued: what comes after is to be judged by it."""
        self._first.append(given)

    async def feed(self, given: DaemonInput) -> None:
        """Queue an input from outside, waiting for room: a gateway that floods is held by its own flow control."""
        while self._inputs.qsize() >= QUEUED_INPUTS_MAX:
            self._room.clear()
            await self._room.wait()
        self.give(given)

    def record_event(self, event_type: str, payload_json: str = "") -> None:
        """Journal an event and send it when it is its turn."""
        self._inputs.put_nowait(_NewEvent(event_type, payload_json))

    async def run(self, first: tuple[DaemonEffect, ...]) -> None:
        """Obey the effects of the start, then every input, for ever."""
        await self._obey_all(first)
        while True:
            given = await self._next()
            if isinstance(given, _NewEvent):
                await self._journal_event(given)
                continue
            await self._take(given)
            if isinstance(given, JournalRoom) and not given.full and self.dropped_events > self._dropped_told:
                self.record_event(EVENTS_DROPPED, json.dumps({"dropped": self.dropped_events}))

    async def _next(self) -> DaemonInput | _NewEvent:
        if self._first:
            return self._first.popleft()
        now_ms = self._world.clock.monotonic_ms()
        try:
            async with asyncio.timeout(daemon_side.next_tick_ms(self.state, now_ms=now_ms) / 1000):
                given = await self._inputs.get()
        except TimeoutError:
            return self._shell.tick()
        self._room.set()
        return given

    async def _take(self, given: DaemonInput) -> None:
        try:
            self.state, produced = daemon_side.step(self.state, given, self._world.clock.monotonic_ms())
        except Exception as error:
            if not isinstance(given, ServerFrameReceived):
                raise
            # A fault of ours that a gateway's frame has found: nothing of it happened, and it is worth a session.
            log.exception("a frame could not be judged")
            produced = (effects.EndSession(Reason.BUG, f"{type(error).__name__}: {error}"),)
        refused = await self._obey_all(produced)
        self.on_step(given)
        if refused is not None:
            await self._take(JournalRefused(refused))

    async def _obey_all(self, produced: tuple[DaemonEffect, ...]) -> str | None:
        """Obey a step; return the id of its new command when the journal had no room for that, and obey nothing."""
        writes = [effect for effect in produced if isinstance(effect, JournalWrite)]
        renewed = any(isinstance(write, effects.TakeNewJournalId) for write in writes)
        journal_id = self._world.ids.uuid7() if renewed else ""
        if writes:
            try:
                await self._journal.write(*(_written(write, journal_id) for write in writes))
            except Unavailable:
                accepted = [write for write in writes if isinstance(write, effects.AcceptCommand)]
                if not accepted:
                    raise
                return accepted[0].entry.command_id
        for effect in produced:
            if not isinstance(effect, JournalWrite):
                await self._obey(effect)
            elif isinstance(effect, effects.StoreTime):
                await self._shell.obey(effect)  # identity.json keeps the mark too
        if renewed:
            await self._renumber(journal_id)
        return None

    async def _obey(self, effect: DaemonEffect) -> None:
        match effect:
            case effects.SendAgentFrame(frame):
                self._shell.send(frame)
            case effects.SendEvents():
                await self._send_events(effect)
            case effects.ResendResult(command_id):
                update = await self._journal.update(command_id)
                if update:
                    frame = messages.AgentFrame()
                    frame.update.ParseFromString(update)
                    self._shell.send(frame)
            case effects.Warn(reason, message):
                log.warning(message, reason=reason)
            case effects.ApplyTrust() | effects.ApplyDesired():
                await self._obey_relayed(effect)
            case _:
                await self._shell.obey(effect)

    async def _obey_relayed(self, effect: effects.ApplyTrust | effects.ApplyDesired) -> None:
        """Take what a gateway relayed; a fault of ours in it, or a disk without room, is worth a session."""
        try:
            await self._shell.obey(effect)
        except JournalDamagedError:
            raise
        except Exception as error:
            log.exception("what was relayed could not be taken", effect=type(effect).__name__)
            await self._shell.obey(effects.EndSession(Reason.BUG, f"{type(error).__name__}: {error}"))

    async def _send_events(self, asked: effects.SendEvents) -> None:
        limit_bytes = MAX_EVENT_BATCH_BYTES - MAX_EVENTS_PER_BATCH * _EVENT_FRAMING_BYTES
        entries = await self._journal.events_after(asked.after_seq, limit=MAX_EVENTS_PER_BATCH, limit_bytes=limit_bytes)
        batch = messages.EventBatch(journal_id=asked.journal_id)
        last_seq = asked.after_seq
        for entry in entries:
            if entry.seq > asked.through_seq:
                break
            event = batch.events.add()
            event.ParseFromString(entry.event)
            event.seq, event.event_id, event.recovered = entry.seq, entry.event_id, entry.recovered
            last_seq = entry.seq
        if batch.events:
            self._shell.send(messages.AgentFrame(events=batch))
        self.give(EventsSent(session_id=asked.session_id, last_seq=last_seq))

    async def _journal_event(self, new: _NewEvent) -> None:
        now_ms = self._world.clock.monotonic_ms()
        at_ms = clock.session_time(self.state.clock, now_ms=now_ms) or self._world.clock.now_ms()
        event = messages.Event(type=new.type, at_ms=at_ms, payload_json=new.payload_json)
        entry = EventEntry(
            seq=self._event_seq + 1,
            event_id=self._world.ids.uuid7(),
            event=event.SerializeToString(),
            recovered=False,
        )
        try:
            await self._journal.write(AppendEvents((entry,)))
        except Unavailable:
            if new.type == EVENTS_DROPPED:
                return  # told when there is room again
            self.dropped_events += 1
            log.warning("an event was dropped: the journal has no room", type=new.type, dropped=self.dropped_events)
            return
        self._event_seq = entry.seq
        if new.type == EVENTS_DROPPED:
            self._dropped_told = self.dropped_events
        await self._take(EventsJournaled(self._event_seq))

    async def _renumber(self, journal_id: str) -> None:
        self._event_seq = await self._journal.last_event_seq()
        log.warning("the journal goes on under a new id: it is older than what the control plane has seen of it")
        await self._take(JournalRenewed(journal_id=journal_id, last_event_seq=self._event_seq))


def _written(write: JournalWrite, journal_id: str) -> Write:
    return RenewJournal(journal_id) if isinstance(write, effects.TakeNewJournalId) else write
