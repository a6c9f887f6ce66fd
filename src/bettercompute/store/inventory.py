"""Decide what is kept of a node's inventory: each section as sent, and the hashes that the daemon last reported.

An inventory is whole when the stored sections agree with the reported hashes. These are facts: no epoch guards them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bettercompute.store.database import Queries, Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSection:
    """A section as a daemon sent it: canonical bytes and their SHA-256, already compared."""

    node_id: str
    section: str
    sha256: bytes
    body: bytes
    collected_at_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A stored section; `agrees` with the hash that the daemon last reported."""

    node_id: str
    section: str
    sha256: bytes
    body: bytes
    collected_at_ms: int | None
    received_at_ms: int
    agrees: bool


async def store_sections(transaction: Queries, sections: Sequence[NewSection]) -> None:
    """Store sections of any nodes; of two of one name the later in the list wins, nodes that have gone are left out."""
    last = {(section.node_id, section.section): section for section in sections}
    if not last:
        return
    ordered = [last[key] for key in sorted(last)]
    await transaction.execute(
        "inventory.store_sections",
        node_ids=[section.node_id for section in ordered],
        sections=[section.section for section in ordered],
        hashes=[section.sha256 for section in ordered],
        bodies=[section.body for section in ordered],
        collected_ats_ms=[section.collected_at_ms for section in ordered],
    )


async def record_hashes(transaction: Queries, hashes: Mapping[str, Mapping[str, bytes]]) -> None:
    """Record the hashes that nodes report, by node id and section. What a node does not name any more stays."""
    rows = sorted((node_id, section, sha256) for node_id, of in hashes.items() for section, sha256 in of.items())
    if not rows:
        return
    await transaction.execute(
        "inventory.record_hashes",
        node_ids=[row[0] for row in rows],
        sections=[row[1] for row in rows],
        hashes=[row[2] for row in rows],
    )


async def replace_hashes(transaction: Transaction, *, node_id: str, hashes: Mapping[str, bytes]) -> None:
    """Record all hashes of a node, as Hello names them: a section it does not name has gone."""
    await transaction.execute("inventory.forget_hashes", node_id=node_id, sections=sorted(hashes))
    await record_hashes(transaction, {node_id: hashes})


async def stored_hashes(queries: Queries, *, node_id: str) -> Mapping[str, bytes]:
    """Return the hashes of the stored sections: what Hello compares with."""
    return {row["section"]: row["sha256"] for row in await queries.fetch("inventory.stored_hashes", node_id=node_id)}


async def read(
    queries: Queries, *, node_ids: Sequence[str], sections: Sequence[str] | None = None
) -> Mapping[str, Mapping[str, Section]]:
    """Return stored sections by node id and name; `sections` None means all."""
    found: dict[str, dict[str, Section]] = {}
    rows = await queries.fetch(
        "inventory.read", node_ids=list(node_ids), sections=None if sections is None else list(sections)
    )
    for row in rows:
        section = Section(**{name: row[name] for name in Section.__dataclass_fields__})
        found.setdefault(section.node_id, {})[section.section] = section
    return found


async def disagreeing(queries: Queries, *, node_id: str) -> tuple[str, ...]:
    """Return the sections that the daemon reports and that are not stored as reported."""
    return tuple(row["section"] for row in await queries.fetch("inventory.disagreeing", node_id=node_id))
