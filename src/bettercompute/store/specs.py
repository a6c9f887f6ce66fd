"""Decide what is kept of desired state: the newest generation of each node, and the ones before it with who asked.

Bodies and signatures are kept and given back byte by byte. A generation is published under the lock of its node's row.
"""

from __future__ import annotations

from dataclasses import dataclass

from bettercompute.delivery.desired_state import NodeGenerations
from bettercompute.delivery.spec_generations import NewGeneration
from bettercompute.protocol import messages
from bettercompute.store.commands import poke_dispatch
from bettercompute.store.database import Queries, Row, Transaction

# Generations kept of a node: some weeks of changes by hand; with bodies at their bound 200 MiB of a node.
KEPT = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedSpec:
    """A node's desired state while its row is locked, and the clock of record."""

    generations: NodeGenerations
    body: messages.DesiredStateBody | None
    """None: no spec was ever published."""
    now_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A generation as history lists it."""

    generation: int
    spec_sha256: bytes
    signed: bool
    patch_base_generation: int | None
    changed: tuple[str, ...]
    body_bytes: int
    issued_at_ms: int
    issued_by: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestSpec:
    """A node's newest generation, and what its daemon says of it."""

    node_id: str
    generations: NodeGenerations
    body: bytes
    """Empty: none."""
    spec_sha256: bytes
    signed: bool
    issued_at_ms: int | None
    issued_by: str
    why: str
    report: bytes
    """The daemon's last StatusReport; empty: none."""
    reported_at_ms: int | None


async def lock(transaction: Transaction, *, node_id: str) -> LockedSpec | None:
    """Lock a node's row and return its desired state; None: no such node."""
    row = await transaction.fetch_one("specs.lock", node_id=node_id)
    if row is None:
        return None
    body = row["spec_body"]
    return LockedSpec(
        generations=_generations(row),
        body=None if body is None else messages.DesiredStateBody.FromString(body),
        now_ms=row["now_ms"],
    )


async def publish(
    transaction: Transaction, new: NewGeneration, *, node_id: str, issued_at_ms: int, issued_by: str, why: str
) -> None:
    """Make a generation the node's newest, under `lock`, and tell the gateways."""
    await transaction.execute(
        "specs.publish",
        node_id=node_id,
        generation=new.generation,
        body=new.body,
        spec_sha256=new.spec_sha256,
        signature=new.signature or None,
        signed_under=new.signed_under,
        patch_base=new.patch_base_generation,
        patch_body=new.patch_body or None,
        patch_signature=new.patch_signature or None,
        changed=list(new.changed),
        issued_at_ms=issued_at_ms,
        issued_by=issued_by,
        why=why,
    )
    await transaction.execute("specs.forget_old", node_id=node_id, kept=KEPT)
    await poke_dispatch(transaction, node_ids=[node_id])


async def newest(queries: Queries, *, node_id: str) -> NewestSpec | None:
    """Return a node's newest generation; None: no such node."""
    row = await queries.fetch_one("specs.newest", node_id=node_id)
    if row is None:
        return None
    return NewestSpec(
        node_id=node_id,
        generations=_generations(row),
        body=row["spec_body"] or b"",
        spec_sha256=row["spec_sha256"] or b"",
        signed=row["signed"],
        issued_at_ms=row["issued_at_ms"],
        issued_by=row["issued_by"],
        why=row["why"],
        report=row["report"] or b"",
        reported_at_ms=row["reported_at_ms"],
    )


async def generation(queries: Queries, *, node_id: str, number: int) -> tuple[Generation, bytes] | None:
    """Return one generation and its body, while it is kept."""
    row = await queries.fetch_one("specs.generation", node_id=node_id, generation=number)
    return None if row is None else (_generation(row), row["body"])


async def history(queries: Queries, *, node_id: str, before: int, page_size: int) -> list[Generation]:
    """Return generations below `before`, newest first."""
    rows = await queries.fetch("specs.history", node_id=node_id, before=before, page_size=page_size)
    return [_generation(row) for row in rows]


async def overtaken(queries: Queries, *, after: str, page_size: int) -> list[str]:
    """Return nodes whose daemon knows a higher generation than their own, in the order of their ids."""
    rows = await queries.fetch("specs.overtaken", after=after, page_size=page_size)
    return [row["node_id"] for row in rows]


def _generations(row: Row) -> NodeGenerations:
    return NodeGenerations(
        generation=row["spec_generation"],
        observed_generation=row["observed_generation"],
        applied_generation=row["applied_generation"],
    )


def _generation(row: Row) -> Generation:
    return Generation(
        generation=row["generation"],
        spec_sha256=row["spec_sha256"],
        signed=row["signed"],
        patch_base_generation=row["patch_base"],
        changed=tuple(row["changed"]),
        body_bytes=row["body_bytes"],
        issued_at_ms=row["issued_at_ms"],
        issued_by=row["issued_by"],
        why=row["why"],
    )
