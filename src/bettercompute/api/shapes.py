"""The JSON of nodes, commands and tokens: what clients may rely on. Times are RFC 3339 in UTC."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from google.protobuf.json_format import MessageToDict
from pydantic import BaseModel

from bettercompute.api.refusals import RefusalShape, refusals_of
from bettercompute.delivery.commands import TERMINAL, CommandState
from bettercompute.protocol import messages
from bettercompute.protocol.frames import ProtocolError
from bettercompute.protocol.kinds import KINDS, decode_result
from bettercompute.session import standing
from bettercompute.session.standing import Lock
from bettercompute.store.attestation import NodeAttestation
from bettercompute.store.commands import Command, OutputPiece
from bettercompute.store.conditions import Condition
from bettercompute.store.inventory import Section
from bettercompute.store.nodes import Node
from bettercompute.store.tokens import Token


def rfc3339(moment_ms: int | None) -> str | None:
    """Return Unix milliseconds as RFC 3339 in UTC."""
    if moment_ms is None:
        return None
    moment = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=moment_ms)  # exact, also in the year 9999
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def message_json(message: messages.ProtoMessage) -> dict[str, Any]:
    """Return a message as protobuf's JSON with the names of the .proto files."""
    return MessageToDict(message, preserving_proto_field_name=True)


class Label(BaseModel):
    """A label and whose it is."""

    key: str
    value: str
    source: str


class SessionShape(BaseModel):
    """The node's present session, or its last one."""

    gateway_id: str | None
    session_id: str | None
    epoch: int
    boot_id: str | None
    journal_id: str | None
    daemon_version: str | None
    trust_version: int
    capabilities: list[str]
    upgrade_only: bool
    peer_address: str | None
    connected_at: str | None
    last_seen_at: str | None
    last_seen_age_ms: int | None
    disconnected_at: str | None


class LockShape(BaseModel):
    """A lock that is in force. `until` None: until it is undone."""

    by: str
    reason: str
    since: str | None
    until: str | None


class RevocationShape(BaseModel):
    """Why no certificate of the node is good any more; `by` None: the control plane itself did it."""

    by: str | None
    reason: str
    at: str | None


class NodeShape(BaseModel):
    """A node as listings show it."""

    node_id: str
    site: str
    role: str
    state: str
    state_reason: str
    state_changed_at: str | None
    joined_at: str | None
    tenant_controlled: bool
    spec_generation: int
    observed_generation: int
    applied_generation: int
    lock: LockShape | None
    revoked: RevocationShape | None
    quarantined: RevocationShape | None
    labels: list[Label]
    session: SessionShape


class ConditionShape(BaseModel):
    """Something that holds, or does not, of a node."""

    type: str
    status: str
    reason: str
    message: str
    changed_at: str | None


class SectionShape(BaseModel):
    """Where an inventory section stands."""

    sha256: str
    received_at: str | None
    agrees: bool


class NodeDetail(NodeShape):
    """A node with everything that is known of it."""

    conditions: list[ConditionShape]
    inventory: dict[str, Any]
    inventory_sections: dict[str, SectionShape]
    attestation: str
    """`none`, `verified`, `unsigned` or `forged`: whether the node's key signed the statement in its last status."""
    attestation_reason: str
    attested_at: str | None
    """The time of the newest statement that verified."""
    refusals: list[RefusalShape]


class CommandShape(BaseModel):
    """A command and what became of it."""

    id: str
    node_id: str
    kind: str
    lane: str
    state: str
    reason: str
    message: str
    overdue: bool
    batch_id: str | None
    payload: dict[str, Any]
    result: dict[str, Any] | None
    attestation: str
    """`none`, `expected`, `verified`, `unsigned` or `forged`: whether the node's own key says how it ended."""
    attestation_reason: str
    progress: dict[str, Any] | None
    attempt: int
    age_ms: int
    created_at: str | None
    created_by: str
    not_before: str | None
    """From when it may be sent as things stand: a back-off moves it, and a hold until its approval."""
    asked_not_before: str | None
    """From when it may be sent as its maker asked; null: at once."""
    not_after: str | None
    timeout_ms: int
    cancel_requested_at: str | None
    dispatched_at: str | None
    acked_at: str | None
    running_at: str | None
    started_at: str | None
    finished_at: str | None


class OutputShape(BaseModel):
    """A piece of a command's output; bytes dropped before it will never come."""

    offset: int
    data_base64: str
    dropped_bytes: int


class TokenShape(BaseModel):
    """A join token without its secret."""

    token_id: str
    state: str
    role: str
    site: str
    node_id: str | None
    used_node_id: str | None
    created_at: str | None
    created_by: str
    expires_at: str | None
    used_at: str | None


def labels_of(node: Node) -> list[Label]:
    """Return what the control plane says of a node, and what operators say."""
    labels = [Label(key=key, value=value, source="system") for key, value in node.system_labels.items()]
    return labels + [Label(key=key, value=value, source="operator") for key, value in node.operator_labels.items()]


def node_fields(node: Node, *, now_ms: int) -> dict[str, Any]:
    """Return the fields of a `NodeShape`."""
    session = node.session
    return {
        "node_id": node.node_id,
        "site": node.site,
        "role": node.role,
        "state": node.state,
        "state_reason": node.state_reason,
        "state_changed_at": rfc3339(node.state_changed_at_ms),
        "joined_at": rfc3339(node.joined_at_ms),
        "tenant_controlled": node.tenant_controlled,
        "spec_generation": node.spec_generation,
        "observed_generation": node.observed_generation,
        "applied_generation": node.applied_generation,
        **_standing_fields(node, now_ms=now_ms),
        "labels": labels_of(node),
        "session": SessionShape(
            gateway_id=session.gateway_id,
            session_id=session.session_id,
            epoch=session.session_epoch,
            boot_id=session.boot_id,
            journal_id=session.journal_id,
            daemon_version=session.daemon_version,
            trust_version=session.trust_version,
            capabilities=list(session.capabilities),
            upgrade_only=session.upgrade_only,
            peer_address=session.peer_address,
            connected_at=rfc3339(session.connected_at_ms),
            last_seen_at=rfc3339(session.last_seen_ms),
            last_seen_age_ms=None if session.last_seen_ms is None else max(0, now_ms - session.last_seen_ms),
            disconnected_at=rfc3339(session.disconnected_at_ms),
        ),
    }


def _standing_fields(node: Node, *, now_ms: int) -> dict[str, Any]:
    """Return what bars a node: nothing of it, or what operators and the control plane have said."""
    lock = None
    if node.locked_by is not None:
        lock = standing.in_force(
            Lock(by=node.locked_by, reason=node.lock_reason or "", until_ms=node.locked_until_ms), now_ms=now_ms
        )
    return {
        "lock": None
        if lock is None
        else LockShape(by=lock.by, reason=lock.reason, since=rfc3339(node.locked_at_ms), until=rfc3339(lock.until_ms)),
        "revoked": None
        if node.revoked_at_ms is None
        else RevocationShape(by=node.revoked_by, reason=node.revoked_reason or "", at=rfc3339(node.revoked_at_ms)),
        "quarantined": None
        if node.quarantined_at_ms is None
        else RevocationShape(by=None, reason=node.quarantine_reason or "", at=rfc3339(node.quarantined_at_ms)),
    }


def node_detail(
    node: Node,
    *,
    conditions: Sequence[Condition],
    sections: Mapping[str, Section],
    attestation: NodeAttestation | None,
    now_ms: int,
) -> NodeDetail:
    """Return one node whole; a section that does not decode is left out of `inventory` and still listed."""
    whole = messages.NodeInventory()
    for name, section in sections.items():
        if name in messages.NodeInventory.DESCRIPTOR.fields_by_name:
            try:
                getattr(whole, name).ParseFromString(section.body)
            except ValueError:
                whole.ClearField(name)  # type: ignore[arg-type]  # checked to be one of its fields
    return NodeDetail(
        **node_fields(node, now_ms=now_ms),
        conditions=[
            ConditionShape(
                type=item.type,
                status=item.status,
                reason=item.reason,
                message=item.message,
                changed_at=rfc3339(item.changed_at_ms),
            )
            for item in conditions
        ],
        inventory=message_json(whole),
        inventory_sections={
            name: SectionShape(
                sha256=section.sha256.hex(), received_at=rfc3339(section.received_at_ms), agrees=section.agrees
            )
            for name, section in sections.items()
        },
        **_attestation_fields(attestation),
    )


def _attestation_fields(attestation: NodeAttestation | None) -> dict[str, Any]:
    """Return what the control plane found of a node's own statement, and what the node says it refused."""
    return {
        "attestation": "none" if attestation is None else attestation.attestation,
        "attestation_reason": "" if attestation is None else attestation.reason,
        "attested_at": None if attestation is None else rfc3339(attestation.attested_at_ms),
        "refusals": [] if attestation is None else refusals_of(attestation.report),
    }


def command_shape(command: Command, *, now_ms: int) -> CommandShape:
    """Return a command; a result that its kind does not explain is left out."""
    return CommandShape(
        id=command.command_id,
        node_id=command.node_id,
        kind=command.kind,
        lane=messages.Lane.Name(messages.Lane.ValueType(command.lane)).removeprefix("LANE_").lower(),
        state=command.state.name.lower(),
        reason=command.reason,
        message=command.message,
        overdue=command.overdue,
        batch_id=command.batch_id,
        payload=dict(command.payload),
        result=_result(command),
        attestation=command.attestation,
        attestation_reason=command.attestation_reason,
        progress=None if command.state in TERMINAL else progress_json(command.progress),
        attempt=command.attempt,
        age_ms=max(0, now_ms - command.created_at_ms),
        created_at=rfc3339(command.created_at_ms),
        created_by=command.created_by,
        not_before=rfc3339(command.not_before_ms),
        asked_not_before=rfc3339(command.asked_not_before_ms),
        not_after=rfc3339(command.not_after_ms),
        timeout_ms=command.timeout_ms,
        cancel_requested_at=rfc3339(command.cancel_requested_at_ms),
        dispatched_at=rfc3339(command.dispatched_at_ms),
        acked_at=rfc3339(command.acked_at_ms),
        running_at=rfc3339(command.running_at_ms),
        started_at=rfc3339(command.started_at_ms),
        finished_at=rfc3339(command.finished_at_ms),
    )


def progress_json(progress: bytes | None) -> dict[str, Any] | None:
    """Return a serialized CommandProgress as JSON."""
    return None if progress is None else message_json(messages.CommandProgress.FromString(progress))


def output_shapes(pieces: Sequence[OutputPiece], *, from_offset: int) -> list[OutputShape]:
    """Return pieces of output, each with what is missing before it: by the node's bound, by ours, or for want of a
    session while it was written.
    """
    shapes = []
    for piece in pieces:
        missing = max(piece.dropped_bytes, piece.output_offset - from_offset)
        data = base64.b64encode(piece.data).decode()
        shapes.append(OutputShape(offset=piece.output_offset, data_base64=data, dropped_bytes=missing))
        from_offset = next_offset((piece,), from_offset=from_offset)
    return shapes


def next_offset(pieces: Sequence[OutputPiece], *, from_offset: int) -> int:
    """Return where to ask on after these pieces."""
    return pieces[-1].output_offset + max(1, len(pieces[-1].data)) if pieces else from_offset


def _result(command: Command) -> dict[str, Any] | None:
    kind = KINDS.get(command.kind)
    if kind is None or command.result is None or command.state is not CommandState.SUCCEEDED:
        return None
    try:
        return message_json(decode_result(kind, command.result))
    except ProtocolError:
        return None


def token_shape(token: Token) -> TokenShape:
    """Return a token with its state in a word."""
    state = "unused"
    if token.revoked_at_ms is not None:
        state = "revoked"
    elif token.used_at_ms is not None:
        state = "used"
    elif token.expired:
        state = "expired"
    return TokenShape(
        token_id=token.token_id,
        state=state,
        role=token.role,
        site=token.site,
        node_id=token.node_id,
        used_node_id=token.used_node_id,
        created_at=rfc3339(token.created_at_ms),
        created_by=token.created_by,
        expires_at=rfc3339(token.expires_at_ms),
        used_at=rfc3339(token.used_at_ms),
    )
