"""A machine's disk in a story: the journal and what its writes leave there. It can be copied, restored and lost."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace

from bettercompute.delivery.commands import CommandState
from bettercompute.delivery.journal_rules import JournalEntry
from bettercompute.protocol import messages
from bettercompute.session import effects
from bettercompute.session.daemon_state import JournalFacts
from tests.stories import wording

WRITES = (
    effects.AcceptCommand,
    effects.TakeUpCommand,
    effects.StartCommand,
    effects.FinishCommand,
    effects.AckCommands,
    effects.ForgetCommands,
    effects.RememberCancelled,
    effects.AckEvents,
    effects.StoreNonces,
    effects.StoreEpoch,
    effects.StoreTime,
    effects.TakeNewJournalId,
)


@dataclass
class Disk:
    """What survives the daemon's process."""

    journal_id: str
    mark_ms: int = 0
    confirmed_ms: int | None = None
    entries: dict[str, JournalEntry] = field(default_factory=dict)
    cancelled: dict[str, int] = field(default_factory=dict)
    events: dict[int, messages.Event] = field(default_factory=dict)
    last_event_seq: int = 0
    acked_event_seq: int = 0
    last_epoch: int = 0
    hello_nonce: bytes = b""
    previous_hello_nonce: bytes = b""
    full: bool = False

    def copied(self) -> Disk:
        """Return what a snapshot keeps."""
        return deepcopy(self)

    def facts(self) -> JournalFacts:
        """Return what a process reads at its start."""
        return JournalFacts(
            journal_id=self.journal_id,
            entries=dict(self.entries),
            cancelled=dict(self.cancelled),
            last_epoch=self.last_epoch,
            last_event_seq=self.last_event_seq,
            acked_event_seq=self.acked_event_seq,
            hello_nonce=self.hello_nonce,
            previous_hello_nonce=self.previous_hello_nonce,
            mark_ms=self.mark_ms,
            confirmed_ms=self.confirmed_ms,
            full=self.full,
        )

    def add_event(self, identifier: str, *, at_ms: int) -> None:
        """Journal an event under the next seq."""
        self.last_event_seq += 1
        self.events[self.last_event_seq] = messages.Event(
            seq=self.last_event_seq, event_id=identifier, type="story.event", at_ms=at_ms
        )

    def drop_events(self, through: int) -> None:
        """Lose the oldest events, acked or not."""
        self.events = {seq: event for seq, event in self.events.items() if seq > through}
        self.acked_event_seq = max(self.acked_event_seq, through)

    def renew(self, journal_id: str) -> None:
        """Take a new id: entries stay, kept events are numbered anew and marked."""
        kept = [self.events[seq] for seq in sorted(self.events)]
        for seq, event in enumerate(kept, 1):
            event.seq, event.recovered = seq, True
        self.journal_id = journal_id
        self.events = dict(enumerate(kept, 1))
        self.last_event_seq, self.acked_event_seq = len(kept), 0

    def write(self, effect: effects.JournalWrite) -> None:
        """Obey one write of a step; a new journal id is the machine's to draw."""
        match effect:
            case effects.AcceptCommand(entry, command):
                self.entries.setdefault(entry.command_id, replace(entry, command=command))
            case effects.TakeUpCommand(command_id, attempt, process_id, command):
                self._change(command_id, attempt=attempt, process_id=process_id, command=command)
            case effects.StartCommand(command_id, boot_id, role, version):
                self._change(
                    command_id,
                    state=CommandState.RUNNING,
                    started=True,
                    start_boot_id=boot_id,
                    start_role=role,
                    start_version=version,
                )
            case effects.FinishCommand(command_id, state, update, done_mark_ms):
                self._change(command_id, state=state, update=update, done_mark_ms=done_mark_ms)
            case effects.AckCommands(command_ids):
                for command_id in command_ids:
                    self._change(command_id, acked=True)
            case effects.ForgetCommands(command_ids):
                for command_id in command_ids:
                    self.entries.pop(command_id, None)
                    self.cancelled.pop(command_id, None)
            case effects.RememberCancelled(command_id, mark_ms):
                self.cancelled[command_id] = mark_ms
            case effects.AckEvents(seq):
                self.drop_events(seq)
            case effects.StoreNonces(hello_nonce, previous):
                self.hello_nonce, self.previous_hello_nonce = hello_nonce, previous
            case effects.StoreEpoch(last_epoch):
                self.last_epoch = last_epoch
            case effects.StoreTime(mark_ms, confirmed_ms):
                self.mark_ms, self.confirmed_ms = mark_ms, confirmed_ms
            case effects.TakeNewJournalId():
                pass

    def _change(self, command_id: str, **values: object) -> None:
        self.entries[command_id] = replace(
            self.entries[command_id],
            **values,  # type: ignore[arg-type]  # names and types are those of the effects
        )

    def shown(self) -> list[str]:
        """Return what matters of it."""
        nonces = f"nonce {wording.nonce_name(self.hello_nonce)} after {wording.nonce_name(self.previous_hello_nonce)}"
        if not self.hello_nonce:
            nonces = f"nonce {wording.nonce_name(self.previous_hello_nonce)} used up"
        lines = [f"journal {self.journal_id}: epoch {self.last_epoch}, {nonces}, mark {wording.clock(self.mark_ms)}"]
        if self.last_event_seq:
            names = wording.listed(wording.event_name(event.event_id) for event in self.events.values())
            kept = f"holding {names}" if names else "holding none"
            lines.append(f"  events up to {self.last_event_seq}, acked up to {self.acked_event_seq}, {kept}")
        lines += [
            f"  {entry.command_id} {entry.kind} {wording.state_name(entry.state)} in {entry.process_id}"
            + (", acked" if entry.acked else "")
            for entry in self.entries.values()
        ]
        lines += [f"  {command_id} is never to run" for command_id in self.cancelled]
        return lines
