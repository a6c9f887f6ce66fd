"""A daemon that keeps to no order, over real TLS and against two gateways on one database.

See docs/sessions.md, "Opening", "Duplicate identity".
"""

from __future__ import annotations

import asyncio
import time

from bettercompute.protocol import messages, service
from bettercompute.protocol.frames import encode_message
from bettercompute.protocol.statuses import Status
from bettercompute.store import leases
from bettercompute.transport.streams import CallEnded, ClientCall, Connection
from tests.e2e.gateways import POLL_S, until
from tests.e2e.test_gateway_tls import WAIT_S, Site, ended, say_hello, site

__all__ = ["site"]

HELLO = messages.Hello(
    node_id="node-a", role=messages.AGENT_ROLE_NODE, boot_id="boot", journal_id="journal", proto_min=1, proto_max=1
)


async def welcomed(connection: Connection) -> tuple[ClientCall, messages.Welcome]:
    """Say Hello until there is room: streams that were given up count against it until their handlers have ended."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return await say_hello(connection, "node-a")
        except CallEnded as end:
            if "REFUSED_STREAM" not in end.message or time.monotonic() > deadline:
                raise
        await asyncio.sleep(POLL_S)


async def test_a_hundred_reconnects_between_two_gateways_are_no_clone_and_delay_nobody(site: Site) -> None:
    gateways = [await site.start("one"), await site.start("two")]
    identity = await site.join("node-a")
    connections = [await site.dial(gateway, identity) for gateway in gateways]
    for number in range(100):
        call = await connections[number % 2].call(service.SESSION)
        call.send(encode_message(messages.AgentFrame(hello=HELLO)))
        await call.drained()
        call.cancel()
    call, welcome = await welcomed(connections[1])
    [row] = await site.database.query("SELECT gateway_id, session_epoch, duplicate_hellos FROM node_sessions")
    assert (row["gateway_id"], row["session_epoch"], row["duplicate_hellos"]) == (
        gateways[1].gateway_id,
        welcome.epoch,
        0,
    )
    assert not await site.database.query("SELECT FROM outbox WHERE type LIKE 'security.%'")
    assert call.status is None
    for connection in connections:
        connection.close()


async def test_what_follows_the_frame_that_ended_a_session_is_not_obeyed(site: Site) -> None:
    gateway = await site.start("one")
    connection = await site.dial(gateway, await site.join("node-a"))
    call, _ = await say_hello(connection, "node-a")
    call.send(encode_message(messages.AgentFrame(hello=HELLO)))
    event = messages.Event(seq=1, event_id="0197a000-0000-7000-8000-000000000001", type="late", at_ms=1)
    late = messages.EventBatch(journal_id="journal", events=[event])
    call.send(encode_message(messages.AgentFrame(events=late)))
    assert await ended(call) == (Status.INVALID_ARGUMENT, "second-hello")
    call, welcome = await say_hello(connection, "node-a", last_epoch=1)
    assert welcome.acked_event_seq == 0
    assert not await site.database.query("SELECT FROM node_events")
    call.half_close()
    assert await ended(call) == (Status.OK, "stream-ended")
    connection.close()


async def test_a_hello_while_the_gateway_begins_to_drain_is_served_or_sent_away(site: Site) -> None:
    first, second = await site.start("one"), await site.start("two")
    identity = await site.join("node-a")
    connection = await site.dial(first, identity)
    early = await connection.call(service.SESSION)
    await until(lambda: first.life is not None and first.life.streams, what="the stream", within_s=WAIT_S)
    assert await leases.request_drain(site.database, name=first.gateway_id, requested_by="op")
    await until(lambda: first.life is not None and first.life.draining, what="the drain", within_s=WAIT_S)
    # Its stream was admitted before: it gets its session, and the Drain frame after it.
    early.send(encode_message(messages.AgentFrame(hello=HELLO)))
    async with asyncio.timeout(WAIT_S):
        cases = []
        while "drain" not in cases:
            data = await early.receive()
            assert data is not None, (early.status, early.status_message)
            cases.append(messages.ServerFrame.FromString(data).WhichOneof("frame"))
    assert cases[0] == "welcome"
    late = await connection.call(service.SESSION)
    assert await ended(late) == (Status.UNAVAILABLE, "draining")
    other = await site.dial(second, identity)
    _, welcome = await say_hello(other, "node-a", last_epoch=1)
    assert welcome.gateway_id == second.gateway_id
    connection.close()
    other.close()
