"""Decide what is kept of an operator's word on a node, and what becomes of its commands.

A lock ends sessions and lets none begin, until it is undone or its time is over. A revocation ends the identity: its
certificates, also those that have expired and could prove a re-join. A node that is forgotten leaves only its revoked
certificates, its history and the audit log. Each runs under the node's session row (`nodes.lock_session`), so that no
Hello, Renew or join slips in between. See docs/security.md, "A node's standing"; decisions 0125 and 0126.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bettercompute.delivery.commands import IN_FLIGHT, CommandState
from bettercompute.session.standing import BY_OPERATOR, FORGOTTEN, Lock, Revocation
from bettercompute.store import certificates, channels, commands
from bettercompute.store.database import Queries, Row, Transaction

REVOKED_REASON = "node-revoked"
FORGOTTEN_REASON = "node-forgotten"
# A node's commands are ended so many at a time, all in one transaction.
END_BATCH = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStanding:
    """What bars a node at the moment of reading; both None: nothing does, or no more."""

    node_id: str
    changed_at_ms: int
    lock: Lock | None
    revocation: Revocation | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What an operator's word has ended."""

    serials: tuple[str, ...]
    """Revoked."""
    commands: Mapping[CommandState, int]
    """By the state in which they have ended."""


async def lock(transaction: Transaction, *, node_id: str, ttl_ms: int | None, locked_by: str, reason: str) -> None:
    """Lock a node for `ttl_ms`, or until it is unlocked; tell the gateways."""
    await transaction.execute("standing.lock", node_id=node_id, ttl_ms=ttl_ms, locked_by=locked_by, reason=reason)
    await _tell(transaction, node_id)


async def unlock(transaction: Transaction, *, node_id: str) -> bool:
    """Undo a lock; tell the gateways. False: none was in force."""
    row = await transaction.fetch_one("standing.unlock", node_id=node_id)
    if row is None:
        return False
    await _tell(transaction, node_id)
    return bool(row["holds"])


async def revoke(
    transaction: Transaction,
    *,
    node_id: str,
    revoked_by: str,
    reason: str,
    notice: bytes,
    draw_id: Callable[[], str],
    event_type: str,
) -> Ended:
    """End the node's identity, and cancel what has not been sent to it; tell the gateways.

    What is in flight stays: the machine may join again with its journal, and tells then what became of it.
    """
    [row] = await transaction.fetch("standing.revoke", node_id=node_id, revoked_by=revoked_by, reason=reason)
    serials = await certificates.revoke_generation(
        transaction,
        node_id=node_id,
        identity_generation=row["identity_generation"],
        reason=BY_OPERATOR,
        notice=notice,
    )
    ended = await _end_commands(
        transaction,
        node_id=node_id,
        states=[CommandState.PENDING],
        reason=REVOKED_REASON,
        messages=(f"the node was revoked by {revoked_by} before it was sent", ""),
        draw_id=draw_id,
        event_type=event_type,
    )
    await _tell(transaction, node_id)
    return Ended(serials=serials, commands=ended)


async def holder(transaction: Transaction, *, node_id: str) -> str | None:
    """Lock the node's row until the end of the transaction, and return the gateway that has its session, if one has.

    The caller holds the node's session row.
    """
    [row] = await transaction.fetch("standing.lock_node", node_id=node_id)
    found: str | None = row["gateway_id"]
    return found


async def forget(
    transaction: Transaction,
    *,
    node_id: str,
    forgotten_by: str,
    notice: bytes,
    draw_id: Callable[[], str],
    event_type: str,
) -> Ended:
    """Remove a node that nobody has a session of: `holder` said so in this transaction."""
    [row] = await transaction.fetch("standing.lock_node", node_id=node_id)
    serials = await certificates.revoke_generation(
        transaction,
        node_id=node_id,
        identity_generation=row["identity_generation"],
        reason=FORGOTTEN,
        notice=notice,
    )
    ended = await _end_commands(
        transaction,
        node_id=node_id,
        states=[CommandState.PENDING, *sorted(IN_FLIGHT)],
        reason=FORGOTTEN_REASON,
        messages=(
            f"the node was forgotten by {forgotten_by} before it was sent",
            f"the node was forgotten by {forgotten_by}; what it did with it is not known",
        ),
        draw_id=draw_id,
        event_type=event_type,
    )
    await transaction.execute("standing.forget", node_id=node_id)
    return Ended(serials=serials, commands=ended)


async def changed_since(queries: Queries, *, since_ms: int) -> list[NodeStanding]:
    """Return the nodes whose standing changed at or after a moment of the database's clock, also to nothing."""
    return [_standing(row) for row in await queries.fetch("standing.changed_since", since_ms=since_ms)]


async def barred(queries: Queries) -> list[NodeStanding]:
    """Return every node that is locked or revoked."""
    return [_standing(row) for row in await queries.fetch("standing.barred")]


async def _tell(transaction: Transaction, node_id: str) -> None:
    await transaction.execute("standing.notify", channel=channels.REVOCATIONS, payloads=channels.payloads([node_id]))


async def _end_commands(
    transaction: Transaction,
    *,
    node_id: str,
    states: list[CommandState],
    reason: str,
    messages: tuple[str, str],
    draw_id: Callable[[], str],
    event_type: str,
) -> Mapping[CommandState, int]:
    """End commands of the node: cancelled what was pending, failed what was in flight. `messages` in that order."""
    counts: dict[CommandState, int] = {}
    ended: list[str] = []
    while True:
        rows = await transaction.fetch(
            "standing.end_commands",
            node_id=node_id,
            states=[int(state) for state in states],
            reason=reason,
            pending_message=messages[0],
            in_flight_message=messages[1],
            outbox_ids=[draw_id() for _ in range(END_BATCH)],
            event_type=event_type,
            batch=END_BATCH,
        )
        for row in rows:
            counts[CommandState(row["state"])] = counts.get(CommandState(row["state"]), 0) + 1
            ended.append(row["command_id"])
        if len(rows) < END_BATCH:
            break
    if ended:
        await commands.tell_finished(transaction, command_ids=ended)
        await transaction.execute("outbox.notify", channel=channels.OUTBOX, payload="")
    return counts


def _standing(row: Row) -> NodeStanding:
    held = (
        Lock(by=row["locked_by"], reason=row["lock_reason"], until_ms=row["locked_until_ms"]) if row["locked"] else None
    )
    revoked = row["revoked_by"] is not None
    return NodeStanding(
        node_id=row["node_id"],
        changed_at_ms=row["changed_at_ms"],
        lock=held,
        revocation=Revocation(by=row["revoked_by"], reason=row["revoked_reason"]) if revoked else None,
    )
