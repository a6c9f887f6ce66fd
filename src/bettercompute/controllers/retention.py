"""The retention controller: what has been kept long enough is removed, in batches.

See docs/gateway.md, "The controllers"; decisions 0115.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from bettercompute.store import idempotency, leases, replay, retention
from bettercompute.store.database import Database

log = structlog.get_logger("bettercompute.controllers.retention")

NAME = "retention"
INTERVAL_MS = 60_000
BATCH = 1_000
DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """How long things are kept."""

    commands_ms: int = 30 * DAY_MS
    outbox_ms: int = 30 * DAY_MS
    events_ms: int = 30 * DAY_MS
    certificates_ms: int = 7 * DAY_MS
    """Past expiry: longer than the 72 hours in which an expired certificate still lets its node join again."""
    join_tokens_ms: int = 30 * DAY_MS
    """Past expiry."""
    leases_ms: int = 7 * DAY_MS
    idempotency_ms: int = DAY_MS
    replay_ms: int = 300_000
    """Past expiry: for clocks that disagree."""


DEFAULT_KEEP = Keep()


class RetentionController:
    """Removes one batch of each per run."""

    name = NAME
    interval_ms = INTERVAL_MS

    def __init__(self, database: Database, *, keep: Keep = DEFAULT_KEEP) -> None:
        self._database = database
        self._keep = keep

    async def reconcile(self) -> bool:
        """Remove a batch of everything; return whether any of them was full."""
        keep, database = self._keep, self._database
        removed = {
            "commands": await retention.delete_commands(database, older_than_ms=keep.commands_ms, batch_size=BATCH),
            "approvals": await retention.delete_approvals(database, older_than_ms=keep.commands_ms, batch_size=BATCH),
            "outbox": await retention.delete_outbox(database, older_than_ms=keep.outbox_ms, batch_size=BATCH),
            "events": await retention.delete_events(database, older_than_ms=keep.events_ms, batch_size=BATCH),
            "event_gaps": await retention.delete_event_gaps(database, older_than_ms=keep.events_ms, batch_size=BATCH),
            "certificates": await retention.delete_certificates(
                database, older_than_ms=keep.certificates_ms, batch_size=BATCH
            ),
            "join_tokens": await retention.delete_join_tokens(
                database, older_than_ms=keep.join_tokens_ms, batch_size=BATCH
            ),
            "leases": await leases.delete_retired(database, retired_for_ms=keep.leases_ms),
            "idempotency": await idempotency.delete_old(database, older_than_ms=keep.idempotency_ms, batch_size=BATCH),
            "replay": await replay.delete_expired(database, kept_after_expiry_ms=keep.replay_ms, batch_size=BATCH),
        }
        if any(removed.values()):
            log.info("removed what was kept long enough", **removed)
        return max(removed.values()) >= BATCH
