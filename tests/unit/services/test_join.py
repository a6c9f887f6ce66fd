"""Join against the real database: one token, one node, one transaction; every refusal with its reason."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from bettercompute.errors import Refused, Unavailable
from bettercompute.pki import certificates, identity
from bettercompute.pki.certificates import Use
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason, Status
from bettercompute.services.attestors.later import LATER
from bettercompute.services.installation import publish_trust
from bettercompute.services.join import JoinService
from bettercompute.store import audit, nodes, outbox, tokens
from bettercompute.store import certificates as stored_certificates
from bettercompute.store.database import Database
from bettercompute.testing import postgres
from tests.unit.services.joining import INSTALLATION, Node, Plane, make_plane


@pytest.fixture
async def plane(database: Database, tmp_path: Path) -> Plane:
    return await make_plane(database, tmp_path)


async def count(database: Database, table: str) -> int:
    [row] = await database.query(f"SELECT count(*) AS n FROM {table}")
    return int(row["n"])


async def refused(plane: Plane, request: messages.JoinRequest, reason: Reason, why: str | None = None) -> None:
    """See a refusal with its status and words, and that nothing came of it."""
    tables = ("nodes", "node_sessions", "node_certs", "outbox", "audit_log")
    before = [await count(plane.database, table) for table in tables]
    with pytest.raises(Refused, match=why) as caught:
        await plane.join.join(request, source="192.0.2.1")
    assert caught.value.reason == reason
    assert [await count(plane.database, table) for table in tables] == before


async def test_a_join_records_everything_at_once(plane):
    node = Node()
    body = await plane.joined(node)
    assert identity.is_name(body.node_id)
    assert body.role == messages.AGENT_ROLE_NODE
    assert (body.site, body.trust_domain, body.identity_generation) == ("default", "bc.local", 1)
    assert list(body.gateway_urls) == ["https://gw:443"]
    leaf = certificates.verify_chain(
        list(body.certificate_chain),
        roots=[plane.keys.node_ca.certificate],
        use=Use.CLIENT,
        now_ms=body.server_time_ms,
    )
    assert identity.identity_of(leaf).role == "node"
    stored = await nodes.get(plane.database, node_id=body.node_id)
    assert stored is not None
    assert (stored.state, stored.attestor, stored.session.session_epoch) == ("joined", "join-token", 0)
    assert stored.hardware_claims == {
        "machine_id": "m1",
        "hostname": "host",
        "mac_addresses": ["00:00:5e:00:53:01"],
        "daemon_version": "0.1.0",
    }
    [certificate] = await stored_certificates.of_node(plane.database, node_id=body.node_id)
    assert certificate.serial == certificates.serial_text(leaf)
    assert certificate.not_after_ms == certificates.not_after_ms(leaf)
    await outbox.assign_positions(plane.database)
    [event] = await outbox.read_from(plane.database, after_position=0)
    assert (event.type, event.node_id) == ("node.joined", body.node_id)
    assert event.payload["identityGeneration"] == 1
    [entry] = await audit.list_page(plane.database, page_size=10)
    assert (entry.action, entry.target) == ("node.join", f"node/{body.node_id}")
    assert entry.actor.startswith("token/")


async def test_one_token_is_good_for_one_of_twenty(plane: Plane) -> None:
    secret = await plane.token()
    machines = [Node() for _ in range(20)]

    async def attempt(node: Node) -> messages.JoinResponse | Refused:
        try:
            return await plane.join.join(node.join_request(secret, plane.keys), source="192.0.2.1")
        except Refused as refusal:
            return refusal

    answers = await asyncio.gather(*map(attempt, machines))
    winners = [
        (node, answer) for node, answer in zip(machines, answers, strict=True) if not isinstance(answer, Refused)
    ]
    losers = [answer for answer in answers if isinstance(answer, Refused)]
    assert len(winners) == 1
    assert {(loser.reason, loser.status) for loser in losers} == {(Reason.TOKEN_USED, Status.PERMISSION_DENIED)}
    node, answer = winners[0]
    body = plane.verified(answer, node)
    assert all(f"was used by node {body.node_id}" in loser.message for loser in losers)
    assert await count(plane.database, "nodes") == 1
    again = await plane.join.join(node.join_request(secret, plane.keys), source="192.0.2.2")
    assert plane.verified(again, node).certificate_chain == body.certificate_chain


async def test_twenty_copies_of_one_request_get_one_certificate(plane):
    secret = await plane.token()
    node = Node()
    requests = [node.join_request(secret, plane.keys) for _ in range(20)]
    answers = await asyncio.gather(*(plane.join.join(request, source="s") for request in requests))
    chains = {tuple(plane.verified(answer, node).certificate_chain) for answer in answers}
    assert len(chains) == 1
    assert await count(plane.database, "node_certs") == 1
    assert await count(plane.database, "outbox") == 1


async def test_a_token_may_fix_the_node(plane):
    body = await plane.joined(Node(), node_id="rack1-n7")
    assert body.node_id == "rack1-n7"
    secret = await plane.token(node_id="rack1-n8")
    node = Node()
    answer = await plane.join.join(node.join_request(secret, plane.keys, node_id="rack1-n8"), source="s")
    assert plane.verified(answer, node).node_id == "rack1-n8"


async def test_a_node_joins_anew_as_another_generation(plane):
    first, second = Node(), Node()
    before = await plane.joined(first, node_id="n1")
    await plane.database.query("UPDATE node_sessions SET session_epoch = 5")
    after = await plane.joined(second, node_id="n1")
    assert (before.identity_generation, after.identity_generation) == (1, 2)
    node = await nodes.get(plane.database, node_id="n1")
    assert node is not None
    assert (node.identity_generation, node.session.session_epoch) == (2, 5)
    by_generation = {c.identity_generation: c for c in await stored_certificates.of_node(plane.database, node_id="n1")}
    assert by_generation[1].revocation_reason == "rejoined"
    assert by_generation[2].revoked_at_ms is None


async def test_a_used_token(plane):
    secret = await plane.token()
    await plane.join.join(Node().join_request(secret, plane.keys), source="s")
    await refused(plane, Node().join_request(secret, plane.keys), Reason.TOKEN_USED, "each is good for one machine")


async def test_an_expired_token(plane):
    secret = await plane.token(lifetime_ms=1000)
    await postgres.move_clock(plane.database, offset_ms=1001)
    await refused(plane, Node().join_request(secret, plane.keys), Reason.TOKEN_EXPIRED, "has expired")


async def test_a_revoked_token(plane):
    secret = await plane.token()
    [token] = await tokens.list_page(plane.database, page_size=1)
    await tokens.revoke(plane.database, token_id=token.token_id, revoked_by="tests")
    await refused(plane, Node().join_request(secret, plane.keys), Reason.TOKEN_REVOKED, "was revoked")


async def test_a_token_for_another_role(plane):
    secret = await plane.token(role="site")
    await refused(plane, Node().join_request(secret, plane.keys), Reason.TOKEN_ROLE, "is for role site, not node")


async def test_an_unknown_token(plane):
    await refused(plane, Node().join_request(bytes(32), plane.keys), Reason.TOKEN_UNKNOWN, "not known here")


async def test_a_token_for_another_node(plane):
    secret = await plane.token(node_id="n1")
    request = Node().join_request(secret, plane.keys, node_id="n2")
    await refused(plane, request, Reason.TOKEN_NODE, "is for node n1, not n2")


async def test_a_token_that_names_no_node_takes_nobody_s_place(plane):
    await plane.joined(Node(), node_id="n1")
    secret = await plane.token()
    node = Node()
    request = node.join_request(secret, plane.keys, node_id="n1")
    await refused(plane, request, Reason.TOKEN_NODE, "does not name node n1")
    answer = await plane.join.join(node.join_request(secret, plane.keys), source="s")
    assert plane.verified(answer, node).node_id != "n1"


async def test_a_token_sealed_for_another_request_or_role(plane):
    secret = await plane.token()
    request = Node().join_request(secret, plane.keys)
    relayed = Node()
    request.csr = relayed.csr
    await refused(plane, request, Reason.TOKEN_MALFORMED, "sealed for another certificate request")
    request = Node().join_request(secret, plane.keys)
    request.role = messages.AGENT_ROLE_SITE
    await refused(plane, request, Reason.TOKEN_MALFORMED, "sealed for role 'node', and the request asks for 'site'")


@pytest.mark.parametrize("sealed", ["", "x", "a.b.c.d.e", "é", "\0"])
async def test_a_malformed_token(plane, sealed):
    request = Node().join_request(await plane.token(), plane.keys)
    request.sealed_token = sealed
    await refused(plane, request, Reason.TOKEN_MALFORMED, "the sealed content")


async def test_a_token_sealed_to_another_installation(plane):
    other = dataclasses.replace(plane.keys, join_encryption_keys=(certificates.generate_key(),))
    request = Node().join_request(await plane.token(), other)
    await refused(plane, request, Reason.TOKEN_MALFORMED, "not sealed to this key")


@pytest.mark.parametrize("attestor", LATER)
async def test_an_attestor_of_a_later_version(plane, attestor):
    request = Node().join_request(await plane.token(), plane.keys, attestor=attestor)
    await refused(plane, request, Reason.ATTESTOR_UNKNOWN, f"attestor {attestor} is not supported by this version")


@pytest.mark.parametrize("attestor", ["", "magic", "x" * 1000])
async def test_an_unknown_attestor(plane, attestor):
    request = Node().join_request(await plane.token(), plane.keys, attestor=attestor)
    await refused(plane, request, Reason.ATTESTOR_UNKNOWN, "is not known here: join by join-token")


@pytest.mark.parametrize(
    ("change", "reason", "why"),
    [
        (lambda r: setattr(r, "role", 0), Reason.BAD_REQUEST, "role 0 is not known"),
        (lambda r: setattr(r, "role", 77), Reason.BAD_REQUEST, "role 77 is not known"),
        (lambda r: setattr(r, "csr", b""), Reason.BAD_CSR, "not a DER certificate request"),
        (lambda r: setattr(r, "node_id", "N1"), Reason.INVALID_NAME, "is not a node id"),
        (lambda r: setattr(r, "daemon_version", "x" * 257), Reason.BAD_REQUEST, "daemon_version of the request"),
        (lambda r: setattr(r.hardware, "hostname", "a\0b"), Reason.BAD_REQUEST, "hostname of the request"),
        (lambda r: r.hardware.mac_addresses.extend(["a"] * 256), Reason.BAD_REQUEST, "257 hardware addresses"),
        (lambda r: r.hardware.mac_addresses.append("\0"), Reason.BAD_REQUEST, "mac_addresses of the request"),
    ],
)
async def test_a_bad_request(plane, change, reason, why):
    request = Node().join_request(await plane.token(), plane.keys)
    change(request)
    await refused(plane, request, reason, why)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ("UPDATE node_certs SET revoked_at = compute_now(), revocation_reason = 'stolen'", Reason.REVOKED),
        ("UPDATE nodes SET identity_generation = 2", Reason.OLD_GENERATION),
        ("UPDATE node_certs SET superseded_at = compute_now()", Reason.SUPERSEDED_CERTIFICATE),
        ("UPDATE node_certs SET not_after = compute_now()", Reason.CERTIFICATE_EXPIRED),
        ("DELETE FROM nodes", Reason.TOKEN_USED),
    ],
)
async def test_a_lost_answer_that_is_not_good_any_more(plane, spoil, reason):
    secret = await plane.token()
    node = Node()
    await plane.join.join(node.join_request(secret, plane.keys), source="s")
    await plane.database.query(spoil)
    await refused(plane, node.join_request(secret, plane.keys), reason)


async def test_a_lost_answer_of_another_role(plane):
    secret = await plane.token()
    node = Node()
    await plane.join.join(node.join_request(secret, plane.keys), source="s")
    await refused(plane, node.join_request(secret, plane.keys, role="site"), Reason.TOKEN_ROLE, "is for role node")


async def test_before_the_first_bundle_nobody_joins_and_no_token_is_spent(plane):
    secret = await plane.token()
    await plane.database.query("DELETE FROM trust_bundles")
    assert await plane.join.trust_bundle() is None
    node = Node()
    with pytest.raises(Unavailable, match="is starting"):
        await plane.join.join(node.join_request(secret, plane.keys), source="s")
    await publish_trust(plane.database, keys=plane.keys, installation=INSTALLATION, world=plane.world)
    plane.verified(await plane.join.join(node.join_request(secret, plane.keys), source="s"), node)


async def test_a_drawn_id_that_is_taken_spends_nothing(plane: Plane) -> None:
    class Ids:
        def uuid7(self) -> str:
            return plane.world.ids.uuid7()

        def random_bytes(self, count: int) -> bytes:
            return bytes(10) if count == 10 else plane.world.ids.random_bytes(count)

    world = dataclasses.replace(plane.world, ids=Ids())
    service = JoinService(plane.database, keys=plane.keys, installation=INSTALLATION, world=world)
    await service.join(Node().join_request(await plane.token(), plane.keys), source="s")
    secret = await plane.token()
    node = Node()
    with pytest.raises(Unavailable, match="was taken just now"):
        await service.join(node.join_request(secret, plane.keys), source="s")
    plane.verified(await plane.join.join(node.join_request(secret, plane.keys), source="s"), node)


async def test_no_secret_is_stored_in_clear(plane):
    secret = await plane.token()
    await plane.join.join(Node().join_request(secret, plane.keys), source="s")
    tables = await plane.database.query("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    for table in tables:
        for row in await plane.database.query(f"SELECT to_jsonb(t)::text AS line FROM {table['tablename']} t"):
            assert secret.hex() not in row["line"]


async def test_the_bundle_rises_with_its_content_only(plane):
    first = await plane.join.trust_bundle()
    assert first is not None
    same = await publish_trust(plane.database, keys=plane.keys, installation=INSTALLATION, world=plane.world)
    assert (same.version, same.signed_bundle) == first
    moved = dataclasses.replace(INSTALLATION, trust_domain="other.example")
    newer = await publish_trust(plane.database, keys=plane.keys, installation=moved, world=plane.world)
    assert newer.version == first[0] + 1
