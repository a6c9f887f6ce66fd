"""Enqueuing, awaiting and showing commands over HTTP."""

import asyncio
from collections.abc import Mapping

import httpx
import pytest

from bettercompute.api.context import ApiContext
from bettercompute.api.shapes import rfc3339
from bettercompute.protocol import messages
from bettercompute.store import audit, commands

Clients = Mapping[str, httpx.AsyncClient]


async def test_a_run_makes_a_command_for_each_node(clients: Clients, context: ApiContext, two_nodes) -> None:
    answer = await clients["operator"].post(
        "/v1/commands",
        json={"kind": "inventory.refresh", "payload": {"sections": ["cpu"]}, "all": True, "timeout_ms": 5_000},
    )
    assert answer.status_code == 201, answer.text
    made = answer.json()
    assert [item["node_id"] for item in made["commands"]] == ["n1", "n2"]
    shown = (await clients["viewer"].get(f"/v1/commands/{made['commands'][0]['id']}")).json()
    assert (shown["state"], shown["lane"], shown["created_by"]) == ("pending", "control", "a-operator")
    assert shown["payload"] == {"sections": ["cpu"]}
    stored = await commands.signed_body(context.database, command_id=made["commands"][1]["id"])
    assert stored is not None
    body = messages.CommandBody.FromString(stored.body)
    assert (body.node_id, body.kind, body.timeout_ms, body.trust_domain) == (
        "n2",
        "inventory.refresh",
        5_000,
        "bc.test",
    )
    assert body.not_after_ms - body.issued_at_ms == 24 * 3_600_000
    payload = messages.InventoryRefreshPayload()
    assert body.payload.Unpack(payload)
    assert list(payload.sections) == ["cpu"]


async def test_a_run_may_be_for_later(clients: Clients, context: ApiContext, two_nodes) -> None:
    request = {"kind": "inventory.refresh", "nodes": ["n1"], "not_before_ms": 3_600_000}
    headers = {"idempotency-key": "later"}
    [made] = (await clients["operator"].post("/v1/commands", json=request, headers=headers)).json()["commands"]
    shown = (await clients["viewer"].get(f"/v1/commands/{made['id']}")).json()
    assert shown["not_before"] == shown["asked_not_before"]
    stored = await commands.signed_body(context.database, command_id=made["id"])
    assert stored is not None
    body = messages.CommandBody.FromString(stored.body)
    assert body.not_before_ms - body.issued_at_ms == 3_600_000
    assert shown["not_before"] == rfc3339(body.not_before_ms)
    why = (await clients["viewer"].get(f"/v1/commands/{made['id']}/why")).json()["reasons"]
    assert "not-before" in [reason["code"] for reason in why] or why[0]["code"] == "no-session"
    again = await clients["operator"].post("/v1/commands", json=request, headers=headers)
    assert again.json()["commands"] == [made]
    sooner = await clients["operator"].post("/v1/commands", json={**request, "not_before_ms": 1}, headers=headers)
    assert (sooner.status_code, sooner.json()["reason"]) == (409, "conflict")
    last = {**request, "not_before_ms": 7 * 86_400_000 - 1, "not_after_ms": 7 * 86_400_000}
    assert (await clients["operator"].post("/v1/commands/preview", json=last)).status_code == 200
    none_left = await clients["operator"].post("/v1/commands/preview", json={**last, "not_after_ms": 1})
    assert (none_left.status_code, "leaves no time" in none_left.json()["detail"]) == (400, True)


async def test_the_same_idempotency_key_acts_once(clients: Clients, two_nodes) -> None:
    request = {"kind": "inventory.refresh", "nodes": ["n1"]}
    headers = {"idempotency-key": "k1"}
    first, second = await asyncio.gather(
        *(clients["operator"].post("/v1/commands", json=request, headers=headers) for _ in range(2))
    )
    assert first.json() == second.json()
    assert len((await clients["viewer"].get("/v1/commands")).json()["items"]) == 1
    other = await clients["operator"].post("/v1/commands", json={**request, "nodes": ["n2"]}, headers=headers)
    assert (other.status_code, other.json()["reason"]) == (409, "conflict")


@pytest.mark.parametrize(
    ("request_json", "status", "says"),
    [
        ({"kind": "nope", "nodes": ["n1"]}, 400, "'nope' is not known"),
        ({"kind": "inventory.refresh"}, 400, "one of the three"),
        ({"kind": "inventory.refresh", "all": True, "nodes": ["n1"]}, 400, "one of the three"),
        ({"kind": "inventory.refresh", "selector": "a=1", "nodes": ["n1"]}, 400, "one of the three"),
        ({"kind": "inventory.refresh", "selector": "a=1,"}, 400, "selector, character 5: a label's key is expected"),
        ({"kind": "inventory.refresh", "selector": "a=1"}, 404, "no node that matches the selector"),
        ({"kind": "inventory.refresh", "nodes": ["n1"], "batch_id": "x"}, 404, "no batch 'x' to add to"),
        ({"kind": "inventory.refresh", "nodes": ["n1", "n9"]}, 404, "no node n9"),
        ({"kind": "inventory.refresh", "nodes": ["n1"], "payload": {"sectons": []}}, 400, "its fields are: sections"),
        ({"kind": "inventory.refresh", "nodes": ["n1"], "timeout_ms": 0}, 422, "timeout_ms"),
        ({"kind": "inventory.refresh", "nodes": ["n1"], "timeout": 5}, 422, "timeout is no field of this request"),
        ({"kind": "inventory.refresh", "nodes": ["n1"], "not_after_ms": 8 * 86_400_000}, 422, "not_after_ms"),
        ({"kind": "inventory.refresh", "nodes": ["n1"], "not_before_ms": -1}, 422, "not_before_ms"),
        ({"kind": "inventory.refresh", "nodes": ["n1"], "not_before_ms": 1 << 70}, 422, "not_before_ms"),
        ({"kind": "inventory.refresh", "nodes": ["n1"], "not_before_ms": 86_400_000}, 400, "leaves no time before"),
    ],
)
async def test_bad_requests_say_what_is_wrong(clients: Clients, two_nodes, request_json, status, says) -> None:
    answer = await clients["operator"].post("/v1/commands", json=request_json)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert says in answer.json()["detail"]
    assert (await clients["viewer"].get("/v1/commands")).json()["items"] == []


async def test_roles(clients: Clients, two_nodes) -> None:
    request = {"kind": "inventory.refresh", "nodes": ["n1"]}
    assert (await clients["nobody"].post("/v1/commands", json=request)).status_code == 401
    refused = await clients["viewer"].post("/v1/commands", json=request)
    assert (refused.status_code, refused.json()["reason"]) == (403, "access-denied")
    assert (await clients["viewer"].get("/v1/commands/none")).status_code == 404


async def test_pages_of_a_batch(clients: Clients, two_nodes) -> None:
    made = (await clients["operator"].post("/v1/commands", json={"kind": "inventory.refresh", "all": True})).json()
    first = (await clients["viewer"].get("/v1/commands", params={"batch_id": made["batch_id"], "limit": 1})).json()
    rest = (
        await clients["viewer"].get(
            "/v1/commands", params={"batch_id": made["batch_id"], "limit": 1, "after": first["next"]}
        )
    ).json()
    assert [first["items"][0]["node_id"], rest["items"][0]["node_id"]] == ["n1", "n2"]
    assert made["without_session"] == ["n1", "n2"]


@pytest.mark.parametrize(
    ("more", "found"),
    [({"node_id": "n2"}, ["n2"]), ({"state": "running"}, []), ({"kind": "gpu.reset"}, []), ({}, ["n1", "n2"])],
)
async def test_filters_narrow_a_batch_too(clients: Clients, two_nodes, more, found) -> None:
    made = (await clients["operator"].post("/v1/commands", json={"kind": "inventory.refresh", "all": True})).json()
    page = await clients["viewer"].get("/v1/commands", params={"batch_id": made["batch_id"], **more})
    assert [item["node_id"] for item in page.json()["items"]] == found


async def test_a_wrong_method_is_told_the_right_ones(clients: Clients) -> None:
    answer = await clients["viewer"].put("/v1/commands", json={})
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, POST"
    assert "this path takes GET, POST" in answer.json()["detail"]


async def test_a_cancel_says_what_it_met(clients: Clients, context: ApiContext, two_nodes) -> None:
    made = (await clients["operator"].post("/v1/commands", json={"kind": "inventory.refresh", "nodes": ["n1"]})).json()
    path = f"/v1/commands/{made['commands'][0]['id']}/cancel"
    assert (await clients["viewer"].post(path, json={})).status_code == 403
    first = (await clients["operator"].post(path, json={"reason": "wrong node"})).json()
    assert (first["outcome"], first["state"]) == ("cancelled", "cancelled")
    assert [row["type"] for row in await context.database.query("SELECT type FROM outbox")] == ["command.finished"]
    [act] = await audit.list_page(context.database, page_size=1, action="command.cancel")
    assert (act.why, act.details) == ("wrong node", {"outcome": "cancelled"})
    again = (await clients["operator"].post(path, json={})).json()
    assert (again["outcome"], again["state"]) == ("too-late", "cancelled")
    unknown = await clients["operator"].post("/v1/commands/none/cancel", json={})
    assert (unknown.status_code, unknown.json()["reason"]) == (404, "not-found")


async def test_why_and_abandon(clients: Clients, context: ApiContext, two_nodes) -> None:
    made = (await clients["operator"].post("/v1/commands", json={"kind": "inventory.refresh", "nodes": ["n1"]})).json()
    path = f"/v1/commands/{made['commands'][0]['id']}"
    why = (await clients["viewer"].get(f"{path}/why")).json()
    assert [reason["code"] for reason in why["reasons"]] == ["no-session"]
    assert (await clients["operator"].post(f"{path}/abandon", json={"reason": "gone"})).status_code == 403
    assert (await clients["admin"].post(f"{path}/abandon", json={})).status_code == 422
    pending = await clients["admin"].post(f"{path}/abandon", json={"reason": "gone"})
    assert (pending.status_code, "cancel it instead" in pending.json()["detail"]) == (409, True)
    await context.database.query(
        "UPDATE commands SET state = 2, session_id = 's', session_epoch = 1, attempt = 1, dispatched_at = compute_now()"
    )
    answer = await clients["admin"].post(f"{path}/abandon", json={"reason": "gone"})
    assert answer.json() == {"id": made["commands"][0]["id"], "state": "failed", "reason": "abandoned"}
    [act] = await audit.list_page(context.database, page_size=1, action="command.abandon")
    assert (act.actor, act.why) == ("a-admin", "gone")
    assert (await clients["admin"].get("/v1/commands/none/why")).status_code == 404


async def test_output_is_read_piece_by_piece(clients: Clients, context: ApiContext, two_nodes) -> None:
    made = (await clients["operator"].post("/v1/commands", json={"kind": "inventory.refresh", "nodes": ["n1"]})).json()
    command_id = made["commands"][0]["id"]
    await context.database.query(
        "INSERT INTO command_output (command_id, output_offset, node_id, data, dropped_bytes)"
        " VALUES ($1, 3, 'n1', 'abc', 2), ($1, 6, 'n1', 'de', 0), ($1, 20, 'n1', 'f', 5)",
        command_id,
    )
    path = f"/v1/commands/{command_id}/output"
    whole = (await clients["viewer"].get(path)).json()
    assert [(item["offset"], item["data_base64"], item["dropped_bytes"]) for item in whole["items"]] == [
        (3, "YWJj", 3),
        (6, "ZGU=", 0),
        (20, "Zg==", 12),
    ], "what is missing is counted, whoever lost it"
    assert (await clients["viewer"].get(path, params={"from_offset": whole["next_offset"]})).json()["items"] == []
    assert (await clients["viewer"].get("/v1/commands/none/output")).status_code == 404
