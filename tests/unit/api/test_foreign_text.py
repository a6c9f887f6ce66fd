"""Texts that cannot be stored, values out of range, bodies that are no JSON: refused with the field and the cure."""

from __future__ import annotations

import contextlib
import json

import pytest

from bettercompute.api import payloads
from bettercompute.errors import Refused
from bettercompute.protocol.kinds import KINDS
from bettercompute.store import conditions, nodes
from bettercompute.store.database import StatementFailed

NASTY = ("a\x00b", "a\ud800b", "a" * 100_000)
RUN = {"kind": "inventory.refresh", "nodes": ["n1"]}


async def post(clients, path, document, **headers):
    content = json.dumps(document).encode()  # httpx would not send half of a surrogate pair
    return await clients["admin"].post(path, content=content, headers={"content-type": "application/json", **headers})


def check_refused(answer, *, says=""):
    assert answer.status_code in {400, 404, 413, 414, 422}, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    detail = answer.json()["detail"]
    assert says in detail
    assert "\n" not in detail
    assert len(detail) < 1000
    for foreign in ("PostgreSQL", "asyncpg", "body.", "Input should", "bettercompute.agent", "type="):
        assert foreign not in detail


@pytest.mark.parametrize(
    ("path", "document", "field"),
    [
        ("/v1/commands", lambda text: {**RUN, "kind": text}, "kind"),
        ("/v1/commands", lambda text: {**RUN, "nodes": ["n1", text]}, "nodes[1]"),
        ("/v1/commands", lambda text: {**RUN, "payload": {"sections": [text]}}, "sections"),
        ("/v1/commands", lambda text: {**RUN, "payload": {text: 1}}, "payload"),
        ("/v1/commands", lambda text: {**RUN, "payload": {"a": [{"b": {"c": text, text: 1}}]}}, "payload"),
        (
            "/v1/commands",
            lambda text: {"kind": "logs.collect", "nodes": ["n1"], "payload": {"upload_headers": {"k": [text]}}},
            "upload_headers",
        ),
        ("/v1/commands/none/cancel", lambda text: {"reason": text}, "reason"),
        ("/v1/tokens", lambda text: {"site": text}, "site"),
        ("/v1/tokens", lambda text: {"role": text}, "role"),
        ("/v1/tokens", lambda text: {"node_id": text}, "node_id"),
        ("/v1/nodes/n9/provision", lambda text: {"csr_pem": text}, "csr_pem"),
        ("/v1/nodes/n9/provision", lambda text: {"csr_pem": "x", "site": text}, "site"),
    ],
)
async def test_bodies(clients, two_nodes, path, document, field):
    for text in NASTY:
        says = "" if len(text) > 65_000 else field
        check_refused(await post(clients, path, document(text)), says=says)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/nodes/{}"),
        ("POST", "/v1/nodes/{}/provision"),
        ("GET", "/v1/commands/{}"),
        ("POST", "/v1/commands/{}/cancel"),
        ("GET", "/v1/batches/{}"),
        ("DELETE", "/v1/tokens/{}"),
        ("GET", "/v1/gateways/{}"),
        ("POST", "/v1/gateways/{}/drain"),
        ("DELETE", "/v1/gateways/{}/drain"),
    ],
)
async def test_path_ids(clients, method, path):
    body = {"csr_pem": "x"} if method == "POST" else None
    for text in ("%00", "a%00b", "%0A", "a%1Fb", "%ED%A0%80%00", "a" * 257, "%C2%85"):
        answer = await clients["admin"].request(method, path.format(text), json=body)
        check_refused(answer, says="_id")
        assert answer.status_code == 400


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/nodes", field) for field in ("after", "site", "role", "state", "limit")]
    + [("/v1/commands", field) for field in ("after", "node_id", "kind", "state", "batch_id", "limit")]
    + [("/v1/tokens", "after"), ("/v1/batches/x", "wait_ms"), ("/v1/batches/x", "size")],
)
async def test_queries(clients, path, field):
    for text in ("%00", "a%00b", "a" * 300):
        answer = await clients["admin"].get(f"{path}?{field}={text}")
        check_refused(answer, says=field)
        assert answer.status_code == 400


async def test_idempotency_keys(clients, two_nodes):
    for key in (b"a\x00b", b"a" * 256, b"a\x01"):
        answer = await post(clients, "/v1/commands", RUN, **{"idempotency-key": key})
        check_refused(answer, says="idempotency-key")
        assert answer.status_code == 400


@pytest.mark.parametrize("path", ["/v1/nodes", "/v1/commands", "/v1/tokens"])
async def test_a_cursor_is_one(clients, path):
    answer = await clients["admin"].get(path, params={"after": "Ü b"})
    check_refused(answer, says=r"after is '\xdc b'")
    assert "`next`" in answer.json()["detail"]


async def test_unknown_filters_are_not_found(clients, two_nodes):
    for field in ("node_id", "batch_id"):
        answer = await clients["viewer"].get("/v1/commands", params={field: "nowhere"})
        assert (answer.status_code, answer.json()["reason"]) == (404, "not-found")
        assert "nowhere" in answer.json()["detail"]
    assert (await clients["viewer"].get("/v1/commands", params={"node_id": "n1"})).json()["items"] == []


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({}, "kind is missing"),
        ([], "the body is a list of 0: send a JSON object"),
        ({**RUN, "kind": 7}, "kind is 7: it must be text"),
        ({**RUN, "nodes": "n1"}, "nodes is 'n1': it must be a list"),
        ({**RUN, "nodes": [None]}, "nodes[0] is null: it must be text"),
        ({**RUN, "payload": [1]}, "payload is a list of 1: it must be an object"),
        ({**RUN, "timeout_ms": "soon"}, "timeout_ms is 'soon': it must be a whole number"),
        ({**RUN, "timeout_ms": 0}, "timeout_ms is 0: it must be at least 1"),
        ({**RUN, "not_after_ms": 1 << 70}, "it must be at most 604800000"),
        ({**RUN, "all": "perhaps"}, "all is 'perhaps': it must be true or false"),
        ({**RUN, "nodes": ["n" * 257]}, "it must be at most 256 characters long"),
        ({**RUN, "nodes": ["n"] * 20_001}, "nodes is a list of 20001: it must have at most 20000 entries"),
        ({**RUN, "payload": {"a": float("nan")}}, "payload.a is no JSON number"),
        ({**RUN, "timeout_ms": float("inf")}, "timeout_ms is inf: it must be a finite number"),
    ],
)
async def test_wrong_values_are_told_in_sentences(clients, two_nodes, document, says):
    answer = await post(clients, "/v1/commands", document)
    check_refused(answer, says=says)
    assert answer.status_code == 422


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (b"kind=x", "application/x-www-form-urlencoded"),
        (b"{}", None),
        (b"{'kind'", "application/json"),
        (b"\xff\xfe\xfa", "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"kind": ' + b"9" * 5000 + b"}", "application/json"),
        (b"", "application/json"),
    ],
)
async def test_what_is_no_json_is_told_so(clients, content, content_type):
    headers = {} if content_type is None else {"content-type": content_type}
    answer = await clients["operator"].post("/v1/commands", content=content, headers=headers)
    check_refused(answer, says="send a JSON object in UTF-8 with `content-type: application/json`")
    assert answer.status_code == 422


async def test_deep_payloads(clients, two_nodes):
    nested: dict[str, list[object]] = {"sections": []}
    for _ in range(60):
        nested = {"a": [nested]}
    check_refused(await post(clients, "/v1/commands", {**RUN, "payload": nested}), says="nested deeper than 32")


@pytest.mark.parametrize(
    ("kind", "payload", "says"),
    [
        ("inventory.refresh", {"sectons": []}, "there is no field 'sectons'; its fields are: sections"),
        ("inventory.refresh", {"sections": "cpu"}, "sections is 'cpu': it takes a list, each entry text"),
        ("inventory.refresh", {"sections": ["cpu", "gpu"]}, "there is no section 'gpu'; the sections are: system, cpu"),
        ("logs.collect", {"since_ms": "x"}, "since_ms is 'x': it takes a whole number"),
        ("logs.collect", {"upload_headers": {"a": 1}}, "it takes a list, each entry an object of name, value"),
        ("logs.collect", {"compression": "BROTLI"}, "it takes one of LOG_COMPRESSION_"),
        ("logs.collect", {"upload_url": 1}, "upload_url is 1: it takes text"),
        ("node.reboot", {"force": "yes"}, "force is 'yes': it takes true or false"),
        ("daemon.upgrade", {"sha256": "x"}, "it takes bytes in base64"),
    ],
)
async def test_payloads(clients, two_nodes, kind, payload, says):
    answer = await post(clients, "/v1/commands", {"kind": kind, "nodes": ["n1"], "payload": payload})
    check_refused(answer, says=says)
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith(f"payload of {kind}: ")


WRONG: list[object] = [None, 1, -1, 1 << 80, 1.5, "x", "=", "", [1], [None], [["a"]], {"a": 1}, {"a": {"b": 1}}, [{}]]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_no_value_of_a_field_is_more_than_refused(kind):
    for field in kind.payload.DESCRIPTOR.fields:
        with pytest.raises(Refused, match=f"payload of {kind.name}: {field.name} is inf"):
            payloads.read(kind, {field.name: float("inf")})
        for value in WRONG:
            with contextlib.suppress(Refused):
                payloads.read(kind, {field.name: value})


async def test_a_run_is_bounded_as_a_whole(clients, two_nodes, monkeypatch):
    monkeypatch.setattr("bettercompute.api.enqueue.BATCH_BYTES_MAX", 9)
    answer = await post(clients, "/v1/commands", {**RUN, "nodes": ["n1", "n2"], "payload": {"sections": ["cpu"]}})
    check_refused(answer, says="for 2 nodes is 10 bytes: one run takes at most 9")


@pytest.mark.parametrize(("sqlstate", "status"), [("22021", 400), ("22P05", 400), ("23505", 500), ("42601", 500)])
async def test_the_database_is_never_quoted(clients, two_nodes, monkeypatch, sqlstate, status):
    async def fail(*_, **__):
        raise StatementFailed(f"PostgreSQL {sqlstate}: invalid byte", sqlstate=sqlstate, constraint=None)

    monkeypatch.setattr(conditions, "of_node", fail)
    answer = await clients["viewer"].get("/v1/nodes/n1")
    assert answer.status_code == status
    assert "invalid byte" not in answer.text
    assert "PostgreSQL" not in answer.text


async def test_what_slips_past_is_stopped_by_the_backstop(clients, context, two_nodes, monkeypatch):
    get = nodes.get

    async def worse(queries, *, node_id):
        return await get(queries, node_id=node_id + "\x00")

    monkeypatch.setattr(nodes, "get", worse)
    answer = await clients["viewer"].get("/v1/nodes/n1")
    check_refused(answer, says="without NUL")
    assert answer.status_code == 400
