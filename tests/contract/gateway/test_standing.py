"""What operators say of a node, at the gateways: locks and revocations end sessions everywhere and let none begin.

See docs/gateway.md, "Liveness".
"""

from __future__ import annotations

from collections.abc import Callable

from bettercompute.gateway.revocation import RevocationFeed
from bettercompute.gateway.server_time import ServerTime
from bettercompute.protocol.statuses import PUSHBACK_TRAILER, Status
from bettercompute.store import certificates, nodes, sessions, standing
from bettercompute.store.database import Transaction
from bettercompute.testing.postgres import move_clock
from tests.contract.gateway import seed
from tests.contract.gateway.rig import Rig

LIVENESS_TICK_MS = 5_000


async def said(rig: Rig, node_id: str, act: Callable[[Transaction], object]) -> object:
    async with rig.database.transaction() as transaction:
        assert await nodes.lock_session(transaction, node_id=node_id)
        return await act(transaction)  # type: ignore[misc] # each act is a coroutine function


async def lock(rig: Rig, node_id: str, *, ttl_ms: int | None = None) -> None:
    await said(
        rig,
        node_id,
        lambda transaction: standing.lock(
            transaction, node_id=node_id, ttl_ms=ttl_ms, locked_by="ops", reason="disk swap"
        ),
    )


async def revoke(rig: Rig, node_id: str) -> None:
    await said(
        rig,
        node_id,
        lambda transaction: standing.revoke(
            transaction,
            node_id=node_id,
            revoked_by="ops",
            reason="stolen",
            notice=b"",
            draw_id=rig.world.ids.uuid7,
            event_type="command.finished",
        ),
    )


async def test_a_lock_ends_the_session_on_whichever_gateway_has_it(rig: Rig) -> None:
    node, other = await rig.add_node("node-a"), await rig.add_node("node-b")
    second, second_server = await rig.start_another()
    daemon = await rig.connect(node, server=second_server)
    untouched = await rig.connect(other, server=second_server)
    began_ms = rig.world.clock.monotonic_ms()
    await lock(rig, "node-a")
    assert await daemon.end() == (
        Status.PERMISSION_DENIED,
        "locked",
        "node node-a is locked by ops until it is unlocked: disk swap",
    )
    assert rig.world.clock.monotonic_ms() - began_ms < LIVENESS_TICK_MS
    assert 30_000 <= int(daemon.call.trailers[PUSHBACK_TRAILER]) <= 60_000
    await rig.until_row("node-a", state="disconnected", state_reason="locked", gateway_id=None)
    for server in (rig.server, second_server):
        refused = await rig.dial(node, server=server)
        refused.say_hello()
        assert (await refused.end())[:2] == (Status.PERMISSION_DENIED, "locked")
    # Nothing is revoked, and nobody else is touched.
    assert [one.revoked_at_ms for one in await certificates.of_node(rig.database, node_id="node-a")] == [None]
    assert untouched.call.status is None
    assert second.session_count == 1


async def test_a_lock_that_the_gateway_has_not_heard_of_is_found_by_the_hello(rig: Rig) -> None:
    node = await rig.add_node("node-a")
    await rig.database.query(
        "UPDATE nodes SET locked_at = compute_now(), locked_by = 'ops', lock_reason = '',"
        " locked_until = compute_now() + interval '1 hour'"
    )
    daemon = await rig.dial(node)
    daemon.say_hello()
    status, reason, message = await daemon.end()
    assert (status, reason) == (Status.PERMISSION_DENIED, "locked")
    assert message.startswith("node node-a is locked by ops for another 3600 s")
    assert (await rig.row("node-a"))["session_epoch"] == 0


async def test_a_lock_ends_by_itself_and_commands_have_waited(rig: Rig) -> None:
    node = await rig.add_node("node-a")
    daemon = await rig.connect(node)
    await lock(rig, "node-a", ttl_ms=1_000)
    assert (await daemon.end())[1] == "locked"
    await seed.add_command(rig.database, "node-a", "c-1")
    await rig.until(lambda: rig.gateway.revocations.locked("node-a") is None)
    again = await rig.connect(node)
    assert (await again.command()).command_id == "c-1"


async def test_an_unlock_lets_the_node_in_at_once(rig: Rig) -> None:
    node = await rig.add_node("node-a")
    daemon = await rig.connect(node)
    await lock(rig, "node-a")
    await daemon.end()
    assert await said(rig, "node-a", lambda transaction: standing.unlock(transaction, node_id="node-a"))
    await rig.until(lambda: rig.gateway.revocations.locked("node-a") is None)
    await rig.connect(node)
    # A second one finds nothing.
    assert not await said(rig, "node-a", lambda transaction: standing.unlock(transaction, node_id="node-a"))


async def test_a_revocation_ends_the_session_on_whichever_gateway_has_it(rig: Rig) -> None:
    node = await rig.add_node("node-a")
    second, second_server = await rig.start_another()
    daemon = await rig.connect(node, server=second_server)
    await seed.add_certificate(rig.database, "node-a", serial="abcd")
    await rig.database.query(
        "UPDATE node_certs SET not_before = '2000-01-01', not_after = '2000-01-02' WHERE serial = 'abcd'"
    )
    began_ms = rig.world.clock.monotonic_ms()
    await revoke(rig, "node-a")
    assert (await daemon.end())[:2] == (Status.UNAUTHENTICATED, "revoked")
    assert rig.world.clock.monotonic_ms() - began_ms < LIVENESS_TICK_MS
    # Expired ones too: they could still prove a re-join.
    assert all(one.revoked_at_ms for one in await certificates.of_node(rig.database, node_id="node-a"))
    for gateway, server in ((rig.gateway, rig.server), (second, second_server)):
        # Each reads the feed in its own time; before that it would wait for a Hello and refuse that.
        await gateway.revocations.read()
        refused = await rig.dial(node, server=server)
        assert (await refused.end())[:2] == (Status.UNAUTHENTICATED, "revoked")


async def test_a_revocation_ends_the_session_of_a_certificate_that_is_not_recorded(rig: Rig) -> None:
    """As after a restore of the database to a time before the certificate was issued."""
    node = await rig.add_node("node-a", recorded=False)
    daemon = await rig.connect(node)
    await revoke(rig, "node-a")
    await daemon.receive("revoked")
    assert (await daemon.end())[:2] == (Status.UNAUTHENTICATED, "revoked")
    again = await rig.dial(node)
    again.say_hello()
    status, reason, message = await again.end()
    assert (status, reason) == (Status.UNAUTHENTICATED, "revoked")
    assert message.startswith("node node-a was revoked by ops: stolen; cure: re-join")


async def test_a_revocation_is_seen_although_the_newest_one_lies_ahead(rig: Rig) -> None:
    """As after a step of the database's clock: what was revoked while it lay ahead must not hide what follows."""
    time = ServerTime(rig.world.clock)
    feed = RevocationFeed(rig.database, server_time=time, world=rig.world)

    async def revoked(node_id: str, serial: str) -> bool:
        await seed.add_node(rig.database, node_id)
        await seed.add_certificate(rig.database, node_id, serial=serial)
        await revoke(rig, node_id)
        time.read(await sessions.server_time_ms(rig.database))
        await feed.read()
        return feed.notice(serial) is not None

    assert await revoked("node-a", "aa")
    await move_clock(rig.database, offset_ms=120_000)
    assert await revoked("node-b", "bb")
    await move_clock(rig.database, offset_ms=0)
    assert await revoked("node-c", "cc")


async def test_a_rejoined_node_is_served_however_old_the_picture_of_the_gateway(rig: Rig) -> None:
    node = await rig.add_node("node-a")
    daemon = await rig.connect(node)
    await revoke(rig, "node-a")
    await daemon.end()
    async with rig.database.transaction() as transaction:
        generation = await nodes.insert_joined(
            transaction,
            nodes.JoinedNode(
                node_id="node-a", site="default", role="node", tenant_controlled=False, attestor="join-token"
            ),
        )
    assert generation == 2
    anew = rig.make_node("node-a")
    await seed.add_certificate(rig.database, "node-a", serial=anew.serial, generation=2)
    served = await rig.connect(anew)
    await rig.gateway.revocations.read()
    assert served.call.status is None
