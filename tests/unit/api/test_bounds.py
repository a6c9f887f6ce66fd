"""What a request may cost: bodies, heads, callers without a token, requests at once; over ASGI and over a socket."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from bettercompute.api import bounds
from bettercompute.api.app import create_app
from bettercompute.api.auth import Principal, Role
from bettercompute.api.bounds import Bounds
from bettercompute.server.http import HttpServer, listen

BEARER = [(b"authorization", b"Bearer secret-operator")]


class Body:
    """A client's side of one ASGI exchange: gives chunks on demand, and counts how many were asked for."""

    def __init__(self, chunks):
        self.chunks = list(chunks)
        self.asked = 0
        self.sent = []

    async def receive(self):
        self.asked += 1
        if not self.chunks:
            return {"type": "http.disconnect"}
        chunk = self.chunks.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": bool(self.chunks)}

    async def send(self, message):
        self.sent.append(message)
        if message["type"] == "http.response.start":
            self.asked_at_start = self.asked

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def problem(self):
        return json.loads(b"".join(message.get("body", b"") for message in self.sent[1:]))


def scope_of(path, *, method="POST", headers=()):
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"api.test"), *headers],
        "server": ("api.test", 80),
        "client": ("127.0.0.1", 1),
    }


@pytest.mark.parametrize("headers", [[], [(b"authorization", b"Bearer wrong")], [(b"authorization", b"Basic eA==")]])
@pytest.mark.parametrize("path", ["/v1/commands", "/v1/tokens", "/v1/nodes/n1/provision", "/v1/nothing", "/v1"])
async def test_nobody_is_refused_before_the_body_is_read(clients, context, headers, path):
    body = Body([b"x" * 1000] * 3)
    chunked = [*headers, (b"transfer-encoding", b"chunked"), (b"content-type", b"application/json")]
    await create_app(context)(scope_of(path, headers=chunked), body.receive, body.send)
    assert (body.status, body.asked_at_start) == (401, 0)
    assert body.problem["reason"] == "unauthenticated"


@pytest.mark.parametrize(
    ("path", "limit"),
    [("/v1/commands", 2 << 20), ("/v1/tokens", 64 << 10), ("/v1/commands/x/cancel", 64 << 10), ("/healthz", 64 << 10)],
)
async def test_a_declared_length_over_the_bound_is_refused_unread(clients, context, path, limit):
    body = Body([b"x"])
    length = [*BEARER, (b"content-length", str(limit + 1).encode())]
    await create_app(context)(scope_of(path, headers=length), body.receive, body.send)
    assert (body.status, body.asked_at_start) == (413, 0)
    assert str(limit) in body.problem["detail"]
    assert body.problem["reason"] == "too-large"


@pytest.mark.parametrize(("path", "limit"), [("/v1/commands", 2 << 20), ("/v1/tokens", 64 << 10)])
@pytest.mark.parametrize("lie", [[(b"transfer-encoding", b"chunked")], [(b"content-length", b"5")]])
async def test_a_chunked_body_is_counted(clients, context, path, limit, lie):
    body = Body([b" " * (32 << 10)] * (limit // (32 << 10) + 20))
    headers = [*BEARER, *lie, (b"content-type", b"application/json")]
    await create_app(context)(scope_of(path, headers=headers), body.receive, body.send)
    assert body.status == 413
    assert body.asked_at_start == limit // (32 << 10) + 1, "not a chunk more than says that it is too much"
    assert str(limit) in body.problem["detail"]


async def test_a_body_at_the_bound_is_read(clients, two_nodes):
    filler = b" " * ((2 << 20) - 100)
    text = b'{"kind": "inventory.refresh", "nodes": ["n1"]' + filler
    headers = {"content-type": "application/json"}
    answer = await clients["operator"].post("/v1/commands", content=text + b"}", headers=headers)
    assert answer.status_code == 201, answer.text


async def test_a_body_that_does_not_come_ends_the_request(clients, context, monkeypatch):
    monkeypatch.setattr(bounds, "BODY_WAIT_S", 0.01)
    monkeypatch.setattr(bounds, "LINGER_S", 0.01)
    body = Body([])

    async def nothing():
        await asyncio.Event().wait()

    headers = [*BEARER, (b"content-length", b"9"), (b"content-type", b"application/json")]
    await create_app(context)(scope_of("/v1/tokens", headers=headers), nothing, body.send)
    assert (body.status, body.problem["reason"]) == (408, "slow-body")


@pytest.mark.parametrize(
    ("path", "headers", "status", "reason"),
    [
        ("/healthz?" + "a" * 9000, {}, 414, "uri-too-long"),
        ("/" + "a" * 5000, {}, 414, "uri-too-long"),
        ("/healthz", {"x-long": "a" * 17_000}, 431, "headers-too-large"),
        ("/healthz", {f"x-{n}": "" for n in range(101)}, 431, "headers-too-large"),
    ],
)
async def test_heads_are_bounded(clients, path, headers, status, reason):
    answer = await clients["nobody"].get(path, headers=headers)
    assert (answer.status_code, answer.json()["reason"]) == (status, reason)
    assert "at most" in answer.json()["detail"]


async def test_requests_at_once_are_bounded_and_room_comes_back(monkeypatch):
    monkeypatch.setattr(bounds, "REQUESTS_MAX", 1)
    inside, leave = asyncio.Event(), asyncio.Event()

    async def slow(scope, receive, send):
        assert scope["state"]["principal"].name == "somebody"
        inside.set()
        await leave.wait()

    async def admit(_):
        return Principal(name="somebody", role=Role.VIEWER)

    app = Bounds(slow, admit=admit)
    first = asyncio.create_task(app(scope_of("/v1/nodes", method="GET"), Body([]).receive, Body([]).send))
    await inside.wait()
    refused = Body([])
    await app(scope_of("/v1/nodes", method="GET"), refused.receive, refused.send)
    assert (refused.status, refused.problem["reason"]) == (503, "overloaded")
    leave.set()
    await first
    served = Body([])
    await app(scope_of("/v1/nodes", method="GET"), served.receive, served.send)
    assert served.sent == []


async def test_a_role_without_a_caller_is_our_fault(clients, context, monkeypatch):
    monkeypatch.setattr(bounds, "needs_principal", lambda _: False)
    answer = await clients["viewer"].get("/v1/nodes")
    assert (answer.status_code, answer.json()["reason"]) == (500, "bug")


async def test_over_a_socket_a_refused_sender_sees_the_answer(clients, context):
    server = HttpServer(create_app(context), listener=listen("127.0.0.1", 0, purpose="api"))
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            unknown = await client.post("/v1/commands", content=b"x" * (2 << 20))
            assert unknown.status_code == 401
            large = await client.post(
                "/v1/commands", content=b"x" * (3 << 20), headers={"authorization": "Bearer secret-operator"}
            )
            assert large.status_code == 413

            async def chunks():
                for _ in range(3 * 16):
                    yield b" " * (64 << 10)

            headers = {"authorization": "Bearer secret-operator", "content-type": "application/json"}
            counted = await client.post("/v1/commands", content=chunks(), headers=headers)
            assert counted.status_code == 413, counted.text
    finally:
        await server.stop()
