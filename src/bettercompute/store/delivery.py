"""Facts of daemons in batches, and the moves of commands that need a session: dispatch, put-back, cancels.

Typed on top of `queries/delivery.sql`. Facts carry no epoch; dispatch and put-back compare epoch, session and gateway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import NamedTuple

from bettercompute.delivery.commands import CommandState, OutgoingCommand
from bettercompute.delivery.facts import EventRecord
from bettercompute.protocol import messages
from bettercompute.protocol.frames import decode_message
from bettercompute.protocol.limits import MAX_OUTPUT_BYTES
from bettercompute.session.gateway_side import DispatchDemand
from bettercompute.session.hello_plan import HeldCommand
from bettercompute.store.database import Queries, Row, StatementFailed
from bettercompute.store.sessions import Lease, SessionKey

CONDITION_STATUSES: Mapping[int, str] = {1: "true", 2: "false", 3: "unknown"}
# The unit separator: no id, type, number or JSON text holds one.
COLUMN_SEPARATOR = "\x1f"
# What a piece of output counts for at least, however short: so many of a command are kept at most, 4,096.
OUTPUT_PIECE_BYTES_MIN = 16
SEEN: Mapping[int, CommandState | None] = {2: None, 3: CommandState.ACKED, 4: CommandState.RUNNING}


class CommandNews(NamedTuple):
    """What one batch says about one command: the highest state of it, and which states it passed.

    A tuple, because one is made for each update.
    """

    node_id: str
    command_id: str
    state: CommandState
    saw_acked: bool
    saw_running: bool
    reason: str
    message: str
    result: bytes
    signature: bytes
    authenticated: bool
    progress: bytes
    started_at_ms: int
    """When the effect began, as the daemon tells it; 0: it did not, or is not told."""
    outbox_id: str
    """Drawn for its `command.finished`, used only when this batch ends it."""

    @property
    def ended(self) -> bool:
        """Return whether the news is an end."""
        return self.state >= CommandState.SUCCEEDED


@dataclass(frozen=True, slots=True, kw_only=True)
class NewsCounts:
    """What became of a batch: for metrics."""

    moved: int
    backwards: int
    late: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusNews:
    """The last status of a node in one batch; `report` None: only an applied generation."""

    node_id: str
    observed_generation: int
    applied_generation: int
    report: bytes | None = None
    trust_version: int = 0
    approver_set_epoch: int | None = None
    approver_set_sha256: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPiece:
    """A piece of a running command's output."""

    node_id: str
    command_id: str
    offset: int
    data: bytes
    dropped_bytes: int
    attempt: int = 1

    @property
    def begins_anew(self) -> bool:
        """Say whether a later run of the command begins with it: nothing was told of that run before."""
        return self.attempt > 1 and self.offset == self.dropped_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedCommand:
    """A command that is now dispatched in a session's epoch."""

    node_id: str
    session_id: str
    command: OutgoingCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyCommand:
    """A command that the daemon refused BUSY."""

    key: SessionKey
    command_id: str
    attempt: int
    back_off_ms: int
    outbox_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PutBackRow:
    """What became of a command that was refused BUSY."""

    state: CommandState
    """Pending or cancelled; or acked or running as before, and then its session sends it again."""
    command: HeldCommand


async def store_command_news(queries: Queries, news: Sequence[CommandNews], *, event_type: str) -> NewsCounts:
    """Write what a batch says of commands, each command once."""
    row = await queries.fetch_one(
        "delivery.store_command_facts",
        command_ids=[item.command_id for item in news],
        node_ids=[item.node_id for item in news],
        states=[int(item.state) for item in news],
        saw_acked=[item.saw_acked for item in news],
        saw_running=[item.saw_running for item in news],
        reasons=[_reason(item) for item in news],
        messages=[item.message for item in news],
        # A result belongs to an end; the schema says so too.
        results=[(item.result or None) if item.ended else None for item in news],
        signatures=[item.signature or None for item in news],
        unauthenticated=[not item.authenticated for item in news],
        progresses=[item.progress or None for item in news],
        started_at_ms=[item.started_at_ms or None for item in news],
        outbox_ids=[item.outbox_id for item in news],
        event_type=event_type,
    )
    assert row is not None
    return NewsCounts(moved=row["moved"], backwards=row["backwards"], late=row["late"])


def _reason(item: CommandNews) -> str:
    """Return the code under which an end is stored: a failure always has one."""
    return item.reason or ("failed" if item.state is CommandState.FAILED else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsNews:
    """Events of one node and journal in one batch, by seq; without a gap up to `contiguous_seq`."""

    node_id: str
    journal_id: str
    events: tuple[EventRecord, ...]
    contiguous_seq: int


async def store_events(queries: Queries, batches: Sequence[EventsNews]) -> dict[tuple[str, str], int]:
    """Write events, each (node, journal) once; return the ack of each, and none where the row names another journal.

    Of the journal that the row names, what lies past a gap is not written, and the ack says so.
    """
    seqs, event_ids, types, occurred_at_ms, payloads, recovered = zip(
        *chain.from_iterable(batch.events for batch in batches), strict=True
    )
    numbers = chain.from_iterable(repeat(str(number), len(batch.events)) for number, batch in enumerate(batches, 1))
    rows = await queries.fetch(
        "delivery.store_events",
        node_ids=[batch.node_id for batch in batches],
        journal_ids=[batch.journal_id for batch in batches],
        first_seqs=[batch.events[0].seq for batch in batches],
        last_seqs=[batch.contiguous_seq for batch in batches],
        batch_numbers=_column(list(numbers)),
        seqs=_column(list(map(str, seqs))),
        event_ids=_column(event_ids),
        types=_column(types),
        occurred_at_ms=_column(list(map(str, occurred_at_ms))),
        recovered=_column(list(map(str, recovered))),
        payloads=_column(payloads),
    )
    return {
        (row["node_id"], row["journal_id"]): row["acked_event_seq"]
        for row in rows
        if row["acked_event_seq"] is not None
    }


def _column(values: Sequence[str]) -> str:
    """Return a column of events as one text.

    Of an array the driver asks of each element whether it is an array itself, which cost half a microsecond for each of
    seven. See decisions 0160.
    """
    joined = COLUMN_SEPARATOR.join(values)
    if joined.count(COLUMN_SEPARATOR) != len(values) - 1:
        raise StatementFailed("a value of an event holds the separator of columns", sqlstate="22023", constraint=None)
    return joined


async def store_statuses(queries: Queries, statuses: Sequence[StatusNews]) -> None:
    """Write the last status of each node; generations and trust versions only rise."""
    conditions = [
        (status.node_id, condition)
        for status in statuses
        if status.report
        for condition in decode_message(messages.StatusReport, status.report).conditions
    ]
    await queries.execute(
        "delivery.store_statuses",
        node_ids=[status.node_id for status in statuses],
        observed=[status.observed_generation for status in statuses],
        applied=[status.applied_generation for status in statuses],
        reports=[status.report for status in statuses],
        trust_versions=[status.trust_version for status in statuses],
        # The digest decides: no approver keys held means NULL in both.
        approver_epochs=[status.approver_set_epoch if status.approver_set_sha256 else None for status in statuses],
        approver_sha256s=[status.approver_set_sha256 or None for status in statuses],
        condition_node_ids=[node_id for node_id, _ in conditions],
        condition_types=[condition.type for _, condition in conditions],
        condition_statuses=[CONDITION_STATUSES.get(condition.status, "unknown") for _, condition in conditions],
        condition_reasons=[condition.reason for _, condition in conditions],
        condition_messages=[condition.message for _, condition in conditions],
    )


async def store_output(queries: Queries, pieces: Sequence[OutputPiece]) -> None:
    """Write pieces of live output; of a command about the last 64 KiB of its last run are kept."""
    begun: dict[tuple[str, str], int] = {}
    for number, piece in enumerate(pieces):
        if piece.begins_anew:
            begun[piece.command_id, piece.node_id] = number
    if begun:
        command_ids, node_ids = zip(*sorted(begun), strict=True)
        await queries.execute("delivery.drop_output", command_ids=list(command_ids), node_ids=list(node_ids))
        pieces = [
            piece for number, piece in enumerate(pieces) if number >= begun.get((piece.command_id, piece.node_id), 0)
        ]
    await queries.execute(
        "delivery.store_output",
        command_ids=[piece.command_id for piece in pieces],
        node_ids=[piece.node_id for piece in pieces],
        offsets=[piece.offset for piece in pieces],
        pieces=[piece.data for piece in pieces],
        dropped=[piece.dropped_bytes for piece in pieces],
    )
    await queries.execute(
        "delivery.trim_output",
        command_ids=sorted({piece.command_id for piece in pieces}),
        kept_bytes=MAX_OUTPUT_BYTES,
        piece_bytes_min=OUTPUT_PIECE_BYTES_MIN,
    )


async def dispatch(queries: Queries, demands: Sequence[DispatchDemand], *, lease: Lease) -> list[MarkedCommand]:
    """Mark what the sessions can take, in one statement; return it in the order of each node's seq."""
    lanes = [(demand, lane) for demand in demands for lane in demand.lanes]
    held = [(demand.node_id, command_id) for demand, lane in lanes for command_id in lane.held]
    rows = await queries.fetch(
        "delivery.dispatch",
        node_ids=[demand.node_id for demand, _ in lanes],
        session_ids=[demand.session_id for demand, _ in lanes],
        session_epochs=[demand.epoch for demand, _ in lanes],
        lanes=[lane.lane for _, lane in lanes],
        pending_limits=[lane.pending for _, lane in lanes],
        kinds=[None if demand.kinds is None else ",".join(sorted(demand.kinds)) for demand, _ in lanes],
        signed_only=[demand.signed_only for demand, _ in lanes],
        held_node_ids=[node_id for node_id, _ in held],
        held_ids=[command_id for _, command_id in held],
        gateway_id=lease.gateway_id,
        lease_token=lease.token,
    )
    marked = [
        MarkedCommand(
            node_id=row["node_id"],
            session_id=row["session_id"],
            command=OutgoingCommand(
                command_id=row["id"],
                kind=row["kind"],
                lane=row["lane"],
                seq=row["seq"],
                attempt=row["attempt"],
                seen=SEEN[row["state"]],
                body=row["body"],
                signature=row["signature"] or b"",
                batch_approval=row["batch_approval"] or b"",
                batch_proof=row["batch_proof"] or b"",
            ),
        )
        for row in rows
    ]
    return sorted(marked, key=lambda item: (item.node_id, item.command.seq))


async def marked(queries: Queries, keys: Sequence[SessionKey]) -> dict[str, list[HeldCommand]]:
    """Return what is marked for these sessions and not acked yet, by node and in seq order."""
    rows = await queries.fetch(
        "delivery.marked",
        node_ids=[key.node_id for key in keys],
        session_ids=[key.session_id for key in keys],
        session_epochs=[key.epoch for key in keys],
    )
    found: dict[str, list[HeldCommand]] = {}
    for row in rows:
        found.setdefault(row["node_id"], []).append(_held(row))
    return found


async def put_back(
    queries: Queries, busy: Sequence[BusyCommand], *, lease: Lease, event_type: str
) -> dict[str, PutBackRow]:
    """Put refused commands back, or cancel them; return those that matched, by id."""
    rows = await queries.fetch(
        "delivery.put_back",
        command_ids=[item.command_id for item in busy],
        node_ids=[item.key.node_id for item in busy],
        session_ids=[item.key.session_id for item in busy],
        session_epochs=[item.key.epoch for item in busy],
        attempts=[item.attempt for item in busy],
        back_offs_ms=[item.back_off_ms for item in busy],
        outbox_ids=[item.outbox_id for item in busy],
        event_type=event_type,
        gateway_id=lease.gateway_id,
        lease_token=lease.token,
    )
    return {row["id"]: PutBackRow(state=CommandState(row["state"]), command=_held(row)) for row in rows}


def _held(row: Row) -> HeldCommand:
    return HeldCommand(command_id=row["id"], kind=row["kind"], lane=row["lane"], seq=row["seq"], signed=row["signed"])


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedAt:
    """What else there is for some nodes than commands that may go now."""

    cancels: tuple[tuple[str, str, str], ...]
    """Node id, command id and reason of each cancel of what is in flight."""
    due_in_ms: Mapping[str, int]
    """How soon the next pending command of a node falls due."""


async def look_at(queries: Queries, node_ids: Sequence[str], *, ahead_ms: int) -> LookedAt:
    """Return the cancels that wait for these nodes, and what falls due within `ahead_ms`."""
    rows = await queries.fetch("delivery.look_at", node_ids=list(node_ids), ahead_ms=ahead_ms)
    return LookedAt(
        cancels=tuple(
            (row["node_id"], row["cancelled_id"], row["cancel_reason"] or "")
            for row in rows
            if row["cancelled_id"] is not None
        ),
        due_in_ms={row["node_id"]: row["due_in_ms"] for row in rows if row["due_in_ms"] is not None},
    )


async def nodes_with_work(queries: Queries, *, gateway_id: str, ahead_ms: int) -> list[str]:
    """Return this gateway's nodes that have a command or a cancel to send, or will within `ahead_ms`.

    The poll behind the notifications.
    """
    rows = await queries.fetch("delivery.nodes_with_work", gateway_id=gateway_id, ahead_ms=ahead_ms)
    return [row["node_id"] for row in rows]


async def expire(
    queries: Queries, *, outbox_ids: Sequence[str], event_type: str, message: str, message_unsure: str
) -> list[tuple[str, str]]:
    """End pending commands whose deadline has passed, at most one per outbox id; return (node id, command id).

    `message_unsure` is for those that were sent once without an answer, and only then answered BUSY.
    """
    rows = await queries.fetch(
        "delivery.expire",
        batch=len(outbox_ids),
        outbox_ids=list(outbox_ids),
        event_type=event_type,
        message=message,
        message_unsure=message_unsure,
    )
    return [(row["node_id"], row["id"]) for row in rows]
