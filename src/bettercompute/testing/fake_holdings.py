"""What a FakeDaemon holds beside commands, all of it in memory: events, inventory sections, the desired state."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from itertools import islice

from bettercompute.protocol import messages
from bettercompute.protocol.limits import MAX_EVENT_BATCH_BYTES
from bettercompute.session.daemon_state import JournalFacts
from bettercompute.session.effects import SendEvents
from bettercompute.session.inputs import SpecHeld
from bettercompute.testing.profiles import Profile

# Field number and length of an event inside its batch.
EVENT_FRAMING_BYTES = 4


class FakeEvents:
    """Events that the gateway has not acked, by seq without gaps."""

    def __init__(self) -> None:
        self.last_seq = 0
        self._events: deque[messages.Event] = deque()

    def __len__(self) -> int:
        return len(self._events)

    def append(self, event_id: str, kind: str, *, payload_json: str, at_ms: int) -> None:
        """Journal one event."""
        self.last_seq += 1
        self._events.append(
            messages.Event(seq=self.last_seq, event_id=event_id, type=kind, at_ms=at_ms, payload_json=payload_json)
        )

    def batch(self, asked: SendEvents) -> tuple[messages.EventBatch, int]:
        """Return the events that are asked for, as many as fit a frame, and the last seq among them."""
        batch = messages.EventBatch(journal_id=asked.journal_id)
        last_seq, room = asked.after_seq, MAX_EVENT_BATCH_BYTES
        begin = asked.after_seq + 1 - self._events[0].seq if self._events else 0
        for event in islice(self._events, max(0, begin), None):
            room -= event.ByteSize() + EVENT_FRAMING_BYTES
            if event.seq > asked.through_seq or (room < 0 and batch.events):
                break
            batch.events.append(event)
            last_seq = event.seq
        return batch, last_seq

    def acked(self, seq: int) -> None:
        """Forget events up to `seq`."""
        while self._events and self._events[0].seq <= seq:
            self._events.popleft()

    def renumber(self) -> None:
        """Count anew under a new journal id, and say so of each event that is kept."""
        for seq, event in enumerate(self._events, start=1):
            event.seq, event.recovered = seq, True
        self.last_seq = len(self._events)


def empty_journal(journal_id: str) -> JournalFacts:
    """Return what a journal holds that has just been made."""
    return JournalFacts(
        journal_id=journal_id,
        entries={},
        cancelled={},
        last_epoch=0,
        last_event_seq=0,
        acked_event_seq=0,
        hello_nonce=b"",
        previous_hello_nonce=b"",
        mark_ms=0,
        confirmed_ms=None,
    )


def hashes_of(sections: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return what Hello says of inventory sections."""
    return {name: hashlib.sha256(body).digest() for name, body in sections.items()}


def section_of(name: str, body: bytes) -> messages.InventorySection:
    """Return one section as it is sent."""
    return messages.InventorySection(name=name, body=body, sha256=hashlib.sha256(body).digest())


def read_desired(
    desired: messages.DesiredState, profile: Profile, *, before: int
) -> tuple[SpecHeld, messages.StatusReport]:
    """Return what is held of a desired state, and the report: converged, but for sections that the profile lacks."""
    body = messages.DesiredStateBody.FromString(desired.body)
    spec = body.full if body.HasField("full") else body.patch.spec
    sections = []
    for field, _ in spec.ListFields():
        state = messages.SectionState(field_number=field.number, generation=body.generation)
        if field.name in profile.lacks_sections:
            state.convergence = messages.SECTION_CONVERGENCE_UNSUPPORTED
            state.reason = str(field.number)
        else:
            state.section = field.name
            state.convergence = messages.SECTION_CONVERGENCE_CONVERGED
        sections.append(state)
    converged = all(state.convergence == messages.SECTION_CONVERGENCE_CONVERGED for state in sections)
    return (
        SpecHeld(body.generation, body.generation if converged else before, body.spec_sha256),
        messages.StatusReport(sections=sections),
    )
