"""The controllers against PostgreSQL, with its clock moved."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from bettercompute.controllers.expiry import ExpiryController
from bettercompute.controllers.liveness import LivenessController
from bettercompute.controllers.outbox import OutboxController
from bettercompute.controllers.retention import DAY_MS, RetentionController
from bettercompute.controllers.worker import Worker
from bettercompute.delivery.commands import CommandState
from bettercompute.errors import Unavailable
from bettercompute.store import liveness as store
from bettercompute.store.sessions import SessionKey
from bettercompute.system import SystemDice, SystemIds, system_world
from bettercompute.testing.postgres import move_clock
from bettercompute.world import World
from tests.contract.gateway import seed

KEY = SessionKey(node_id="node-a", session_id="session-a", epoch=7)


@dataclass
class ManualClock:
    """A monotonic clock that a test moves."""

    now: int = 1_000_000

    def now_ms(self) -> int:
        return self.now

    def monotonic_ms(self) -> int:
        return self.now


class Time:
    """The database's clock and the controller's, moved together, or apart."""

    def __init__(self, database) -> None:
        self.clock = ManualClock()
        self.world = World(clock=self.clock, dice=SystemDice(), ids=SystemIds())
        self.offset_ms = 0
        self._database = database

    async def pass_ms(self, ms: int, *, database_only: bool = False) -> None:
        self.offset_ms += ms
        if not database_only:
            self.clock.now += ms
        await move_clock(self._database, offset_ms=self.offset_ms)


@pytest.fixture
async def fleet(database):
    await seed.add_lease(database, left_s=15)
    await seed.add_node(database, "node-a")
    await seed.connect_node(database, KEY)
    return database


async def state(database) -> tuple[str, str]:
    [row] = await database.query("SELECT state, state_reason FROM nodes WHERE node_id = 'node-a'")
    return row["state"], row["state_reason"]


async def watch(controller: LivenessController, time: Time, ms: int, *, step_ms: int = 5_000) -> None:
    """Let time pass in steps small enough that nobody could say it was not watched."""
    for _ in range(ms // step_ms):
        await time.pass_ms(step_ms)
        await controller.reconcile()


def keep_seen(database):
    return database.query("UPDATE node_sessions SET last_seen = compute_now() WHERE gateway_id IS NOT NULL")


async def test_a_gateway_lost_for_two_minutes_disconnects_its_nodes_and_is_retired(fleet):
    time = Time(fleet)
    controller = LivenessController(fleet, world=time.world, holder="worker")
    await watch(controller, time, 15_000 + 105_000)
    assert await state(fleet) == ("connected", "")
    await watch(controller, time, 25_000)
    assert await state(fleet) == ("disconnected", "gateway-lost")
    [lease] = await fleet.query("SELECT retired_at FROM leases")
    assert lease["retired_at"] is not None
    [row] = await fleet.query("SELECT gateway_id, session_epoch FROM node_sessions")
    assert (row["gateway_id"], row["session_epoch"]) == (None, 7)
    [event] = await fleet.query("SELECT type, payload->>'reason' AS reason FROM outbox")
    assert (event["type"], event["reason"]) == ("node.disconnected", "gateway-lost")


async def test_a_silent_node_of_a_living_gateway_becomes_stale(fleet):
    time = Time(fleet)
    controller = LivenessController(fleet, world=time.world, holder="worker")
    await fleet.query("UPDATE leases SET expires_at = compute_now() + interval '1 day'")
    await watch(controller, time, 60_000)
    assert await state(fleet) == ("connected", "")
    await watch(controller, time, 20_000)
    assert await state(fleet) == ("disconnected", "stale")


async def test_its_own_heartbeat_interval_counts(fleet):
    time = Time(fleet)
    controller = LivenessController(fleet, world=time.world, holder="worker")
    await fleet.query("UPDATE leases SET expires_at = compute_now() + interval '1 day'")
    await fleet.query("UPDATE node_sessions SET heartbeat_interval_ms = 60000")
    await watch(controller, time, 200_000)
    assert await state(fleet) == ("connected", "")


async def test_a_disconnected_node_becomes_unreachable_after_five_minutes(fleet):
    time = Time(fleet)
    controller = LivenessController(fleet, world=time.world, holder="worker")
    await seed.add_command(fleet, "node-a", "c1", state=3, key=KEY)
    await fleet.query("UPDATE node_sessions SET gateway_id = NULL, disconnected_at = compute_now()")
    await fleet.query("UPDATE nodes SET state = 'disconnected', state_changed_at = compute_now()")
    await watch(controller, time, 280_000)
    assert (await state(fleet))[0] == "disconnected"
    await watch(controller, time, 25_000)
    assert await state(fleet) == ("unreachable", "unreachable")
    assert await seed.state_of(fleet, "c1") == CommandState.ACKED, "nothing is released"


async def test_nothing_is_judged_for_five_minutes_after_nobody_watched(fleet):
    time = Time(fleet)
    controller = LivenessController(fleet, world=time.world, holder="worker")
    await controller.reconcile()
    await time.pass_ms(600_000)
    await controller.reconcile()
    assert await state(fleet) == ("connected", "")
    await watch(controller, time, 280_000)
    assert await state(fleet) == ("connected", "")
    await watch(controller, time, 25_000)
    assert (await state(fleet))[0] == "disconnected"


async def test_a_standby_that_takes_no_writes_is_an_outage_although_it_tells_the_time(fleet):
    time = Time(fleet)
    controller = LivenessController(fleet, world=time.world, holder="worker")
    await controller.reconcile()
    await fleet.query(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " RAISE EXCEPTION 'cannot execute INSERT in a read-only transaction' USING ERRCODE = '25006'; END $$"
    )
    await fleet.query("CREATE TRIGGER refuse BEFORE INSERT ON controller_runs EXECUTE FUNCTION refuse()")
    for _ in range(60):
        await time.pass_ms(5_000)
        with pytest.raises(Unavailable, match="read-only"):
            await controller.reconcile()
    await fleet.query("DROP TRIGGER refuse ON controller_runs")
    await watch(controller, time, 280_000)
    assert await state(fleet) == ("connected", "")
    await watch(controller, time, 25_000)
    assert (await state(fleet))[0] == "disconnected"


async def test_a_restarted_controller_knows_that_it_was_away_and_keeps_the_grace(fleet):
    time = Time(fleet)
    await LivenessController(fleet, world=time.world, holder="first").reconcile()
    await time.pass_ms(600_000)
    await LivenessController(fleet, world=time.world, holder="second").reconcile()
    await watch(LivenessController(fleet, world=time.world, holder="third"), time, 200_000)
    assert await state(fleet) == ("connected", "")


async def test_a_jump_of_the_databases_clock_begins_the_grace(fleet):
    time = Time(fleet)
    controller = LivenessController(fleet, world=time.world, holder="worker")
    await controller.reconcile()
    await time.pass_ms(86_400_000, database_only=True)
    await controller.reconcile()
    assert await state(fleet) == ("connected", "")


async def test_a_node_that_said_hello_meanwhile_is_left_alone(fleet, monkeypatch):
    time = Time(fleet)
    controller = LivenessController(fleet, world=time.world, holder="worker")
    await watch(controller, time, 130_000)
    real = store.overdue

    async def overdue(*args, **kwargs):
        found = await real(*args, **kwargs)
        await fleet.query("UPDATE node_sessions SET session_epoch = session_epoch + 1, session_id = 'newer'")
        return found

    monkeypatch.setattr(store, "overdue", overdue)
    await watch(controller, time, 20_000)
    assert await state(fleet) == ("connected", "")


async def test_expiry_ends_overdue_commands_and_tells(fleet):
    await seed.add_command(fleet, "node-a", "late", not_after_s=-1)
    await seed.add_command(fleet, "node-a", "in-flight", state=2, key=KEY, not_after_s=-1)
    assert not await ExpiryController(fleet, world=system_world()).reconcile()
    assert await seed.state_of(fleet, "late") == CommandState.EXPIRED
    assert await seed.state_of(fleet, "in-flight") == CommandState.DISPATCHED
    [event] = await fleet.query("SELECT type FROM outbox")
    assert event["type"] == "command.finished"


async def test_the_outbox_is_numbered(fleet):
    for number in range(3):
        await fleet.query("INSERT INTO outbox (id, type, payload) VALUES ($1, 'node.joined', '{}')", f"id-{number}")
    assert not await OutboxController(fleet).reconcile()
    rows = await fleet.query("SELECT position FROM outbox ORDER BY id")
    assert [row["position"] for row in rows] == [1, 2, 3]


async def test_retention_removes_only_what_is_old_enough(fleet):
    await seed.add_command(fleet, "node-a", "old", state=5)
    await seed.add_command(fleet, "node-a", "new", state=5)
    await seed.add_command(fleet, "node-a", "pending")
    await fleet.query("UPDATE commands SET finished_at = compute_now() - interval '31 days' WHERE id = 'old'")
    await fleet.query(
        "INSERT INTO command_output (command_id, output_offset, node_id, data) VALUES ('old', 0, 'node-a', '')"
    )
    await fleet.query(
        "INSERT INTO outbox (id, type, payload, created_at, position) VALUES"
        " ('old', 'x', '{}', compute_now() - interval '31 days', 1),"
        " ('unpublished', 'x', '{}', compute_now() - interval '31 days', NULL), ('new', 'x', '{}', compute_now(), 2)"
    )
    await seed.add_certificate(fleet, "node-a", serial="0dead")
    await fleet.query(
        "UPDATE node_certs SET not_before = 'epoch', not_after = now() - interval '8 days' WHERE serial = '0dead'"
    )
    await fleet.query(
        "INSERT INTO join_tokens (token_id, secret_sha256, site, role, expires_at, created_by) VALUES"
        " ('old', sha256('a'), 's', 'node', now() - interval '31 days', 'ops'),"
        " ('new', sha256('b'), 's', 'node', now(), 'ops')"
    )
    for table, columns, values in (
        ("node_events", "seq, event_id, type, occurred_at, payload, received_at", "'e' || n, 't', 'epoch', '', t"),
        ("node_event_gaps", "first_seq, last_seq, noticed_at", "n, t"),
    ):
        await fleet.query(
            f"INSERT INTO {table} (node_id, journal_id, {columns}) SELECT 'node-a', 'j', n, {values}"
            " FROM (VALUES (1, compute_now() - interval '31 days'), (2, compute_now())) v (n, t)"
        )
    assert not await RetentionController(fleet).reconcile()
    assert [row["seq"] for row in await fleet.query("SELECT seq FROM node_events")] == [2]
    assert [row["first_seq"] for row in await fleet.query("SELECT first_seq FROM node_event_gaps")] == [2]
    assert await fleet.query("SELECT FROM node_certs WHERE serial = '0dead'") == []
    assert [row["token_id"] for row in await fleet.query("SELECT token_id FROM join_tokens")] == ["new"]
    assert {row["id"] for row in await fleet.query("SELECT id FROM commands")} == {"new", "pending"}
    assert {row["id"] for row in await fleet.query("SELECT id FROM outbox")} == {"unpublished", "new"}
    assert await fleet.query("SELECT FROM command_output") == []
    assert DAY_MS == 86_400_000


async def test_the_worker_publishes_what_it_is_told_of(fleet):
    worker = Worker(fleet, world=system_world(), holder="worker")
    worker.start()
    try:
        await fleet.query("INSERT INTO outbox (id, type, payload) VALUES ('one', 'node.joined', '{}')")
        await fleet.query("SELECT pg_notify('bc_outbox', '')")
        for _ in range(5_000):
            if await fleet.query("SELECT FROM outbox WHERE position IS NOT NULL"):
                break
        else:
            raise AssertionError("not published")
    finally:
        await worker.stop()
