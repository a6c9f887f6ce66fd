"""What the gateway remembers of a live session, and what dispatch may take from it.

Values only; the rules are elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bettercompute.delivery.lanes import GatewayLane
from bettercompute.protocol import messages
from bettercompute.session.hello_plan import HeldCommand


@dataclass(frozen=True, kw_only=True)
class GatewaySession:
    """One live session at the gateway. Times are on the monotonic clock of the process.

    Without slots, for `changed`.
    """

    node_id: str
    session_id: str
    epoch: int
    gateway_id: str
    boot_id: str
    journal_id: str
    certificate_serial: str
    certificate_ends_at_ms: int
    heartbeat_interval_ms: int
    upgrade_only: bool
    signed_only: bool
    allowed_kinds: frozenset[str] | None
    lacking: frozenset[str]
    """Kinds that need a capability which the daemon does not advertise."""
    tenant_controlled: bool
    trust_version: int
    last_heard_ms: int
    lanes: Mapping[int, GatewayLane]
    sent: Mapping[str, int]
    """Commands sent on this stream or running at its begin, with their lanes: those that hold a credit."""
    held: tuple[HeldCommand, ...]
    """In flight, unsent, without a credit; in seq order."""
    next_event_seq: int
    observed_generation: int
    applied_generation: int
    offered_generation: int
    busy: Mapping[str, int]
    """How often each command was refused BUSY in this session."""
    ending: frozenset[str] = frozenset()
    """Commands whose end was heard and is not committed yet: their rows still say that they are in flight."""
    cancels_told: frozenset[str] = frozenset()
    """Cancels that this stream has carried, of commands that have not ended: polls name them until they have."""
    load: messages.NodeLoad | None = None
    """From the last heartbeat; kept in memory only."""
    drain_at_ms: int | None = None
    """When the daemon was asked to have reconnected elsewhere."""
    trust_offered: int = 0
    """The trust version that Welcome carried; 0: none, for the daemon held the newest."""
    awaits_new_journal: bool = False
    """Welcome said `new_journal`: nothing is sent before the daemon says Hello anew."""
    closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneDemand:
    """What one lane of a session can take: first those held back, then pending ones, both in seq order."""

    lane: int
    free: int
    held: tuple[str, ...]
    """At most `free` ids in flight in this epoch to re-send: attempt + 1, `sent_boot_id` = boot_id."""
    pending: int
    """How many pending commands may follow them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchDemand:
    """What the next dispatch transaction may mark for a session.

    All writes are fenced by epoch, session and gateway.
    """

    node_id: str
    session_id: str
    epoch: int
    boot_id: str
    lanes: tuple[LaneDemand, ...]
    kinds: frozenset[str] | None
    """Only these kinds; None: all. Upgrade-only sessions name `daemon.upgrade`."""
    signed_only: bool
