"""Liveness: heartbeats, silence at both ends, the flush, and the transitions that nobody reports.

Nothing is written for a heartbeat. A gateway keeps last-seen times in memory, flushes them as ages, and closes a
session after three silent intervals. What no gateway can report (its own death) the Liveness controller finds from
the rows; none of its transitions releases anything. See docs/sessions.md, "Liveness"; decisions 0107.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from bettercompute.session.closing import Cause

HEARTBEAT_INTERVAL_MS = 10_000
HEARTBEATS_PER_S_MAX = 500
"""What a gateway sees at most, whatever the fleet: 5,000 sessions at 10 s."""
OBEYED_INTERVAL_MIN_MS = 10
OBEYED_INTERVAL_MAX_MS = 600_000
"""300,000 sessions at one gateway."""
MISSED_MAX = 3
FLUSH_PERIOD_MS = 15_000
FLUSH_CHUNK = 500
HASHES_EVERY = 10
"""Every 10th heartbeat carries the inventory hashes."""
SERVER_SILENCE_MS = 60_000
"""An idle gateway sends nothing but answers to PINGs, every 20 s: three of them missing means that it is gone."""

GATEWAY_LOST_AFTER_MS = 120_000
STALE_SLACK_MS = 30_000
UNREACHABLE_AFTER_MS = 300_000
OUTAGE_MS = 20_000
"""The database or the controller away for longer than this: ages that nobody could flush are no evidence."""
GRACE_MS = 300_000


def heartbeat_interval_ms(live_sessions: int) -> int:
    """Return the interval to tell at Welcome: 10 s up to 5,000 sessions, then as long as keeps 500 heartbeats a
    second.
    """
    return max(HEARTBEAT_INTERVAL_MS, -(-live_sessions * 1_000 // HEARTBEATS_PER_S_MAX))


def heartbeat_interval_obeyed(told_ms: int) -> int:
    """Return the interval that a daemon keeps, whatever it was told: a lie must not make it spin, nor fall silent."""
    return max(OBEYED_INTERVAL_MIN_MS, min(told_ms, OBEYED_INTERVAL_MAX_MS))


def check_period_ms(interval_ms: int) -> int:
    """Return how often the gateway looks for silent sessions: half the interval, at most the flush period."""
    return min(interval_ms // 2, FLUSH_PERIOD_MS)


def live_window_ms(interval_ms: int) -> int:
    """Return how long after its last sign a previous session still counts as live for duplicate identity."""
    return MISSED_MAX * interval_ms + FLUSH_PERIOD_MS


def closing_cause(
    *, last_heard_ms: int, heartbeat_interval_ms: int, certificate_ends_at_ms: int, now_ms: int
) -> Cause | None:
    """Return why the gateway's check ends a session: silence or an expired certificate; None when it lives on."""
    if now_ms >= certificate_ends_at_ms:
        return Cause.CERTIFICATE_EXPIRED
    if now_ms - last_heard_ms > MISSED_MAX * heartbeat_interval_ms:
        return Cause.HEARTBEAT_TIMEOUT
    return None


# The flush


@dataclass(frozen=True, slots=True, order=True)
class FlushRow:
    """One session's last-seen time, as an age: a gateway's clock skew cannot fake liveness."""

    node_id: str
    epoch: int
    session_id: str
    age_ms: int


def flush_chunks(rows: Iterable[FlushRow]) -> tuple[tuple[FlushRow, ...], ...]:
    """Return the rows in node order, 500 to a transaction: locks taken in one order never wait in a circle."""
    ordered = sorted(rows)
    return tuple(tuple(ordered[at : at + FLUSH_CHUNK]) for at in range(0, len(ordered), FLUSH_CHUNK))


# The daemon's heartbeats


def carries_hashes(*, heartbeats_sent: int, inventory_changed: bool) -> bool:
    """Say whether the next heartbeat carries the hashes: every 10th, and the first after changed sections were sent."""
    return inventory_changed or (heartbeats_sent + 1) % HASHES_EVERY == 0


def server_silent(*, last_heard_ms: int, now_ms: int) -> bool:
    """Say whether the daemon gives a gateway up: no frame and no answered PING for 60 s."""
    return now_ms - last_heard_ms >= SERVER_SILENCE_MS


# The Liveness controller


class Connectivity(StrEnum):
    """What is shown of a node's connection."""

    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLiveness:
    """One node as the controller reads it; all ages by the database's clock."""

    connectivity: Connectivity
    gateway_lease_expired_ms: int | None = None
    """How long ago its gateway's lease expired; None while it has not, or for a node without a gateway."""
    last_seen_age_ms: int = 0
    heartbeat_interval_ms: int = HEARTBEAT_INTERVAL_MS
    disconnected_age_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """A transition nobody reports. It is written with the epoch and last_seen that were read."""

    to: Connectivity
    reason: str
    retire_lease: bool = False
    clear_gateway: bool = False


GATEWAY_LOST = Transition(to=Connectivity.DISCONNECTED, reason="gateway-lost", retire_lease=True, clear_gateway=True)
STALE = Transition(to=Connectivity.DISCONNECTED, reason="stale", clear_gateway=True)
UNREACHABLE = Transition(to=Connectivity.UNREACHABLE, reason="unreachable")


def stale_after_ms(interval_ms: int) -> int:
    """Return how old a live gateway's last_seen may be: three of its own intervals, one flush period and 30 s."""
    return MISSED_MAX * interval_ms + FLUSH_PERIOD_MS + STALE_SLACK_MS


def transition(node: NodeLiveness) -> Transition | None:
    """Return what becomes of a node outside of any grace; None when nothing does. Only Hello makes a node connected."""
    if node.connectivity is Connectivity.CONNECTED:
        if node.gateway_lease_expired_ms is not None:
            return GATEWAY_LOST if node.gateway_lease_expired_ms > GATEWAY_LOST_AFTER_MS else None
        return STALE if node.last_seen_age_ms > stale_after_ms(node.heartbeat_interval_ms) else None
    if node.connectivity is Connectivity.DISCONNECTED and node.disconnected_age_ms > UNREACHABLE_AFTER_MS:
        return UNREACHABLE
    return None


@dataclass(frozen=True, slots=True)
class Watch:
    """What the controller remembers of its own passes, to notice that nobody was watching."""

    database_ms: int | None = None
    """compute_now() of the last pass; at start the one a former process stored, None when there is none."""
    monotonic_ms: int | None = None
    quiet_until_ms: int | None = None
    """No transition before this time, on the monotonic clock."""


def watched(watch: Watch, *, database_ms: int, monotonic_ms: int) -> Watch:
    """Return the watch after a pass read the database: an outage or a jump of its clock begins a grace of 5 minutes."""
    quiet_until_ms = watch.quiet_until_ms
    if watch.database_ms is not None:
        elapsed_ms = database_ms - watch.database_ms
        away = elapsed_ms > OUTAGE_MS or elapsed_ms < -OUTAGE_MS
        if watch.monotonic_ms is not None:
            passed_ms = monotonic_ms - watch.monotonic_ms
            away = passed_ms > OUTAGE_MS or abs(elapsed_ms - passed_ms) > OUTAGE_MS
        if away:
            quiet_until_ms = monotonic_ms + GRACE_MS
    return replace(watch, database_ms=database_ms, monotonic_ms=monotonic_ms, quiet_until_ms=quiet_until_ms)


def in_grace(watch: Watch, *, monotonic_ms: int) -> bool:
    """Say whether transitions wait."""
    return watch.quiet_until_ms is not None and monotonic_ms < watch.quiet_until_ms


def transitions(nodes: Sequence[NodeLiveness], watch: Watch, *, monotonic_ms: int) -> tuple[Transition | None, ...]:
    """Return the transition of each node of a pass, in order; none of them during a grace."""
    if in_grace(watch, monotonic_ms=monotonic_ms):
        return (None,) * len(nodes)
    return tuple(transition(node) for node in nodes)
