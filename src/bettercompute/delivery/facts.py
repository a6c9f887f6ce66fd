"""Facts: what a daemon reported, fit for the store ("Epochs and fencing": facts are not fenced; the Delivery page's
bounds).

A fact is true no matter which session carried it, so nothing here knows an epoch. Facts of many nodes are written in
one batch; `delivery.validation` therefore refuses what the store could not take (NUL in text, numbers past bigint,
sizes past their bound) before a frame becomes a fact: one daemon must not poison everybody's batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bettercompute.delivery.commands import CommandState


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandFact:
    """One command update: acked, running or terminal. Merged per command: the highest state wins, terminal ones never
    move.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """One journaled event. `event_id` was drawn at birth; the store drops a `recovered` one whose id it has."""

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
