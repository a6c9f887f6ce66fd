"""Decide what is kept of a node beside its session: who joined, as what, with which labels, and how people see it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bettercompute.delivery.selectors import Requirement, Source
from bettercompute.protocol.limits import MAX_LABELS
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import json_columns
from bettercompute.store.database import Queries, Row, Transaction

SYSTEM = Source.SYSTEM.value
OPERATOR = Source.OPERATOR.value


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedNode:
    """What JoinService found out about a node that joins; `role` is node, site or ramdisk."""

    node_id: str
    site: str
    role: str
    tenant_controlled: bool
    attestor: str
    hardware_claims: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSession:
    """The public half of a node_sessions row: where the node's present or last session is or was."""

    gateway_id: str | None
    session_id: str | None
    session_epoch: int
    boot_id: str | None
    journal_id: str | None
    daemon_version: str | None
    proto_max: int | None
    trust_version: int
    capabilities: tuple[str, ...]
    acked_event_seq: int
    cert_serial: str | None
    peer_address: str | None
    upgrade_only: bool
    signed_only: bool
    heartbeat_interval_ms: int
    connected_at_ms: int | None
    last_seen_ms: int | None
    disconnected_at_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node. `state` is joined, connected, disconnected or unreachable; `role` is node, site or ramdisk."""

    node_id: str
    site: str
    role: str
    tenant_controlled: bool
    state: str
    state_reason: str
    state_changed_at_ms: int
    identity_generation: int
    attestor: str
    hardware_claims: Mapping[str, Any]
    spec_generation: int
    observed_generation: int
    applied_generation: int
    locked_at_ms: int | None
    """A lock may have ended by itself since: `session.standing.in_force`."""
    locked_until_ms: int | None
    locked_by: str | None
    lock_reason: str | None
    revoked_at_ms: int | None
    revoked_by: str | None
    revoked_reason: str | None
    quarantined_at_ms: int | None
    quarantine_reason: str | None
    joined_at_ms: int
    system_labels: Mapping[str, str]
    operator_labels: Mapping[str, str]
    session: NodeSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A node as far as somebody must know it who wants to run something on it."""

    node_id: str
    role: str
    state: str


async def lock_session(transaction: Transaction, *, node_id: str) -> bool:
    """Lock the node's session row, as Hello does, by a statement of its own; return whether there is one."""
    return await transaction.fetch_one("nodes.lock_session", node_id=node_id) is not None


async def insert_joined(transaction: Transaction, node: JoinedNode) -> int:
    """Record a join and return the identity generation: 1 for a new node, raised by one for a node that re-joins."""
    values = {
        "node_id": node.node_id,
        "site": node.site,
        "role": node.role,
        "tenant_controlled": node.tenant_controlled,
        "attestor": node.attestor,
        "hardware_claims": json_columns.encode(node.hardware_claims),
    }
    inserted = await transaction.fetch_one("nodes.insert", **values)
    if inserted is not None:
        await transaction.execute("nodes.insert_session", node_id=node.node_id)
        return int(inserted["identity_generation"])
    # Under the lock that Hello takes: no session is opened by a certificate of the generation that ends here.
    await lock_session(transaction, node_id=node.node_id)
    [row] = await transaction.fetch("nodes.rejoin", **values)
    return int(row["identity_generation"])


async def get(queries: Queries, *, node_id: str) -> Node | None:
    """Return one node."""
    found = await get_many(queries, node_ids=[node_id])
    return found[0] if found else None


async def get_many(queries: Queries, *, node_ids: Sequence[str]) -> list[Node]:
    """Return those of the named nodes that exist, by node id."""
    return [_node(row) for row in await queries.fetch("nodes.get", node_ids=list(node_ids))]


async def existing(queries: Queries, *, node_ids: Sequence[str]) -> list[Chosen]:
    """Return those of the named ids that are nodes, by id."""
    return [_chosen(row) for row in await queries.fetch("nodes.existing", node_ids=list(node_ids))]


async def choose(
    queries: Queries, requirements: Sequence[Requirement], *, after: str = "", page_size: int
) -> list[Chosen]:
    """Return the next nodes after the id `after` that meet every requirement, by node id.

    Where one of them asks for a label of one value, only the nodes with that label are looked at.
    """
    arguments: dict[str, Any] = {
        "after": after,
        "page_size": page_size,
        "keys": [item.key for item in requirements],
        "sources": [item.source.value for item in requirements],
        "value_sets": [None if item.values is None else json.dumps(item.values) for item in requirements],
        "negations": [item.negated for item in requirements],
    }
    for item in requirements:
        if item.source is not Source.FIELD and not item.negated and item.values is not None and len(item.values) == 1:
            label = {"label_key": item.key, "label_value": item.values[0], "label_source": item.source.value}
            rows = await queries.fetch("nodes.choose_labelled", **arguments, **label)
            break
    else:
        rows = await queries.fetch("nodes.choose", **arguments)
    return [_chosen(row) for row in rows]


async def outside(queries: Queries, labels: Sequence[Requirement], *, node_ids: Sequence[str]) -> list[str]:
    """Return those of the ids whose node lacks one of the labels, each a requirement of one value; by id."""
    rows = await queries.fetch(
        "nodes.outside",
        node_ids=sorted(set(node_ids)),
        keys=[item.key for item in labels],
        sources=[item.source.value for item in labels],
        label_values=[item.values[0] if item.values else "" for item in labels],
    )
    return [row["node_id"] for row in rows]


async def list_page(
    queries: Queries, *, after: str = "", page_size: int, requirements: Sequence[Requirement] = ()
) -> list[Node]:
    """Return the next nodes after the id `after` whole; the last one's id is where the next page goes on."""
    chosen = await choose(queries, requirements, after=after, page_size=page_size)
    return await get_many(queries, node_ids=[node.node_id for node in chosen])


async def state_counts(queries: Queries) -> Mapping[str, int]:
    """Return how many nodes are in each state."""
    return {row["state"]: row["nodes"] for row in await queries.fetch("nodes.state_counts")}


async def change_labels(
    transaction: Transaction, *, node_id: str, source: str, wanted: Mapping[str, str], removed: Sequence[str] = ()
) -> None:
    """Set and remove labels of one source. Refuses to pass the bound of labels per node, both sources together."""
    if removed:
        await transaction.execute("nodes.remove_labels", node_id=node_id, source=source, keys=sorted(removed))
    if wanted:
        keys = sorted(wanted)
        await transaction.execute(
            "nodes.set_labels", node_id=node_id, source=source, keys=keys, values=[wanted[key] for key in keys]
        )
    [row] = await transaction.fetch("nodes.count_labels", node_id=node_id)
    if row["labels"] > MAX_LABELS:
        raise refuse(
            Reason.BAD_REQUEST,
            f"node {node_id} would have {row['labels']} labels, {MAX_LABELS} is the limit: remove some first",
        )


def _chosen(row: Row) -> Chosen:
    return Chosen(node_id=row["node_id"], role=row["role"], state=row["state"])


def _node(row: Row) -> Node:
    session = NodeSession(
        **{name: row[name] for name in NodeSession.__dataclass_fields__ if name != "capabilities"},
        capabilities=tuple(row["capabilities"]),
    )
    decoded = ("hardware_claims", "system_labels", "operator_labels")
    values: dict[str, Any] = {
        name: row[name] for name in Node.__dataclass_fields__ if name not in {*decoded, "session"}
    }
    values |= {name: json_columns.decode(row[name]) for name in decoded}
    return Node(**values, session=session)
