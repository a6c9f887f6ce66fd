"""Both ends of the internal HTTP over real TLS: what is asked and answered, refused, bounded, and who may call."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from bettercompute.errors import BetterComputeError, Bug, Refused, Unavailable
from bettercompute.pki import certificates
from bettercompute.protocol import messages
from bettercompute.protocol.limits import MAX_JOIN_BYTES
from bettercompute.protocol.statuses import Reason, Status, refuse
from bettercompute.server import http, internal_client, internal_server
from bettercompute.server.http import HttpServer, listen
from bettercompute.server.internal_client import RemoteServices
from bettercompute.server.internal_rpc import ANSWER_BYTES_MAX, JOIN_PATH, MESSAGE_TYPE, RENEW_PATH, SOURCE_HEADER
from bettercompute.server.internal_tls import dialer_tls, listener_tls
from bettercompute.store.database import Database
from bettercompute.transport.tls import ServerSecrets
from tests.unit.server.internal_site import CHAIN, JOIN, RENEW, WORLD, Site, Told, calling, refused_by, serving
from tests.unit.services.joining import Node, make_plane

AWAY = "this gateway cannot reach the join service now: try again"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internal_client, "RETRY_S", 0.01)
    monkeypatch.setattr(http, "GRACEFUL_STOP_S", 0)


@pytest.fixture(scope="module")
def site() -> Site:
    return Site()


@pytest.fixture(scope="module")
def secrets(site: Site) -> ServerSecrets:
    return site.serving("127.0.0.1", "localhost")


@contextlib.asynccontextmanager
async def both(told: Told, secrets: ServerSecrets) -> AsyncIterator[RemoteServices]:
    async with serving(told, secrets) as url, calling(url, secrets) as client:
        yield client


async def test_what_is_asked_and_answered(secrets: ServerSecrets) -> None:
    told = Told()
    newer = messages.JoinRequest.FromString(JOIN.SerializeToString() + b"\xf2\x7f\x03new")
    async with both(told, secrets) as client:
        assert await client.join(newer, source="2001:db8::1%eth0") == messages.JoinResponse(body=b"body")
        assert await client.renew(RENEW, peer_chain=CHAIN) == messages.RenewResponse(body=b"body")
        assert await client.renew(RENEW, peer_chain=()) == messages.RenewResponse(body=b"body")
        assert await client.trust_bundle() is None
        told.bundle = (7, b"a bundle")
        assert await client.trust_bundle() == (7, b"a bundle")
    assert told.asked == [
        (newer, "2001:db8::1%eth0"),
        (RENEW, CHAIN),
        (RENEW, ()),
        (None, None),
        (None, None),
    ]


async def test_every_refusal_passes_through_whole(secrets: ServerSecrets) -> None:
    told = Told()
    async with both(told, secrets) as client:
        for reason in Reason:
            for error in (
                refuse(reason, f"no: {reason}, ü", pushback_ms=1_234),
                Unavailable(f"later: {reason}", reason=reason),
            ):
                told.error = error
                for call in (
                    client.join(JOIN, source="192.0.2.1"),
                    client.renew(RENEW, peer_chain=CHAIN),
                    client.trust_bundle(),
                ):
                    with pytest.raises(type(error)) as refused:
                        await call
                    heard = refused.value
                    assert isinstance(heard, BetterComputeError)
                    assert (heard.message, heard.status, heard.reason, heard.pushback_ms) == (
                        error.message,
                        error.status,
                        error.reason,
                        error.pushback_ms,
                    )
    assert len(told.asked) == 6 * len(Reason), "what is refused is not asked again"


@pytest.mark.parametrize("fault", [Bug("inside"), RuntimeError("inside"), KeyError("inside")])
async def test_a_fault_of_the_services_is_told_without_its_inside(secrets: ServerSecrets, fault: Exception) -> None:
    with capture_logs() as logs:
        async with both(Told(error=fault), secrets) as client:
            refused = await refused_by(client)
    assert (type(refused), refused.status, refused.reason) == (Refused, Status.INTERNAL, Reason.BUG)
    assert "inside" not in refused.message
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["call failed"]


async def test_a_node_joins_and_renews_through_it(database: Database, tmp_path: Path, secrets: ServerSecrets) -> None:
    plane = await make_plane(database, tmp_path)
    node, following = Node(), Node()
    async with serving(plane.join, secrets) as url, calling(url, secrets) as client:
        request = node.join_request(await plane.token(), plane.keys)
        first = plane.verified(await client.join(request, source="192.0.2.1"), node)
        again = plane.verified(await client.join(request, source="192.0.2.1"), node)
        assert again.certificate_chain == first.certificate_chain
        with pytest.raises(Refused) as used:
            await client.join(Node().join_request(b"x" * 32, plane.keys), source="192.0.2.1")
        assert used.value.reason == Reason.TOKEN_UNKNOWN
        renewal = node.renew_request(first, next_node=following, client_time_ms=first.server_time_ms)
        chain = tuple(first.certificate_chain)
        renewed = plane.verified(await client.renew(renewal, peer_chain=chain), following)
        assert renewed.node_id == first.node_id
        published = await client.trust_bundle()
        assert published is not None
        assert published == await plane.join.trust_bundle()


# Bounds


async def test_a_request_over_its_bound_is_not_sent(secrets: ServerSecrets) -> None:
    told = Told()
    async with both(told, secrets) as client:
        with pytest.raises(Refused, match=r"over its bound of 65536") as refused:
            await client.join(messages.JoinRequest(csr=bytes(MAX_JOIN_BYTES)), source="192.0.2.1")
    assert refused.value.reason == Reason.FRAME_TOO_LARGE
    assert not told.asked


@contextlib.asynccontextmanager
async def stranger(url: str, secrets: ServerSecrets) -> AsyncIterator[httpx.AsyncClient]:
    """A client with a good certificate and manners of its own."""
    context = dialer_tls(lambda: secrets)()
    async with httpx.AsyncClient(base_url=url, verify=context, trust_env=False, timeout=30) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "content", "headers", "status", "why"),
    [
        (JOIN_PATH, b"", {"content-type": "text/plain"}, 415, "application/x-protobuf"),
        (JOIN_PATH, b"", {SOURCE_HEADER: ""}, 400, "from where"),
        (JOIN_PATH, b"", {SOURCE_HEADER: "x" * 101}, 400, "from where"),
        (JOIN_PATH, bytes(MAX_JOIN_BYTES + 1), {}, 400, "over its bound"),
        (JOIN_PATH, b"\xff", {}, 400, "no JoinRequest"),
        (RENEW_PATH, b"", {"client-cert": "?"}, 400, "RFC 9440"),
        ("/internal/v1/secrets", b"", {}, 404, "Not Found"),
    ],
)
async def test_a_call_that_no_gateway_makes(
    secrets: ServerSecrets, path: str, content: bytes, headers: dict[str, str], status: int, why: str
) -> None:
    told = Told()
    usual = {"content-type": MESSAGE_TYPE, SOURCE_HEADER: "192.0.2.1"}
    async with serving(told, secrets) as url, stranger(url, secrets) as client:
        answer = await client.post(path, content=content, headers={**usual, **headers})
        assert (await client.get(JOIN_PATH)).status_code == 405
    assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (status, "text/plain")
    assert why in answer.text
    assert not told.asked


async def test_services_that_do_not_answer_in_time_say_so(
    secrets: ServerSecrets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(internal_server, "ANSWER_S", 0.05)
    async with both(Told(gate=asyncio.Event()), secrets) as client:
        refused = await refused_by(client)
    assert refused.message == "the join service had no answer within 0.05 s: try again"
    assert refused.status == Status.UNAVAILABLE


# What is no answer


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]


@contextlib.asynccontextmanager
async def scripted(secrets: ServerSecrets, script: Script) -> AsyncIterator[tuple[str, list[int]]]:
    """A listener that answers by hand; `script` gets the connection's number from 1."""
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(len(connections) + 1)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            await script(reader, writer, connections[-1])
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=listener_tls(lambda: secrets))
    async with server:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", connections


def answering(head: str, body: bytes = b"") -> Script:
    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: int) -> None:
        writer.write(f"HTTP/1.1 {head}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()

    return script


@pytest.mark.parametrize(
    ("script", "logged"),
    [
        (answering("404 Not Found", b"not here"), "HTTP 404, which is no answer of the join service: 'not here'"),
        (answering("302 Found\r\nlocation: https://127.0.0.1:1/"), "HTTP 302"),
        (answering("503 Busy\r\ncontent-type: application/json", b"{}"), "HTTP 503"),
        (answering("200 OK\r\ncontent-type: text/html", b"<html>"), "HTTP 200"),
        (answering(f"200 OK\r\ncontent-type: {MESSAGE_TYPE}", b"\xff"), "are no JoinResponse"),
        (answering("204 No Content"), "an empty answer"),
        (answering(f"200 OK\r\ncontent-type: {MESSAGE_TYPE}", bytes(ANSWER_BYTES_MAX + 1)), "more than 327680 bytes"),
        (answering(f"200 OK\r\ncontent-type: {MESSAGE_TYPE}\r\ncontent-encoding: gzip", b"\xff"), "no JoinResponse"),
    ],
    ids=["404", "redirect", "json", "html", "garbage", "empty", "large", "compressed"],
)
async def test_what_is_no_answer_is_unavailable_and_logged(secrets: ServerSecrets, script: Script, logged: str) -> None:
    with capture_logs() as logs:
        async with scripted(secrets, script) as (url, connections), calling(url, secrets) as client:
            refused = await refused_by(client)
            await refused_by(client)
    assert (type(refused), refused.message, refused.reason) == (Unavailable, AWAY, Reason.UNAVAILABLE)
    [entry] = logs
    assert entry["event"] == "join service cannot be reached"
    assert entry["url"] == url
    assert logged in entry["why"]
    assert len(connections) == 2, "an answer is not asked for again"


async def test_a_lost_connection_is_tried_again_with_the_same_request(secrets: ServerSecrets) -> None:
    asked: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        asked.append(await reader.readexactly(len(JOIN.SerializeToString())))
        if number == 2:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-le")
        if number == 3:
            body = messages.JoinResponse(body=b"third").SerializeToString()
            await answering(f"200 OK\r\ncontent-type: {MESSAGE_TYPE}", body)(reader, writer, number)

    with capture_logs() as logs:
        async with scripted(secrets, script) as (url, _), calling(url, secrets) as client:
            assert (await client.join(JOIN, source="192.0.2.1")).body == b"third"
    assert asked == [JOIN.SerializeToString()] * 3
    assert not logs


async def test_services_that_are_away_and_come_back(secrets: ServerSecrets) -> None:
    told = Told()
    with capture_logs() as logs:
        async with serving(told, secrets) as url, calling(url, secrets) as client:
            await client.join(JOIN, source="192.0.2.1")
        port = int(url.rpartition(":")[2])
        async with calling(url, secrets) as client:
            refused = await refused_by(client)
            await refused_by(client)
            with pytest.raises(Unavailable):
                await client.trust_bundle()
            async with serving(told, secrets, port=port):
                await client.join(JOIN, source="192.0.2.1")
    assert refused.message == AWAY
    assert [entry["event"] for entry in logs] == ["join service cannot be reached", "join service is back"]


async def test_who_accepts_and_says_nothing_costs_one_deadline(
    secrets: ServerSecrets, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()
    with capture_logs() as logs:
        async with both(told, secrets) as client:
            # The connection stands already: a machine may take long for a handshake.
            await client.trust_bundle()
            told.gate = asyncio.Event()
            monkeypatch.setattr(internal_client, "DEADLINE_S", 0.3)
            assert (await refused_by(client)).message == AWAY
    assert logs[0]["why"] == "no answer within 0.3 s"
    assert len(told.asked) == 2


async def test_neither_proxy_nor_environment_come_between(
    secrets: ServerSecrets, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "SSL_CERT_FILE"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with both(Told(), secrets) as client:
        await client.join(JOIN, source="192.0.2.1")


# Who may call, and who is called


async def test_only_a_leaf_of_the_serving_ca_calls(site: Site, secrets: ServerSecrets) -> None:
    told = Told()
    another = Site()
    callers = {
        "client certificate of an unknown CA": [site.node(site.node_ca), site.serving(ca=another.serving_ca)],
        "client certificate expired": [site.serving(issued_ms_ago=certificates.DAY_MS, lifetime_ms=1_000)],
    }
    async with serving(told, secrets) as url:
        for why, wrong in callers.items():
            for caller in wrong:
                with capture_logs() as logs:
                    async with calling(url, caller) as client:
                        assert (await refused_by(client)).message == AWAY
                refusals = [entry["why"] for entry in logs if entry["event"] == "caller refused"]
                assert refusals
                assert all(refusal.startswith(why) for refusal in refusals)
                [gone] = [entry["why"] for entry in logs if entry["event"] == "join service cannot be reached"]
                assert "where it refused our certificate, its log says why" in gone
    assert not told.asked


async def test_without_a_certificate_or_tls_1_3_nobody_calls(site: Site, secrets: ServerSecrets) -> None:
    told = Told()
    nobody = ssl.create_default_context(cadata=secrets.client_ca_pem.decode())
    old = dialer_tls(lambda: secrets)()
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    async with serving(told, secrets) as url:
        for context in (nobody, old):
            async with httpx.AsyncClient(base_url=url, verify=context, trust_env=False, timeout=30) as client:
                with pytest.raises(httpx.TransportError):
                    await client.get("/internal/v1/trust-bundle")
    assert not told.asked


@pytest.mark.parametrize("name", ["gw.example.org", "2001:db8::1"])
async def test_gateway_names_shut_out_the_other_leaves(site: Site, secrets: ServerSecrets, name: str) -> None:
    told = Told()
    async with serving(told, secrets, gateway_names=["GW.example.org", "2001:DB8:0::1"]) as url:
        async with calling(url, site.serving(name)) as client:
            await client.join(JOIN, source="192.0.2.1")
        with capture_logs() as logs:
            async with calling(url, site.serving("stolen.example.org")) as client:
                assert (await refused_by(client)).message == AWAY
    assert len(told.asked) == 1
    why = "the caller's certificate names stolen.example.org, none of which is in [internal] gateway_names"
    assert [why in entry["why"] for entry in logs] == [True, True], "both logs name it"


@pytest.mark.parametrize(
    ("names", "of_another_ca", "why"),
    [
        (("api.internal",), False, "its certificate is for another name"),
        (("127.0.0.1",), True, "does not come from the serving CA"),
    ],
)
async def test_a_gateway_tells_its_secrets_to_the_services_only(
    site: Site, secrets: ServerSecrets, names: tuple[str, ...], of_another_ca: bool, why: str
) -> None:
    told = Told()
    impostor = site.serving(*names, ca=Site().serving_ca if of_another_ca else None)
    with capture_logs() as logs:
        async with serving(told, impostor) as url, calling(url, secrets) as client:
            assert (await refused_by(client)).message == AWAY
    assert why in logs[0]["why"]
    assert not told.asked


async def test_both_ends_take_up_new_certificates(site: Site, secrets: ServerSecrets) -> None:
    shown = {"server": secrets, "client": site.serving("old.gateway")}
    seen: list[tuple[str, ...]] = []
    told = Told()

    server = internal_server.create_internal_app(told, gateway_names=["old.gateway", "new.gateway"])

    async def app(scope: dict[str, object], receive: object, send: object) -> None:
        state = scope["state"]
        assert isinstance(state, dict)
        seen.append(state["caller_names"])
        await server(scope, receive, send)  # type: ignore[arg-type]

    running = HttpServer(
        app,  # type: ignore[arg-type]
        listener=listen("127.0.0.1", 0, purpose="tests"),
        tls=listener_tls(lambda: shown["server"]),
        protocol=internal_server.CallerProtocol,
    )
    client = RemoteServices(running.url, tls=dialer_tls(lambda: shown["client"]), world=WORLD)
    try:
        await client.join(JOIN, source="192.0.2.1")
        shown["client"] = site.serving("new.gateway")
        await client.join(JOIN, source="192.0.2.1")
        # A server under another name: a new connection finds it.
        shown["server"], shown["client"] = site.serving("api.internal"), site.serving("new.gateway")
        with capture_logs() as logs:
            assert (await refused_by(client)).message == AWAY
        assert "for another name" in logs[0]["why"]
        # Half of a change changes nothing.
        shown["server"] = secrets
        shown["client"] = ServerSecrets(b"", b"", b"")
        with capture_logs() as logs:
            await client.join(JOIN, source="192.0.2.1")
        assert logs[0]["event"] == "new certificates not taken up, the last ones stay"
    finally:
        await client.close()
        await running.stop()
    assert seen == [("old.gateway",), ("new.gateway",), ("new.gateway",)]
