"""Nodes, join tokens, health and problem documents over HTTP."""

import base64
from collections.abc import Mapping

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from bettercompute.api.context import ApiContext
from bettercompute.pki import join_token
from bettercompute.store import audit

Clients = Mapping[str, httpx.AsyncClient]


def a_csr() -> str:
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(Encoding.PEM).decode()


async def test_nodes_are_listed_in_pages(clients: Clients, two_nodes) -> None:
    first = (await clients["viewer"].get("/v1/nodes", params={"limit": 1})).json()
    assert ([item["node_id"] for item in first["items"]], first["next"]) == (["n1"], "n1")
    node = first["items"][0]
    assert (node["state"], node["role"], node["session"]["epoch"]) == ("joined", "node", 0)
    last = (await clients["viewer"].get("/v1/nodes", params={"after": "n1"})).json()
    assert ([item["node_id"] for item in last["items"]], last["next"]) == (["n2"], None)
    assert (await clients["viewer"].get("/v1/nodes", params={"state": "connected"})).json()["items"] == []


async def test_a_node_is_shown_with_inventory(clients: Clients, two_nodes) -> None:
    shown = (await clients["viewer"].get("/v1/nodes/n1")).json()
    assert (shown["inventory"], shown["conditions"]) == ({}, [])
    missing = await clients["viewer"].get("/v1/nodes/n7")
    assert (missing.status_code, missing.json()["reason"]) == (404, "not-found")


async def test_labels_are_set_removed_and_selected_by(clients: Clients, context: ApiContext, two_nodes) -> None:
    path = "/v1/nodes/n1/labels"
    assert (await clients["viewer"].patch(path, json={"set": {"gpu": "h100"}})).status_code == 403
    await clients["operator"].patch(path, json={"set": {"gpu": "h100", "rack": "7"}})
    changed = (await clients["operator"].patch(path, json={"set": {"gpu": "h200"}, "remove": ["rack"]})).json()
    assert changed["labels"] == [{"key": "gpu", "value": "h200", "source": "operator"}]
    found = (await clients["viewer"].get("/v1/nodes", params={"selector": "gpu in (h100,h200),site!=x"})).json()
    assert [item["node_id"] for item in found["items"]] == ["n1"]
    [act] = await audit.list_page(context.database, page_size=1, action="node.label")
    assert (act.target, act.details) == ("node/n1", {"set": {"gpu": "h200"}, "removed": ["rack"]})
    for body, says in (
        ({"set": {"bc.dev/cap.nvml": "1"}}, "the control plane's own"),
        ({"set": {"a": "1"}, "remove": ["a"]}, "both set and removed"),
        ({"set": {f"k{number}": "" for number in range(256)}}, "would have 257 labels, 256 is the limit"),
    ):
        refused = await clients["operator"].patch(path, json=body)
        assert (refused.status_code, says in refused.json()["detail"]) == (400, True), refused.text
    assert (await clients["operator"].patch("/v1/nodes/n9/labels", json={})).status_code == 404


async def test_a_token_holds_all_that_a_node_needs(clients: Clients, context: ApiContext) -> None:
    made = (await clients["operator"].post("/v1/tokens", json={"node_id": "web-1", "ttl_ms": 60_000})).json()
    token = join_token.parse_token(made["token"])
    assert token.gateway_urls == context.join_endpoint.gateway_urls
    assert token.serving_ca_pins == context.join_endpoint.serving_ca_pins
    listed = (await clients["operator"].get("/v1/tokens")).json()["items"]
    assert [(item["token_id"], item["state"], item["node_id"]) for item in listed] == [
        (made["token_id"], "unused", "web-1")
    ]
    assert "token" not in listed[0]
    revoked = (await clients["operator"].delete(f"/v1/tokens/{made['token_id']}")).json()
    assert revoked["state"] == "revoked"
    acts = await audit.list_page(context.database, page_size=10)
    assert [(act.actor, act.action) for act in acts] == [("a-operator", "token.revoke"), ("a-operator", "token.create")]


@pytest.mark.parametrize("request_json", [{"role": "king"}, {"site": "Uber"}, {"node_id": "Not A Name"}])
async def test_bad_tokens_are_refused(clients: Clients, request_json) -> None:
    answer = await clients["operator"].post("/v1/tokens", json=request_json)
    assert answer.status_code == 400
    assert next(iter(request_json.values()))[:3] in answer.json()["detail"]


async def test_unknown_tokens(clients: Clients) -> None:
    assert (await clients["operator"].delete("/v1/tokens/none")).status_code == 404
    assert (await clients["viewer"].get("/v1/tokens")).status_code == 403


async def test_provisioning_takes_a_certificate_request(clients: Clients) -> None:
    answer = (await clients["admin"].post("/v1/nodes/n9/provision", json={"csr_pem": a_csr(), "role": "site"})).json()
    assert (answer["identity"]["role"], answer["identity"]["site"]) == ("site", "default")
    assert base64.b64decode(answer["trust_bundle_base64"]) == b"\x00bundle"
    bad = await clients["admin"].post("/v1/nodes/n9/provision", json={"csr_pem": "nonsense"})
    assert (bad.status_code, bad.json()["reason"]) == (400, "bad-csr")
    assert (await clients["operator"].post("/v1/nodes/n9/provision", json={"csr_pem": a_csr()})).status_code == 403


async def test_health_needs_no_token(clients: Clients) -> None:
    assert (await clients["nobody"].get("/healthz")).json() == {"status": "ok"}
    assert (await clients["nobody"].get("/readyz")).json() == {"status": "ready"}
    assert (await clients["nobody"].get("/metrics")).status_code == 200


async def test_unknown_paths_and_methods_are_problems(clients: Clients) -> None:
    for answer in (await clients["viewer"].get("/v1/nothing"), await clients["viewer"].put("/v1/nodes")):
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["status"] == answer.status_code
    assert (await clients["viewer"].get("/openapi.json")).json()["info"]["title"] == "better-compute"
