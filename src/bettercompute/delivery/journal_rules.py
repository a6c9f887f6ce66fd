"""What the journal keeps, for how long, and when it is full.

The journal is the daemon's memory of what it owes and of what it must never do twice. Forgetting too early would run
a command twice; so an id goes only when its result is acked *and* a day has passed *and* no delivery of it can still
be valid, all of it by the stored time mark, which no single gateway can push far ahead. At a bound the answer is
BUSY, never forgetting. See docs/delivery.md, "The journal"; decisions 0055 and 0104.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bettercompute.delivery.commands import CommandState
from bettercompute.protocol.limits import MAX_DONE_RESULTS, MAX_NOT_AFTER_MS

KEEP_MS = 24 * 3_600_000
"""A gateway that was cut off may replay for a day before anybody would call it an outage of another kind."""
DELIVERY_GRACE_MS = 5 * 60_000
"""The clock allowance of a Welcome: a session's time may lie this far behind the mark."""
IDS_MAX = 100_000
"""All ids held, done and cancelled ones too: more than a command a second for a whole day."""
CANCELLED_MAX = 10_000
"""Of them, ids that were cancelled before any delivery: no honest fleet has a hundredth of it."""
COMMAND_ID_BYTES_MAX = 64
"""No command has a longer one."""
JOURNAL_BYTES_MAX = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """One command that this node accepted, until its id may be forgotten."""

    command_id: str
    kind: str
    lane: int
    attempt: int
    state: CommandState
    """ACKED: accepted, no effect yet. RUNNING: the effect may have begun. Terminal: done."""
    not_after_ms: int
    process_id: str
    """The daemon process that accepted it, or took it up again."""
    started: bool = False
    """Durable before the effect began."""
    start_boot_id: str = ""
    start_role: int = 0
    start_version: str = ""
    update: bytes = b""
    """The terminal `CommandUpdate`, serialized: kept here until acked, afterwards only in the journal itself."""
    command: bytes = b""
    """The delivered `Command`, serialized: only in entries read at process start, for the proofs of rule 5 and to know
    the same command again."""
    done_mark_ms: int = 0
    """The stored mark when it was done."""
    acked: bool = False

    @property
    def done(self) -> bool:
        """Say whether the command has ended."""
        return self.state >= CommandState.SUCCEEDED


def entry_may_go(entry: JournalEntry, *, mark_ms: int) -> bool:
    """Say whether a command's id may be forgotten: acked, 24 h, and `not_after` + 5 min, all by the stored mark."""
    return (
        entry.done
        and entry.acked
        and mark_ms >= entry.done_mark_ms + KEEP_MS
        and mark_ms >= entry.not_after_ms + DELIVERY_GRACE_MS
    )


def cancelled_may_go(cancelled_mark_ms: int, *, mark_ms: int) -> bool:
    """Say whether an id cancelled before its delivery may be forgotten: the longest deadline there is has passed."""
    return mark_ms >= cancelled_mark_ms + MAX_NOT_AFTER_MS + DELIVERY_GRACE_MS


def left_may_go(entry: JournalEntry, *, process_id: str, mark_ms: int) -> bool:
    """Say whether an entry that an earlier process left unfinished may go: it was never delivered again, and cannot be.

    It may run again or never ran, so forgetting it loses nothing; a delivery after all of this is answered as expired.
    """
    return (
        not entry.done
        and entry.process_id != process_id
        and mark_ms >= entry.not_after_ms + DELIVERY_GRACE_MS + KEEP_MS
    )


def forgettable(
    entries: Iterable[JournalEntry], cancelled: Mapping[str, int], *, process_id: str, mark_ms: int
) -> tuple[str, ...]:
    """Return the ids that may be forgotten now. `cancelled` maps an id to the mark at its cancel."""
    return (
        *(
            entry.command_id
            for entry in entries
            if entry_may_go(entry, mark_ms=mark_ms) or left_may_go(entry, process_id=process_id, mark_ms=mark_ms)
        ),
        *(command_id for command_id, at_ms in cancelled.items() if cancelled_may_go(at_ms, mark_ms=mark_ms)),
    )


def may_remember(command_id: str, *, cancelled: int) -> bool:
    """Say whether the id of a cancel for an unknown command is remembered.

    Cancels are not signed: whoever relays them could otherwise fill the journal, and a full one is BUSY for a week.
    """
    return 0 < len(command_id.encode()) <= COMMAND_ID_BYTES_MAX and cancelled < CANCELLED_MAX


def has_room(*, done_unacked: int, ids: int, journal_full: bool) -> bool:
    """Say whether one more command may be accepted; otherwise it is answered BUSY."""
    return not journal_full and done_unacked < MAX_DONE_RESULTS and ids < IDS_MAX
