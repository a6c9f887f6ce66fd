"""Rows of node_sessions and what goes with them: the Hello transaction's reads and writes, liveness, closing.

Typed on top of `queries/sessions.sql`: the pure rules' facts come out, their plans go in. Nothing is decided here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bettercompute import telemetry
from bettercompute.delivery.commands import CommandState
from bettercompute.delivery.desired_state import StoredSpec
from bettercompute.errors import Unavailable
from bettercompute.protocol.statuses import Reason
from bettercompute.session.hello_plan import (
    BootSeen,
    CertificateFacts,
    CommandInFlight,
    ConditionChange,
    HelloPlan,
    NodeFacts,
    PublishedEvent,
    RefusalWrites,
    RowValues,
    SessionRow,
)
from bettercompute.session.standing import Lock, Revocation
from bettercompute.store import channels
from bettercompute.store.database import Queries, Row

# AgentRole on the wire, a word in the tables.
ROLE_NAMES: Mapping[int, str] = {1: "node", 2: "site", 3: "ramdisk"}
ROLE_NUMBERS: Mapping[str, int] = {name: number for number, name in ROLE_NAMES.items()}


HELLO_STATEMENTS = ("sessions.lock_for_hello", "sessions.hello_facts", "sessions.apply_hello", "sessions.newer_specs")
"""What opens a session. With NULL for every argument they find no node and write nothing: they may be rehearsed."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What a fenced statement names: who writes, and the proof that it still may."""

    gateway_id: str
    token: str


@dataclass(frozen=True, slots=True)
class ReadHello:
    """What the facts statement of a Hello found."""

    now_ms: int
    certificate: CertificateFacts
    row: SessionRow | None
    node: NodeFacts
    commands: tuple[CommandInFlight, ...]
    inventory_hashes: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKey:
    """Whose row, and which session of it: what every fenced write compares."""

    node_id: str
    session_id: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnect:
    """One session's end."""

    key: SessionKey
    reason: str
    outbox_id: str
    payload: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxRow:
    """An event with the id that the shell has drawn for it."""

    outbox_id: str
    event: PublishedEvent


def lease_lost() -> Unavailable:
    """Return the error of a write that the lease no longer covers."""
    return Unavailable("the gateway's lease is not held any more: nothing was written", reason=Reason.FENCED)


async def lock_for_hello(transaction: Queries, *, lease: Lease, node_id: str) -> bool:
    """Lock the node's session row; return whether there is one. Raises Unavailable when the lease is not held."""
    row = await transaction.fetch_one(
        "sessions.lock_for_hello", node_id=node_id, gateway_id=lease.gateway_id, lease_token=lease.token
    )
    if row is not None and not row["lease_held"]:
        raise lease_lost()
    return row is not None


async def read_hello(
    transaction: Queries, *, lease: Lease, certificate: CertificateFacts, reported_ids: Sequence[str]
) -> ReadHello:
    """Read everything a Hello is decided by, under the lock of `lock_for_hello`.

    `certificate` holds what its bytes say; `reported_ids` are the commands whose results the Hello brings, which are
    locked together with those in flight.
    """
    row = await transaction.fetch_one(
        "sessions.hello_facts",
        node_id=certificate.node_id,
        cert_serial=certificate.serial,
        reported_ids=list(reported_ids),
        gateway_id=lease.gateway_id,
        lease_token=lease.token,
    )
    if row is None or not row["lease_held"]:
        raise lease_lost()
    return ReadHello(
        now_ms=row["now_ms"],
        certificate=_certificate(certificate, row),
        row=_session_row(row) if row["joined"] else None,
        node=NodeFacts(
            identity_generation=row["identity_generation"] or 0,
            spec_generation=row["spec_generation"] or 0,
            spec_sha256=row["spec_sha256"] or b"",
            conditions=frozenset(row["conditions"]),
            lock=None
            if row["locked_by"] is None
            else Lock(by=row["locked_by"], reason=row["lock_reason"], until_ms=row["locked_until_ms"]),
            revocation=None
            if row["revoked_by"] is None
            else Revocation(by=row["revoked_by"], reason=row["revoked_reason"]),
        ),
        commands=tuple(_command_in_flight(command) for command in row["commands"]),
        inventory_hashes=dict(row["sections"]),
    )


def _certificate(certificate: CertificateFacts, row: Row) -> CertificateFacts:
    allowed_kinds = row["allowed_kinds"]
    return CertificateFacts(
        serial=certificate.serial,
        node_id=certificate.node_id,
        role=certificate.role,
        tenant_controlled=certificate.tenant_controlled,
        not_after_ms=certificate.not_after_ms,
        recorded=row["certificate_recorded"],
        revocation_reason=row["revocation_reason"],
        generation=row["certificate_generation"] or 0,
        superseded=row["certificate_superseded"],
        used=row["certificate_used"],
        allowed_kinds=None if allowed_kinds is None else frozenset(allowed_kinds),
    )


def _session_row(row: Row) -> SessionRow:
    return SessionRow(
        gateway_id=row["gateway_id"] or "",
        session_id=row["session_id"] or "",
        session_epoch=row["session_epoch"],
        boot_id=row["boot_id"] or "",
        recent_boots=tuple(
            BootSeen(boot_id=boot["boot_id"], seen_at_ms=boot["seen_ms"], forked=boot["forked"])
            for boot in json.loads(row["recent_boots"])
        ),
        journal_id=row["journal_id"] or "",
        hello_nonce=row["hello_nonce"] or b"",
        role=ROLE_NUMBERS.get(row["role"] or "", 0),
        daemon_version=row["daemon_version"] or "",
        trust_version=row["trust_version"],
        acked_event_seq=row["acked_event_seq"],
        heartbeat_interval_ms=row["heartbeat_interval_ms"],
        duplicate_hellos=row["duplicate_hellos"],
        duplicate_since_ms=row["duplicate_since_ms"],
        last_seen_ms=row["last_seen_ms"],
        disconnected_at_ms=row["disconnected_at_ms"],
        peer_address=row["peer_address"] or "",
    )


def _command_in_flight(command: tuple[Any, ...]) -> CommandInFlight:
    command_id, kind, lane, seq, state, attempt, sent_boot_id, cancel_requested, body, signature, *approval = command
    batch_approval, batch_proof = approval
    return CommandInFlight(
        command_id=command_id,
        kind=kind,
        lane=lane,
        seq=seq,
        state=CommandState(state),
        attempt=attempt,
        sent_boot_id=sent_boot_id or "",
        cancel_requested=cancel_requested,
        body=body,
        signature=signature or b"",
        batch_approval=batch_approval or b"",
        batch_proof=batch_proof or b"",
    )


async def apply_hello(
    transaction: Queries, plan: HelloPlan, *, lease: Lease, outbox: Sequence[OutboxRow], finished: Sequence[str]
) -> None:
    """Write a plan but its results (`delivery.store_command_facts`), in one statement.

    `outbox` holds the plan's events and one for each of its ends; `finished` the ids of commands that this Hello ends.
    Raises Unavailable when the lease is not held any more: the transaction must be rolled back.
    """
    notices = [(channels.OUTBOX, "")] if outbox else []
    notices += [(channels.FINISHED, payload) for payload in channels.payloads(finished)]
    notices += [(channels.NODES, plan.node_id)] if plan.wake_nodes else []
    gap = plan.event_gap
    row = await transaction.fetch_one(
        "sessions.apply_hello",
        node_id=plan.node_id,
        lease_token=lease.token,
        **_row_arguments(plan.row),
        **_command_arguments(plan),
        **_condition_arguments(plan.conditions),
        **_outbox_arguments(outbox),
        observed_generation=plan.observed_generation,
        applied_generation=plan.applied_generation,
        first_use=plan.first_use,
        capability_labels=list(plan.capability_labels),
        sections=list(plan.inventory_hashes),
        section_hashes=list(plan.inventory_hashes.values()),
        gap_first_seq=None if gap is None else gap.first_seq,
        gap_last_seq=None if gap is None else gap.last_seq,
        notify_channels=[channel for channel, _ in notices],
        notify_payloads=[payload for _, payload in notices],
    )
    if row is None:
        raise lease_lost()


def _row_arguments(values: RowValues) -> dict[str, Any]:
    return {
        "gateway_id": values.gateway_id,
        "session_id": values.session_id,
        "session_epoch": values.session_epoch,
        "boot_id": values.boot_id,
        "recent_boots": json.dumps(
            [
                {"boot_id": boot.boot_id, "seen_ms": boot.seen_at_ms, "forked": boot.forked}
                for boot in values.recent_boots
            ]
        ),
        "journal_id": values.journal_id,
        "hello_nonce": values.hello_nonce or None,
        "role": ROLE_NAMES.get(values.role),
        "daemon_version": values.daemon_version,
        "proto_max": values.proto_max,
        "trust_version": values.trust_version,
        "capabilities": list(values.capabilities),
        "approver_set_epoch": values.approver_set_epoch,
        "approver_set_sha256": values.approver_set_sha256,
        "acked_event_seq": values.acked_event_seq,
        "cert_serial": values.cert_serial,
        "upgrade_only": values.upgrade_only,
        "signed_only": values.signed_only,
        "heartbeat_interval_ms": values.heartbeat_interval_ms,
        "duplicate_hellos": values.duplicate_hellos,
        "duplicate_since_ms": values.duplicate_since_ms,
        "peer_address": values.peer_address,
    }


def _command_arguments(plan: HelloPlan) -> dict[str, Any]:
    attempts = {command.command_id: command.attempt for command in plan.resent}
    ends = {end.command_id: end for end in plan.ends}
    held = {command.command_id for command in plan.held}
    ids = [*ends, *(command_id for command_id in plan.in_flight if command_id not in ends)]
    return {
        "command_ids": ids,
        "attempts": [attempts.get(command_id) for command_id in ids],
        "end_states": [int(ends[i].state) if i in ends else None for i in ids],
        "end_reasons": [ends[i].reason if i in ends else None for i in ids],
        "end_messages": [ends[i].message if i in ends else None for i in ids],
        "held_back": [command_id in held for command_id in ids],
    }


def _condition_arguments(conditions: Sequence[ConditionChange]) -> dict[str, Any]:
    return {
        "condition_types": [condition.type for condition in conditions],
        "condition_statuses": ["true" if condition.holds else "false" for condition in conditions],
        "condition_reasons": [condition.reason for condition in conditions],
        "condition_messages": [condition.message for condition in conditions],
    }


def _outbox_arguments(outbox: Sequence[OutboxRow]) -> dict[str, Any]:
    return {
        "outbox_ids": [row.outbox_id for row in outbox],
        "outbox_types": [row.event.name for row in outbox],
        "outbox_payloads": [json.dumps(row.event.attributes) for row in outbox],
    }


async def refuse_hello(
    transaction: Queries, *, lease: Lease, node_id: str, writes: RefusalWrites, outbox: Sequence[OutboxRow]
) -> tuple[str, ...]:
    """Write what a refused Hello still commits; return the serials it revoked."""
    revoke = writes.revoke
    notices = [(channels.OUTBOX, "")] if outbox else []
    if revoke is not None:
        notices.append((channels.REVOCATIONS, node_id))
    row = await transaction.fetch_one(
        "sessions.refuse_hello",
        node_id=node_id,
        gateway_id=lease.gateway_id,
        lease_token=lease.token,
        reset_duplicates=writes.reset_duplicates,
        revocation_reason=None if revoke is None else revoke.reason,
        revocation_notice=None if writes.notice is None else writes.notice.SerializeToString(),
        quarantine_event=telemetry.EVENT_NODE_QUARANTINED,
        revoked_generation=0 if revoke is None else revoke.generation,
        **_condition_arguments(writes.conditions),
        **_outbox_arguments(outbox),
        notify_channels=[channel for channel, _ in notices],
        notify_payloads=[payload for _, payload in notices],
    )
    if row is None:
        raise lease_lost()
    return tuple(row["serials"])


async def flush_last_seen(
    queries: Queries, *, lease: Lease, ages_ms: Sequence[tuple[SessionKey, int]]
) -> frozenset[str]:
    """Write ages of one chunk, sorted by node id; return the nodes whose rows are still these sessions'."""
    row = await queries.fetch_one(
        "sessions.flush_last_seen",
        node_ids=[key.node_id for key, _ in ages_ms],
        session_ids=[key.session_id for key, _ in ages_ms],
        session_epochs=[key.epoch for key, _ in ages_ms],
        ages_ms=[age_ms for _, age_ms in ages_ms],
        gateway_id=lease.gateway_id,
        lease_token=lease.token,
    )
    if row is None or not row["lease_held"]:
        raise lease_lost()
    return frozenset(row["node_ids"])


async def disconnect(queries: Queries, *, lease: Lease, ends: Sequence[Disconnect], event_type: str) -> frozenset[str]:
    """Write the ends of sessions; return the nodes whose rows were still theirs."""
    row = await queries.fetch_one(
        "sessions.disconnect",
        node_ids=[end.key.node_id for end in ends],
        session_ids=[end.key.session_id for end in ends],
        session_epochs=[end.key.epoch for end in ends],
        reasons=[end.reason for end in ends],
        outbox_ids=[end.outbox_id for end in ends],
        outbox_payloads=[json.dumps(end.payload) for end in ends],
        event_type=event_type,
        outbox_channel=channels.OUTBOX,
        gateway_id=lease.gateway_id,
        lease_token=lease.token,
    )
    if row is None or not row["lease_held"]:
        raise lease_lost()
    return frozenset(row["node_ids"])


async def newer_specs(queries: Queries, *, generations: Mapping[str, int]) -> dict[str, StoredSpec]:
    """Return the specs of these nodes that are above the generations told."""
    rows = await queries.fetch(
        "sessions.newer_specs", node_ids=list(generations), generations=list(generations.values())
    )
    return {
        row["node_id"]: StoredSpec(
            generation=row["spec_generation"],
            body=row["spec_body"],
            signature=row["spec_signature"] or b"",
            patch_base_generation=row["patch_base"],
            patch_body=row["patch_body"] or b"",
            patch_signature=row["patch_signature"] or b"",
        )
        for row in rows
    }


async def recently_published_specs(queries: Queries, *, gateway_id: str, window_ms: int) -> list[str]:
    """Return this gateway's nodes whose spec changed within the window."""
    rows = await queries.fetch("sessions.recently_published_specs", gateway_id=gateway_id, window_ms=window_ms)
    return [row["node_id"] for row in rows]


async def server_time_ms(queries: Queries) -> int:
    """Return compute_now()."""
    row = await queries.fetch_one("sessions.server_time")
    assert row is not None
    return int(row["now_ms"])
