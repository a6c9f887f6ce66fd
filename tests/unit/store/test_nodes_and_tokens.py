"""Joining in the store: nodes, certificates, tokens, what is used once."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from bettercompute.delivery import selectors
from bettercompute.errors import Refused
from bettercompute.store import certificates, channels, conditions, controller_runs, nodes, replay, tokens
from bettercompute.store.certificates import NewCertificate
from bettercompute.store.database import DedicatedConnection
from bettercompute.testing.postgres import move_clock

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


def sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


async def join(database, node_id="n1", **changes):
    node = nodes.JoinedNode(
        **{
            "node_id": node_id,
            "site": "default",
            "role": "node",
            "tenant_controlled": False,
            "attestor": "join-token",
            "hardware_claims": {"dmi_uuid": "u", "nested": {"a": [1]}},
            **changes,
        }
    )
    async with database.transaction() as transaction:
        return await nodes.insert_joined(transaction, node)


async def issue(database, *, node_id="n1", serial, generation=1, csr=None, lifetime_ms=DAY_MS):
    now_ms = await controller_runs.now_ms(database)
    async with database.transaction() as transaction:
        await certificates.insert(
            transaction,
            NewCertificate(
                serial=serial,
                node_id=node_id,
                identity_generation=generation,
                csr_sha256=sha256(csr or serial),
                chain=b"chain " + serial.encode(),
                not_before_ms=now_ms - 300_000,
                not_after_ms=now_ms + lifetime_ms,
            ),
        )


async def test_a_node_joins_with_a_session_row_of_epoch_0(database):
    assert await join(database) == 1
    node = await nodes.get(database, node_id="n1")
    assert node is not None
    assert (node.state, node.session.session_epoch, node.session.gateway_id) == ("joined", 0, None)
    assert node.hardware_claims == {"dmi_uuid": "u", "nested": {"a": [1]}}
    assert (node.system_labels, node.operator_labels, node.session.capabilities) == ({}, {}, ())
    assert await nodes.get(database, node_id="n2") is None


async def test_a_re_join_raises_the_identity_generation_and_ends_a_quarantine(database):
    await join(database)
    await database.query("UPDATE nodes SET quarantined_at = compute_now(), quarantine_reason = 'duplicate-identity'")
    assert await join(database, site="other") == 2
    node = await nodes.get(database, node_id="n1")
    assert node is not None
    assert (node.site, node.identity_generation, node.quarantined_at_ms) == ("other", 2, None)


async def test_joins_of_one_node_at_once_each_get_a_generation_of_their_own(database):
    assert sorted(await asyncio.gather(*(join(database) for _ in range(5)))) == [1, 2, 3, 4, 5]


async def test_nodes_are_listed_in_pages_and_by_labels(database):
    for number in range(5):
        await join(database, f"n{number}", site="a" if number < 3 else "b")
    async with database.transaction() as transaction:
        for node_id in ("n1", "n3"):
            await nodes.change_labels(
                transaction, node_id=node_id, source=nodes.OPERATOR, wanted={"gpu": "h100", "rack": node_id}
            )
        await nodes.change_labels(transaction, node_id="n1", source=nodes.SYSTEM, wanted={"gpu": "none"})
    first = await nodes.list_page(database, page_size=2)
    second = await nodes.list_page(database, after=first[-1].node_id, page_size=10)
    assert [node.node_id for node in first + second] == ["n0", "n1", "n2", "n3", "n4"]
    assert (first[1].operator_labels, first[1].system_labels) == ({"gpu": "h100", "rack": "n1"}, {"gpu": "none"})
    assert [node.node_id for node in await nodes.existing(database, node_ids=["n9", "n2"])] == ["n2"]
    assert await nodes.state_counts(database) == {"joined": 5}


@pytest.mark.parametrize(
    ("selector", "meant"),
    [
        ("gpu=h100", ["n1", "n3"]),
        ("gpu=h100,site=b", ["n3"]),
        ("gpu!=h100", ["n0", "n2", "n4"]),
        ("gpu,!bc.dev/cap.nvml", ["n3"]),
        ("bc.dev/cap.nvml=1", ["n1"]),
        ("bc.dev/cap.nvml=2", []),
        ("rack in (n0, n3, n9)", ["n3"]),
        ("rack notin (n3),gpu", ["n1"]),
        ("site in (b),role=node,state=joined", ["n3", "n4"]),
        ("state=connected", []),
    ],
)
async def test_a_selector_means_the_nodes_that_meet_all_of_it(database, selector, meant):
    for number in range(5):
        await join(database, f"n{number}", site="a" if number < 3 else "b")
    async with database.transaction() as transaction:
        for node_id in ("n1", "n3"):
            await nodes.change_labels(
                transaction, node_id=node_id, source=nodes.OPERATOR, wanted={"gpu": "h100", "rack": node_id}
            )
        await nodes.change_labels(transaction, node_id="n1", source=nodes.SYSTEM, wanted={"bc.dev/cap.nvml": "1"})
        # As an older version may have left it: an operator's word is not the control plane's.
        await nodes.change_labels(transaction, node_id="n2", source=nodes.OPERATOR, wanted={"bc.dev/cap.nvml": "1"})
    requirements = selectors.parse(selector)
    found = await nodes.choose(database, requirements, page_size=10)
    assert [node.node_id for node in found] == meant
    paged, after = [], ""
    while page := await nodes.choose(database, requirements, after=after, page_size=1):
        paged += [node.node_id for node in page]
        after = paged[-1]
    assert paged == meant


async def test_labels_are_removed_and_bounded(database):
    await join(database)

    async def change(**changes):
        async with database.transaction() as transaction:
            await nodes.change_labels(transaction, node_id="n1", source=nodes.OPERATOR, **changes)

    await change(wanted={"a": "1", "b": "2"})
    await change(wanted={"b": "3"}, removed=["a"])
    node = await nodes.get(database, node_id="n1")
    assert node is not None
    assert node.operator_labels == {"b": "3"}
    with pytest.raises(Refused, match="would have 257 labels, 256 is the limit"):
        await change(wanted={f"k{number}": "v" for number in range(256)})


def new_token(name="t1", **changes):
    values = {"token_id": name, "secret_sha256": sha256(name), "site": "default", "role": "node"}
    return tokens.NewToken(**{**values, "created_by": "ops", "lifetime_ms": HOUR_MS, **changes})


async def redeem(database, name="t1", *, csr="csr", role="node", drawn="drawn", asked=None):
    async with database.transaction() as transaction:
        return await tokens.redeem(
            transaction,
            secret_sha256=sha256(name),
            csr_sha256=sha256(csr),
            role=role,
            drawn_node_id=drawn,
            asked_node_id=asked,
            source="192.0.2.1",
        )


async def test_of_20_that_redeem_a_token_at_once_exactly_one_wins(database):
    await tokens.create(database, new_token())

    async def attempt(number):
        return await redeem(database, csr=f"csr {number}", drawn=f"n{number}")

    results = await asyncio.gather(*(attempt(number) for number in range(20)), return_exceptions=True)
    [winner] = [result for result in results if isinstance(result, tokens.Redeemed)]
    losers = [result for result in results if isinstance(result, Refused)]
    assert [refusal.reason for refusal in losers] == ["token-used"] * 19
    token = await tokens.get(database, token_id="t1")
    assert token is not None
    assert token.used_node_id == winner.node_id
    assert not winner.again


async def test_the_same_request_may_ask_again_even_at_once(database):
    await tokens.create(database, new_token())
    results = await asyncio.gather(*(redeem(database, drawn=f"n{number}") for number in range(5)))
    assert len({result.node_id for result in results}) == 1
    assert sorted(result.again for result in results) == [False, True, True, True, True]


async def test_a_redeeming_that_is_rolled_back_leaves_the_token_unused(database):
    await tokens.create(database, new_token())

    async def failing():
        async with database.transaction() as transaction:
            await tokens.redeem(
                transaction,
                secret_sha256=sha256("t1"),
                csr_sha256=sha256("csr"),
                role="node",
                drawn_node_id="n1",
                asked_node_id=None,
                source="",
            )
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await failing()
    assert not (await redeem(database, csr="another")).again


async def test_a_token_is_refused_with_its_reason(database):
    with pytest.raises(Refused) as refusal:
        await redeem(database, "unheard of")
    assert refusal.value.reason == "token-unknown"
    await tokens.create(database, new_token(node_id="fixed"))
    for reason, arguments in (("token-role", {"role": "site"}), ("token-node", {"asked": "other"})):
        with pytest.raises(Refused) as refusal:
            await redeem(database, **arguments)
        assert refusal.value.reason == reason
    assert (await redeem(database, asked="fixed")).node_id == "fixed"
    await tokens.create(database, new_token("t2"))
    assert await tokens.revoke(database, token_id="t2", revoked_by="ops")
    assert not await tokens.revoke(database, token_id="t2", revoked_by="ops")
    assert not await tokens.revoke(database, token_id="t1", revoked_by="ops")
    with pytest.raises(Refused) as refusal:
        await redeem(database, "t2")
    assert refusal.value.reason == "token-revoked"
    await tokens.create(database, new_token("t3"))
    await move_clock(database, offset_ms=HOUR_MS + 1)
    with pytest.raises(Refused) as refusal:
        await redeem(database, "t3")
    assert refusal.value.reason == "token-expired"
    # The lost answer of a used token is given again, also later.
    assert (await redeem(database, asked="fixed")).again
    listed = await tokens.list_page(database, page_size=10)
    assert [(token.token_id, token.expired) for token in listed] == [("t3", True), ("t2", True), ("t1", True)]
    assert [token.token_id for token in await tokens.list_page(database, before="t2", page_size=10)] == ["t1"]


async def test_the_same_request_gets_the_same_certificate(database):
    await join(database)
    await issue(database, serial="a1")
    found = await certificates.find_by_request(database, node_id="n1", csr_sha256=sha256("a1"))
    assert found is not None
    assert (found.serial, found.chain, found.allowed_kinds) == ("a1", b"chain a1", None)
    assert await certificates.find_by_request(database, node_id="n1", csr_sha256=sha256("other")) is None
    assert await certificates.find(database, serial="a1") == found


async def test_revoking_ends_every_serial_of_the_identity_and_tells_the_gateways(database, dsn):
    await join(database)
    for serial, generation, lifetime_ms in (("a1", 1, DAY_MS), ("a2", 1, DAY_MS), ("a3", 1, 1_000), ("b1", 2, DAY_MS)):
        await issue(database, serial=serial, generation=generation, lifetime_ms=lifetime_ms)
    await move_clock(database, offset_ms=HOUR_MS)
    heard: asyncio.Queue[str] = asyncio.Queue()
    listener = await DedicatedConnection.open(dsn, application_name="tests")
    await listener.listen(channels.REVOCATIONS, heard.put_nowait)
    async with database.transaction() as transaction:
        await nodes.lock_session(transaction, node_id="n1")
        serials = await certificates.revoke_generation(
            transaction, node_id="n1", identity_generation=1, reason="duplicate-identity"
        )
    # a3 has expired: it opens nothing, and must not prove a re-join either.
    assert serials == ("a1", "a2", "a3")
    assert channels.names(await asyncio.wait_for(heard.get(), 30)) == frozenset({"n1"})
    await listener.close()
    feed = await certificates.revoked_since(database, since_ms=0)
    assert [(row.serial, row.revocation_reason) for row in feed] == [
        ("a1", "duplicate-identity"),
        ("a2", "duplicate-identity"),
    ]
    assert await certificates.revoked_since(database, since_ms=feed[0].revoked_at_ms + 1) == []


async def test_what_is_used_once_is_used_once(database):
    results = await asyncio.gather(
        *(replay.consume(database, purpose="renew-pop", jti="j", expires_at_ms=1_000) for _ in range(10))
    )
    assert sorted(results) == [False] * 9 + [True]
    assert await replay.consume(database, purpose="ticket", jti="j", expires_at_ms=2**41)
    assert await replay.delete_expired(database, kept_after_expiry_ms=HOUR_MS, batch_size=10) == 1
    assert not await replay.consume(database, purpose="ticket", jti="j", expires_at_ms=2**41)


async def test_a_condition_keeps_its_time_while_its_status_does(database):
    await join(database)

    async def set_condition(status, reason):
        condition = conditions.NewCondition(node_id="n1", type="Full", source="gateway", status=status, reason=reason)
        gone = conditions.NewCondition(node_id="gone", type="Full", source="gateway", status=status)
        await conditions.set_all(database, [gone, condition])
        [stored] = await conditions.of_node(database, node_id="n1")
        return stored

    first = await set_condition(conditions.TRUE, "a")
    await move_clock(database, offset_ms=HOUR_MS)
    second = await set_condition(conditions.TRUE, "b")
    assert (second.reason, second.changed_at_ms) == ("b", first.changed_at_ms)
    third = await set_condition(conditions.FALSE, "b")
    assert third.changed_at_ms >= first.changed_at_ms + HOUR_MS


async def test_controllers_leave_a_note_of_their_last_run(database):
    assert await controller_runs.get(database, name="liveness") is None
    await controller_runs.record(database, name="liveness", holder="w1", grace_until_ms=123_000)
    await move_clock(database, offset_ms=HOUR_MS)
    last = await controller_runs.get(database, name="liveness")
    assert last is not None
    assert (last.holder, last.grace_until_ms) == ("w1", 123_000)
    assert last.now_ms - last.ran_at_ms >= HOUR_MS
