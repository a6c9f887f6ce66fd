"""Renew against the real database: proven, once, idempotent, and never a lock-out."""

from __future__ import annotations

import asyncio

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from bettercompute.errors import Refused
from bettercompute.pki import certificates, identity
from bettercompute.pki.identity import NodeIdentity
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason
from bettercompute.store import certificates as stored_certificates
from bettercompute.store import nodes, standing
from bettercompute.testing import postgres
from tests.unit.services.joining import Node, Plane, make_plane

NOW_MS = 1_900_000_000_000


@pytest.fixture
async def plane(database, tmp_path) -> Plane:
    await postgres.freeze_clock(database, now_ms=NOW_MS)
    return await make_plane(database, tmp_path)


async def renew(
    plane: Plane, node: Node, body: messages.JoinResponseBody, following: Node, *, client_time_ms: int = NOW_MS
) -> messages.JoinResponseBody:
    request = node.renew_request(body, next_node=following, client_time_ms=client_time_ms)
    response = await plane.join.renew(request, peer_chain=list(body.certificate_chain))
    return plane.verified(response, following)


def serial(body: messages.JoinResponseBody) -> str:
    return certificates.serial_text(certificates.load_certificate(body.certificate_chain[0]))


async def good_serials(plane: Plane, node_id: str) -> set[str]:
    rows = await stored_certificates.of_node(plane.database, node_id=node_id)
    return {row.serial for row in rows if row.superseded_at_ms is None and row.revoked_at_ms is None}


async def refused(
    plane: Plane, request: messages.RenewRequest, chain: list[bytes], reason: Reason, why: str | None = None
) -> None:
    with pytest.raises(Refused, match=why) as caught:
        await plane.join.renew(request, peer_chain=chain)
    assert caught.value.reason == reason


async def test_a_renewed_certificate_is_of_the_same_identity(plane):
    node, following = Node(), Node()
    body = await plane.joined(node, node_id="n1")
    renewed = await renew(plane, node, body, following)
    assert (renewed.node_id, renewed.identity_generation) == ("n1", 1)
    leaves = [certificates.load_certificate(one.certificate_chain[0]) for one in (body, renewed)]
    assert identity.identity_of(leaves[0]) == identity.identity_of(leaves[1])
    assert await good_serials(plane, "n1") == {serial(body), serial(renewed)}


async def test_the_same_request_gets_the_same_certificate(plane):
    node, following = Node(), Node()
    body = await plane.joined(node)
    answers = await asyncio.gather(
        *(renew(plane, node, body, following, client_time_ms=NOW_MS + skew) for skew in range(10))
    )
    assert len({tuple(answer.certificate_chain) for answer in answers}) == 1


async def test_where_tls_shows_no_certificate_the_request_brings_it(plane):
    node, following = Node(), Node()
    body = await plane.joined(node)
    request = node.renew_request(body, next_node=following, client_time_ms=NOW_MS)
    await refused(plane, request, [], Reason.NO_CERTIFICATE, "needs the node's present certificate")
    request.certificate_chain.extend(body.certificate_chain)
    plane.verified(await plane.join.renew(request, peer_chain=[]), following)


@pytest.mark.parametrize(("skew_ms", "good"), [(-60_000, True), (-60_001, False), (60_000, True), (60_001, False)])
async def test_a_proof_is_dated_by_server_time(plane, skew_ms, good):
    node, following = Node(), Node()
    body = await plane.joined(node)
    if good:
        await renew(plane, node, body, following, client_time_ms=NOW_MS + skew_ms)
    else:
        request = node.renew_request(body, next_node=following, client_time_ms=NOW_MS + skew_ms)
        chain = list(body.certificate_chain)
        await refused(plane, request, chain, Reason.BAD_PROOF, "the limit is 60000: date it by server time")


async def test_a_proof_is_used_once_even_when_its_certificate_is_gone(plane):
    node, following = Node(), Node()
    body = await plane.joined(node, node_id="n1")
    request = node.renew_request(body, next_node=following, client_time_ms=NOW_MS)
    renewed = plane.verified(await plane.join.renew(request, peer_chain=list(body.certificate_chain)), following)
    await plane.database.query(f"DELETE FROM node_certs WHERE serial = '{serial(renewed)}'")
    await refused(plane, request, list(body.certificate_chain), Reason.BAD_PROOF, "was used before")


async def test_a_proof_is_of_the_present_key_for_this_request_and_node(plane):
    node, following, other = Node(), Node(), Node()
    body = await plane.joined(node, node_id="n1")
    chain = list(body.certificate_chain)
    stolen = other.renew_request(body, next_node=following, client_time_ms=NOW_MS)
    await refused(plane, stolen, chain, Reason.BAD_PROOF, "does not verify")
    swapped = node.renew_request(body, next_node=following, client_time_ms=NOW_MS)
    swapped.csr = other.csr
    await refused(plane, swapped, chain, Reason.BAD_PROOF, "does not verify")
    moved = node.renew_request(body, next_node=following, client_time_ms=NOW_MS)
    moved.client_time_ms += 1
    await refused(plane, moved, chain, Reason.BAD_PROOF, "does not verify")
    elsewhere = node.renew_request(messages.JoinResponseBody(node_id="n2"), next_node=following, client_time_ms=NOW_MS)
    await refused(plane, elsewhere, chain, Reason.BAD_PROOF, "does not verify")


async def test_at_most_two_serials_wait_unused_and_nobody_is_locked_out(plane):
    node = Node()
    body = await plane.joined(node, node_id="n1")
    answers = []
    for minute in range(1, 5):
        await postgres.freeze_clock(plane.database, now_ms=NOW_MS + minute * 60_000)
        answers.append(await renew(plane, node, body, Node(), client_time_ms=NOW_MS + minute * 60_000))
    newest = {serial(answer) for answer in answers[-2:]}
    assert await good_serials(plane, "n1") == {serial(body), *newest}


async def test_a_superseded_certificate_renews_nothing(plane):
    node, following = Node(), Node()
    body = await plane.joined(node, node_id="n1")
    await renew(plane, node, body, following)
    await plane.database.query(f"UPDATE node_certs SET superseded_at = compute_now() WHERE serial = '{serial(body)}'")
    request = node.renew_request(body, next_node=Node(), client_time_ms=NOW_MS)
    await refused(plane, request, list(body.certificate_chain), Reason.SUPERSEDED_CERTIFICATE, "replaced by a newer")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ("UPDATE node_certs SET revoked_at = compute_now(), revocation_reason = 'stolen'", Reason.REVOKED),
        ("UPDATE nodes SET identity_generation = 2", Reason.OLD_GENERATION),
        ("UPDATE nodes SET quarantined_at = compute_now(), quarantine_reason = 'clone'", Reason.QUARANTINED),
        ("UPDATE nodes SET revoked_at = compute_now(), revoked_by = 'ops', revoked_reason = ''", Reason.REVOKED),
        ("DELETE FROM nodes", Reason.NOT_JOINED),
        ("UPDATE node_certs SET node_id = 'other'", Reason.BAD_CERTIFICATE),
    ],
)
async def test_who_may_not_renew(plane, spoil, reason):
    node = Node()
    body = await plane.joined(node)
    await plane.database.query(spoil)
    request = node.renew_request(body, next_node=Node(), client_time_ms=NOW_MS)
    await refused(plane, request, list(body.certificate_chain), reason)


async def test_a_certificate_that_a_restore_has_forgotten_renews(plane):
    """It was issued after the backup; what the newest one on record allows, the next one allows."""
    node, between, following = Node(), Node(), Node()
    body = await plane.joined(node, node_id="n1")
    await plane.database.query("UPDATE node_certs SET allowed_kinds = '{inventory.refresh}'")
    second = await renew(plane, node, body, between)
    await plane.database.query(f"DELETE FROM node_certs WHERE serial = '{serial(second)}'")
    third = await renew(plane, between, second, following, client_time_ms=NOW_MS + 1)
    assert await good_serials(plane, "n1") == {serial(body), serial(second), serial(third)}
    stored = await stored_certificates.find(plane.database, serial=serial(third))
    assert stored is not None
    assert (stored.identity_generation, stored.allowed_kinds) == (1, ("inventory.refresh",))
    await plane.database.query("DELETE FROM node_certs")
    fourth = Node()
    await renew(plane, following, third, fourth, client_time_ms=NOW_MS + 2)


async def test_a_locked_node_renews(plane):
    """A lock takes nothing away: when it ends the node is back by itself."""
    node = Node()
    body = await plane.joined(node)
    await plane.database.query("UPDATE nodes SET locked_at = compute_now(), locked_by = 'ops', lock_reason = ''")
    await renew(plane, node, body, Node())


async def test_a_node_that_was_revoked_or_forgotten_joins_by_a_new_token_only(plane):
    node, again, anew = Node(), Node(), Node()
    first = await plane.joined(node, node_id="n1")
    what = {"node_id": "n1", "notice": b"", "draw_id": plane.world.ids.uuid7, "event_type": "command.finished"}
    async with plane.database.transaction() as transaction:
        await nodes.lock_session(transaction, node_id="n1")
        await standing.revoke(transaction, revoked_by="ops", reason="", **what)
    request = node.renew_request(first, next_node=Node(), client_time_ms=NOW_MS)
    await refused(plane, request, list(first.certificate_chain), Reason.REVOKED)
    second = await plane.joined(again, node_id="n1")
    assert second.identity_generation == 2
    await renew(plane, again, second, Node())
    async with plane.database.transaction() as transaction:
        await nodes.lock_session(transaction, node_id="n1")
        await standing.forget(transaction, forgotten_by="ops", **what)
    request = again.renew_request(second, next_node=Node(), client_time_ms=NOW_MS + 1)
    await refused(plane, request, list(second.certificate_chain), Reason.NOT_JOINED)
    third = await plane.joined(anew, node_id="n1")
    assert third.identity_generation == 1
    # Nobody comes back by what the forgotten node had, though the generations are the same again.
    request = node.renew_request(first, next_node=Node(), client_time_ms=NOW_MS + 2)
    await refused(plane, request, list(first.certificate_chain), Reason.REVOKED)


async def test_an_expired_certificate_does_not_renew(plane):
    node = Node()
    body = await plane.joined(node)
    late_ms = NOW_MS + 24 * 3_600_000 + 1000
    await postgres.freeze_clock(plane.database, now_ms=late_ms)
    request = node.renew_request(body, next_node=Node(), client_time_ms=late_ms)
    await refused(plane, request, list(body.certificate_chain), Reason.CERTIFICATE_EXPIRED, "it expired at")


@pytest.mark.parametrize(
    ("named", "reason", "why"),
    [
        ({"trust_domain": "other.example"}, Reason.BAD_CERTIFICATE, "of trust domain other.example, not ours"),
        ({"attestation_key_sha256": "ab" * 32}, Reason.ATTESTOR_UNKNOWN, "a TPM certifies is not supported yet"),
    ],
)
async def test_a_certificate_that_was_not_issued_by_join(plane, named, reason, why):
    node = Node()
    await plane.joined(Node(), node_id="n1")
    leaf = certificates.make_node_leaf(
        plane.keys.node_ca,
        public_key=node.key.public_key(),
        identity=NodeIdentity(
            **{"trust_domain": "bc.local", "site": "default", "node_id": "n1", "role": "node", **named}
        ),
        serial=bytes(16),
        now_ms=NOW_MS,
    )
    body = messages.JoinResponseBody(node_id="n1", certificate_chain=[leaf.public_bytes(Encoding.DER)])
    request = node.renew_request(body, next_node=Node(), client_time_ms=NOW_MS)
    await refused(plane, request, list(body.certificate_chain), reason, why)
