"""What the Hello transaction reads and what it writes, as plain values.

The shell locks the node's session row by a statement of its own, reads `HelloFacts` in later ones, calls
`hello.decide`, and writes everything the `HelloPlan` names in the same transaction. After the commit it opens the
session with `gateway_side.open_session(plan, ...)`, whose effects are Welcome and what follows it. A `HelloRefusal`
whose `writes` is not None commits those writes first and is refused then. See docs/sessions.md, "The
Hello transaction", "The node_sessions table".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bettercompute.delivery.commands import CommandState, OutgoingCommand
from bettercompute.delivery.facts import CommandFact
from bettercompute.errors import Refused
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason
from bettercompute.session.standing import Lock, Revocation

# --- Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFacts:
    """The client certificate: what its verified bytes say, and what node_certs knows of its serial."""

    serial: str
    node_id: str
    role: int
    """`AgentRole`; 0 when the certificate carries none."""
    tenant_controlled: bool
    not_after_ms: int
    recorded: bool
    """False: the serial is not in node_certs; then nothing below was read."""
    revocation_reason: str | None = None
    """None: not revoked."""
    generation: int = 0
    """The identity generation of the node that it was issued for."""
    superseded: bool = False
    """A newer serial of the same generation has been used in a committed Hello."""
    used: bool = False
    """This serial has been used in a committed Hello."""
    allowed_kinds: frozenset[str] | None = None
    """None: all kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BootSeen:
    """A change of boot id in the node's row: `seen_at_ms` by the database, and whether the Hello that brought it
    forked.
    """

    boot_id: str
    seen_at_ms: int
    forked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRow:
    """The node's node_sessions row as the lock found it. A column that is NULL is "", 0, b"" or None as typed here."""

    gateway_id: str
    """Empty: no gateway holds a session of the node."""
    session_id: str
    session_epoch: int
    boot_id: str
    recent_boots: tuple[BootSeen, ...]
    journal_id: str
    """As written by the last Hello: `ROLLED_BACK` and the id when that Hello was told to take a new one."""
    hello_nonce: bytes
    role: int
    daemon_version: str
    trust_version: int
    acked_event_seq: int
    heartbeat_interval_ms: int
    duplicate_hellos: int
    duplicate_since_ms: int | None
    last_seen_ms: int | None
    disconnected_at_ms: int | None
    peer_address: str = ""
    """From where the previous session came, to tell both clones; empty where it is not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandInFlight:
    """A row of the node that is dispatched, acked or running."""

    command_id: str
    kind: str
    lane: int
    seq: int
    state: CommandState
    attempt: int
    sent_boot_id: str
    """The boot to which it was last sent."""
    cancel_requested: bool
    body: bytes
    signature: bytes = b""
    batch_approval: bytes = b""
    batch_proof: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The node's row in nodes."""

    identity_generation: int
    spec_generation: int
    """0: no spec."""
    spec_sha256: bytes = b""
    conditions: frozenset[str] = frozenset()
    """Types of the conditions that hold and that the control plane owns (`DuplicateIdentity`, `RebootLoop`)."""
    lock: Lock | None = None
    """By an operator; it may have ended by itself."""
    revocation: Revocation | None = None
    """By an operator, of the present identity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayFacts:
    """What the gateway brings to a Hello: drawn, configured or measured, none of it read from the database."""

    gateway_id: str
    session_id: str
    """Drawn for this session."""
    protocol_min: int
    protocol_max: int
    capabilities: tuple[str, ...]
    lane_credits: Mapping[int, int]
    """By `Lane`."""
    heartbeat_interval_ms: int
    """`liveness.heartbeat_interval_ms(live sessions)`."""
    peer_address: str
    signed_only: bool = False
    """A WebSocket session."""
    hello_proven: bool = True
    """False: a WebSocket Hello without `hsh`, which never causes quarantine or resume rules 5 and 6."""
    trust_version: int = 0
    """Of the newest published bundle; 0: none."""
    duplicate_hellos_max: int = 3
    duplicate_window_ms: int = 600_000
    drawn: float = 0.0
    """Even from [0, 1): spreads those who are told when to come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloFacts:
    """Everything `hello.decide` knows beside the Hello itself. `now_ms` is compute_now(), read after the lock."""

    now_ms: int
    certificate: CertificateFacts
    gateway: GatewayFacts
    row: SessionRow | None
    """None: the node has no row, so it has not joined."""
    node: NodeFacts
    commands: tuple[CommandInFlight, ...] = ()
    inventory_hashes: Mapping[str, bytes] | None = None
    """Of the *stored* sections; None or a missing name: never seen."""


# --- The plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RowValues:
    """The node_sessions row after this Hello. connected_at = last_seen = compute_now(), disconnected_at = NULL."""

    gateway_id: str
    session_id: str
    session_epoch: int
    boot_id: str
    recent_boots: tuple[BootSeen, ...]
    journal_id: str
    hello_nonce: bytes
    """Empty: NULL."""
    role: int
    daemon_version: str
    proto_max: int
    trust_version: int
    capabilities: tuple[str, ...]
    approver_set_epoch: int | None
    approver_set_sha256: bytes | None
    acked_event_seq: int
    cert_serial: str
    upgrade_only: bool
    signed_only: bool
    heartbeat_interval_ms: int
    duplicate_hellos: int
    duplicate_since_ms: int | None
    peer_address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEnd:
    """One of our own moves to a terminal state by a resume rule: `WHERE id AND node_id AND state IN (in flight)`."""

    command_id: str
    state: CommandState
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCommand:
    """In flight in the new epoch, unsent and without a credit, ahead of what is pending."""

    command_id: str
    kind: str
    lane: int
    seq: int
    signed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedEvent:
    """A row for the outbox. Attribute values are what JSON holds."""

    name: str
    node_id: str
    attributes: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionChange:
    """A condition of the node that the control plane owns."""

    type: str
    holds: bool
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class EventGap:
    """Events that the daemon no longer has and the control plane never got: stored as a gap and shown."""

    first_seq: int
    last_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloPlan:
    """Every write of the Hello transaction, then what the session begins with.

    Written in the lock order of delivery.
    """

    node_id: str
    row: RowValues
    # node_certs
    first_use: bool
    """Mark the serial used, and those of its generation that were issued before it superseded."""
    # commands, by id
    results: tuple[CommandFact, ...]
    """done_results of the Hello, for the fact statement (merged, `AND node_id =`); all are acked after the commit."""
    ends: tuple[CommandEnd, ...]
    in_flight: tuple[str, ...]
    """Ids that move to the new epoch and session, sent or not."""
    resent: tuple[OutgoingCommand, ...]
    """In seq order; attempt already raised: write `attempt` and `sent_boot_id` = the row's boot."""
    # inserts and the rest
    events: tuple[PublishedEvent, ...]
    capability_labels: Mapping[str, str]
    """System labels `bc.dev/cap.<name>`; those of that prefix that are not named here are dropped."""
    inventory_hashes: Mapping[str, bytes]
    """As reported: recorded."""
    conditions: tuple[ConditionChange, ...]
    event_gap: EventGap | None
    wake_nodes: bool
    """The node's own controllers (spec, inventory) have something to look at."""
    wake_commands: tuple[str, ...]
    """Commands whose owning controllers must decide again (rules 5 and 6)."""
    # for the session
    close_previous: bool
    """The previous session was on this gateway: `Superseded` for it, when it is still live."""
    protocol_version: int
    upgrade_required: bool
    new_journal: bool
    send_trust: bool
    """The published bundle is newer than the daemon's: Welcome carries it."""
    send_spec: bool
    """Read the spec after the commit and hand it to `open_session`."""
    request_sections: tuple[str, ...]
    running: Mapping[str, int]
    """Ids that keep their credit, with their lanes."""
    held: tuple[HeldCommand, ...]
    """In seq order."""
    cancels: tuple[str, ...]
    allowed_kinds: frozenset[str] | None
    tenant_controlled: bool
    certificate_left_ms: int
    """How long the certificate is still valid, counted from the facts' now."""
    next_event_seq: int
    """The only seq with which this session's first event batch may begin, or less."""
    observed_generation: int
    applied_generation: int
    lane_credits: Mapping[int, int]
    gateway_capabilities: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityRevocation:
    """Revoke every unexpired serial of one identity generation of the node, with this reason."""

    node_id: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalWrites:
    """What a refused Hello still commits. No epoch is bumped."""

    events: tuple[PublishedEvent, ...]
    revoke: IdentityRevocation | None = None
    """The shell fills the revoked serials into the events' `serials`, and gives `Revoked` to the clone connected
    here.
    """
    reset_duplicates: bool = False
    """duplicate_hellos = 0, duplicate_since = NULL."""
    conditions: tuple[ConditionChange, ...] = ()
    notice: messages.RevocationNotice | None = None
    """What both clones are told, wherever they are connected: kept beside each revoked serial, which it does not name.
    """


@dataclass(frozen=True, slots=True)
class HelloRefusal:
    """No session. `refused` is raised once `writes`, when there are any, have committed."""

    refused: Refused
    writes: RefusalWrites | None = None

    @property
    def reason(self) -> Reason:
        """Return the reason code."""
        return Reason(self.refused.reason)
