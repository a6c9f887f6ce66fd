"""What one group commit writes: the facts of all sessions, merged.

Pure. Per command the highest state wins, so that acked, running and succeeded of one moment are one row write; per node
the last status wins; events are ordered by seq, and the ack goes only as far as they are without a gap. See
docs/gateway.md, "Facts".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from bettercompute.delivery.commands import TERMINAL, CommandState
from bettercompute.delivery.facts import (
    AppliedGenerationFact,
    CommandFact,
    EventRecord,
    EventsFact,
    Fact,
    InventoryFact,
    InventoryHashesFact,
    StatusFact,
)
from bettercompute.store.delivery import CommandNews, EventsNews, OutputPiece, StatusNews
from bettercompute.store.inventory import NewSection

FRAME_OVERHEAD_BYTES = 256


@dataclass(slots=True)
class FactBatch:
    """The merged facts, by the table they go to."""

    commands: dict[tuple[str, str], CommandNews] = field(default_factory=dict)
    events: dict[tuple[str, str], dict[int, EventRecord]] = field(default_factory=dict)
    statuses: dict[str, StatusNews] = field(default_factory=dict)
    sections: dict[tuple[str, str], NewSection] = field(default_factory=dict)
    hashes: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    output: list[OutputPiece] = field(default_factory=list)

    def event_news(self) -> list[EventsNews]:
        """Return the events of each node and journal, in the order in which their rows are locked."""
        return [
            _event_news(node_id, journal_id, events) for (node_id, journal_id), events in sorted(self.events.items())
        ]


def merge(facts: Iterable[tuple[str, Fact]], *, draw_id: Callable[[], str]) -> FactBatch:
    """Return the batch of (node id, fact) pairs in the order in which they came; `draw_id` gives outbox ids."""
    batch = FactBatch()
    for node_id, fact in facts:
        _add(batch, node_id, fact, draw_id)
    return batch


def _add(batch: FactBatch, node_id: str, fact: Fact, draw_id: Callable[[], str]) -> None:
    match fact:
        case CommandFact():
            _add_command(batch, node_id, fact, draw_id)
        case EventsFact():
            # Where two frames hold the same seq, the first one stays.
            key = (node_id, fact.journal_id)
            batch.events[key] = {event.seq: event for event in fact.events} | batch.events.get(key, {})
        case StatusFact():
            _add_status(batch, node_id, fact)
        case AppliedGenerationFact():
            _add_applied(batch, node_id, fact)
        case InventoryFact():
            batch.sections[node_id, fact.section] = NewSection(
                node_id=node_id,
                section=fact.section,
                sha256=fact.sha256,
                body=fact.body,
                collected_at_ms=fact.collected_at_ms or None,
            )
        case InventoryHashesFact():
            batch.hashes[node_id] = {**batch.hashes.get(node_id, {}), **fact.hashes}


def _add_command(batch: FactBatch, node_id: str, fact: CommandFact, draw_id: Callable[[], str]) -> None:
    if fact.output or fact.output_dropped_bytes:
        batch.output.append(
            OutputPiece(
                node_id=node_id,
                command_id=fact.command_id,
                offset=fact.output_offset,
                data=fact.output,
                dropped_bytes=fact.output_dropped_bytes,
                attempt=fact.attempt,
            )
        )
    key = (node_id, fact.command_id)
    before = batch.commands.get(key)
    saw_acked = fact.state is CommandState.ACKED or (before is not None and before.saw_acked)
    saw_running = fact.state is CommandState.RUNNING or (before is not None and before.saw_running)
    if before is not None and (before.state in TERMINAL or fact.state < before.state):
        batch.commands[key] = before._replace(saw_acked=saw_acked, saw_running=saw_running)
        return
    batch.commands[key] = CommandNews(
        node_id=node_id,
        command_id=fact.command_id,
        state=fact.state,
        saw_acked=saw_acked,
        saw_running=saw_running,
        reason=fact.reason,
        message=fact.message,
        result=fact.result,
        signature=fact.signature,
        authenticated=fact.authenticated,
        progress=fact.progress or (b"" if before is None else before.progress),
        started_at_ms=fact.started_at_ms or (0 if before is None else before.started_at_ms),
        outbox_id=draw_id() if before is None else before.outbox_id,
    )


def _add_status(batch: FactBatch, node_id: str, fact: StatusFact) -> None:
    before = batch.statuses.get(node_id)
    trust_before = before is not None and before.trust_version > fact.trust_version
    status = StatusNews(
        node_id=node_id,
        observed_generation=max(fact.observed_generation, 0 if before is None else before.observed_generation),
        applied_generation=max(fact.applied_generation, 0 if before is None else before.applied_generation),
        report=fact.report,
        trust_version=fact.trust_version,
        approver_set_epoch=fact.approver_set_epoch,
        approver_set_sha256=fact.approver_set_sha256,
    )
    if before is not None and trust_before:
        status = replace(
            status,
            trust_version=before.trust_version,
            approver_set_epoch=before.approver_set_epoch,
            approver_set_sha256=before.approver_set_sha256,
        )
    batch.statuses[node_id] = status


def _add_applied(batch: FactBatch, node_id: str, fact: AppliedGenerationFact) -> None:
    before = batch.statuses.get(node_id)
    if before is None:
        batch.statuses[node_id] = StatusNews(
            node_id=node_id,
            observed_generation=fact.applied_generation,
            applied_generation=fact.applied_generation,
        )
    elif fact.applied_generation > before.applied_generation:
        batch.statuses[node_id] = replace(before, applied_generation=fact.applied_generation)


def _event_news(node_id: str, journal_id: str, events: Mapping[int, EventRecord]) -> EventsNews:
    seqs = sorted(events)
    contiguous_seq = seqs[-1]
    if contiguous_seq - seqs[0] >= len(seqs):
        contiguous_seq = next(seq for seq in seqs if seq + 1 not in events)
    return EventsNews(
        node_id=node_id,
        journal_id=journal_id,
        events=tuple(map(events.__getitem__, seqs)),
        contiguous_seq=contiguous_seq,
    )


def rows(fact: Fact) -> int:
    """Return how many rows a fact writes at most."""
    return len(fact.events) if isinstance(fact, EventsFact) else 1


def size_bytes(fact: Fact) -> int:
    """Return about what a fact holds in memory: what bounds the queue."""
    match fact:
        case CommandFact():
            return FRAME_OVERHEAD_BYTES + len(fact.result) + len(fact.output) + len(fact.message)
        case EventsFact():
            return FRAME_OVERHEAD_BYTES * len(fact.events) + sum([len(event.payload_json) for event in fact.events])
        case StatusFact():
            return FRAME_OVERHEAD_BYTES + len(fact.report)
        case InventoryFact():
            return FRAME_OVERHEAD_BYTES + len(fact.body)
        case InventoryHashesFact() | AppliedGenerationFact():
            return FRAME_OVERHEAD_BYTES
