"""Standing: what an operator has said of a node, and what its daemon is told then.

A lock ends the node's sessions and lets none begin, and takes nothing away: certificates stay good and are renewed, and
when the lock ends the node is back by itself. A revocation is for good: only a join with a new token helps. See
docs/security.md, "A node's standing"; decisions 0125 and 0126.
"""

from __future__ import annotations

from dataclasses import dataclass

from bettercompute.errors import Refused
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason, refuse

RETURN_MS = (30_000, 60_000)
"""When a locked node asks again: an unlock is felt within a minute, and of a thousand locked nodes 22 ask a second."""
SPREAD_MS = 5_000
"""Nodes whose lock ends at one moment come back within so long after it."""
CURE = "re-join the machine with a new join token (`bcd rejoin`)"
BY_OPERATOR = "operator"
FORGOTTEN = "forgotten"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """Who has locked a node, why (may be empty), and until when by the database's clock; None: until it is undone."""

    by: str
    reason: str
    until_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocation:
    """Who has revoked a node's identity, and why (may be empty)."""

    by: str
    reason: str


def in_force(lock: Lock | None, *, now_ms: int) -> Lock | None:
    """Return a lock that has not ended by itself."""
    return lock if lock is not None and (lock.until_ms is None or now_ms < lock.until_ms) else None


def refuse_locked(node_id: str, lock: Lock, *, now_ms: int, drawn: float) -> Refused:
    """Return the refusal of a session of a locked node. `drawn` is even from [0, 1)."""
    low_ms, high_ms = RETURN_MS
    wait_ms = round(low_ms + (high_ms - low_ms) * drawn)
    if lock.until_ms is None:
        end = "until it is unlocked"
    else:
        left_ms = max(0, lock.until_ms - now_ms)
        end = f"for another {-(-left_ms // 1000)} s"
        wait_ms = min(wait_ms, left_ms + round(SPREAD_MS * drawn))
    why = f": {lock.reason}" if lock.reason else ""
    return refuse(Reason.LOCKED, f"node {node_id} is locked by {lock.by} {end}{why}", pushback_ms=max(1, wait_ms))


def refuse_revoked(node_id: str, revocation: Revocation) -> Refused:
    """Return the refusal of a session of a revoked node, whatever certificate it shows."""
    notice = revoked_notice(node_id, revocation)
    return refuse(Reason.REVOKED, f"{notice.message}; cure: {notice.cure}")


def revoked_notice(node_id: str, revocation: Revocation) -> messages.RevocationNotice:
    """Return what the holder of a revoked identity is told."""
    why = f": {revocation.reason}" if revocation.reason else ""
    return messages.RevocationNotice(
        reason=BY_OPERATOR, message=f"node {node_id} was revoked by {revocation.by}{why}", cure=CURE
    )


def forgotten_notice(node_id: str, *, by: str) -> messages.RevocationNotice:
    """Return what somebody is told who shows a certificate of a node that was forgotten."""
    return messages.RevocationNotice(
        reason=FORGOTTEN, message=f"node {node_id} was forgotten by {by}: there is no such node any more", cure=CURE
    )
