"""The expiry controller: pending commands whose `not_after` has passed end expired.

Only what no session holds expires here: what was never sent, and what was put back because the node was busy. A
command in flight past its deadline on a silent node is shown as overdue and never guessed at. See docs/gateway.md,
"The controllers"; decisions 0105.
"""

from __future__ import annotations

import structlog

from bettercompute import telemetry
from bettercompute.store import commands, delivery
from bettercompute.store.database import Database, Transaction
from bettercompute.world import World

log = structlog.get_logger("bettercompute.controllers.expiry")

NAME = "expiry"
INTERVAL_MS = 10_000
BATCH = 500
MESSAGE = "not delivered before its deadline (not_after); nothing of it has begun"
MESSAGE_UNSURE = (
    "not delivered before its deadline (not_after); an earlier delivery was never answered: the node may have begun it"
)


class ExpiryController:
    """Ends what is overdue, a batch at a time."""

    name = NAME
    interval_ms = INTERVAL_MS

    def __init__(self, database: Database, *, world: World) -> None:
        self._database = database
        self._world = world

    async def reconcile(self) -> bool:
        """End one batch; return whether there may be more."""

        async def work(transaction: Transaction) -> int:
            expired = await delivery.expire(
                transaction,
                outbox_ids=[self._world.ids.uuid7() for _ in range(BATCH)],
                event_type=telemetry.EVENT_COMMAND_FINISHED,
                message=MESSAGE,
                message_unsure=MESSAGE_UNSURE,
            )
            await commands.tell_finished(transaction, command_ids=[command_id for _, command_id in expired])
            return len(expired)

        expired = await self._database.retrying(work)
        if expired:
            log.info("commands expired", commands=expired)
        return expired == BATCH
