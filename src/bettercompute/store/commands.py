"""Decide how commands are enqueued, shown and cancelled. What gateways do with them is in `delivery`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from bettercompute.delivery.commands import IN_FLIGHT, CommandState
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import channels, hints, json_columns
from bettercompute.store.database import Queries, Row, Transaction

CANCELLED_REASON = "cancelled"
# Sorts after every id.
NEWEST = "\uffff"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCommand:
    """A command about to be enqueued; `body` holds `command_id`, `node_id`, `seq` and the rest once more."""

    command_id: str
    """UUIDv7: commands are listed by it."""
    node_id: str
    kind: str
    lane: int
    seq: int
    """Drawn by `draw_seqs`."""
    body: bytes
    created_by: str
    not_after_ms: int
    timeout_ms: int
    not_before_ms: int | None = None
    """From when dispatch may take it: what was asked for, or later."""
    asked_not_before_ms: int | None = None
    """What the body says; None: at once."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """What people see of the payload."""
    signature: bytes | None = None
    signed_under: str | None = None
    """The command root of the signature."""
    batch_id: str | None = None
    batch_approval: bytes | None = None
    batch_proof: bytes | None = None
    attested: bool = False
    """The node signs how it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command as people see it. `overdue`: in flight past its deadline, which is shown and never guessed at."""

    command_id: str
    node_id: str
    kind: str
    lane: int
    seq: int
    batch_id: str | None
    payload: Mapping[str, Any]
    state: CommandState
    created_at_ms: int
    created_by: str
    not_before_ms: int | None
    """From when dispatch may take it: a back-off moves it, and a hold until its approval."""
    asked_not_before_ms: int | None
    """From when it may be sent as its maker asked, and its body says; None: at once."""
    not_after_ms: int
    timeout_ms: int
    session_epoch: int | None
    session_id: str | None
    attempt: int
    busy_count: int
    sent_boot_id: str | None
    cancel_requested_at_ms: int | None
    cancel_requested_by: str | None
    cancel_reason: str | None
    dispatched_at_ms: int | None
    acked_at_ms: int | None
    running_at_ms: int | None
    started_at_ms: int | None
    finished_at_ms: int | None
    progress: bytes | None
    """A serialized CommandProgress."""
    reason: str
    message: str
    result: bytes | None
    """The serialized result message of the kind."""
    unauthenticated: bool
    attestation: str
    """`pki.attestation.Attestation`."""
    attestation_reason: str
    overdue: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOf:
    """Where one command is: what those who wait look at."""

    command_id: str
    node_id: str
    state: CommandState
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedBody:
    """The bytes of a command that signatures cover."""

    node_id: str
    body: bytes
    signature: bytes | None
    result: bytes | None
    update_signature: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPiece:
    """A piece of live output; bytes dropped before it will never come."""

    output_offset: int
    data: bytes
    dropped_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOutput:
    """What somebody sees who follows a command: the next pieces of its output, and a serialized CommandProgress."""

    command_id: str
    progress: bytes | None
    pieces: tuple[OutputPiece, ...]


class CancelOutcome(StrEnum):
    """What became of a request to cancel."""

    CANCELLED = "cancelled"
    """It was pending and has ended."""
    REQUESTED = "requested"
    """It is in flight; the daemon is told and decides."""
    TOO_LATE = "too-late"
    """It had ended before."""
    UNKNOWN = "unknown"


async def draw_seqs(queries: Queries, *, count: int) -> list[int]:
    """Draw places in the order of commands, rising; they are part of the bodies that are signed."""
    return sorted(row["seq"] for row in await queries.fetch("commands.draw_seqs", count=count))


async def enqueue(transaction: Transaction, commands: Sequence[NewCommand]) -> None:
    """Insert commands, and poke the gateways of their nodes once that is committed.

    Refuses NOT_FOUND when one of the nodes does not exist.
    """
    if not commands:
        return
    rows = await transaction.fetch("commands.insert", **_columns(commands))
    missing = sorted({command.node_id for command in commands} - {row["node_id"] for row in rows})
    if missing:
        raise refuse(Reason.NOT_FOUND, f"no node {', '.join(missing[:10])}: `nodes list` shows the ones there are")
    named: dict[str, list[str]] = {}
    for command in commands:
        channel = channels.COMMANDS if command.not_before_ms is None else channels.DISPATCH
        named.setdefault(channel, []).append(command.node_id)
    hints.tell_after(transaction, named)


async def poke_dispatch(queries: Queries, *, node_ids: Sequence[str]) -> None:
    """Tell the gateways that these nodes have something to be sent: a command, a cancel or a newer spec."""
    payloads = channels.payloads(node_ids)
    if payloads:
        await queries.execute("commands.notify", channel=channels.DISPATCH, payloads=payloads)


async def tell_finished(queries: Queries, *, command_ids: Sequence[str]) -> None:
    """Tell those who wait that these commands have ended."""
    payloads = channels.payloads(command_ids)
    if payloads:
        await queries.execute("commands.notify", channel=channels.FINISHED, payloads=payloads)


async def get(queries: Queries, *, command_id: str) -> Command | None:
    """Return one command."""
    found = await get_many(queries, command_ids=[command_id])
    return found[0] if found else None


async def get_many(queries: Queries, *, command_ids: Sequence[str]) -> list[Command]:
    """Return those of the named commands that exist, by id."""
    return [_command(row) for row in await queries.fetch("commands.get", command_ids=list(command_ids))]


async def list_page(
    queries: Queries,
    *,
    before: str = NEWEST,
    page_size: int,
    node_ids: Sequence[str] | None = None,
    kind: str | None = None,
    states: Sequence[CommandState] | None = None,
) -> list[Command]:
    """Return the next older commands before the id `before`, newest first; None: of any node."""
    wanted: dict[str, Any] = {"before": before, "page_size": page_size, "kind": kind}
    wanted["states"] = None if states is None else [int(state) for state in states]
    if node_ids is None:
        rows = await queries.fetch("commands.list", **wanted)
    else:
        rows = await queries.fetch("commands.list_of_nodes", node_ids=list(node_ids), **wanted)
    return [_command(row) for row in rows]


async def list_batch(
    queries: Queries,
    *,
    batch_id: str,
    after: str = "",
    page_size: int,
    node_id: str | None = None,
    kind: str | None = None,
    states: Sequence[CommandState] | None = None,
) -> list[Command]:
    """Return the next commands of a batch after the id `after`, in the order of ids."""
    rows = await queries.fetch(
        "commands.list_of_batch",
        batch_id=batch_id,
        after=after,
        page_size=page_size,
        node_id=node_id,
        kind=kind,
        states=None if states is None else [int(state) for state in states],
    )
    return [_command(row) for row in rows]


async def states(queries: Queries, *, command_ids: Sequence[str]) -> list[StateOf]:
    """Return where these commands are, by id."""
    return [_state(row) for row in await queries.fetch("commands.states", command_ids=list(command_ids))]


async def nodes_of_batch(queries: Queries, *, batch_id: str) -> list[str]:
    """Return the nodes that a batch asked."""
    return [row["node_id"] for row in await queries.fetch("commands.nodes_of_batch", batch_id=batch_id)]


async def states_of_batch(queries: Queries, *, batch_id: str, after: str = "") -> list[StateOf]:
    """Return where the commands of a batch after the id `after` are, by id."""
    return [_state(row) for row in await queries.fetch("commands.states_of_batch", batch_id=batch_id, after=after)]


def _state(row: Row) -> StateOf:
    return StateOf(
        command_id=row["command_id"],
        node_id=row["node_id"],
        state=CommandState(row["state"]),
        reason=row["reason"],
        message=row["message"],
    )


async def signed_body(queries: Queries, *, command_id: str) -> SignedBody | None:
    """Return the bytes of a command that signatures cover."""
    row = await queries.fetch_one("commands.signed_body", command_id=command_id)
    return None if row is None else SignedBody(**{name: row[name] for name in SignedBody.__dataclass_fields__})


async def output(queries: Queries, *, command_id: str, from_offset: int = 0, page_size: int = 100) -> list[OutputPiece]:
    """Return the next pieces of a command's output."""
    rows = await queries.fetch("commands.output", command_id=command_id, from_offset=from_offset, page_size=page_size)
    return [OutputPiece(**{name: row[name] for name in OutputPiece.__dataclass_fields__}) for row in rows]


async def output_of_batch(
    queries: Queries, *, batch_id: str, from_offsets: Mapping[str, int], page_size: int = 20
) -> list[LiveOutput]:
    """Return the next pieces of these commands of a batch, and what each says it is doing, by id."""
    rows = await queries.fetch(
        "commands.output_of_batch",
        batch_id=batch_id,
        command_ids=list(from_offsets),
        from_offsets=list(from_offsets.values()),
        page_size=page_size,
    )
    found: dict[str, tuple[bytes | None, list[OutputPiece]]] = {}
    for row in rows:
        _, pieces = found.setdefault(row["command_id"], (row["progress"], []))
        if row["output_offset"] is not None:
            pieces.append(OutputPiece(**{name: row[name] for name in OutputPiece.__dataclass_fields__}))
    return [
        LiveOutput(command_id=command_id, progress=progress, pieces=tuple(pieces))
        for command_id, (progress, pieces) in found.items()
    ]


async def request_cancel(
    transaction: Transaction,
    *,
    command_ids: Sequence[str],
    requested_by: str,
    reason: str = "",
    draw_id: Callable[[], str],
    event_type: str,
) -> Mapping[str, CancelOutcome]:
    """Cancel what is pending, and ask for the end of what is in flight; return what became of each.

    `draw_id` gives the ids of the events of type `event_type` that tell of what has ended.
    """
    rows = await transaction.fetch("commands.lock", command_ids=list(command_ids))
    pending = [row["command_id"] for row in rows if row["state"] == CommandState.PENDING]
    in_flight = [row["command_id"] for row in rows if row["state"] in IN_FLIGHT]
    who = {"requested_by": requested_by, "cancel_reason": reason}
    if pending:
        await transaction.execute(
            "commands.cancel_pending",
            command_ids=pending,
            outbox_ids=[draw_id() for _ in pending],
            event_type=event_type,
            end_reason=CANCELLED_REASON,
            message=f"cancelled by {requested_by} before it was sent",
            **who,
        )
        await tell_finished(transaction, command_ids=pending)
        await transaction.execute("outbox.notify", channel=channels.OUTBOX, payload="")
    if in_flight:
        await transaction.execute("commands.request_cancel", command_ids=in_flight, **who)
        nodes = {row["command_id"]: row["node_id"] for row in rows}
        await poke_dispatch(transaction, node_ids=[nodes[command_id] for command_id in in_flight])
    outcomes = dict.fromkeys(command_ids, CancelOutcome.UNKNOWN)
    outcomes |= {row["command_id"]: CancelOutcome.TOO_LATE for row in rows}
    outcomes |= dict.fromkeys(pending, CancelOutcome.CANCELLED) | dict.fromkeys(in_flight, CancelOutcome.REQUESTED)
    return outcomes


def _columns(commands: Sequence[NewCommand]) -> dict[str, list[Any]]:
    return {
        "ids": [command.command_id for command in commands],
        "node_ids": [command.node_id for command in commands],
        "kinds": [command.kind for command in commands],
        "lanes": [command.lane for command in commands],
        "seqs": [command.seq for command in commands],
        "batch_ids": [command.batch_id for command in commands],
        "bodies": [command.body for command in commands],
        "signatures": [command.signature for command in commands],
        "signed_unders": [command.signed_under for command in commands],
        "batch_approvals": [command.batch_approval for command in commands],
        "batch_proofs": [command.batch_proof for command in commands],
        "payloads": [json_columns.encode(command.payload) for command in commands],
        "created_bys": [command.created_by for command in commands],
        "not_befores_ms": [command.not_before_ms for command in commands],
        "asked_not_befores_ms": [command.asked_not_before_ms for command in commands],
        "not_afters_ms": [command.not_after_ms for command in commands],
        "timeouts_ms": [command.timeout_ms for command in commands],
        "attestations": ["expected" if command.attested else "none" for command in commands],
    }


def _command(row: Row) -> Command:
    plain = {name: row[name] for name in Command.__dataclass_fields__ if name not in {"payload", "state"}}
    return Command(**plain, payload=json_columns.decode(row["payload"]), state=CommandState(row["state"]))
