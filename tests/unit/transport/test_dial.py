"""Dialing over real TLS: who is believed, who is refused, and in which words."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bettercompute.system import system_world
from bettercompute.transport import tls
from bettercompute.transport.streams import (
    CallEnded,
    DialFailed,
    DialKind,
    DialTarget,
    Identity,
    Server,
    ServerCall,
    ServerSecrets,
    dial,
    parse_gateway_url,
    reloading,
    serve,
    server_context,
)
from tests.contract.transport.authority import DAY, Authority, shared_pki

WORLD = system_world()
PKI = shared_pki()


async def who(call: ServerCall) -> None:
    """Answer with how many certificates the peer has shown, and its address."""
    call.send(f"{len(call.peer.certificate_chain)} {call.peer.address}".encode())


Start = Callable[..., Awaitable[Server]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    servers: list[Server] = []

    async def start_server(serving: Identity = PKI.serving, *, host: str = "127.0.0.1") -> Server:
        secrets = ServerSecrets(serving.certificate_chain_pem, serving.private_key_pem, PKI.node_ca.pem)
        context = server_context(secrets)
        servers.append(await serve(who, host=host, tls=lambda: context, world=WORLD))
        return servers[-1]

    yield start_server
    for server in servers:
        await server.close(drain_ms=0)


def target_of(server: Server, **changes: object) -> DialTarget:
    target = DialTarget(f"https://127.0.0.1:{server.port}", PKI.serving_ca.pin, identity=PKI.node)
    return replace(target, **changes)  # type: ignore[arg-type]


async def ask(target: DialTarget) -> str:
    connection = await dial(target, world=WORLD)
    try:
        return (await connection.unary("/who", b"", timeout_s=10)).decode()
    finally:
        connection.close()
        await connection.wait_closed()


async def refused(target: DialTarget) -> DialFailed:
    with pytest.raises(DialFailed) as failure:
        await dial(target, world=WORLD)
    return failure.value


async def test_the_pin_is_found_in_the_chain_and_kept(start: Start):
    server = await start()
    connection = await dial(target_of(server), world=WORLD)
    assert connection.serving_ca_pem == PKI.serving_ca.pem
    connection.close()
    await connection.wait_closed()
    assert await ask(target_of(server, serving_ca_pem=connection.serving_ca_pem)) == "2 127.0.0.1"


async def test_a_cached_ca_that_is_not_the_pinned_one_is_not_believed(start: Start):
    server = await start()
    assert await ask(target_of(server, serving_ca_pem=PKI.node_ca.pem)) == "2 127.0.0.1"
    assert await ask(target_of(server, serving_ca_pem=b"no PEM at all")) == "2 127.0.0.1"
    foreign = Authority.new("foreign")
    failure = await refused(target_of(server, serving_ca_spki_sha256=foreign.pin, serving_ca_pem=foreign.pem))
    assert failure.kind is DialKind.PIN_MISMATCH


async def test_another_ca_than_the_pinned_one_is_a_pin_mismatch(start: Start):
    server = await start()
    failure = await refused(target_of(server, serving_ca_spki_sha256=bytes(32)))
    assert failure.kind is DialKind.PIN_MISMATCH
    assert f"127.0.0.1:{server.port}" in failure.message
    assert "pin mismatch" in failure.message


async def test_a_certificate_with_the_pinned_key_alone_vouches_for_nothing(start: Start):
    """The chain shows the pinned CA, which is public, but the leaf is another's."""
    foreign = Authority.new("test serving CA").issue("gateway", names=("127.0.0.1",))
    leaf = foreign.certificate_chain_pem.partition(b"-----END CERTIFICATE-----\n")
    serving = Identity(leaf[0] + leaf[1] + PKI.serving_ca.pem, foreign.private_key_pem)
    failure = await refused(target_of(await start(serving)))
    assert failure.kind in (DialKind.PIN_MISMATCH, DialKind.SERVER_CERTIFICATE)


async def test_an_intermediate_may_be_the_pinned_one_and_so_may_its_root(start: Start):
    root = Authority.new("root")
    intermediate = Authority.new("intermediate", issuer=root)
    server = await start(intermediate.issue("gateway", names=("127.0.0.1",)))
    assert await ask(target_of(server, serving_ca_spki_sha256=intermediate.pin)) == "2 127.0.0.1"
    assert await ask(target_of(server, serving_ca_spki_sha256=root.pin)) == "2 127.0.0.1"


async def test_the_name_is_checked_and_can_be_given(start: Start):
    server = await start(PKI.serving_ca.issue("gateway", names=("gateway.test",)))
    failure = await refused(target_of(server))
    assert failure.kind is DialKind.SERVER_NAME
    assert "gateway_server_name" in failure.message
    assert await ask(target_of(server, server_name="gateway.test")) == "2 127.0.0.1"
    assert (await refused(target_of(server, server_name="other.test"))).kind is DialKind.SERVER_NAME


@pytest.mark.parametrize(("not_before", "not_after"), [(-3 * DAY, -2 * DAY), (2 * DAY, 3 * DAY)])
async def test_the_dates_of_the_gateways_certificate_are_the_callers_to_judge(
    start: Start, not_before: timedelta, not_after: timedelta
):
    serving = PKI.serving_ca.issue("gateway", names=("127.0.0.1",), not_before=not_before, not_after=not_after)
    connection = await dial(target_of(await start(serving)), world=WORLD)
    leaf = connection.server_certificate
    assert leaf is not None
    assert leaf.not_after_ms - leaf.not_before_ms == DAY.total_seconds() * 1000
    assert abs(leaf.not_after_ms - WORLD.clock.now_ms() - not_after.total_seconds() * 1000) < 60_000
    connection.close()
    await connection.wait_closed()


async def test_without_a_client_certificate_the_peer_has_no_chain(start: Start):
    assert await ask(target_of(await start(), identity=None)) == "0 127.0.0.1"


@pytest.mark.parametrize(
    ("identity", "kind", "words"),
    [
        (Authority.new("foreign").issue("node-1", client=True), DialKind.UNKNOWN_CA, "unknown CA"),
        (
            PKI.node_ca.issue("node-1", client=True, not_before=-3 * DAY, not_after=-DAY),
            DialKind.CERTIFICATE_EXPIRED,
            "expired",
        ),
        (
            PKI.node_ca.issue("node-1", client=True, not_before=DAY, not_after=2 * DAY),
            DialKind.CERTIFICATE_REFUSED,
            f"it is valid from {datetime.now(UTC) + DAY:%Y-%m-%d}",
        ),
        (PKI.node_ca.issue("node-1", client=False), DialKind.CERTIFICATE_REFUSED, "refused our certificate"),
    ],
    ids=["foreign CA", "expired", "not yet valid", "wrong usage"],
)
async def test_a_refused_client_certificate_is_told_in_words(
    start: Start, identity: Identity, kind: DialKind, words: str
):
    server = await start()
    failure = await refused(target_of(server, identity=identity))
    assert failure.kind is kind
    assert words in failure.message
    assert server.connection_count == 0
    # And nobody else suffers.
    assert await ask(target_of(server)) == "2 127.0.0.1"


async def test_ipv6_works_by_literal(start: Start):
    server = await start(host="::1")
    assert await ask(target_of(server, url=f"https://[::1]:{server.port}")) == "2 ::1"


async def test_any_address_takes_both_families(start: Start):
    server = await start(host="::")
    assert await ask(target_of(server, url=f"https://[::1]:{server.port}")) == "2 ::1"
    assert await ask(target_of(server)) == "2 127.0.0.1"


async def test_tls_1_2_is_refused(start: Start):
    server = await start()
    context = tls.probe_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
        await asyncio.open_connection("127.0.0.1", server.port, ssl=context, server_hostname="x")


async def test_a_client_that_does_not_ask_for_http2_is_cut_off(start: Start):
    server = await start()
    context = tls.probe_context()
    context.set_alpn_protocols(["http/1.1"])
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context, server_hostname="x")
    with contextlib.suppress(ConnectionError):
        assert not await reader.read(1)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def test_sessions_cannot_be_resumed(start: Start):
    """A resumed one would outlive the rotation of the client CA."""
    server = await start()
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", server.port, ssl=tls.probe_context(), server_hostname="x"
    )
    await reader.read(1)
    assert writer.get_extra_info("ssl_object").session.has_ticket is False
    writer.close()
    await writer.wait_closed()


@contextlib.asynccontextmanager
async def silent_server(*, ssl_context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Accept, and say nothing until the client leaves."""
    left = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        left.set()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0, ssl=ssl_context)
    async with server:
        yield server.sockets[0].getsockname()[1]
        await left.wait()


async def test_a_server_without_http2_is_told_apart():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_identity(context, PKI.serving)

    async with silent_server(ssl_context=context) as port:
        failure = await refused(
            DialTarget(f"https://127.0.0.1:{port}", PKI.serving_ca.pin, serving_ca_pem=PKI.serving_ca.pem)
        )
    assert failure.kind is DialKind.NOT_HTTP2


async def test_nobody_listening_and_no_such_name():
    failure = await refused(DialTarget("https://127.0.0.1:1", PKI.serving_ca.pin))
    assert failure.kind is DialKind.CONNECT
    assert "127.0.0.1:1" in failure.message
    failure = await refused(DialTarget("https://a..b:1", PKI.serving_ca.pin))
    assert failure.kind is DialKind.NAME_LOOKUP


async def test_an_address_of_a_family_that_the_kernel_has_not_is_passed_over(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    server = await start()
    loop = asyncio.get_running_loop()
    resolve, no_family = loop.getaddrinfo, 1_000

    async def two_families(host: str, port: int, **options: Any) -> list[Any]:
        if host != "two.test":
            return await resolve(host, port, **options)
        here = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port))
        return [(no_family, socket.SOCK_STREAM, 0, "", ("::1", port)), here]

    monkeypatch.setattr(loop, "getaddrinfo", two_families)
    target = target_of(server, url=f"https://two.test:{server.port}", server_name="127.0.0.1")
    assert await ask(target) == "2 127.0.0.1"


async def test_a_silent_server_is_given_up_in_time():
    async with silent_server() as port:
        failure = await refused(DialTarget(f"https://127.0.0.1:{port}", PKI.serving_ca.pin, timeout_s=0.1))
    assert failure.kind is DialKind.TIMEOUT


@pytest.mark.parametrize(
    "url",
    [
        "http://gw:1",
        "gw:1",
        "https://",
        "https://gw/path",
        "https://gw?x",
        "https://u@gw",
        "https://gw:99999",
        "https://[::1",
    ],
)
async def test_a_malformed_url_is_named(url: str):
    failure = await refused(DialTarget(url, PKI.serving_ca.pin))
    assert failure.kind is DialKind.BAD_TARGET


def test_good_urls():
    assert parse_gateway_url("https://gw.example") == ("gw.example", 443)
    assert parse_gateway_url("https://[2001:db8::1]:8443/") == ("2001:db8::1", 8443)


async def test_a_pin_of_the_wrong_length_is_named():
    assert (await refused(DialTarget("https://gw", b"short"))).kind is DialKind.BAD_TARGET


async def test_the_server_follows_its_secrets_without_dropping_anybody():
    secrets = PKI.server_secrets
    source = reloading(lambda: secrets)
    server = await serve(who, tls=source, world=WORLD)
    old = await dial(target_of(server), world=WORLD)
    assert source() is source()
    other_ca = Authority.new("next node CA")
    newer = PKI.serving_ca.issue("gateway", names=("127.0.0.1",))
    secrets = ServerSecrets(newer.certificate_chain_pem, newer.private_key_pem, PKI.node_ca.pem + other_ca.pem)
    new = await dial(target_of(server, identity=other_ca.issue("node-2", client=True)), world=WORLD)
    assert new.server_certificate != old.server_certificate
    for connection in (old, new):
        assert await connection.unary("/who", b"", timeout_s=10) == b"2 127.0.0.1"
        connection.close()
        await connection.wait_closed()
    await server.close(drain_ms=0)


async def test_a_context_that_cannot_be_had_costs_one_connection():
    secrets: ServerSecrets = ServerSecrets(b"", b"", b"")
    server = await serve(who, tls=reloading(lambda: secrets), world=WORLD)
    failure = await refused(target_of(server))
    assert failure.kind is DialKind.CONNECT
    secrets = PKI.server_secrets
    assert await ask(target_of(server)) == "2 127.0.0.1"
    await server.close(drain_ms=0)


async def test_the_identity_passes_through_a_file_where_there_is_no_memory_file(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr("os.memfd_create")
    tls.dialer_context(serving_ca_pem=PKI.serving_ca.pem, identity=PKI.node)


async def test_a_lost_connection_is_told_to_its_owner(start: Start):
    server = await start()
    connection = await dial(target_of(server), world=WORLD)
    await server.close(drain_ms=0)
    await connection.wait_closed()
    assert isinstance(connection.end, CallEnded)
