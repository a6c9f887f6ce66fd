"""The node_spec controller: where a daemon knows a higher generation than the database, its spec is published anew.

It happens when the database was restored from a backup. The daemon refuses what is below the highest generation it has
applied, and takes what it has read already for nothing new, so the spec as it stands goes out above both. See
docs/desired-state.md, "After a restored database"; decisions 0106.

While a command root is being replaced, specs that are signed under it are published anew, signed under the next one:
once it is retired, nobody could read them any more. See docs/rotation.md, "The life of a key"; decisions 0130.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from bettercompute import telemetry
from bettercompute.delivery.desired_state import NodeGenerations, next_generation, overtaken_by
from bettercompute.delivery.spec_generations import Circumstances, compose
from bettercompute.pki.rotation import KeyStage, Purpose, in_stage
from bettercompute.store import outbox, specs, trust
from bettercompute.store.database import Database, Transaction
from bettercompute.store.signing import Signing, signer_of
from bettercompute.store.specs import LockedSpec
from bettercompute.world import World

log = structlog.get_logger("bettercompute.controllers.node_spec")

NAME: Final = "node_spec"
# The poll behind the notification that Hello gives.
INTERVAL_MS: Final = 10_000
BATCH: Final = 100
ISSUED_BY: Final = "controller/node_spec"
SIGNED_ANEW: Final = "signed anew: the command root was replaced"


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

    def __init__(self, database: Database, *, world: World, signing: Signing | None = None) -> None:
        self._database = database
        self._signing = signing
        self._world = world
        self._after = ""

    async def reconcile(self) -> bool:
        """Publish for one page of nodes; return whether there may be more. What is beyond help is passed over."""
        page = await specs.overtaken(self._database, after=self._after, page_size=BATCH)
        for node_id in page:
            await self._database.retrying(partial(self._look, node_id=node_id))
        full = len(page) == BATCH
        self._after = page[-1] if full else ""
        return await self._sign_anew() or full

    async def _sign_anew(self) -> bool:
        """Publish anew what is signed under a root that was replaced, one page of nodes; return whether there is more.

        None of it is passed over, so a page that is done leaves room for the next.
        """
        if self._signing is None:
            return False
        keys = await trust.keys(self._database)
        replaced = [key.key_sha256 for key in in_stage(keys, Purpose.COMMAND_ROOT, KeyStage.PREVIOUS)]
        if not replaced:
            return False
        page = await trust.specs_signed_under(self._database, keys=replaced, after="", page_size=BATCH)
        for node_id in page:
            await self._database.retrying(partial(self._sign_one_anew, node_id=node_id))
        if page:
            log.info("specs signed anew under the new command root", nodes=len(page))
        return len(page) == BATCH

    async def _sign_one_anew(self, transaction: Transaction, *, node_id: str) -> None:
        locked = await specs.lock(transaction, node_id=node_id)
        if locked is not None and locked.body is not None:
            generation = next_generation(locked.generations)
            await self._publish(transaction, locked, node_id=node_id, generation=generation, why=SIGNED_ANEW)

    async def _look(self, transaction: Transaction, *, node_id: str) -> None:
        locked = await specs.lock(transaction, node_id=node_id)
        planned = None if locked is None else decide(locked.generations)
        if locked is None or locked.body is None or planned is None:
            return
        why = f"the daemon knows generation {planned.above}, the database had {locked.generations.generation}"
        await self._publish(transaction, locked, node_id=node_id, generation=planned.generation, why=why)
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

    async def _publish(
        self, transaction: Transaction, locked: LockedSpec, *, node_id: str, generation: int, why: str
    ) -> None:
        """Publish the spec as it stands, under a higher generation."""
        assert locked.body is not None, "the caller looked"
        new = compose(
            locked.body.full,
            before=locked.body,
            of=Circumstances(
                node_id=node_id,
                trust_domain=locked.body.trust_domain,
                generation=generation,
                issued_at_ms=locked.now_ms,
            ),
            signer=await signer_of(self._signing, transaction),
        )
        await specs.publish(transaction, new, node_id=node_id, issued_at_ms=locked.now_ms, issued_by=ISSUED_BY, why=why)
