"""Re-joining by an expired certificate against the real database: who, until when, once, and never locked out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from bettercompute.errors import Refused
from bettercompute.pki import certificates
from bettercompute.pki.identity import NodeIdentity
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason, Status
from bettercompute.services.join import JoinService
from bettercompute.store import audit, nodes
from bettercompute.store import certificates as stored_certificates
from bettercompute.testing import postgres
from tests.unit.services.joining import INSTALLATION, Node, Plane, make_plane

NOW_MS = 1_900_000_000_000
HOUR_MS = 3_600_000
LATER_MS = NOW_MS + 30 * HOUR_MS
"""Six hours after the certificate's expiry."""


@pytest.fixture
async def plane(database, tmp_path) -> Plane:
    await postgres.freeze_clock(database, now_ms=NOW_MS)
    return await make_plane(database, tmp_path)


async def expired(plane: Plane, node: Node) -> messages.JoinResponseBody:
    """Let a node join, and its certificate expire."""
    body = await plane.joined(node, node_id="n1")
    await postgres.freeze_clock(plane.database, now_ms=LATER_MS)
    return body


async def rejoin(plane: Plane, request: messages.JoinRequest, following: Node) -> messages.JoinResponseBody:
    return plane.verified(await plane.join.join(request, source="192.0.2.9"), following)


async def refused(plane: Plane, request: messages.JoinRequest, reason: Reason, why: str) -> Refused:
    """See a refusal, and that nothing came of it."""
    counted = "SELECT (SELECT count(*) FROM node_certs) + (SELECT count(*) FROM outbox) AS n"
    before = await plane.database.query(counted)
    with pytest.raises(Refused, match=why) as caught:
        await plane.join.join(request, source="192.0.2.9")
    assert caught.value.reason == reason
    assert await plane.database.query(counted) == before
    return caught.value


def serial(body: messages.JoinResponseBody) -> str:
    return certificates.serial_text(certificates.load_certificate(body.certificate_chain[0]))


async def test_an_expired_node_comes_back_as_the_next_generation_of_itself(plane):
    node, following = Node(), Node()
    body = await expired(plane, node)
    again = await rejoin(plane, node.rejoin_request(body, next_node=following, client_time_ms=LATER_MS), following)
    assert (again.node_id, again.site, again.role) == (body.node_id, body.site, body.role)
    assert (body.identity_generation, again.identity_generation) == (1, 2)
    stored = await nodes.get(plane.database, node_id="n1")
    assert stored is not None
    assert (stored.attestor, stored.identity_generation) == ("x509pop", 2)
    by_serial = {one.serial: one for one in await stored_certificates.of_node(plane.database, node_id="n1")}
    assert by_serial[serial(again)].revoked_at_ms is None
    [entry, _] = await audit.list_page(plane.database, page_size=10)
    assert (entry.actor, entry.action) == ("node/n1", "node.join")
    assert entry.details["attestor"] == "x509pop"


async def test_what_its_token_allowed_stays(plane):
    node, following = Node(), Node()
    body = await expired(plane, node)
    await plane.database.query("UPDATE node_certs SET allowed_kinds = ARRAY['inventory.refresh']")
    again = await rejoin(plane, node.rejoin_request(body, next_node=following, client_time_ms=LATER_MS), following)
    stored = await stored_certificates.find(plane.database, serial=serial(again))
    assert stored is not None
    assert stored.allowed_kinds == ("inventory.refresh",)


@pytest.mark.parametrize(
    ("late_ms", "good"),
    [(0, True), (71 * HOUR_MS, True), (72 * HOUR_MS, True), (72 * HOUR_MS + 1000, False), (400 * HOUR_MS, False)],
)
async def test_how_old_a_certificate_may_be(plane, late_ms, good):
    node, following = Node(), Node()
    body = await plane.joined(node, node_id="n1")
    now_ms = certificates.not_after_ms(certificates.load_certificate(body.certificate_chain[0])) + late_ms
    await postgres.freeze_clock(plane.database, now_ms=now_ms)
    request = node.rejoin_request(body, next_node=following, client_time_ms=now_ms)
    if good:
        await rejoin(plane, request, following)
    else:
        await refused(plane, request, Reason.CERTIFICATE_EXPIRED, "72 h are the limit .* join anew with a new token")


async def test_one_that_is_still_good_is_renewed_and_not_joined_anew(plane):
    node = Node()
    body = await plane.joined(node, node_id="n1")
    request = node.rejoin_request(body, next_node=Node(), client_time_ms=NOW_MS)
    refusal = await refused(plane, request, Reason.CONFLICT, "is still good: dial with it, and renew it")
    assert refusal.status == Status.FAILED_PRECONDITION


@pytest.mark.parametrize(("skew_ms", "good"), [(-60_000, True), (-60_001, False), (60_000, True), (60_001, False)])
async def test_a_proof_is_dated_by_server_time(plane, skew_ms, good):
    node, following = Node(), Node()
    body = await expired(plane, node)
    request = node.rejoin_request(body, next_node=following, client_time_ms=LATER_MS + skew_ms)
    if good:
        await rejoin(plane, request, following)
    else:
        await refused(plane, request, Reason.BAD_PROOF, "the limit is 60000: date it by server time")


async def test_the_same_request_gets_the_same_certificate_on_any_instance_of_the_service(plane):
    node, following = Node(), Node()
    body = await expired(plane, node)
    other = JoinService(plane.database, keys=plane.keys, installation=INSTALLATION, world=plane.world)
    requests = [
        node.rejoin_request(body, next_node=following, client_time_ms=LATER_MS + skew) for skew in (0, 0, 1, 2, 3, 4)
    ]
    services = (plane.join, other) * 3
    answers = await asyncio.gather(
        *(service.join(request, source="s") for service, request in zip(services, requests, strict=True))
    )
    assert len({tuple(plane.verified(answer, following).certificate_chain) for answer in answers}) == 1
    [stored] = await nodes.get_many(plane.database, node_ids=["n1"])
    assert stored.identity_generation == 2


async def test_of_two_that_hold_the_key_one_comes_back(plane):
    node, first, second = Node(), Node(), Node()
    body = await expired(plane, node)
    requests = [
        node.rejoin_request(body, next_node=following, client_time_ms=LATER_MS) for following in (first, second)
    ]
    answers = await asyncio.gather(
        *(plane.join.join(request, source="s") for request in requests), return_exceptions=True
    )
    [loser] = [answer for answer in answers if isinstance(answer, BaseException)]
    assert isinstance(loser, Refused)
    assert loser.reason == Reason.OLD_GENERATION


async def test_a_proof_is_used_once_even_when_its_certificate_is_gone(plane):
    node, following = Node(), Node()
    body = await expired(plane, node)
    request = node.rejoin_request(body, next_node=following, client_time_ms=LATER_MS)
    again = await rejoin(plane, request, following)
    await plane.database.query(f"DELETE FROM node_certs WHERE serial = '{serial(again)}'")
    await plane.database.query("UPDATE nodes SET identity_generation = 1")
    await plane.database.query("ALTER TABLE node_certs DISABLE TRIGGER USER")  # nothing of ours takes that back
    await plane.database.query("UPDATE node_certs SET revoked_at = NULL, revocation_reason = NULL")
    restarted = JoinService(plane.database, keys=plane.keys, installation=INSTALLATION, world=plane.world)
    with pytest.raises(Refused, match="was used before") as caught:
        await restarted.join(request, source="s")
    assert caught.value.reason == Reason.BAD_PROOF


async def test_an_answer_that_never_arrived_is_given_anew_when_it_has_expired_unused(plane):
    node, following = Node(), Node()
    body = await expired(plane, node)
    lost = await rejoin(plane, node.rejoin_request(body, next_node=following, client_time_ms=LATER_MS), following)
    late_ms = LATER_MS + 25 * HOUR_MS
    await postgres.freeze_clock(plane.database, now_ms=late_ms)
    again = await rejoin(plane, node.rejoin_request(body, next_node=following, client_time_ms=late_ms), following)
    assert again.identity_generation == lost.identity_generation == 2
    assert serial(again) != serial(lost)
    assert await stored_certificates.find(plane.database, serial=serial(lost)) is None
    await refused(
        plane,
        node.rejoin_request(body, next_node=Node(), client_time_ms=late_ms),
        Reason.OLD_GENERATION,
        "is of an older identity of the node: join anew with a new token",
    )


async def test_a_newer_certificate_that_nobody_used_locks_nobody_out(plane):
    node, renewed, following = Node(), Node(), Node()
    body = await plane.joined(node, node_id="n1")
    await plane.join.renew(
        node.renew_request(body, next_node=renewed, client_time_ms=NOW_MS), peer_chain=list(body.certificate_chain)
    )
    await postgres.freeze_clock(plane.database, now_ms=LATER_MS)
    await rejoin(plane, node.rejoin_request(body, next_node=following, client_time_ms=LATER_MS), following)


@pytest.mark.parametrize(
    ("spoil", "reason", "why"),
    [
        (
            "UPDATE node_certs SET revoked_at = compute_now(), revocation_reason = 'stolen'",
            Reason.REVOKED,
            r"was revoked \(stolen\)",
        ),
        ("UPDATE nodes SET identity_generation = 2", Reason.OLD_GENERATION, "older identity"),
        (
            "UPDATE nodes SET quarantined_at = compute_now(), quarantine_reason = 'clone'",
            Reason.QUARANTINED,
            r"is quarantined \(clone\)",
        ),
        ("UPDATE node_certs SET superseded_at = compute_now()", Reason.SUPERSEDED_CERTIFICATE, "replaced by a newer"),
        ("DELETE FROM nodes", Reason.NOT_JOINED, "has not joined here"),
        (
            "UPDATE nodes SET revoked_at = compute_now(), revoked_by = 'ops', revoked_reason = ''",
            Reason.REVOKED,
            "was revoked by ops",
        ),
    ],
)
async def test_who_may_not_come_back(plane, spoil, reason, why):
    node = Node()
    body = await expired(plane, node)
    await plane.database.query(spoil)
    request = node.rejoin_request(body, next_node=Node(), client_time_ms=LATER_MS)
    refusal = await refused(plane, request, reason, why)
    assert "join anew with a new token" in refusal.message


async def test_what_a_restore_has_forgotten_comes_back_as_what_it_was_and_once(plane):
    """Its certificate was issued after the backup, and expired before the node was on again."""
    node, forgotten, following = Node(), Node(), Node()
    body = await plane.joined(node, node_id="n1")
    await plane.database.query("UPDATE node_certs SET allowed_kinds = '{inventory.refresh}'")
    renewal = node.renew_request(body, next_node=forgotten, client_time_ms=NOW_MS)
    lost = plane.verified(await plane.join.renew(renewal, peer_chain=list(body.certificate_chain)), forgotten)
    await plane.database.query(f"DELETE FROM node_certs WHERE serial = '{serial(lost)}'")
    await postgres.freeze_clock(plane.database, now_ms=LATER_MS)
    request = forgotten.rejoin_request(lost, next_node=following, client_time_ms=LATER_MS)
    again = await rejoin(plane, request, following)
    assert await rejoin(plane, request, following) == again
    stored = await stored_certificates.find(plane.database, serial=serial(again))
    assert stored is not None
    assert (stored.identity_generation, stored.allowed_kinds) == (2, ("inventory.refresh",))
    copy = forgotten.rejoin_request(lost, next_node=Node(), client_time_ms=LATER_MS)
    await refused(plane, copy, Reason.OLD_GENERATION, "older identity")


@pytest.mark.parametrize(
    ("newer", "reason", "why"),
    [
        ("first_used_at = compute_now()", Reason.SUPERSEDED_CERTIFICATE, "older than one that the node has used"),
        ("first_used_at = NULL", Reason.OLD_GENERATION, "older than the node's present identity"),
    ],
)
async def test_what_is_older_than_the_record_was_not_forgotten_by_a_restore(plane, newer, reason, why):
    node, renewed, late = Node(), Node(), NOW_MS + 60_000
    body = await plane.joined(node, node_id="n1")
    await postgres.freeze_clock(plane.database, now_ms=late)
    renewal = node.renew_request(body, next_node=renewed, client_time_ms=late)
    await plane.join.renew(renewal, peer_chain=list(body.certificate_chain))
    await plane.database.query(f"DELETE FROM node_certs WHERE serial = '{serial(body)}'")
    await plane.database.query(f"UPDATE node_certs SET {newer}")
    if reason is Reason.SUPERSEDED_CERTIFICATE:
        joined = "INSERT INTO node_certs SELECT 'ab', node_id, 1, sha256('a'), chain, to_timestamp(0), not_after"
        await plane.database.query(f"{joined} FROM node_certs")
    await postgres.freeze_clock(plane.database, now_ms=LATER_MS)
    await refused(plane, node.rejoin_request(body, next_node=Node(), client_time_ms=LATER_MS), reason, why)


async def test_what_was_revoked_stays_revoked_for_the_request_that_was_answered(plane):
    node, following = Node(), Node()
    body = await expired(plane, node)
    await rejoin(plane, node.rejoin_request(body, next_node=following, client_time_ms=LATER_MS), following)
    await plane.database.query(
        "UPDATE node_certs SET revoked_at = compute_now(), revocation_reason = 'stolen' WHERE identity_generation = 2"
    )
    request = node.rejoin_request(body, next_node=following, client_time_ms=LATER_MS + 1)
    await refused(plane, request, Reason.OLD_GENERATION, "older identity")


def other_key(request: messages.JoinRequest, evidence: messages.X509PopEvidence) -> None:
    other = Node()
    evidence.proof.CopyFrom(
        messages.X509PopEvidence.FromString(
            other.rejoin_request(
                messages.JoinResponseBody(node_id="n1", role=request.role),
                next_node=Node(csr=request.csr),
                client_time_ms=LATER_MS,
            ).evidence
        ).proof
    )


Change = Callable[[messages.JoinRequest, messages.X509PopEvidence], object]


@pytest.mark.parametrize(
    ("change", "reason", "why"),
    [
        (other_key, Reason.BAD_PROOF, "does not verify"),
        (lambda r, _: setattr(r, "csr", Node().csr), Reason.BAD_PROOF, "does not verify"),
        (lambda _, e: setattr(e, "client_time_ms", LATER_MS + 1), Reason.BAD_PROOF, "does not verify"),
        (lambda _, e: setattr(e, "client_time_ms", -1), Reason.INVALID_FRAME, "cannot be signed"),
        (lambda _, e: e.ClearField("proof"), Reason.BAD_PROOF, "it has 0 bytes"),
        (lambda _, e: e.ClearField("certificate_chain"), Reason.ATTESTATION, "holds no certificate"),
        (lambda r, _: setattr(r, "role", messages.AGENT_ROLE_SITE), Reason.ROLE_MISMATCH, "a re-join keeps it"),
        (lambda r, _: setattr(r, "node_id", "n2"), Reason.NODE_MISMATCH, "is node n1's, and the request is for n2"),
    ],
)
async def test_a_proof_is_of_that_key_for_this_request(plane, change: Change, reason, why):
    node = Node()
    body = await expired(plane, node)
    request = node.rejoin_request(body, next_node=Node(), client_time_ms=LATER_MS)
    evidence = messages.X509PopEvidence.FromString(request.evidence)
    change(request, evidence)
    request.evidence = evidence.SerializeToString()
    await refused(plane, request, reason, why)


async def test_evidence_that_is_none(plane):
    request = Node().rejoin_request(
        messages.JoinResponseBody(role=messages.AGENT_ROLE_NODE), next_node=Node(), client_time_ms=0
    )
    request.evidence = b"\xff\xff"
    await refused(plane, request, Reason.INVALID_FRAME, "are no X509PopEvidence")


@pytest.mark.parametrize(
    ("named", "reason", "why"),
    [
        ({"trust_domain": "other.example"}, Reason.BAD_CERTIFICATE, "of trust domain other.example, not ours"),
        ({"attestation_key_sha256": "ab" * 32}, Reason.ATTESTOR_UNKNOWN, "a TPM certifies is not supported yet"),
    ],
)
async def test_a_certificate_that_was_not_issued_by_join(plane, named, reason, why):
    node = Node()
    await expired(plane, Node())
    leaf = certificates.make_node_leaf(
        plane.keys.node_ca,
        public_key=node.key.public_key(),
        identity=NodeIdentity(
            **{"trust_domain": "bc.local", "site": "default", "node_id": "n1", "role": "node", **named}
        ),
        serial=bytes(16),
        now_ms=NOW_MS,
    )
    body = messages.JoinResponseBody(
        node_id="n1", role=messages.AGENT_ROLE_NODE, certificate_chain=[leaf.public_bytes(Encoding.DER)]
    )
    await refused(plane, node.rejoin_request(body, next_node=Node(), client_time_ms=LATER_MS), reason, why)
