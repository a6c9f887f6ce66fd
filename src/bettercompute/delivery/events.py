"""Events, both ends: batches without gaps, cumulative acks, a bounded window.

An event is journaled before it is sent and forgotten once a cumulative ack says that it is stored. Sequence numbers
of a journal have no gaps, so the gateway needs to remember only the next one: a gap inside a session is a broken
daemon, one at Hello is a fact (a journal that had to drop events) that is stored and shown. See docs/delivery.md,
"Events"; decisions 0108.
"""

from __future__ import annotations

from dataclasses import dataclass

from bettercompute.delivery.facts import EventsFact
from bettercompute.protocol.limits import MAX_EVENT_BATCH_BYTES, MAX_EVENTS_PER_BATCH
from bettercompute.protocol.statuses import Reason, refuse

BATCH_EVENTS_MAX = MAX_EVENTS_PER_BATCH
BATCH_BYTES_MAX = MAX_EVENT_BATCH_BYTES
WINDOW_EVENTS = 4 * BATCH_EVENTS_MAX
"""Events sent and not yet acked: enough that a gateway's group commit never waits for the daemon, small to send
again.
"""


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a session's events stand at Hello, by the row's ack and what the daemon's journal still holds."""

    acked_seq: int
    """Everything up to here is stored, or lost for good."""
    gap: tuple[int, int] | None
    """First and last seq that the daemon no longer has and that never came."""


def cursor_at_hello(*, row_acked_seq: int, first_unacked_seq: int, last_seq: int) -> Cursor:
    """Return where events go on. `first_unacked_seq` 0: the journal holds none, so what was not acked is gone."""
    first_held = first_unacked_seq or last_seq + 1
    if first_held > row_acked_seq + 1:
        return Cursor(acked_seq=first_held - 1, gap=(row_acked_seq + 1, first_held - 1))
    return Cursor(acked_seq=row_acked_seq, gap=None)


def checked_batch(fact: EventsFact, *, journal_id: str, next_seq: int) -> int:
    """Return the next seq after a batch, or refuse it INVALID_ARGUMENT: another journal, no events, or a gap.

    A batch may begin before `next_seq` (sent again after a lost ack); the store drops what it has.
    """
    if fact.journal_id != journal_id:
        raise refuse(
            Reason.EVENT_GAP,
            f"an event batch of journal {fact.journal_id!r} came on a session whose Hello named {journal_id!r}",
        )
    if not fact.events:
        raise refuse(Reason.INVALID_FRAME, "an event batch holds no events: it must hold 1 to 500")
    expected = fact.events[0].seq
    if expected > next_seq:
        raise refuse(
            Reason.EVENT_GAP,
            f"events {next_seq} to {expected - 1} of journal {journal_id!r} are missing: a batch must not begin after "
            f"{next_seq}",
        )
    for event in fact.events:
        if event.seq != expected:
            raise refuse(
                Reason.EVENT_GAP, f"an event batch goes on with seq {event.seq} where {expected} comes next: no gaps"
            )
        expected += 1
    return max(next_seq, expected)


def batch_to_send(*, acked_seq: int, sent_seq: int, last_seq: int) -> tuple[int, int] | None:
    """Return after which seq and up to which one the daemon may send now; None when nothing is due or the window is
    full.
    """
    through = min(last_seq, sent_seq + BATCH_EVENTS_MAX, acked_seq + WINDOW_EVENTS)
    return (sent_seq, through) if through > sent_seq else None
