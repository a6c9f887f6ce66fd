"""The Hello transaction: its round trips, its races, and that a failed one leaves no stream."""

from __future__ import annotations

import asyncio

import pytest

from bettercompute.delivery.commands import CommandState
from bettercompute.errors import Unavailable
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Status
from bettercompute.session.announcements import notice_text
from bettercompute.store import sessions
from bettercompute.store.database import Conflict, Transaction
from tests.contract.gateway import seed


@pytest.fixture
def statements(monkeypatch):
    """The names of the statements that transactions run."""
    names: list[str] = []
    real = Transaction.fetch

    async def fetch(self, name, /, **arguments):
        names.append(name)
        return await real(self, name, **arguments)

    monkeypatch.setattr(Transaction, "fetch", fetch)
    return names


async def test_a_plain_hello_takes_three_round_trips(rig, statements):
    node = await rig.add_node("node-a")
    await rig.connect(node)
    assert statements == ["sessions.lock_for_hello", "sessions.hello_facts", "sessions.apply_hello"]


async def test_a_hello_with_everything_takes_four(rig, statements):
    node = await rig.add_node("node-a")
    for number in range(4):
        await seed.add_command(rig.database, "node-a", f"c{number}")
    first = await rig.connect(node)
    for _ in range(4):
        await first.command()
    first.connection.close()
    await rig.until_row("node-a", state="disconnected")
    statements.clear()
    second = await rig.connect(
        node,
        journal_id="journal-2",
        boot_id="boot-2",
        done_results=[
            messages.CommandUpdate(command_id="c0", state=messages.COMMAND_STATE_SUCCEEDED, attempt=1),
            messages.CommandUpdate(
                command_id="c1", state=messages.COMMAND_STATE_FAILED, attempt=1, reason="interrupted"
            ),
        ],
        running_command_ids=["c2"],
        capabilities=["cdi"],
        inventory_hashes={"cpu": b"h" * 32},
        first_unacked_event_seq=5,
        last_event_seq=6,
    )
    assert len(statements) <= 4
    assert list((await second.receive("ack")).ack.command_ids) == ["c0", "c1"]
    assert await seed.state_of(rig.database, "c0") == CommandState.SUCCEEDED
    assert await seed.state_of(rig.database, "c1") == CommandState.FAILED
    rows = await rig.database.query("SELECT id, session_epoch, attempt FROM commands WHERE state = 2 ORDER BY id")
    assert [(row["id"], row["session_epoch"], row["attempt"]) for row in rows] == [("c2", 2, 1), ("c3", 2, 2)]
    assert (await second.receive("command")).command.attempt == 2
    [gap] = await rig.database.query("SELECT first_seq, last_seq FROM node_event_gaps")
    assert (gap["first_seq"], gap["last_seq"]) == (1, 4)


async def test_what_a_forgotten_node_lost_is_told_however_often_it_begins_anew(rig):
    """Its row begins anew: a gap that began at 1 again was taken for the one that was known."""
    node = await rig.add_node("node-a")

    async def hello(*, first_unacked: int) -> list[tuple[int, int]]:
        await rig.database.query("UPDATE node_sessions SET journal_id = '', acked_event_seq = 0")
        daemon = await rig.connect(
            node, journal_id="journal-1", first_unacked_event_seq=first_unacked, last_event_seq=first_unacked
        )
        daemon.connection.close()
        await rig.until_row("node-a", state="disconnected")
        gaps = await rig.database.query("SELECT first_seq, last_seq FROM node_event_gaps ORDER BY first_seq")
        return [(row["first_seq"], row["last_seq"]) for row in gaps]

    assert await hello(first_unacked=3) == [(1, 2)]
    assert await hello(first_unacked=3) == [(1, 2)], "nothing is missing that is not known"
    assert await hello(first_unacked=9) == [(1, 2), (3, 8)]
    # Events behind the gap that came in before it was noticed hide nothing of it.
    await rig.database.query(
        "INSERT INTO node_events (node_id, journal_id, seq, event_id, type, occurred_at, payload)"
        " SELECT 'node-a', 'journal-1', seq, 'event-' || seq, 'daemon.started', compute_now(), '{}'"
        " FROM generate_series(12, 20) AS seq"
    )
    assert await hello(first_unacked=12) == [(1, 2), (3, 8), (9, 11)]


async def test_a_lost_journal_ends_what_is_not_retry_safe(rig):
    node = await rig.add_node("node-a")
    await seed.add_command(rig.database, "node-a", "c1", kind="gpu.reset")
    first = await rig.connect(node)
    await first.command()
    first.connection.close()
    await rig.connect(node, journal_id="journal-2", boot_id="boot-2")
    [row] = await rig.database.query("SELECT state, reason FROM commands")
    assert (row["state"], row["reason"]) == (CommandState.FAILED, "journal-lost")
    types = [row["type"] for row in await rig.database.query("SELECT type FROM outbox ORDER BY id")]
    assert types.count("command.finished") == 1


async def test_a_hello_sees_what_was_dispatched_while_it_waited_for_the_lock(rig):
    node = await rig.add_node("node-a")
    await seed.add_command(rig.database, "node-a", "c1")
    await rig.database.query(
        "UPDATE node_sessions SET session_epoch = 4, session_id = 'old', boot_id = 'boot-1',"
        " journal_id = 'journal-1', last_seen = compute_now(), gateway_id = 'gone'"
    )
    daemon = await rig.dial(node)
    async with rig.database.transaction() as dispatch:
        await dispatch.query("SELECT FROM node_sessions WHERE node_id = 'node-a' FOR SHARE")
        daemon.say_hello()
        await until_blocked(rig.database)
        await dispatch.query(
            "UPDATE commands SET state = 2, session_epoch = 4, session_id = 'old', attempt = 1,"
            " dispatched_at = compute_now(), sent_boot_id = 'boot-1'"
        )
    frame = await daemon.receive("command")
    assert frame.command.attempt == 2, "it is replayed, not stuck in an epoch that is over"
    [row] = await rig.database.query("SELECT session_epoch FROM commands")
    assert row["session_epoch"] == 5


async def until_blocked(database) -> None:
    for _ in range(5_000):
        if await database.query(
            "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        ):
            return
    raise AssertionError("nobody waits for a lock")


async def test_a_hello_that_did_not_commit_closes_the_stream(rig, monkeypatch):
    async def away(*_: object, **__: object) -> None:
        raise Unavailable("the database is away")

    node = await rig.add_node("node-a")
    with monkeypatch.context() as patched:
        patched.setattr(sessions, "apply_hello", away)
        daemon = await rig.dial(node)
        daemon.say_hello()
        status, reason, _ = await daemon.end()
    assert (status, reason) == (Status.UNAVAILABLE, "database")
    assert 1_000 <= int(daemon.call.trailers["grpc-retry-pushback-ms"]) <= 5_000
    assert (await rig.row("node-a"))["session_epoch"] == 0
    assert len(rig.gateway.life.registry) == 0


async def test_a_commit_whose_outcome_is_unknown_leaves_no_row_without_a_stream(rig, monkeypatch):
    database = rig.database
    real = database.retrying

    async def commits_and_loses_the_answer(work, **kwargs):
        await real(work, **kwargs)
        raise Unavailable("the connection broke at COMMIT")

    node = await rig.add_node("node-a")
    monkeypatch.setattr(database, "retrying", commits_and_loses_the_answer)
    daemon = await rig.dial(node)
    daemon.say_hello()
    assert (await daemon.end())[:2] == (Status.UNAVAILABLE, "database")
    await rig.until_row("node-a", gateway_id=None, session_epoch=1, state="disconnected")


async def test_a_conflict_is_run_again(rig, monkeypatch):
    real = sessions.apply_hello
    attempts: list[int] = []

    async def conflicts_once(*args, **kwargs):
        attempts.append(1)
        if len(attempts) == 1:
            raise Conflict("deadlock detected")
        await real(*args, **kwargs)

    monkeypatch.setattr(sessions, "apply_hello", conflicts_once)
    daemon = await rig.connect(await rig.add_node("node-a"))
    assert daemon.welcome.epoch == 1
    assert len(attempts) == 2


async def test_a_gateway_without_its_lease_takes_no_node_over(rig):
    node = await rig.add_node("node-a")
    # Under another token, so that no renewal may bring it back in between.
    await rig.database.query("UPDATE leases SET token = 'gone', expires_at = compute_now() - interval '1 second'")
    daemon = await rig.dial(node)
    daemon.say_hello()
    assert (await daemon.end())[0] == Status.UNAVAILABLE
    assert (await rig.row("node-a"))["session_epoch"] == 0


async def test_first_use_supersedes_what_was_issued_before(rig):
    node = await rig.add_node("node-a")
    for serial, seconds in (("abc", -60), ("def", 60)):
        await seed.add_certificate(rig.database, "node-a", serial=serial)
        await rig.database.query(
            f"UPDATE node_certs SET issued_at = issued_at + interval '{seconds} s' WHERE serial = '{serial}'"
        )
    await rig.connect(node)
    rows = await rig.database.query("SELECT serial, first_used_at, superseded_at FROM node_certs")
    by_serial = {row["serial"]: row for row in rows}
    assert by_serial[node.serial]["first_used_at"] is not None
    assert by_serial[node.serial]["superseded_at"] is None
    assert by_serial["abc"]["superseded_at"] is not None
    # A renewal that has not been used yet stays valid.
    assert by_serial["def"]["superseded_at"] is None


async def test_clones_are_quarantined_and_both_are_told(rig):
    node = await rig.add_node("node-a")
    clones = ["boot-a", "boot-b"]
    daemon = None
    for number in range(4):
        daemon = await rig.connect(node, boot_id=clones[number % 2])
    last = await rig.dial(node, address="192.0.2.9")
    last.say_hello(boot_id=clones[0])
    status, reason, message = await last.end()
    assert (status, reason) == (Status.UNAUTHENTICATED, "quarantined")
    assert message
    assert daemon is not None
    notice = (await daemon.receive("revoked")).revoked
    assert notice.reason == "duplicate-identity"
    assert list(notice.serials) == [node.serial]
    assert notice.cure
    assert (await daemon.end())[0] == Status.UNAUTHENTICATED
    [certificate] = await rig.database.query("SELECT revocation_reason FROM node_certs")
    assert certificate["revocation_reason"] == "duplicate-identity"
    [event] = await rig.database.query("SELECT payload FROM outbox WHERE type = 'security.node.quarantined'")
    assert node.serial in event["payload"]
    assert (await rig.row("node-a"))["session_epoch"] == 4


async def test_a_clone_on_another_gateway_is_told_the_same(rig):
    node = await rig.add_node("node-a")
    _, server = await rig.start_another()
    for number in range(3):
        await rig.connect(node, boot_id=("boot-a", "boot-b")[number % 2])
    elsewhere = await rig.connect(node, server=server, boot_id="boot-b")
    last = await rig.dial(node, address="192.0.2.9")
    last.say_hello(boot_id="boot-a")
    _, reason, refusal = await last.end()
    assert reason == "quarantined"
    notice = (await elsewhere.receive("revoked")).revoked
    assert notice.reason == "duplicate-identity"
    assert [(one.boot_id, one.address) for one in notice.claimants] == [
        ("boot-b", "127.0.0.1"),
        ("boot-a", "192.0.2.9"),
    ]
    assert list(notice.serials) == [node.serial]
    assert notice_text(notice) == refusal
    assert (await elsewhere.end())[:2] == (Status.UNAUTHENTICATED, "revoked")
    # One that was not connected is told when it dials again.
    late = await rig.dial(node, server=server)
    assert await late.end() == (Status.UNAUTHENTICATED, "revoked", refusal)


async def test_the_daemon_leaving_during_its_hello_leaves_no_live_row(rig):
    node = await rig.add_node("node-a")
    daemon = await rig.dial(node)
    async with rig.database.transaction() as held:
        await held.query("SELECT FROM node_sessions WHERE node_id = 'node-a' FOR UPDATE")
        daemon.say_hello()
        await until_blocked(rig.database)
        daemon.connection.close()
        await asyncio.sleep(0)
    await rig.until_row("node-a", session_epoch=1, gateway_id=None, state="disconnected")
