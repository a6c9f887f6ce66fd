"""The outbox publisher: committed events get their place in the stream, after the commit.

See docs/gateway.md, "The controllers"; decisions 0034 and 0109.
"""

from __future__ import annotations

from bettercompute.store import outbox
from bettercompute.store.database import Database

NAME = "outbox"
# The poll behind the notification.
INTERVAL_MS = 1_000


class OutboxController:
    """Numbers what waits; any number of them take turns."""

    name = NAME
    interval_ms = INTERVAL_MS

    def __init__(self, database: Database) -> None:
        self._database = database

    async def reconcile(self) -> bool:
        """Number one batch; return whether there may be more."""
        return await outbox.assign_positions(self._database) >= outbox.PUBLISH_BATCH
