"""`provisioned` and `discovery` against the real database: challenged, once, on their machine, every refusal."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest

from bettercompute.errors import Refused
from bettercompute.pki import certificates, discovery, join_challenge, signatures
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import join_response_input
from bettercompute.protocol.statuses import Reason, Status
from bettercompute.services.attestors.discovery import discovered_node_id
from bettercompute.services.join import JoinService
from bettercompute.store import audit, nodes
from bettercompute.testing import postgres
from tests.unit.services.joining import INSTALLATION, Node, Plane, make_plane

NOW_MS = 1_900_000_000_000
MAC = "00:00:5e:00:53:01"
MACHINE = {"serial": "S1"}


@pytest.fixture
async def plane(database, tmp_path) -> Plane:
    await postgres.freeze_clock(database, now_ms=NOW_MS)
    return await make_plane(database, tmp_path)


def other_instance(plane: Plane) -> JoinService:
    """JoinService on another host, or after a restart."""
    return JoinService(plane.database, keys=plane.keys, installation=INSTALLATION, world=plane.world)


def deferral(plane: Plane, response: messages.JoinResponse, node: Node) -> messages.JoinDeferral:
    """Check a deferral as a node does."""
    signatures.verify(response.signature, plane.keys.join_signing.public_key(), join_response_input(response.body))
    body = messages.JoinResponseBody.FromString(response.body)
    assert body.csr_sha256 == hashlib.sha256(node.csr).digest()
    assert not body.certificate_chain
    return body.deferral


async def refused(plane: Plane, request: messages.JoinRequest, reason: Reason, why: str) -> Refused:
    counted = (
        "SELECT (SELECT count(*) FROM node_certs) + (SELECT count(*) FROM outbox) + (SELECT count(*) FROM replay_cache)"
        " + (SELECT count(*) FROM join_tokens WHERE used_at IS NOT NULL) AS n"
    )
    before = await plane.database.query(counted)
    with pytest.raises(Refused, match=why) as caught:
        await plane.join.join(request, source="192.0.2.9")
    assert caught.value.reason == reason
    assert await plane.database.query(counted) == before
    return caught.value


class Case:
    """One machine that joins by one of the two attestors."""

    def __init__(self, plane: Plane, secret: bytes, request: messages.JoinRequest, node: Node) -> None:
        self.plane, self.secret, self.request, self.node = plane, secret, request, node

    async def challenged(self, service: JoinService | None = None) -> messages.JoinRequest:
        """Ask, and return the request that answers the challenge."""
        response = await (service or self.plane.join).join(self.request, source="s")
        found = deferral(self.plane, response, self.node)
        assert (found.reason, found.retry_after_seconds) == ("challenge", 0)
        return self.node.answered(self.request, response, self.secret, self.plane.keys)

    async def joined(self, service: JoinService | None = None) -> messages.JoinResponseBody:
        response = await (service or self.plane.join).join(await self.challenged(), source="s")
        return self.plane.verified(response, self.node)


async def provisioned(plane: Plane, *, node: Node | None = None, node_id: str = "n1", **token: Any) -> Case:
    node = node or Node()
    secret = await plane.token(node_id=node_id, attestor="provisioned", **{"machine": MACHINE, **token})
    request = node.join_request(secret, plane.keys, attestor="provisioned", node_id=node_id)
    request.hardware.serial = "s1 "
    return Case(plane, secret, request, node)


async def discovered(plane: Plane, *, agent: Node | None = None, **changes: Any) -> Case:
    """A machine that a site agent of site `oslo` has seen boot."""
    node, site_agent = Node(), agent or Node()
    secret = plane.world.ids.random_bytes(32)
    agent_secret = await plane.token(node_id="site-1", role="site", site="oslo")
    body = plane.verified(
        await plane.join.join(site_agent.join_request(agent_secret, plane.keys, role="site"), source="s"), site_agent
    )
    assertion = messages.site.DiscoveryAssertion(
        **{
            "site_node_id": "site-1",
            "site": "oslo",
            "mac_address": MAC,
            "nonce_sha256": hashlib.sha256(secret).digest(),
            "issued_at_ms": NOW_MS,
            "not_after_ms": NOW_MS + 600_000,
            **changes,
        }
    )
    request = node.join_request(secret, plane.keys, attestor="discovery", role="ramdisk")
    request.evidence = discovery.sign_assertion(assertion, key=site_agent.key, chain_der=list(body.certificate_chain))
    return Case(plane, secret, request, node)


MAKERS = {"provisioned": provisioned, "discovery": discovered}
both = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@both
async def test_a_challenge_is_answered_and_the_machine_is_in(plane, make):
    case = await make(plane)
    body = await case.joined()
    stored = await nodes.get(plane.database, node_id=body.node_id)
    assert stored is not None
    assert stored.attestor == case.request.attestor


@both
async def test_a_challenge_leaves_no_trace(plane, make):
    case = await make(plane)
    counted = "SELECT (SELECT count(*) FROM replay_cache) AS r, (SELECT count(*) FROM nodes) AS n"
    before = await plane.database.query(counted)
    for _ in range(5):
        await case.challenged()
    assert await plane.database.query(counted) == before


@both
async def test_a_challenge_is_good_on_every_instance_and_over_a_restart(plane, make):
    case = await make(plane)
    answer = await case.challenged(other_instance(plane))
    plane.verified(await other_instance(plane).join(answer, source="s"), case.node)


@both
async def test_an_answer_is_used_once_on_all_instances_together(plane, make):
    case = await make(plane)
    answer = await case.challenged()
    services = [plane.join, other_instance(plane), other_instance(plane)]
    outcomes = await asyncio.gather(*(one.join(answer, source="s") for one in services), return_exceptions=True)
    assert len([one for one in outcomes if isinstance(one, messages.JoinResponse)]) == 1
    for loser in (one for one in outcomes if isinstance(one, BaseException)):
        assert isinstance(loser, Refused)
        assert (loser.reason, loser.status) == (Reason.BAD_PROOF, Status.UNAUTHENTICATED)
        assert "each is good for once: ask again" in loser.message
    with pytest.raises(Refused, match="was answered before"):
        await other_instance(plane).join(answer, source="s")


@both
async def test_a_lost_answer_is_asked_for_by_a_new_challenge_and_is_the_same(plane, make):
    case = await make(plane)
    first = await case.joined()
    again = await case.joined(other_instance(plane))
    assert again.certificate_chain == first.certificate_chain


@both
@pytest.mark.parametrize(("late_ms", "good"), [(119_999, True), (120_000, False)])
async def test_a_challenge_expires(plane, make, late_ms, good):
    case = await make(plane)
    answer = await case.challenged()
    await postgres.freeze_clock(plane.database, now_ms=NOW_MS + late_ms)
    if good:
        plane.verified(await plane.join.join(answer, source="s"), case.node)
    else:
        await refused(plane, answer, Reason.BAD_PROOF, "the challenge expired 0 ms ago, it is good for 120000 ms")


@both
async def test_a_challenge_is_for_one_request(plane, make):
    case = await make(plane)
    answer = await case.challenged()
    thief = Node()
    stolen = messages.JoinRequest()
    stolen.CopyFrom(answer)
    stolen.csr = thief.csr
    await refused(plane, stolen, Reason.TOKEN_MALFORMED, "sealed for another certificate request")
    other = await make(plane, **({"node_id": "n2"} if make is provisioned else {"agent": Node()}))
    mixed = messages.JoinRequest()
    mixed.CopyFrom(other.request)
    mixed.challenge_answer = answer.challenge_answer
    await refused(plane, mixed, Reason.BAD_PROOF, "given for another request, altered, or not given here")


@both
@pytest.mark.parametrize(
    ("answer", "reason", "why"),
    [
        (b"\xff", Reason.INVALID_FRAME, "are no SealedChallengeAnswer"),
        (messages.SealedChallengeAnswer(challenge=b"x").SerializeToString(), Reason.BAD_PROOF, "it has 1 bytes"),
        (
            messages.SealedChallengeAnswer(challenge=b"\1" * join_challenge.CHALLENGE_BYTES).SerializeToString(),
            Reason.BAD_PROOF,
            "altered, or not given here",
        ),
    ],
    ids=["bytes", "short", "forged"],
)
async def test_an_answer_to_no_challenge_of_ours(plane, make, answer, reason, why):
    case = await make(plane)
    case.request.challenge_answer = answer
    await refused(plane, case.request, reason, why)


@both
async def test_the_first_proof_is_no_answer_and_another_secret_neither(plane, make):
    case = await make(plane)
    answer = await case.challenged()
    found = messages.SealedChallengeAnswer.FromString(answer.challenge_answer)
    found.sealed_secret = case.request.sealed_token
    answer.challenge_answer = found.SerializeToString()
    await refused(plane, answer, Reason.TOKEN_MALFORMED, "sealed for another challenge")
    response = await plane.join.join(case.request, source="s")
    other = case.node.answered(case.request, response, bytes(32), plane.keys)
    await refused(plane, other, Reason.BAD_PROOF, "answered with another secret")


# provisioned


async def test_a_credential_is_for_the_machine_that_was_named(plane):
    case = await provisioned(plane, machine={"serial": "S2", "dmi_uuid": "U"})
    answer = await case.challenged()
    await refused(plane, answer, Reason.ATTESTATION, "dmi_uuid 'U' was expected, and it claims ''; make one for it")


async def test_a_credential_without_a_machine_is_for_the_one_the_node_joined_on(plane):
    await plane.joined(Node(), node_id="n1")
    case = await provisioned(plane, machine={})
    case.request.hardware.mac_addresses[:] = ["00:00:5E:00:53:01", "00:00:5e:00:53:99"]
    assert (await case.joined()).identity_generation == 2
    other = await provisioned(plane, machine={})
    other.request.hardware.mac_addresses[:] = ["00:00:5e:00:53:77"]
    await refused(plane, await other.challenged(), Reason.ATTESTATION, "none of its hardware addresses")


async def test_a_credential_for_a_machine_of_which_nothing_is_known(plane):
    case = await provisioned(plane, machine={})
    await refused(
        plane, await case.challenged(), Reason.ATTESTATION, "nothing is known of the machine of node n1: make"
    )


async def test_a_live_node_is_not_replaced_but_waited_for(plane):
    await plane.joined(Node(), node_id="n1")
    await plane.database.query(
        "UPDATE node_sessions SET gateway_id = 'g', session_id = 's', session_epoch = 1, last_seen = compute_now()"
    )
    case = await provisioned(plane)
    answer = await case.challenged()
    found = deferral(plane, await plane.join.join(answer, source="s"), case.node)
    assert (found.reason, found.retry_after_seconds, found.challenge) == ("node-connected", 15, b"")
    assert "node n1 has a live session" in found.message
    await postgres.freeze_clock(plane.database, now_ms=NOW_MS + 46_000)
    assert (await case.joined()).identity_generation == 2


@pytest.mark.parametrize("attestor", ["join-token", "provisioned"])
async def test_a_token_is_for_its_attestor(plane, attestor):
    other = {"join-token": "provisioned", "provisioned": "join-token"}[attestor]
    secret = await plane.token(node_id="n1", attestor=other)
    request = Node().join_request(secret, plane.keys, attestor=attestor)
    await refused(plane, request, Reason.ATTESTATION, f"is for attestor {other}, not {attestor}: join by that one")


async def test_a_credential_is_for_its_node(plane):
    case = await provisioned(plane)
    case.request.node_id = "n2"
    await refused(plane, await case.challenged(), Reason.TOKEN_NODE, "is for node n1, not n2")


async def test_an_unknown_credential(plane):
    request = Node().join_request(bytes(32), plane.keys, attestor="provisioned")
    await refused(plane, request, Reason.TOKEN_UNKNOWN, "not known here")


async def test_what_can_go_wrong_with_a_token_can_go_wrong_with_a_credential(plane):
    case = await provisioned(plane)
    answer = await case.challenged()
    await plane.database.query("UPDATE join_tokens SET expires_at = compute_now()")
    await refused(plane, answer, Reason.TOKEN_EXPIRED, "has expired: make another one")
    await plane.database.query("UPDATE join_tokens SET revoked_at = compute_now(), revoked_by = 'x'")
    await refused(plane, await case.challenged(), Reason.TOKEN_REVOKED, "was revoked")


# discovery


async def test_a_discovered_machine_is_a_ramdisk_of_its_agents_site_and_the_same_node_at_each_boot(plane):
    body = await (await discovered(plane)).joined()
    assert (body.node_id, body.site, body.role) == (
        discovered_node_id(site="oslo", mac_address=MAC), "oslo", messages.AGENT_ROLE_RAMDISK
    )  # fmt: skip
    [entry, *_] = await audit.list_page(plane.database, page_size=1)
    assert entry.actor == "node/site-1"
    again = await (await discovered(plane)).joined()
    assert (again.node_id, again.identity_generation) == (body.node_id, 2)
    assert discovered_node_id(site="bergen", mac_address=MAC) != body.node_id


async def test_an_assertion_lets_one_machine_in_once(plane):
    case = await discovered(plane)
    await case.joined()
    thief = Node()
    request = thief.join_request(case.secret, plane.keys, attestor="discovery", role="ramdisk")
    request.evidence = case.request.evidence
    other = Case(plane, case.secret, request, thief)
    await refused(plane, await other.challenged(), Reason.ATTESTATION, "was used before: boot the machine again")


async def test_whoever_relayed_the_assertion_cannot_use_it(plane):
    case = await discovered(plane)
    thief = Node()
    request = thief.join_request(bytes(32), plane.keys, attestor="discovery", role="ramdisk")
    request.evidence = case.request.evidence
    await refused(plane, request, Reason.BAD_PROOF, "is not that of the script which the assertion is about")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"not_after_ms": NOW_MS}, "boot the machine again"),
        ({"issued_at_ms": NOW_MS + 60_001}, "set the clock of the site agent"),
        ({"issued_at_ms": NOW_MS - 3_600_000}, "3600000 are the limit"),
        ({"issued_at_ms": -(2**63)}, "3600000 are the limit"),
        ({"mac_address": "00:00:5E:00:53:01"}, "is no hardware address"),
        ({"mac_address": "00:00:5e:00:53:77"}, "which this one is not"),
        ({"uuid": "U2"}, "about the machine with UUID 'u2', not 'u1'"),
        ({"nonce_sha256": b"x"}, "has 1 bytes, a SHA-256 has 32"),
        ({"site": "bergen"}, "site-1 of site oslo signed it"),
        ({"site_node_id": "site-2"}, "it speaks for 'site-2'"),
    ],
)
async def test_an_assertion_that_is_not_right(plane, changes, why):
    case = await discovered(plane, **changes)
    case.request.hardware.dmi_uuid = "U1"
    await refused(plane, case.request, Reason.ATTESTATION, why)


async def test_only_a_site_agent_may_assert(plane):
    case, node = await discovered(plane), Node()
    body = await plane.joined(node, node_id="n7")
    signed = messages.site.SignedDiscoveryAssertion.FromString(case.request.evidence)
    assertion = messages.site.DiscoveryAssertion.FromString(signed.body)
    case.request.evidence = discovery.sign_assertion(assertion, key=node.key, chain_der=list(body.certificate_chain))
    await refused(plane, case.request, Reason.ATTESTATION, "whose role is node: only a site agent may assert")


@pytest.mark.parametrize(
    ("spoil", "reason", "why"),
    [
        ("DELETE FROM nodes WHERE node_id = 'site-1'", Reason.ATTESTATION, "is not known here"),
        (
            "UPDATE nodes SET quarantined_at = compute_now(), quarantine_reason = 'clone' WHERE node_id = 'site-1'",
            Reason.ATTESTATION,
            "is quarantined",
        ),
        ("UPDATE node_certs SET revoked_at = compute_now(), revocation_reason = 'x'", Reason.REVOKED, "was revoked"),
        ("UPDATE node_certs SET superseded_at = compute_now()", Reason.SUPERSEDED_CERTIFICATE, "replaced by a newer"),
        ("UPDATE nodes SET identity_generation = 7", Reason.OLD_GENERATION, "older identity"),
    ],
)
async def test_an_agent_that_is_not_good_now(plane, spoil, reason, why):
    case = await discovered(plane)
    await plane.database.query(spoil)
    await refused(plane, case.request, reason, why)


async def test_an_agent_whose_certificate_a_restore_has_forgotten(plane):
    case = await discovered(plane)
    await plane.database.query("DELETE FROM node_certs")
    assert (await case.joined()).site == "oslo"


async def test_an_assertion_under_another_ca(plane):
    case = await discovered(plane)
    signed = messages.site.SignedDiscoveryAssertion.FromString(case.request.evidence)
    signed.body += b"\0"
    case.request.evidence = signed.SerializeToString()
    await refused(plane, case.request, Reason.BAD_PROOF, "does not verify")
    case.request.evidence = messages.site.SignedDiscoveryAssertion(body=b"").SerializeToString()
    await refused(plane, case.request, Reason.BAD_CERTIFICATE, "has 0 certificates")
    case.request.evidence = b"\xff"
    await refused(plane, case.request, Reason.INVALID_FRAME, "are no SignedDiscoveryAssertion")
    other_ca = certificates.make_node_ca(serial=bytes(16), now_ms=NOW_MS)
    assert other_ca.certificate != plane.keys.node_ca.certificate


@pytest.mark.parametrize(
    ("change", "reason", "why"),
    [
        ({"role": messages.AGENT_ROLE_NODE}, Reason.ROLE_MISMATCH, "joins as ramdisk, and it asks for node"),
        ({"node_id": "n1"}, Reason.NODE_MISMATCH, "is named by JoinService, not n1"),
    ],
)
async def test_what_a_discovered_machine_may_not_ask(plane, change, reason, why):
    case = await discovered(plane)
    for name, value in change.items():
        setattr(case.request, name, value)
    await refused(plane, case.request, reason, why)


async def test_a_discovered_machine_takes_nobodys_place(plane):
    await plane.joined(Node(), node_id=discovered_node_id(site="oslo", mac_address=MAC))
    case = await discovered(plane)
    await refused(plane, await case.challenged(), Reason.CONFLICT, "has joined by join-token: forget it first")
