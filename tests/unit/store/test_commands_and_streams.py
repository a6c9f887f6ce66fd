"""The API's half of commands, the outbox, inventory, trust, leases, and what the API keeps for itself."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from bettercompute.delivery.commands import CommandState
from bettercompute.errors import Refused
from bettercompute.store import (
    api_tokens,
    audit,
    channels,
    commands,
    idempotency,
    inventory,
    leases,
    nodes,
    outbox,
    trust,
)
from bettercompute.store.commands import CancelOutcome, NewCommand
from bettercompute.store.database import DedicatedConnection
from bettercompute.testing.postgres import move_clock

HOUR_MS = 3_600_000
FAR_MS = 4_102_444_800_000
DISPATCHED = "state = 2, session_epoch = 1, session_id = 's', attempt = 1, dispatched_at = compute_now()"


def sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


@pytest.fixture
async def fleet(database):
    async with database.transaction() as transaction:
        for node_id in ("n1", "n2"):
            await nodes.insert_joined(
                transaction,
                nodes.JoinedNode(
                    node_id=node_id, site="default", role="node", tenant_controlled=False, attestor="join-token"
                ),
            )
    return database


async def enqueue(database, *names, node_id="n1", **changes):
    seqs = await commands.draw_seqs(database, count=len(names))
    async with database.transaction() as transaction:
        await commands.enqueue(
            transaction,
            [
                NewCommand(
                    command_id=name,
                    node_id=node_id,
                    kind="inventory.refresh",
                    lane=1,
                    seq=seq,
                    body=b"body",
                    created_by="ops",
                    not_after_ms=FAR_MS,
                    timeout_ms=60_000,
                    payload={"sections": ["cpu"]},
                    **changes,
                )
                for name, seq in zip(names, seqs, strict=True)
            ],
        )


def _hear(heard: asyncio.Queue[tuple[str, str]], channel: str, payload: str) -> None:
    heard.put_nowait((channel, payload))


@pytest.mark.parametrize(
    ("not_before_ms", "channel"), [(None, channels.COMMANDS), (1_000, channels.DISPATCH)], ids=["now", "later"]
)
async def test_gateways_are_told_whether_a_command_may_go_at_once(fleet, dsn, not_before_ms, channel):
    heard: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    listener = await DedicatedConnection.open(dsn, application_name="tests")
    for name in (channels.COMMANDS, channels.DISPATCH):
        await listener.listen(name, partial(_hear, heard, name))
    await enqueue(fleet, "c2", "c1", not_before_ms=not_before_ms)
    await fleet.execute("commands.notify", channel=channels.DISPATCH, payloads=["last"])
    assert await asyncio.wait_for(heard.get(), 30) == (channel, "n1")
    assert await asyncio.wait_for(heard.get(), 30) == (channels.DISPATCH, "last")
    await listener.close()


async def test_commands_are_enqueued(fleet):
    await enqueue(fleet, "c2", "c1", batch_id="b1", not_before_ms=1_000)
    first, second = await commands.get_many(fleet, command_ids=["c1", "c2", "c3"])
    assert (first.state, first.payload, first.not_before_ms) == (CommandState.PENDING, {"sections": ["cpu"]}, 1_000)
    assert (first.attempt, first.timeout_ms, first.overdue) == (0, 60_000, False)
    assert second.seq < first.seq
    signed = await commands.signed_body(fleet, command_id="c1")
    assert signed is not None
    assert (signed.body, signed.signature) == (b"body", None)


async def test_a_hint_leaves_its_connection_as_durable_as_it_was(dsn):
    connection = await DedicatedConnection.open(dsn, application_name="tests")
    await connection.execute("hints.tell", channels=[channels.FINISHED], payloads=["c1"])
    [row] = await connection.query("SELECT current_setting('synchronous_commit') AS waits")
    await connection.close()
    assert row["waits"] == "on"


async def test_a_command_for_a_node_that_is_not_there_refuses_all_of_them(fleet):
    with pytest.raises(Refused, match="no node n9"):
        await enqueue(fleet, "c1", node_id="n9")
    assert await commands.get(fleet, command_id="c1") is None


async def test_commands_are_listed_newest_first_in_pages(fleet):
    await enqueue(fleet, "c1", "c2", "c3", batch_id="b")
    await enqueue(fleet, "c4", node_id="n2")
    first = await commands.list_page(fleet, page_size=3)
    second = await commands.list_page(fleet, before=first[-1].command_id, page_size=3)
    assert [command.command_id for command in first + second] == ["c4", "c3", "c2", "c1"]
    of_node = await commands.list_page(fleet, page_size=9, node_ids=["n1"], before="c3", states=[CommandState.PENDING])
    assert [command.command_id for command in of_node] == ["c2", "c1"]
    assert await commands.list_page(fleet, page_size=9, states=[CommandState.FAILED]) == []
    assert await commands.list_page(fleet, page_size=9, kind="node.reboot") == []
    batch = await commands.list_batch(fleet, batch_id="b", after="c1", page_size=9)
    assert [command.command_id for command in batch] == ["c2", "c3"]
    assert [state.command_id for state in await commands.states(fleet, command_ids=["c4", "c1"])] == ["c1", "c4"]


async def test_cancelling_ends_what_is_pending_and_asks_for_the_end_of_the_rest(fleet, dsn):
    await enqueue(fleet, "c1", "c2", "c3")
    await fleet.query(f"UPDATE commands SET {DISPATCHED} WHERE id = 'c2'")
    await fleet.query("UPDATE commands SET state = 5, finished_at = compute_now() WHERE id = 'c3'")
    heard: asyncio.Queue[str] = asyncio.Queue()
    listener = await DedicatedConnection.open(dsn, application_name="tests")
    await listener.listen(channels.DISPATCH, heard.put_nowait)
    outcomes: Mapping[str, CancelOutcome] = {}
    for _ in range(2):
        async with fleet.transaction() as transaction:
            outcomes = await commands.request_cancel(
                transaction,
                command_ids=["c1", "c2", "c3", "c4"],
                requested_by="ops",
                reason="mistake",
                draw_id=iter(("o1", "o2", "o3", "o4")).__next__,
                event_type="command.finished",
            )
        assert outcomes["c2"] is CancelOutcome.REQUESTED
        assert outcomes["c3"] is CancelOutcome.TOO_LATE
        assert outcomes["c4"] is CancelOutcome.UNKNOWN
        assert channels.names(await asyncio.wait_for(heard.get(), 30)) == frozenset({"n1"})
    await listener.close()
    assert outcomes["c1"] is CancelOutcome.TOO_LATE
    first, second, third = await commands.get_many(fleet, command_ids=["c1", "c2", "c3"])
    assert (first.state, first.reason, first.cancel_requested_by) == (CommandState.CANCELLED, "cancelled", "ops")
    assert (second.state, second.cancel_reason) == (CommandState.DISPATCHED, "mistake")
    assert third.cancel_requested_at_ms is None


async def test_a_command_in_flight_past_its_deadline_is_overdue_and_nothing_else(fleet):
    await enqueue(fleet, "c1")
    await fleet.query(f"UPDATE commands SET {DISPATCHED}")
    await move_clock(fleet, offset_ms=FAR_MS)
    command = await commands.get(fleet, command_id="c1")
    assert command is not None
    assert (command.overdue, command.state) == (True, CommandState.DISPATCHED)


@pytest.mark.parametrize(
    "change",
    [
        "state = 5",
        "finished_at = compute_now()",
        "state = 2",
        "session_epoch = 1, session_id = 's'",
        "result = 'r'",
        "state = 9, finished_at = compute_now()",
        "cancel_requested_at = compute_now()",
    ],
)
async def test_the_schema_knows_what_a_command_cannot_be(fleet, change):
    await enqueue(fleet, "c1")
    with pytest.raises(Exception, match=r"commands_(state_)?check"):
        await fleet.query(f"UPDATE commands SET {change}")


async def test_a_session_row_cannot_be_held_and_disconnected(fleet):
    with pytest.raises(Exception, match="node_sessions_check"):
        await fleet.query(
            "UPDATE node_sessions SET gateway_id = 'g', session_id = 's', session_epoch = 1, "
            "last_seen = compute_now(), disconnected_at = compute_now()"
        )


def event(name: str, **payload):
    return outbox.NewEvent(id=name, type="node.joined", node_id="n1", payload=payload)


async def test_events_get_their_place_after_the_commit_so_that_no_reader_passes_a_late_one(database):
    async with database.transaction() as late:
        await outbox.publish(late, [event("e1", n=1)])
        async with database.transaction() as transaction:
            await outbox.publish(transaction, [event("e2", n=2)])
        assert await outbox.assign_positions(database) == 1
        [seen] = await outbox.read_from(database, after_position=0)
        assert seen.id == "e2"
    assert await outbox.assign_positions(database) == 1
    async with database.transaction() as other:
        await other.query("SELECT FROM outbox_publisher FOR UPDATE")
        assert await outbox.assign_positions(database) == 0, "with nothing to publish no turn is waited for"
    rest = await outbox.read_from(database, after_position=seen.position)
    assert [(read.id, read.payload) for read in rest] == [("e1", {"n": 1})]
    assert await outbox.bounds(database) == outbox.StreamBounds(1, 2)


async def test_publishers_take_turns_and_leave_no_gap(database):
    async with database.transaction() as transaction:
        await outbox.publish(transaction, [event(f"e{number:02}") for number in range(40)])
        await outbox.publish(transaction, [event("e00")])
    done = await asyncio.gather(*(outbox.assign_positions(database, batch_size=7) for _ in range(10)))
    assert sum(done) == 40
    read = await outbox.read_from(database, after_position=0)
    assert [row.position for row in read] == list(range(1, 41))
    assert [row.id for row in read] == [f"e{number:02}" for number in range(40)]


async def test_a_trust_bundle_gets_a_new_version_only_when_its_content_changes(database):
    signed: list[int] = []

    def sign(version: int) -> bytes:
        signed.append(version)
        return f"bundle {version}".encode()

    async def publish(content: str) -> trust.StoredBundle:
        async with database.transaction() as transaction:
            await trust.lock(transaction)
            return await trust.publish(transaction, content_sha256=sha256(content), sign=sign, purposes=())

    assert await trust.current(database) is None
    assert {bundle.version for bundle in await asyncio.gather(*(publish("one") for _ in range(5)))} == {1}
    second = await publish("two")
    back = await publish("one")
    assert (second.version, back.version, back.signed_bundle, signed) == (2, 3, b"bundle 3", [1, 2, 3])
    assert await trust.current(database) == back


async def test_an_inventory_agrees_when_the_sections_are_those_reported(fleet):
    def section(name, body, node_id="n1"):
        return inventory.NewSection(
            node_id=node_id, section=name, sha256=sha256(body), body=body.encode(), collected_at_ms=5_000
        )

    async with fleet.transaction() as transaction:
        await inventory.replace_hashes(
            transaction, node_id="n1", hashes={"cpu": sha256("c"), "disks": sha256("d"), "old": sha256("o")}
        )
        await inventory.replace_hashes(transaction, node_id="n1", hashes={"cpu": sha256("c"), "disks": sha256("d")})
        await inventory.store_sections(
            transaction, [section("disks", "stale"), section("cpu", "c"), section("cpu", "x", node_id="gone")]
        )
    assert await inventory.disagreeing(fleet, node_id="n1") == ("disks",)
    found = (await inventory.read(fleet, node_ids=["n1"]))["n1"]
    assert {name: stored.agrees for name, stored in found.items()} == {"cpu": True, "disks": False}
    async with fleet.transaction() as transaction:
        await inventory.store_sections(transaction, [section("disks", "x"), section("disks", "d")])
    assert await inventory.disagreeing(fleet, node_id="n1") == ()
    assert await inventory.stored_hashes(fleet, node_id="n1") == {"cpu": sha256("c"), "disks": sha256("d")}
    only = await inventory.read(fleet, node_ids=["n1", "n2"], sections=["disks"])
    assert (list(only), only["n1"]["disks"].collected_at_ms) == (["n1"], 5_000)


async def test_a_lease_is_told_by_name_and_token_and_retired_for_good(database):
    lease = leases.NewLease(
        name="g-1", token="t", advertise_url="https://g", internal_url="https://i", version="1", stream_limit=5
    )
    foreign = leases.NewLease(
        name="g-1", token="x", advertise_url="https://g", internal_url="https://i", version="1", stream_limit=5
    )
    assert await leases.claim(database, lease)
    assert await leases.claim(database, lease)
    assert not await leases.claim(database, foreign)
    assert await leases.renew(database, name="g-1", token="t", stream_count=3)
    assert not await leases.renew(database, name="g-1", token="x", stream_count=9)
    [shown] = await leases.list_all(database)
    assert (shown.live, shown.stream_count, shown.draining) == (True, 3, False)
    async with database.transaction() as transaction:
        assert not await leases.retire(transaction, name="g-1", expired_for_ms=120_000)
    await move_clock(database, offset_ms=15_000 + 120_000 + 1_000)
    async with database.transaction() as transaction:
        assert await leases.retire(transaction, name="g-1", expired_for_ms=120_000)
    assert not await leases.renew(database, name="g-1", token="t", stream_count=3)
    assert not await leases.claim(database, lease)
    assert not await leases.release(database, name="g-1", token="t")
    assert await leases.list_all(database) == []
    [retired] = await leases.list_all(database, with_retired=True)
    assert (retired.live, retired.retired_at_ms is not None) == (False, True)
    await move_clock(database, offset_ms=HOUR_MS)
    assert await leases.delete_retired(database, retired_for_ms=1_000) == 1


async def test_a_request_made_twice_acts_once(database):
    acts = []

    async def request(text="same"):
        async with database.transaction() as transaction:
            stored = await idempotency.claim(transaction, principal="ops", key="k", request_sha256=sha256(text))
            if stored is not None:
                return stored
            acts.append(text)
            answer = {"id": len(acts)}
            await idempotency.complete(transaction, principal="ops", key="k", response=answer)
            return answer

    assert await asyncio.gather(*(request() for _ in range(8))) == [{"id": 1}] * 8
    with pytest.raises(Refused, match="used for another request"):
        await request("other")
    assert acts == ["same"]
    await move_clock(database, offset_ms=HOUR_MS)
    assert await idempotency.delete_old(database, older_than_ms=1_000, batch_size=10) == 1


async def test_api_tokens_are_found_by_their_hash_until_they_end(database):
    created: dict[str, Any] = {"sha256": sha256("a"), "role": "admin", "created_by": "dev"}
    assert await api_tokens.create(database, token_id="1", name="ops", **created)
    assert not await api_tokens.create(database, token_id="2", name="ops", **{**created, "sha256": sha256("b")})
    scope = {"site": "x"}
    short: dict[str, Any] = {**created, "sha256": sha256("c"), "lifetime_ms": 1_000, "label_scope": scope}
    assert await api_tokens.create(database, token_id="3", name="short", **short)
    found = await api_tokens.find(database, sha256=sha256("a"))
    assert found is not None
    assert (found.name, found.role, found.label_scope, found.expires_at_ms) == ("ops", "admin", None, None)
    limited = await api_tokens.find(database, sha256=sha256("c"))
    assert limited is not None
    assert limited.label_scope == scope
    assert await api_tokens.revoke(database, name="ops")
    assert not await api_tokens.revoke(database, name="ops")
    await move_clock(database, offset_ms=HOUR_MS)
    for text in "abc":
        assert await api_tokens.find(database, sha256=sha256(text)) is None
    assert [token.name for token in await api_tokens.list_all(database)] == ["ops", "short"]


async def test_acts_are_recorded_and_read_newest_first(database):
    for number in range(3):
        await audit.record(
            database,
            audit.NewEntry(
                id=f"a{number}",
                actor="ops",
                action="token.create" if number else "node.label",
                target=f"node/{number % 2}",
                outcome="done",
                details={"n": number},
            ),
        )
    assert [entry.id for entry in await audit.list_page(database, page_size=2)] == ["a2", "a1"]
    assert [entry.id for entry in await audit.list_page(database, page_size=9, target="node/0")] == ["a2", "a0"]
    [labelled] = await audit.list_page(database, page_size=9, action="node.label", actor="ops")
    assert labelled.details == {"n": 0}


def test_payloads_hold_as_many_names_as_fit_and_then_mean_any():
    assert channels.payloads([]) == []
    assert channels.payloads(["b", "a", "b"]) == ["a,b"]
    many = [f"node-{number:050}" for number in range(1_000)]
    packed = channels.payloads(many)
    assert all(len(payload) <= channels.PAYLOAD_BYTES_MAX for payload in packed)
    assert frozenset().union(*(channels.names(payload) or () for payload in packed)) == set(many)
    assert channels.payloads(f"{number:060}" for number in range(10_000)) == [channels.ANY]
    assert channels.names(channels.ANY) is None
