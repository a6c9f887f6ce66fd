"""A gateway without its lease writes nothing; one whose lease was retired starts over under a new id."""

from __future__ import annotations

import asyncio
import re

import pytest

from bettercompute.delivery.commands import CommandState
from bettercompute.gateway import lease
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Status
from tests.contract.gateway import seed
from tests.contract.gateway.rig import WAIT_S


@pytest.fixture(autouse=True)
def _renew_often(monkeypatch):
    monkeypatch.setattr(lease, "RENEW_EVERY_MS", 100)


def lapse(fence) -> None:
    """Make the fence believe that its trust has run out, as after a process was stopped and continued."""
    fence._trusted_until_ms = 0


async def test_a_lapse_ends_sessions_without_a_disconnect_write(rig):
    node = await rig.add_node("node-a")
    daemon = await rig.connect(node)
    lapse(rig.gateway.life.fence)
    status, reason, _ = await daemon.end()
    assert (status, reason) == (Status.UNAVAILABLE, "fenced")
    row = await rig.row("node-a")
    assert (row["session_id"], row["state"]) == (daemon.welcome.session_id, "connected")
    assert row["gateway_id"] == rig.gateway.gateway_id


async def test_after_a_lapse_a_renewal_reopens_admission_for_new_sessions(rig):
    node = await rig.add_node("node-a")
    daemon = await rig.connect(node)
    gateway_id = rig.gateway.gateway_id
    lapse(rig.gateway.life.fence)
    await daemon.end()
    await asyncio.wait_for(rig.gateway.until_ready(), WAIT_S)
    again = await rig.connect(node)
    assert again.welcome.epoch == 2
    assert rig.gateway.gateway_id == gateway_id, "the lease was never lost to anybody"


async def test_queued_facts_of_a_fenced_session_are_not_written(rig):
    node = await rig.add_node("node-a")
    await seed.add_command(rig.database, "node-a", "c1")
    daemon = await rig.connect(node)
    await daemon.command()
    lapse(rig.gateway.life.fence)
    daemon.update("c1", messages.COMMAND_STATE_SUCCEEDED, attempt=1)
    assert (await daemon.end())[:2] == (Status.UNAVAILABLE, "fenced")
    assert await seed.state_of(rig.database, "c1") == CommandState.DISPATCHED
    assert [frame for frame in daemon.frames if frame.HasField("ack")] == []


async def test_a_retired_gateway_starts_over_under_a_new_id(rig):
    node = await rig.add_node("node-a")
    daemon = await rig.connect(node)
    before = rig.gateway.gateway_id
    await rig.database.query("UPDATE leases SET retired_at = compute_now()")
    assert (await daemon.end())[:2] == (Status.UNAVAILABLE, "fenced")
    await rig.until(lambda: rig.gateway.gateway_id not in {"", before})
    await asyncio.wait_for(rig.gateway.until_ready(), WAIT_S)
    again = await rig.connect(node)
    assert again.welcome.gateway_id == rig.gateway.gateway_id != before
    assert again.welcome.epoch == 2


async def test_a_database_that_was_promoted_ends_every_session_and_begins_another_life(rig):
    node = await rig.add_node("node-a")
    daemon = await rig.connect(node)
    before = rig.gateway.gateway_id
    [told] = await rig.database.query(
        "SELECT pg_get_functiondef('database_timeline'::regproc) AS definition, database_timeline() AS timeline"
    )
    assert re.fullmatch("[0-9A-F]{8}", told["timeline"])
    await rig.database.query(
        "CREATE OR REPLACE FUNCTION database_timeline() RETURNS text LANGUAGE sql STABLE AS $$ SELECT 'another' $$"
    )
    try:
        assert (await daemon.end())[:2] == (Status.UNAVAILABLE, "fenced")
        await rig.until(lambda: rig.gateway.gateway_id not in {"", before})
        await asyncio.wait_for(rig.gateway.until_ready(), WAIT_S)
        assert (await rig.connect(node)).welcome.epoch == 2
    finally:
        await rig.database.query(told["definition"])


async def test_a_disconnect_write_names_its_own_session_only(rig):
    node = await rig.add_node("node-a")
    daemon = await rig.connect(node)
    await rig.database.query(
        "UPDATE node_sessions SET session_epoch = 9, session_id = 'elsewhere', gateway_id = 'other'"
    )
    daemon.connection.close()
    await rig.until(lambda: len(rig.gateway.life.registry) == 0)
    await rig.until(lambda: rig.gateway.life._disconnects.idle)
    row = await rig.row("node-a")
    assert (row["session_id"], row["gateway_id"], row["state"]) == ("elsewhere", "other", "connected")


async def test_dispatch_sends_nothing_that_a_newer_session_elsewhere_should_have(rig):
    node = await rig.add_node("node-a")
    await rig.connect(node)
    await rig.database.query(
        "UPDATE node_sessions SET session_epoch = 9, session_id = 'elsewhere', gateway_id = 'other'"
    )
    await seed.add_command(rig.database, "node-a", "c1")
    rig.gateway.life.dispatcher.poke("node-a")
    await rig.until(lambda: not rig.gateway.life.dispatcher._named)
    await rig.database.query("SELECT 1")
    assert await seed.state_of(rig.database, "c1") == CommandState.PENDING


async def test_the_flush_writes_ages_and_leaves_the_rest_alone(rig):
    node = await rig.add_node("node-a")
    await rig.connect(node)
    await rig.database.query("UPDATE node_sessions SET last_seen = compute_now() - interval '1 hour'")
    await rig.gateway.life.liveness.flush()
    [row] = await rig.database.query(
        "SELECT last_seen > compute_now() - interval '1 minute' AS fresh FROM node_sessions"
    )
    assert row["fresh"]
    assert len(rig.gateway.life.registry) == 1


async def test_the_flush_finds_a_session_whose_node_has_said_hello_elsewhere(rig):
    node = await rig.add_node("node-a")
    zombie = await rig.connect(node)
    _, server = await rig.start_another()
    newer = await rig.connect(node, server=server)
    await rig.gateway.life.liveness.flush()
    assert (await zombie.end())[:2] == (Status.ABORTED, "superseded")
    row = await rig.row("node-a")
    assert (row["session_id"], row["disconnected_at"]) == (newer.welcome.session_id, None)


async def test_a_flush_without_the_lease_ends_nobody(rig):
    node = await rig.add_node("node-a")
    daemon = await rig.connect(node)
    await rig.database.query("UPDATE leases SET expires_at = compute_now() + interval '1 second'")
    await rig.gateway.life.liveness.flush()
    assert daemon.call.status is None
    assert len(rig.gateway.life.registry) == 1


async def test_silent_sessions_end_after_three_intervals(rig):
    node = await rig.add_node("node-a")
    daemon = await rig.connect(node)
    session = rig.gateway.life.registry.get("node-a")
    object.__setattr__(session.state, "last_heard_ms", session.state.last_heard_ms - 31_000)
    await rig.gateway.life.liveness.look()
    status, reason, _ = await daemon.end()
    assert (status, reason) == (Status.UNAVAILABLE, "heartbeat-timeout")
    await rig.until_row("node-a", state="disconnected", state_reason="heartbeat-timeout")


async def test_an_expired_certificate_ends_its_session(rig):
    node = await rig.add_node("node-a")
    daemon = await rig.connect(node)
    session = rig.gateway.life.registry.get("node-a")
    object.__setattr__(session.state, "certificate_ends_at_ms", 0)
    await rig.gateway.life.liveness.look()
    assert (await daemon.end())[:2] == (Status.UNAUTHENTICATED, "certificate-expired")


async def test_a_loop_that_fails_gives_the_id_up_and_another_life_begins(rig, monkeypatch):
    node = await rig.add_node("node-a")
    daemon = await rig.connect(node)
    life = rig.gateway.life

    def broken() -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(life, "_follow_drain", broken)
    assert (await daemon.end())[0] == Status.UNAVAILABLE
    await rig.until(lambda: rig.gateway.life is not life and rig.gateway.ready)
    assert (await rig.connect(node)).welcome.epoch == 2


async def test_a_broken_session_ends_alone(rig, monkeypatch):
    broken = await rig.connect(await rig.add_node("node-a"))
    other = await rig.connect(await rig.add_node("node-b"))
    session = rig.gateway.life.registry.get("node-a")
    monkeypatch.setattr(session, "_obey_all", lambda _: 1 / 0)
    await rig.gateway.life.liveness.look()
    assert (await broken.end())[0] == Status.INTERNAL
    assert rig.gateway.life.registry.get("node-a") is None
    await seed.add_command(rig.database, "node-b", "c1")
    await rig.database.query("SELECT pg_notify('bc_dispatch', 'node-b')")
    assert (await other.command()).command_id == "c1"
