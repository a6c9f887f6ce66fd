"""Facts: what a daemon reported, as values of the store.

A fact is true no matter which session carried it, so nothing here knows an epoch. Facts of many nodes are written in
one batch; `protocol.validation` therefore refuses what the store could not take (NUL in text, numbers past bigint,
sizes past their bound) before a frame becomes a fact: one daemon must not poison everybody's batch. See
docs/delivery.md, "Facts".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from bettercompute.delivery.commands import REPORTABLE, CommandState
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason, refuse


class CommandFact(NamedTuple):
    """One command update: acked, running or terminal. Merged per command: the highest state wins, terminal ones never
    move. A tuple for the same reason as `EventRecord`: a third of the price of a frozen dataclass.

    `state` is never REJECTED: a rejection other than BUSY is a failure with its reason, and BUSY is routing, not a
    fact.
    """

    command_id: str
    state: CommandState
    attempt: int
    reason: str = ""
    """Short stable code of a failed or cancelled command."""
    message: str = ""
    result: bytes = b""
    """The serialized result message of the kind; empty when there is none."""
    signature: bytes = b""
    """The serialized `Signature` of purpose `command-update`; empty when unsigned."""
    progress: bytes = b""
    """The serialized `CommandProgress`; empty when there is none."""
    output: bytes = b""
    """A piece of live output; empty when there is none."""
    output_offset: int = 0
    """Where the piece begins, counted from the output's begin."""
    output_dropped_bytes: int = 0
    at_ms: int = 0
    started_at_ms: int = 0
    """When the effect began; 0: it did not, or is not told."""
    authenticated: bool = True
    """False for an unsigned fact of a signed-only session: stored and marked, never proof of anything."""


class EventRecord(NamedTuple):
    """One journaled event. `event_id` was drawn at birth; the store drops a `recovered` one whose id it has.

    A tuple, because events are the most frequent rows of all: one is made, and many are turned into columns, without a
    line of Python for each.
    """

    seq: int
    event_id: str
    type: str
    at_ms: int
    payload_json: str = ""
    recovered: bool = False


@dataclass(frozen=True, slots=True)
class EventsFact:
    """A batch of events of one journal, seq rising without a gap. Deduplicated by (node_id, journal_id, seq)."""

    journal_id: str
    events: tuple[EventRecord, ...]

    @property
    def last_seq(self) -> int:
        """Return the highest seq of the batch: what may be acked once it is committed."""
        return self.events[-1].seq


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusFact:
    """A status report. In the store `observed_generation` and `trust_version` only ever rise."""

    observed_generation: int
    applied_generation: int
    report: bytes
    """The serialized `StatusReport`, which the store keeps whole (sections, conditions, pressure)."""
    trust_version: int = 0
    """0: unchanged, and the approver set says nothing."""
    approver_set_epoch: int | None = None
    approver_set_sha256: bytes | None = None
    """None in both: no approver keys held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InventoryFact:
    """One inventory section: canonical bytes and their SHA-256, already compared."""

    section: str
    sha256: bytes
    body: bytes
    collected_at_ms: int


@dataclass(frozen=True, slots=True)
class InventoryHashesFact:
    """The hashes that a daemon reports; an inventory is applied once the stored sections agree with them."""

    hashes: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class AppliedGenerationFact:
    """A heartbeat's applied generation, passed on only when it differs from the last one this session told."""

    applied_generation: int


Fact = CommandFact | EventsFact | StatusFact | InventoryFact | InventoryHashesFact | AppliedGenerationFact


_STATES: Mapping[int, CommandState] = {int(state): state for state in (*REPORTABLE, CommandState.REJECTED)}
_NO_OUTPUT = messages.CommandOutput()


def command_fact(update: messages.CommandUpdate, *, authenticated: bool = True) -> CommandFact | None:
    """Return the fact in a validated update; None for a state that says nothing here (older news, or a newer peer's).

    A rejection is a failure with its reason. BUSY is not a fact: see `is_busy`.
    """
    reason = update.reason
    state = _STATES.get(update.state)
    if state is CommandState.REJECTED:
        state, reason = CommandState.FAILED, rejection_reason(update.reject_reason)
    if state is None:
        return None
    told = update.output if update.HasField("output") else _NO_OUTPUT
    return CommandFact(
        command_id=update.command_id,
        state=state,
        attempt=update.attempt,
        reason=reason,
        message=update.message,
        result=update.result,
        signature=update.signature.SerializeToString() if update.HasField("signature") else b"",
        progress=update.progress.SerializeToString() if update.HasField("progress") else b"",
        output=told.data,
        output_offset=told.offset,
        output_dropped_bytes=told.dropped_bytes,
        at_ms=update.at_ms,
        started_at_ms=update.started_at_ms,
        authenticated=authenticated,
    )


def is_busy(update: messages.CommandUpdate) -> bool:
    """Say whether an update is the one rejection that does not end the command."""
    return (
        update.state == messages.COMMAND_STATE_REJECTED and update.reject_reason == messages.COMMAND_REJECT_REASON_BUSY
    )


def rejection_reason(reason: messages.CommandRejectReason.ValueType) -> str:
    """Return the short stable code under which a rejection is stored: `rejected-bad-signature` and so on."""
    name = messages.CommandRejectReason.Name(reason) if reason in messages.CommandRejectReason.values() else "unknown"
    return "rejected-" + name.removeprefix("COMMAND_REJECT_REASON_").lower().replace("_", "-")


def events_fact(batch: messages.EventBatch) -> EventsFact:
    """Return the fact in a validated batch; `delivery.events.checked_batch` judges its order."""
    rows = [
        (event.seq, event.event_id, event.type, event.at_ms, event.payload_json, event.recovered)
        for event in batch.events
    ]
    return EventsFact(journal_id=batch.journal_id, events=tuple(map(EventRecord._make, rows)))


def status_fact(report: messages.StatusReport) -> StatusFact:
    """Return the fact in a validated status report. The approver set counts only beside a trust version."""
    told = report.trust_version > 0
    held = told and bool(report.approver_set_sha256)
    return StatusFact(
        observed_generation=report.observed_generation,
        applied_generation=report.applied_generation,
        report=report.SerializeToString(),
        trust_version=report.trust_version,
        approver_set_epoch=report.approver_set_epoch if held else None,
        approver_set_sha256=report.approver_set_sha256 if held else None,
    )


def inventory_fact(section: messages.InventorySection) -> InventoryFact:
    """Return the fact in a validated section, or refuse one without a name or whose bytes are not those of its hash."""
    if not section.name:
        raise refuse(Reason.INVALID_FRAME, "an inventory section has no name")
    actual = sha256(section.body).digest()
    if actual != section.sha256:
        raise refuse(
            Reason.INVALID_FRAME,
            f"inventory section {section.name!r} hashes to {actual.hex()}, but says {section.sha256.hex()}",
        )
    return InventoryFact(
        section=section.name, sha256=actual, body=section.body, collected_at_ms=section.collected_at_ms
    )
