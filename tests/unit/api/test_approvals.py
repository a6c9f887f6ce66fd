"""Approver sets and the approval of destructive batches over the API, signed as an approver's command line signs."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from bettercompute.api.app import create_app
from bettercompute.api.context import ApiContext
from bettercompute.pki import certificates, quorum, signatures, trust
from bettercompute.pki.keyfiles import KeyFolder
from bettercompute.pki.quorum import ApproverSet, Unbatched
from bettercompute.pki.review import OfferedCommand, review
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import batch_approval_input
from bettercompute.protocol.kinds import KINDS
from bettercompute.services.installation import Installation, publish_trust
from bettercompute.services.keys import KeyRing
from bettercompute.services.pki_setup import initialise
from bettercompute.services.rotating import RotationService
from bettercompute.store import audit, delivery
from bettercompute.store import trust as stored_trust
from bettercompute.system import system_world

DOMAIN = "bc.test"
REBOOT = {"kind": "node.reboot", "nodes": ["n1", "n2"]}


class Approver:
    """A person with a key."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.key = certificates.generate_key()

    @property
    def shape(self) -> dict[str, str]:
        return {"name": self.name, "public_key": base64.b64encode(spki(self.key)).decode()}

    def sign(self, signing_input: bytes) -> str:
        return base64.b64encode(signatures.sign(self.key, signing_input).SerializeToString()).decode()


def spki(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


ALICE, BOB, CAROL = Approver("alice"), Approver("bob"), Approver("carol")


@pytest.fixture
async def api(
    context: ApiContext, clients: Mapping[str, httpx.AsyncClient], two_nodes: tuple[str, str], tmp_path: Path
) -> AsyncIterator[httpx.AsyncClient]:
    """An administrator's client of an installation that can publish."""
    world = system_world()
    folder = KeyFolder(tmp_path / "pki")
    initialise(folder, world=world)
    ring, installation = KeyRing(folder), Installation(trust_domain=DOMAIN, gateway_urls=("https://gw.test:8443",))
    await publish_trust(context.database, keys=ring.read(), installation=installation, world=world)
    keeper = RotationService(context.database, keys=ring.read, installation=installation, signing=None, world=world)
    app = create_app(dataclasses.replace(context, trust=keeper))
    headers = clients["admin"].headers
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api.test", headers=headers) as client:
        yield client


async def found(api: httpx.AsyncClient, *approvers: Approver, threshold: int = 2, unbatched: int = 0) -> dict[str, Any]:
    body = {
        "approvers": [approver.shape for approver in approvers],
        "threshold": threshold,
        "tiers": [1, 2],
        "unbatched_per_hour": unbatched,
    }
    answer = await api.post("/v1/approvers/proposal", json=body)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def set_of(shown: dict[str, Any]) -> ApproverSet:
    return quorum.make_approver_set(
        [base64.b64decode(one["public_key"]) for one in shown["approvers"]],
        epoch=shown["epoch"],
        threshold=shown["threshold"],
        tiers=shown["tiers"],
        unbatched_per_hour=shown["unbatched_per_hour"],
    )


async def published(context: ApiContext) -> trust.Trust:
    bundle = await stored_trust.current(context.database)
    assert bundle is not None
    return trust.read_own(bundle.signed_bundle)


async def sign_set(api: httpx.AsyncClient, approver: Approver, shown: dict[str, Any]) -> httpx.Response:
    signing_input = set_of(shown).signing_input(trust_domain=DOMAIN)
    body = {"epoch": shown["epoch"], "signature": approver.sign(signing_input)}
    return await api.post("/v1/approvers/signatures", json=body)


async def sign_batch(api: httpx.AsyncClient, approver: Approver, batch_id: str) -> httpx.Response:
    offered = (await api.get(f"/v1/approvals/{batch_id}")).json()
    scope = (await api.get(f"/v1/approvals/{batch_id}/scope")).json()["items"]
    commands = [
        OfferedCommand(
            command_id=item["command_id"],
            node_id=item["node_id"],
            kind=item["kind"],
            body=base64.b64decode(item["body"]),
        )
        for item in scope
    ]
    reviewed = review(
        batch_id=batch_id,
        scope_root=bytes.fromhex(offered["scope_root"]),
        not_after_ms=offered["not_after_ms"],
        commands=commands,
    )
    assert reviewed.node_ids == ("n1", "n2")
    signing_input = batch_approval_input(reviewed.approval, trust_domain=reviewed.trust_domain)
    return await api.post(f"/v1/approvals/{batch_id}/signatures", json={"signature": approver.sign(signing_input)})


async def test_without_approvers_nothing_waits(api: httpx.AsyncClient) -> None:
    made = (await api.post("/v1/commands", json=REBOOT)).json()
    assert made["approvals_required"] == 0
    assert (await api.get("/v1/approvals")).json() == []
    assert (await api.get(f"/v1/approvals/{made['batch_id']}")).status_code == 404


async def test_a_batch_is_released_by_the_last_approval_and_its_nodes_believe_it(
    api: httpx.AsyncClient, context: ApiContext
) -> None:
    await found(api, ALICE, BOB, CAROL)
    assert (await published(context)).content.approvers.threshold == 2
    preview = (await api.post("/v1/commands/preview", json=REBOOT)).json()
    assert preview["approvals_required"] == 2
    made = (await api.post("/v1/commands", json=REBOOT)).json()
    assert made["approvals_required"] == 2
    batch_id = made["batch_id"]
    [command_id, _] = [command["id"] for command in made["commands"]]
    rows = await context.database.query("SELECT not_before = not_after AS held, batch_proof FROM commands")
    assert all(row["held"] and row["batch_proof"] for row in rows)
    assert [item["batch_id"] for item in (await api.get("/v1/approvals")).json()] == [batch_id]

    # Kept under her name it would count nowhere, and keep her from signing.
    forged = await api.post(f"/v1/approvals/{batch_id}/signatures", json={"signature": ALICE.sign(b"another batch")})
    assert forged.status_code == 403
    first = await sign_batch(api, ALICE, batch_id)
    assert (first.json()["state"], first.json()["approved_by"]) == ("waiting", ["alice"])
    why = (await api.get(f"/v1/commands/{command_id}/why")).json()["reasons"][0]
    assert why["code"] == "approvals"
    assert why["sentence"].startswith("waiting for approvals (1 of 2, by alice)")
    again = await sign_batch(api, ALICE, batch_id)
    assert (again.status_code, "already" in again.json()["detail"]) == (409, True)
    stranger = await sign_batch(api, Approver("mallory"), batch_id)
    assert stranger.status_code == 403
    assert (await sign_batch(api, BOB, batch_id)).json()["state"] == "approved"
    assert (await sign_batch(api, CAROL, batch_id)).status_code == 409

    held = (await published(context)).content.approvers
    for row in await context.database.query("SELECT body, batch_approval, batch_proof, not_before FROM commands"):
        assert row["not_before"] is None
        body = messages.CommandBody.FromString(row["body"])
        command = messages.Command(
            body=row["body"],
            batch_approval=messages.BatchApproval.FromString(row["batch_approval"]),
            batch_proof=messages.BatchProof.FromString(row["batch_proof"]),
        )
        grounds = quorum.judge_approval(
            command,
            body,
            KINDS["node.reboot"],
            approvers=held,
            trust_domain=DOMAIN,
            unbatched=Unbatched("boot"),
            server_time_ms=body.issued_at_ms + 1,
            monotonic_ms=1,
        )
        assert grounds is quorum.Approval.BATCH
    acts = await audit.list_page(context.database, page_size=10, target=f"batch/{batch_id}")
    assert [entry.action for entry in acts] == ["batch.approve", "batch.approve", "command.run"]


async def test_a_refused_batch_ends(api: httpx.AsyncClient) -> None:
    await found(api, ALICE, BOB)
    made = (await api.post("/v1/commands", json=REBOOT)).json()
    refused = await api.post(f"/v1/approvals/{made['batch_id']}/refusal", json={"reason": "not on a Friday"})
    assert refused.json()["state"] == "refused"
    states = (await api.get(f"/v1/batches/{made['batch_id']}")).json()
    assert {item["state"] for item in states["items"]} == {"cancelled"}
    assert (await sign_batch(api, ALICE, made["batch_id"])).status_code == 409


async def step(api: httpx.AsyncClient, batch_id: str, *command_ids: str) -> dict[str, Any]:
    answer = await api.post(f"/v1/batches/{batch_id}/steps", json={"commands": command_ids})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_a_run_in_steps_is_approved_as_a_whole_and_sent_as_its_maker_says(
    api: httpx.AsyncClient, clients: Mapping[str, httpx.AsyncClient], context: ApiContext
) -> None:
    await found(api, ALICE, BOB)
    later = {"stepwise": True, "not_before_ms": 3_600_000}
    made = (await api.post("/v1/commands", json=REBOOT | later)).json()
    batch_id, (first, second) = made["batch_id"], (command["id"] for command in made["commands"])
    assert await step(api, batch_id, first) == {"batch_id": batch_id, "state": "waiting", "released": 0}
    await sign_batch(api, ALICE, batch_id)
    approved = (await sign_batch(api, BOB, batch_id)).json()
    assert (approved["state"], approved["stepwise"]) == ("approved", True)
    [why] = (await api.get(f"/v1/commands/{first}/why")).json()["reasons"][-1:]
    assert why["sentence"].startswith(
        f"it is approved, and waits for its step of the rolling run that {made_by(approved)} leads; and it is not to"
    )
    assert [(await step(api, batch_id, first))["released"] for _ in range(2)] == [1, 0]
    commands = {
        one["id"]: one for one in (await api.get("/v1/commands", params={"batch_id": batch_id})).json()["items"]
    }
    # A step lets it be sent, and not sooner than was asked for.
    assert commands[first]["not_before"] == commands[first]["asked_not_before"] < commands[first]["not_after"]
    assert commands[second]["not_before"] == commands[second]["not_after"]
    other = await clients["operator"].post(f"/v1/batches/{batch_id}/steps", json={"commands": [second]})
    assert (other.status_code, "only its maker" in other.text) == (409, True)
    strange = await api.post(f"/v1/batches/{batch_id}/steps", json={"commands": [second, "c-9"]})
    assert (strange.status_code, "has no command c-9" in strange.text) == (404, True)
    assert (await api.post(f"/v1/batches/{batch_id}/stop")).json() == {"batch_id": batch_id, "cancelled": 1}
    assert (await step(api, batch_id, second))["released"] == 0
    states = [(await api.get(f"/v1/commands/{one}")).json()["state"] for one in (first, second)]
    assert states == ["pending", "cancelled"]
    acts = [entry.action for entry in await audit.list_page(context.database, page_size=10)]
    assert acts[:5] == ["batch.stop", "batch.step", "batch.approve", "batch.approve", "command.run"]


def made_by(approval: dict[str, Any]) -> str:
    return str(approval["asked_by"])


async def test_a_run_in_steps_that_is_stopped_before_it_is_approved_ends(api: httpx.AsyncClient) -> None:
    await found(api, ALICE, BOB)
    batch_id = (await api.post("/v1/commands", json=REBOOT | {"stepwise": True})).json()["batch_id"]
    assert (await api.post(f"/v1/batches/{batch_id}/stop")).json()["cancelled"] == 2
    assert (await api.get(f"/v1/approvals/{batch_id}")).json()["state"] == "refused"


async def test_only_what_must_be_approved_is_held_back_for_steps(api: httpx.AsyncClient) -> None:
    refused = await api.post("/v1/commands", json=REBOOT | {"stepwise": True})
    assert (refused.status_code, "needs no approval" in refused.text) == (409, True)
    batch_id = (await api.post("/v1/commands", json=REBOOT)).json()["batch_id"]
    assert (await api.post(f"/v1/batches/{batch_id}/stop")).status_code == 404


async def test_what_nobody_approves_expires(api: httpx.AsyncClient, context: ApiContext) -> None:
    await found(api, ALICE, BOB)
    made = (await api.post("/v1/commands", json=REBOOT)).json()
    await context.database.query(
        "UPDATE commands SET not_after = compute_now() - interval '1 s', not_before = compute_now() - interval '1 s'"
    )
    await context.database.query("UPDATE approval_batches SET not_after = compute_now() - interval '1 s'")
    async with context.database.transaction() as transaction:
        drawn = [f"o{number}" for number in range(10)]
        expired = await delivery.expire(
            transaction, outbox_ids=drawn, event_type="command.finished", message="late", message_unsure="late"
        )
    assert len(expired) == 2
    assert (await api.get(f"/v1/approvals/{made['batch_id']}")).json()["state"] == "expired"
    assert (await sign_batch(api, ALICE, made["batch_id"])).status_code == 409


async def test_an_approved_batch_takes_no_more_and_the_few_an_hour_pass(api: httpx.AsyncClient) -> None:
    await found(api, ALICE, BOB, unbatched=1)
    made = (await api.post("/v1/commands", json=REBOOT)).json()
    added = await api.post("/v1/commands", json={**REBOOT, "batch_id": made["batch_id"]})
    assert (added.status_code, "approved as a whole" in added.json()["detail"]) == (409, True)
    added = await api.post("/v1/commands", json={**REBOOT, "batch_id": made["batch_id"], "unbatched": True})
    assert added.status_code == 409
    passed = (await api.post("/v1/commands", json={**REBOOT, "unbatched": True})).json()
    assert passed["approvals_required"] == 0
    harmless = (await api.post("/v1/commands", json={**REBOOT, "kind": "inventory.refresh"})).json()
    assert harmless["approvals_required"] == 0


async def test_the_set_changes_by_the_word_of_the_set_in_force(api: httpx.AsyncClient, context: ApiContext) -> None:
    await found(api, ALICE, BOB)
    before = await published(context)
    shown = await found(api, BOB, CAROL)
    assert (shown["proposed"]["epoch"], shown["proposed"]["signatures_missing"]) == (2, 2)
    assert (await published(context)).version == before.version
    assert (await sign_set(api, CAROL, shown["proposed"])).status_code == 403
    forged = {"epoch": 2, "signature": ALICE.sign(b"another set")}
    assert (await api.post("/v1/approvers/signatures", json=forged)).status_code == 403
    assert (await sign_set(api, ALICE, shown["proposed"])).json()["proposed"]["signatures_missing"] == 1
    assert (await sign_set(api, ALICE, shown["proposed"])).status_code == 409
    changed = (await sign_set(api, BOB, shown["proposed"])).json()
    assert (changed["current"]["epoch"], changed["proposed"]) == (2, None)
    after = await published(context)
    enforced, change = trust.enforced_approvers(before.content.approvers, after)
    assert (change, enforced.epoch) == (quorum.SetChange.TAKE, 2)

    # A node that was away while it changed twice takes it by the word of those whom it knows.
    again = await found(api, CAROL, threshold=1)
    for approver in (BOB, CAROL):
        await sign_set(api, approver, again["proposed"])
    third = await published(context)
    assert trust.enforced_approvers(before.content.approvers, third)[1] is quorum.SetChange.NOT_SIGNED
    current = (await api.get("/v1/approvers")).json()["current"]
    assert (await sign_set(api, ALICE, current)).status_code == 201
    fourth = await published(context)
    assert fourth.version > third.version
    assert trust.enforced_approvers(before.content.approvers, fourth)[0].epoch == 3


async def test_one_proposal_at_a_time_and_giving_up(api: httpx.AsyncClient, context: ApiContext) -> None:
    nobody = {"approvers": [], "threshold": 0, "tiers": []}
    assert (await api.post("/v1/approvers/proposal", json=nobody)).status_code == 409
    await found(api, ALICE, threshold=1)
    assert (await api.post("/v1/approvers/proposal", json=nobody)).status_code == 201
    other = await api.post("/v1/approvers/proposal", json=nobody)
    assert (other.status_code, "withdraw it" in other.json()["detail"]) == (409, True)
    assert (await api.delete("/v1/approvers/proposal")).json()["proposed"] is None
    shown = (await api.post("/v1/approvers/proposal", json=nobody)).json()["proposed"]
    assert shown["epoch"] == 3
    given_up = ApproverSet(epoch=3, keys=(), threshold=0, tiers=())
    signature = ALICE.sign(given_up.signing_input(trust_domain=DOMAIN))
    await api.post("/v1/approvers/signatures", json={"epoch": 3, "signature": signature})
    assert (await published(context)).content.approvers == given_up
    assert (await api.post("/v1/commands", json=REBOOT)).json()["approvals_required"] == 0


async def test_epochs_rise_above_what_nodes_enforce(api: httpx.AsyncClient, context: ApiContext) -> None:
    await context.database.query(
        "UPDATE node_sessions SET approver_set_epoch = 9, approver_set_sha256 = sha256('x') WHERE node_id = 'n1'"
    )
    assert (await found(api, ALICE, threshold=1))["current"]["epoch"] == 10
    behind = (await api.get("/v1/pki/trust/nodes")).json()["items"]
    assert {item["node_id"]: item["quorum_behind"] for item in behind} == {"n1": True, "n2": True}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"approvers": [ALICE.shape], "threshold": 2, "tiers": [1]}, "threshold of 2"),
        ({"approvers": [{"public_key": "AAAA"}], "threshold": 1, "tiers": [1]}, "no SubjectPublicKeyInfo"),
        ({"approvers": [{"public_key": "?"}], "threshold": 1, "tiers": [1]}, "not base64"),
        ({"approvers": [], "threshold": 1, "tiers": [1]}, "mean nothing"),
    ],
    ids=["threshold", "key", "base64", "nobody"],
)
async def test_a_set_that_no_node_could_use_is_refused(api: httpx.AsyncClient, body: dict[str, Any], says: str) -> None:
    answer = await api.post("/v1/approvers/proposal", json=body)
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["detail"]
