"""What a daemon's rules remember over its process and over each stream. Values only; the rules are elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from bettercompute.delivery.journal_rules import JournalEntry
from bettercompute.delivery.lanes import DaemonLane
from bettercompute.pki.quorum import Unbatched
from bettercompute.protocol import messages
from bettercompute.session.authority import ANYBODY, Authority
from bettercompute.session.clock import Clock
from bettercompute.session.reconnect import Backoff


class Phase(StrEnum):
    """Where the daemon is with its stream."""

    OFFLINE = "offline"
    AWAITING_WELCOME = "awaiting-welcome"
    LIVE = "live"
    ENDING = "ending"
    """This side has ended the stream and waits for `StreamEnded`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonFacts:
    """What does not change while the process lives."""

    node_id: str
    role: int
    boot_id: str
    process_id: str
    daemon_version: str
    proto_min: int
    proto_max: int
    trust_domain: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalFacts:
    """What the journal held when the process started."""

    journal_id: str
    entries: Mapping[str, JournalEntry]
    cancelled: Mapping[str, int]
    """Ids cancelled before their delivery, with the mark at that time."""
    last_epoch: int
    last_event_seq: int
    acked_event_seq: int
    hello_nonce: bytes
    previous_hello_nonce: bytes
    mark_ms: int
    confirmed_ms: int | None
    full: bool = False
    unbatched: Unbatched | None = None
    """Destructive commands that ran without an approval, as last kept; None: never one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advertised:
    """What Hello claims beside identity and journal; the shell may replace it between two streams."""

    capabilities: tuple[str, ...] = ()
    drivers: tuple[messages.DriverManifest, ...] = ()
    inventory_hashes: Mapping[str, bytes] = field(default_factory=dict)
    observed_generation: int = 0
    applied_generation: int = 0
    spec_sha256: bytes = b""
    trust_version: int = 0


@dataclass(frozen=True, kw_only=True)
class DaemonSession:
    """Everything the daemon's rules remember. Times are on the host's monotonic clock unless named otherwise.

    Without slots, for `changed`.
    """

    facts: DaemonFacts
    advertised: Advertised
    clock: Clock
    unbatched: Unbatched
    uncounted: tuple[str, Unbatched] | None = None
    """The last command that was counted as one without an approval, and the count before it."""
    authority: Authority = ANYBODY
    # the journal as this process knows it
    journal_id: str
    journal_full: bool
    entries: Mapping[str, JournalEntry]
    """Commands that are not done, or whose result is not acked."""
    settled: Mapping[str, JournalEntry]
    """Done and acked: kept so that a late delivery does not run twice."""
    cancelled: Mapping[str, int]
    last_epoch: int
    last_event_seq: int
    acked_event_seq: int
    hello_nonce: bytes
    """Empty once a Welcome for it was applied: the next dial draws a fresh one, also when another process makes it."""
    previous_hello_nonce: bytes
    # the stream
    phase: Phase
    backoff: Backoff
    serving_not_before_ms: int | None = None
    serving_not_after_ms: int | None = None
    dialed_at_ms: int = 0
    session_id: str = ""
    epoch: int = 0
    upgrade_only: bool = False
    update_batches: bool = False
    """The gateway reads several updates in one frame."""
    lanes: Mapping[int, DaemonLane] = field(default_factory=dict)
    heartbeat_interval_ms: int = 0
    next_heartbeat_at_ms: int | None = None
    heartbeats_sent: int = 0
    hashes_due: bool = False
    """The inventory changed since the last heartbeat that carried hashes."""
    hello_results: frozenset[str] = frozenset()
    """Results that rode in this stream's Hello; the others follow Welcome."""
    sent_event_seq: int = 0
    sending_events: bool = False
    """A `SendEvents` has not been answered yet."""
    status: messages.StatusReport | None = None
    trust_reported: bool = True
    """The trust bundle in force has been told, in Hello or in a status report, since it was applied."""
    refused: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """What was refused of what gateways relayed, and how often in this process: `session.refusals`."""
    refused_reported: bool = True
    drain_at_ms: int | None = None
    last_heard_ms: int = 0
