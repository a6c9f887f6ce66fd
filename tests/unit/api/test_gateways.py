"""`/v1/gateways`: who may ask for a drain, what it leaves behind, and what is said of gateways that are not there."""

from __future__ import annotations

import pytest

from bettercompute.store import leases
from bettercompute.store.sessions import SessionKey
from tests.contract.gateway import seed


@pytest.fixture
async def gateway_id(database):
    await seed.add_lease(database)
    return seed.LEASE.gateway_id


async def test_a_drain_is_asked_for_once_and_undone(clients, database, gateway_id):
    [listed] = (await clients["viewer"].get("/v1/gateways")).json()["items"]
    assert (listed["gateway_id"], listed["live"], listed["draining"]) == (gateway_id, True, False)
    first = (await clients["operator"].post(f"/v1/gateways/{gateway_id}/drain", json={})).json()
    assert (first["draining"], first["refuses"], first["drain_requested_by"]) == (True, False, "a-operator")
    again = (await clients["admin"].post(f"/v1/gateways/{gateway_id}/drain", json={})).json()
    assert again["drain_requested_by"] == "a-operator"
    assert again["drain_requested_at"] == first["drain_requested_at"]
    assert await leases.renew(database, name=gateway_id, token=seed.LEASE.token, stream_count=2, draining=True)
    seen = (await clients["viewer"].get(f"/v1/gateways/{gateway_id}")).json()
    assert (seen["draining"], seen["refuses"], seen["sessions"]) == (True, True, 2), "a renewal leaves the wish alone"
    undone = (await clients["operator"].delete(f"/v1/gateways/{gateway_id}/drain")).json()
    assert undone["drain_requested_at"] is None
    actions = [row["action"] for row in await database.query("SELECT action FROM audit_log ORDER BY id")]
    assert actions == ["gateway.drain", "gateway.drain", "gateway.undo-drain"]


async def test_viewers_may_not(clients, gateway_id):
    assert (await clients["viewer"].post(f"/v1/gateways/{gateway_id}/drain", json={})).status_code == 403
    assert (await clients["viewer"].delete(f"/v1/gateways/{gateway_id}/drain")).status_code == 403
    assert not (await clients["viewer"].get("/v1/gateways")).json()["items"][0]["draining"]


async def test_the_nodes_that_it_holds_are_counted_by_their_rows(clients, database, gateway_id, two_nodes):
    await database.query("INSERT INTO node_sessions (node_id) VALUES ('n1'), ('n2') ON CONFLICT DO NOTHING")
    await seed.connect_node(database, SessionKey(node_id="n2", session_id="s", epoch=1))
    shown = (await clients["viewer"].get(f"/v1/gateways/{gateway_id}")).json()
    assert (shown["nodes"], shown["node_ids"]) == (1, ["n2"])


async def test_unknown_and_ended_gateways(clients, database, gateway_id):
    missing = await clients["operator"].post("/v1/gateways/gw-nowhere/drain", json={})
    assert (missing.status_code, missing.json()["reason"]) == (404, "not-found")
    await leases.release(database, name=gateway_id, token=seed.LEASE.token)
    ended = await clients["operator"].post(f"/v1/gateways/{gateway_id}/drain", json={})
    assert (ended.status_code, ended.json()["reason"]) == (409, "conflict")
    shown = (await clients["viewer"].get(f"/v1/gateways/{gateway_id}")).json()
    assert shown["retired_at"] is not None
    assert (await clients["viewer"].get("/v1/gateways")).json()["items"] == []
    assert await database.query("SELECT FROM audit_log") == []
