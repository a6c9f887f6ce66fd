"""The node_spec controller against PostgreSQL: a node whose daemon knows more than the database."""

from __future__ import annotations

import pytest

from bettercompute.controllers.node_spec import ISSUED_BY, NodeSpecController, Republish, decide
from bettercompute.delivery.desired_state import GENERATION_LEAP_MAX, NodeGenerations
from bettercompute.delivery.spec_generations import Circumstances, compose
from bettercompute.protocol import messages
from bettercompute.store import sessions, specs
from bettercompute.system import system_world
from tests.contract.gateway import seed

SPEC = messages.NodeSpec(daemon=messages.DaemonSection(log_level="debug"))


def held(generation: int, observed: int, applied: int) -> NodeGenerations:
    return NodeGenerations(generation=generation, observed_generation=observed, applied_generation=applied)


@pytest.mark.parametrize(
    ("generations", "planned"),
    [
        (held(3, 3, 3), None),
        (held(3, 2, 1), None),
        (held(3, 5, 5), Republish(6, 5)),
        (held(3, 5, 3), Republish(6, 5)),
        (held(0, 5, 5), None),
        (held(3, 4 + GENERATION_LEAP_MAX, 3), None),
    ],
    ids=range(6),
)
def test_decide(generations: NodeGenerations, planned: Republish | None) -> None:
    assert decide(generations) == planned


@pytest.fixture
async def restored(database):
    """Three nodes at generation 1; the daemon of the first has applied 7, that of the last claims nonsense."""
    for node_id, applied in (("n1", 7), ("n2", 1), ("n3", 2**62)):
        await seed.add_node(database, node_id)
        async with database.transaction() as transaction:
            of = Circumstances(node_id=node_id, trust_domain="bc.test", generation=1, issued_at_ms=7)
            new = compose(SPEC, before=None, of=of)
            await specs.publish(transaction, new, node_id=node_id, issued_at_ms=7, issued_by="ops", why="")
        await database.query(
            "UPDATE nodes SET observed_generation = $1, applied_generation = $1 WHERE node_id = $2", applied, node_id
        )
    return database


async def test_its_spec_goes_out_above_what_the_daemon_knows(restored):
    controller = NodeSpecController(restored, world=system_world())
    assert not await controller.reconcile()
    found = await sessions.newer_specs(restored, generations={"n1": 1, "n2": 1, "n3": 1})
    assert set(found) == {"n1"}
    body = messages.DesiredStateBody.FromString(found["n1"].body)
    assert (found["n1"].generation, body.generation, body.full) == (8, 8, SPEC)
    assert (body.node_id, body.trust_domain) == ("n1", "bc.test")
    [newest, _] = await specs.history(restored, node_id="n1", before=2**63 - 1, page_size=10)
    assert (newest.issued_by, newest.changed) == (ISSUED_BY, ())
    assert newest.why == "the daemon knows generation 7, the database had 1"
    [event] = await restored.query("SELECT type, node_id, payload->>'generation' AS generation FROM outbox")
    assert (event["type"], event["node_id"], event["generation"]) == ("node.spec-overtaken", "n1", "8")
    assert not await controller.reconcile()
    assert len(await restored.query("SELECT FROM outbox")) == 1


async def test_what_is_beyond_help_does_not_keep_the_others_back(restored, monkeypatch):
    monkeypatch.setattr("bettercompute.controllers.node_spec.BATCH", 1)
    controller = NodeSpecController(restored, world=system_world())
    await restored.query("UPDATE nodes SET applied_generation = 2^62, observed_generation = 2^62 WHERE node_id = 'n1'")
    await restored.query("UPDATE nodes SET applied_generation = 3, observed_generation = 3 WHERE node_id = 'n3'")
    assert await controller.reconcile(), "a full page: there may be more"
    assert await controller.reconcile()
    assert set(await sessions.newer_specs(restored, generations={"n1": 1, "n3": 1})) == {"n3"}
    assert not await controller.reconcile(), "and from the start again"
