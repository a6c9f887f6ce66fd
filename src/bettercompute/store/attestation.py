"""Decide what is kept of who said it: the verdicts over commands' ends and nodes' statements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bettercompute.pki.attestation import Judged
from bettercompute.store.database import Queries, Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class DueUpdate:
    """A command of an attested kind that has ended, and has not been looked at."""

    command_id: str
    node_id: str
    kind: str
    state: int
    result: bytes
    signature: bytes
    sent: bool
    """False: it ended before any node had it."""
    chains_pem: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DueReport:
    """A status report that has not been looked at. `received_at` is PostgreSQL's own text of the moment."""

    node_id: str
    report: bytes
    received_at: str
    newest_ms: int
    now_ms: int
    """By the database, not by what a gateway says of when it came."""
    attestation: str
    chains_pem: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedReport:
    """The verdict over a report, with the statement where it verified."""

    due: DueReport
    judged: Judged
    body: bytes | None = None
    at_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAttestation:
    """What is known of a node's last report and of its newest statement."""

    report: bytes
    attestation: str
    reason: str
    attested_body: bytes | None
    attested_at_ms: int | None


async def due_updates(queries: Queries, *, page_size: int) -> list[DueUpdate]:
    """Return ended commands whose attestation is not verified yet."""
    rows = await queries.fetch("attestation.due_updates", page_size=page_size)
    return [
        DueUpdate(
            command_id=row["command_id"],
            node_id=row["node_id"],
            kind=row["kind"],
            state=row["state"],
            result=row["result"] or b"",
            signature=row["update_signature"] or b"",
            sent=row["sent"],
            chains_pem=tuple(row["chains"]),
        )
        for row in rows
    ]


async def record_updates(transaction: Transaction, judged: Sequence[tuple[str, Judged]]) -> frozenset[str]:
    """Write verdicts by command id; return the ids that nobody had judged before."""
    rows = await transaction.fetch(
        "attestation.record_updates",
        command_ids=[command_id for command_id, _ in judged],
        attestations=[verdict.attestation.value for _, verdict in judged],
        reasons=[verdict.reason for _, verdict in judged],
    )
    return frozenset(row["id"] for row in rows)


async def due_reports(queries: Queries, *, page_size: int) -> list[DueReport]:
    """Return status reports that have not been looked at."""
    rows = await queries.fetch("attestation.due_reports", page_size=page_size)
    return [
        DueReport(
            node_id=row["node_id"],
            report=row["report"],
            received_at=row["received_at"],
            newest_ms=row["attested_at_ms"] or 0,
            now_ms=row["now_ms"],
            attestation=row["attestation"],
            chains_pem=tuple(row["chains"]),
        )
        for row in rows
    ]


async def record_reports(transaction: Transaction, judged: Sequence[JudgedReport]) -> frozenset[str]:
    """Write verdicts over reports; return the nodes whose report was still the one that was judged."""
    rows = await transaction.fetch(
        "attestation.record_reports",
        node_ids=[item.due.node_id for item in judged],
        received_ats=[item.due.received_at for item in judged],
        attestations=[item.judged.attestation.value for item in judged],
        reasons=[item.judged.reason for item in judged],
        bodies=[item.body for item in judged],
        attested_at_ms=[item.at_ms for item in judged],
    )
    return frozenset(row["node_id"] for row in rows)


async def of_node(queries: Queries, *, node_id: str) -> NodeAttestation | None:
    """Return what is known of a node's statements; None before its first report."""
    row = await queries.fetch_one("attestation.of_node", node_id=node_id)
    if row is None:
        return None
    return NodeAttestation(
        report=row["report"],
        attestation=row["attestation"],
        reason=row["attestation_reason"],
        attested_body=row["attested_body"],
        attested_at_ms=row["attested_at_ms"],
    )
