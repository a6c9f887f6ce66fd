"""The node_spec controller: where a daemon knows a higher generation than the database, its spec is published anew.

It happens when the database was restored from a backup. The daemon refuses what is below the highest generation it has
applied, and takes what it has read already for nothing new, so the spec as it stands goes out above both. See
docs/desired-state.md, "After a restored database"; decisions 0106.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from bettercompute import telemetry
from bettercompute.delivery.desired_state import NodeGenerations, next_generation, overtaken_by
from bettercompute.delivery.spec_generations import Circumstances, compose
from bettercompute.pki.intent import IntentSigner
from bettercompute.store import outbox, specs
from bettercompute.store.database import Database, Transaction
from bettercompute.world import World

log = structlog.get_logger("bettercompute.controllers.node_spec")

NAME: Final = "node_spec"
# The poll behind the notification that Hello gives.
INTERVAL_MS: Final = 10_000
BATCH: Final = 100
ISSUED_BY: Final = "controller/node_spec"


@dataclass(frozen=True, slots=True)
class Republish:
    """Publish the spec as it stands, under this generation; `above` is what the daemon knows."""

    generation: int
    above: int


def decide(held: NodeGenerations) -> Republish | None:
    """Return what to do about a node. A node that never had a spec is left alone: nothing is desired of it."""
    above = overtaken_by(held)
    if held.generation == 0 or above is None:
        return None
    return Republish(next_generation(held), above)


class NodeSpecController:
    """Looks for such nodes through an index that is almost always empty, and publishes one after the other."""

    name = NAME
    interval_ms = INTERVAL_MS

    def __init__(self, database: Database, *, world: World, signer: IntentSigner | None = None) -> None:
        self._database = database
        self._signer = signer
        self._world = world
        self._after = ""

    async def reconcile(self) -> bool:
        """Publish for one page of nodes; return whether there may be more. What is beyond help is passed over."""
        page = await specs.overtaken(self._database, after=self._after, page_size=BATCH)
        for node_id in page:
            await self._database.retrying(partial(self._look, node_id=node_id))
        full = len(page) == BATCH
        self._after = page[-1] if full else ""
        return full

    async def _look(self, transaction: Transaction, *, node_id: str) -> None:
        locked = await specs.lock(transaction, node_id=node_id)
        planned = None if locked is None else decide(locked.generations)
        if locked is None or locked.body is None or planned is None:
            return
        new = compose(
            locked.body.full,
            before=locked.body,
            of=Circumstances(
                node_id=node_id,
                trust_domain=locked.body.trust_domain,
                generation=planned.generation,
                issued_at_ms=locked.now_ms,
            ),
            signer=self._signer,
        )
        await specs.publish(
            transaction,
            new,
            node_id=node_id,
            issued_at_ms=locked.now_ms,
            issued_by=ISSUED_BY,
            why=f"the daemon knows generation {planned.above}, the database had {locked.generations.generation}",
        )
        told = {"nodeId": node_id, "generation": planned.generation, "above": planned.above}
        await outbox.publish(
            transaction,
            [
                outbox.NewEvent(
                    id=self._world.ids.uuid7(),
                    type=telemetry.EVENT_NODE_SPEC_OVERTAKEN,
                    node_id=node_id,
                    payload=told,
                )
            ],
        )
        log.warning("a daemon knows a higher generation than the database: was it restored?", **told)
