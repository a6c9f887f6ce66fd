"""What one node may take of a gateway: many streams of one certificate cost the others nothing, nor itself for long.

See docs/sessions.md, "Opening".
"""

from __future__ import annotations

import asyncio

import pytest

from bettercompute.gateway.config import GatewayConfig
from bettercompute.protocol.statuses import Status
from bettercompute.session import opening
from tests.contract.gateway.rig import Daemon, Node, Rig


async def unanswered(rig: Rig, node: Node, count: int, *, hello: bool, attempt: str = "0") -> list[Daemon]:
    """Open streams of one node and leave them open."""
    daemons = []
    for _ in range(count):
        daemon = await rig.dial(node, metadata={"x-bc-attempt": attempt})
        if hello:
            daemon.say_hello()
        daemons.append(daemon)
    return daemons


async def test_a_daemon_that_reconnects_a_hundred_times_is_no_clone_and_does_not_wait_for_itself(rig: Rig) -> None:
    node = await rig.add_node("node-a")
    for _ in range(100):
        daemon = await rig.dial(node)
        daemon.say_hello()
        # Until its Hello is in line: one that ends before is not even read.
        for _ in range(10):
            await asyncio.sleep(0)
        daemon.connection.close()
    # `receive` waits 10 s at most: a tenth of what a hundred turns of a second each would take.
    await rig.connect(node)
    [row] = await rig.database.query("SELECT duplicate_hellos FROM node_sessions WHERE node_id = 'node-a'")
    assert row["duplicate_hellos"] == 0
    assert not await rig.database.query("SELECT FROM outbox WHERE type LIKE 'security.%'")


@pytest.mark.parametrize("hello", [False, True], ids=["silent", "hello"])
async def test_only_so_many_streams_of_a_node_wait_for_their_session(rig: Rig, hello: bool) -> None:
    node = await rig.add_node("node-a")
    await unanswered(rig, node, opening.OPENING_PER_NODE_MAX, hello=hello)
    await rig.until(lambda: rig.gateway.life is not None and rig.gateway.life.streams >= opening.OPENING_PER_NODE_MAX)
    another = await rig.dial(node)
    status, reason, message = await another.end()
    assert (status, reason) == (Status.RESOURCE_EXHAUSTED, "hellos")
    assert "node-a" in message
    assert int(another.call.trailers["grpc-retry-pushback-ms"]) >= 1_000
    await rig.connect(await rig.add_node("node-b"))


class TestHeld:
    """A gateway whose bucket is empty, and one node that claims to have waited, again and again."""

    @pytest.fixture
    def config(self) -> GatewayConfig:
        return GatewayConfig(name="gw", handshakes_per_s=10)

    async def test_one_node_does_not_fill_the_places_of_those_who_are_held(self, rig: Rig) -> None:
        node = await rig.add_node("node-a")
        daemons = await unanswered(rig, node, 50, hello=False, attempt="2")
        await rig.until(
            lambda: sum(one.call.status is not None for one in daemons) >= 50 - opening.OPENING_PER_NODE_MAX
        )
        held = await rig.dial(await rig.add_node("node-b"), metadata={"x-bc-attempt": "2"})
        held.say_hello()
        await held.receive("welcome")
