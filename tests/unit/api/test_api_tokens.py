"""API tokens: made once, listed without their secret, useless once revoked; and what a label scope lets through.

See docs/operations.md, "Who may do what".
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

import httpx
import pytest

from bettercompute.api import events
from bettercompute.api.app import create_app
from bettercompute.api.auth import Principal, Role
from bettercompute.api.context import ApiContext
from bettercompute.store import outbox
from bettercompute.store.outbox import NewEvent

Clients = Mapping[str, httpx.AsyncClient]


@pytest.fixture
async def bearer(context: ApiContext) -> AsyncIterator[Any]:
    """Gives a client of a token."""
    opened = []

    def client(token: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=create_app(context), raise_app_exceptions=False)
        headers = {"authorization": f"Bearer {token}"}
        opened.append(httpx.AsyncClient(transport=transport, base_url="http://api.test", headers=headers))
        return opened[-1]

    yield client
    for one in opened:
        await one.aclose()


async def test_a_token_is_made_listed_used_and_revoked(clients: Clients, context: ApiContext, bearer: Any) -> None:
    admin = clients["admin"]
    made = (await admin.post("/v1/api-tokens", json={"name": "ci", "role": "operator", "ttl_ms": 3_600_000})).json()
    assert made["token"].startswith("bct1_")
    assert (made["role"], made["labels"], made["created_by"]) == ("operator", None, "a-admin")
    client = bearer(made["token"])
    assert (await client.get("/v1/nodes")).status_code == 200
    assert (await client.get("/v1/api-tokens")).status_code == 403
    listed = (await admin.get("/v1/api-tokens")).json()
    assert "ci" in [token["name"] for token in listed]
    assert not any("token" in token or "sha256" in token for token in listed)
    again = await admin.post("/v1/api-tokens", json={"name": "ci"})
    assert (again.status_code, "choose another" in again.json()["detail"]) == (409, True)
    assert (await admin.delete("/v1/api-tokens/ci")).status_code == 204
    assert (await client.get("/v1/nodes")).status_code == 401
    assert (await admin.delete("/v1/api-tokens/ci")).status_code == 404
    acts = await context.database.query("SELECT action, target FROM audit_log ORDER BY id")
    assert [(act["action"], act["target"]) for act in acts] == [
        ("api-token.create", "api-token/ci"),
        ("api-token.revoke", "api-token/ci"),
    ]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"name": "has space"}, "name"),
        ({"name": "x", "role": "root"}, "role"),
        ({"name": "x", "labels": {"site": "a"}}, "site"),
        ({"name": "x", "labels": {"rack": "no space"}}, "no value"),
        ({"name": "x", "role": "admin", "labels": {"rack": "7"}}, "whole installation"),
    ],
    ids=["name", "role", "field", "value", "admin"],
)
async def test_what_makes_no_sense_is_refused(clients: Clients, body: dict[str, Any], says: str) -> None:
    answer = await clients["admin"].post("/v1/api-tokens", json=body)
    assert answer.status_code in (400, 422), answer.text
    assert says in answer.text


async def test_a_label_scope_bounds_nodes_and_their_commands(clients: Clients, bearer: Any, two_nodes: Any) -> None:
    admin = clients["admin"]
    await admin.patch("/v1/nodes/n1/labels", json={"set": {"rack": "7", "tier": "gpu"}})
    await admin.patch("/v1/nodes/n2/labels", json={"set": {"rack": "8"}})
    body = {"name": "rack-7", "role": "operator", "labels": {"rack": "7"}}
    scoped = bearer((await admin.post("/v1/api-tokens", json=body)).json()["token"])
    run = {"kind": "inventory.refresh"}

    assert [node["node_id"] for node in (await scoped.get("/v1/nodes")).json()["items"]] == ["n1"]
    assert (await scoped.get("/v1/nodes", params={"selector": "rack=8"})).json()["items"] == []
    assert (await scoped.get("/v1/nodes/n1")).status_code == 200
    for path in ("/v1/nodes/n2", "/v1/nodes/unknown"):
        answer = await scoped.get(path)
        assert (answer.status_code, "rack=7 only" in answer.json()["detail"]) == (403, True)

    everywhere = (await scoped.post("/v1/commands", json={**run, "all": True})).json()
    assert [command["node_id"] for command in everywhere["commands"]] == ["n1"]
    preview = (await scoped.post("/v1/commands/preview", json={**run, "selector": "tier=gpu"})).json()
    assert [node["node_id"] for node in preview["nodes"]] == ["n1"]
    for path in ("/v1/commands", "/v1/commands/preview"):
        assert (await scoped.post(path, json={**run, "nodes": ["n1", "n2"]})).status_code == 403

    assert (await scoped.get(f"/v1/batches/{everywhere['batch_id']}")).status_code == 200
    both = (await admin.post("/v1/commands", json={**run, "all": True})).json()
    batch, one = both["batch_id"], both["commands"][0]["id"]
    assert (await scoped.get(f"/v1/batches/{batch}")).status_code == 403
    assert (await scoped.get(f"/v1/batches/{batch}/output", params={"command": f"{one}:0"})).status_code == 403
    for asked, status in (({}, 200), ({"batch_id": batch}, 403), ({"node_id": "n2"}, 403), ({"node_id": "n1"}, 200)):
        listed = await scoped.get("/v1/commands", params=asked)
        assert listed.status_code == status
        assert status != 200 or {item["node_id"] for item in listed.json()["items"]} == {"n1"}

    own = everywhere["commands"][0]["id"]
    foreign = (await admin.post("/v1/commands", json={**run, "nodes": ["n2"]})).json()["commands"][0]["id"]
    for suffix in ("", "/why", "/output"):
        assert (await scoped.get(f"/v1/commands/{own}{suffix}")).status_code == 200
        assert (await scoped.get(f"/v1/commands/{foreign}{suffix}")).status_code == 403
        assert (await scoped.get(f"/v1/commands/nobody{suffix}")).status_code == 404
    assert (await scoped.post(f"/v1/commands/{foreign}/cancel", json={})).status_code == 403
    assert (await scoped.post(f"/v1/commands/{own}/cancel", json={})).status_code == 200

    # A label that goes takes the node out of the scope at once; and nobody draws a node into one's own.
    assert (await scoped.patch("/v1/nodes/n2/labels", json={"set": {"rack": "7"}})).status_code == 403
    await admin.patch("/v1/nodes/n1/labels", json={"remove": ["rack"]})
    assert (await scoped.get("/v1/nodes/n1")).status_code == 403


async def test_a_label_scope_bounds_events_and_specs(
    clients: Clients, context: ApiContext, bearer: Any, two_nodes: Any
) -> None:
    admin = clients["admin"]
    await admin.patch("/v1/nodes/n1/labels", json={"set": {"rack": "7"}})
    scoped = {}
    for role in ("viewer", "operator"):
        body = {"name": f"rack-7-{role}", "role": role, "labels": {"rack": "7"}}
        scoped[role] = bearer((await admin.post("/v1/api-tokens", json=body)).json()["token"])

    async with context.database.transaction() as transaction:
        made = [NewEvent(id=f"e-{node}", type="t", node_id=node, payload={}) for node in ("n1", "n2", None)]
        await outbox.publish(transaction, made)
    await outbox.assign_positions(context.database)
    page = (await scoped["viewer"].get("/v1/events", params={"limit": 3})).json()
    assert ([item["id"] for item in page["items"]], page["next"]) == (["e-n1"], 3)
    assert (await scoped["viewer"].get("/v1/events", params={"node_id": "n2"})).status_code == 403
    assert len((await admin.get("/v1/events")).json()["items"]) == 3
    for node_id, status in (("n1", 200), ("n2", 403), ("nobody", 403)):
        assert (await scoped["viewer"].get(f"/v1/nodes/{node_id}/events")).status_code == status
    caller = Principal(name="rack-7-viewer", role=Role.VIEWER, labels={"rack": "7"})
    stream = events.follow(context, after=0, wanted=partial(events._wanted, context, caller, None))
    told = [await asyncio.wait_for(anext(stream), 10) for _ in range(2)]
    await stream.aclose()
    assert "e-n1" in told[1]
    assert "e-n2" not in told[1]

    spec = {"spec": {"daemon": {"log_level": "debug"}}}
    part = {"sections": {"daemon": None}}
    assert (await scoped["operator"].put("/v1/nodes/n1/spec", json=spec)).json()["generation"] == 1
    assert (await scoped["operator"].patch("/v1/nodes/n1/spec", json=part)).json()["generation"] == 2
    assert (await scoped["viewer"].put("/v1/nodes/n1/spec", json=spec)).status_code == 403
    for suffix in ("", "/history"):
        assert (await scoped["viewer"].get(f"/v1/nodes/n1/spec{suffix}")).status_code == 200
        for node_id in ("n2", "nobody"):
            assert (await scoped["viewer"].get(f"/v1/nodes/{node_id}/spec{suffix}")).status_code == 403
    for node_id in ("n2", "nobody"):
        assert (await scoped["operator"].put(f"/v1/nodes/{node_id}/spec", json=spec)).status_code == 403
        assert (await scoped["operator"].patch(f"/v1/nodes/{node_id}/spec", json=part)).status_code == 403
    assert (await admin.get("/v1/nodes/n2/spec")).json()["generation"] == 0


async def test_every_other_route_is_closed_to_a_scope(clients: Clients, context: ApiContext, bearer: Any) -> None:
    """A route that is not about single nodes, or forgot to ask, refuses; the list of those that ask is short."""
    body = {"name": "rack-7", "role": "operator", "labels": {"rack": "7"}}
    scoped = bearer((await clients["admin"].post("/v1/api-tokens", json=body)).json()["token"])
    asks = {
        ("get", "/v1/nodes"),
        ("get", "/v1/nodes/{node_id}"),
        ("post", "/v1/commands"),
        ("post", "/v1/commands/preview"),
        ("get", "/v1/commands"),
        ("get", "/v1/batches/{batch_id}"),
        ("get", "/v1/batches/{batch_id}/output"),
        ("post", "/v1/batches/{batch_id}/steps"),
        ("post", "/v1/batches/{batch_id}/stop"),
        ("get", "/v1/commands/{command_id}"),
        ("get", "/v1/commands/{command_id}/output"),
        ("get", "/v1/commands/{command_id}/why"),
        ("post", "/v1/commands/{command_id}/cancel"),
        ("get", "/v1/events"),
    }
    schema = create_app(context).openapi()
    for path, operations in schema["paths"].items():
        for method in operations:
            if not path.startswith("/v1/") or (method, path) in asks:
                continue
            answer = await scoped.request(method, path.replace("{", "").replace("}", ""))
            # Some say first what they cannot read of an empty request; none answers.
            assert answer.status_code in (401, 403, 422), f"{method} {path}: {answer.status_code}"
