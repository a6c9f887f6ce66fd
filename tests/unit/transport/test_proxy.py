"""Which proxy, and the way through it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from bettercompute.system import system_world
from bettercompute.transport.proxy import Proxy, authority_of, parse_proxy, proxy_for
from bettercompute.transport.streams import DialFailed, DialKind, DialTarget, ServerCall, dial, serve, server_context
from tests.contract.transport.authority import shared_pki

PROXY = {"https_proxy": "http://proxy.test:3128"}


@pytest.mark.parametrize(
    ("environment", "used"),
    [
        ({}, False),
        ({"http_proxy": "http://proxy.test:3128"}, False),
        (PROXY, True),
        ({"HTTPS_PROXY": "proxy.test:3128"}, True),
        ({"ALL_PROXY": "http://proxy.test:3128"}, True),
        ({"https_proxy": "", "all_proxy": ""}, False),
    ],
)
def test_the_environment_names_the_proxy(environment: dict[str, str], used: bool):
    assert proxy_for("gw.example", 443, environment) == (Proxy("proxy.test", 3128) if used else None)


@pytest.mark.parametrize(
    ("no_proxy", "host", "exempt"),
    [
        ("*", "gw.example", True),
        ("gw.example", "gw.example", True),
        ("GW.Example", "gw.example.", True),
        ("example", "gw.example", True),
        (".example", "gw.example", True),
        ("*.example", "gw.example", True),
        ("ample", "gw.example", False),
        ("other, gw.example ,x", "gw.example", True),
        ("gw.example:443", "gw.example", True),
        ("gw.example:8443", "gw.example", False),
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.0.0.0/8", "11.1.2.3", False),
        ("10.1.2.3", "10.1.2.3", True),
        ("10.1.2.3:443", "10.1.2.3", True),
        ("10.1.2.3:80", "10.1.2.3", False),
        ("2001:db8::/32", "2001:db8::1", True),
        ("[2001:db8::1]:443", "2001:db8::1", True),
        ("[2001:db8::1]:80", "2001:db8::1", False),
        ("2001:db8::1", "2001:db8:0::1", True),
        ("example", "10.0.0.1", False),
        ("", "gw.example", False),
        (",,", "gw.example", False),
        ("10.0.0.0/99", "10.0.0.1", False),
    ],
)
def test_no_proxy(no_proxy: str, host: str, exempt: bool):
    assert (proxy_for(host, 443, {**PROXY, "NO_PROXY": no_proxy}) is None) == exempt


def test_a_proxy_url():
    assert parse_proxy("http://user:p%40ss@[::1]:8080") == Proxy("::1", 8080, "Basic dXNlcjpwQHNz")
    assert parse_proxy("proxy") == Proxy("proxy", 80)
    assert "p%40ss" not in repr(parse_proxy("http://user:p%40ss@proxy"))


@pytest.mark.parametrize(
    "url", ["https://proxy:1", "socks5://proxy:1", "http://", "http://proxy:99999", "http://user:s\udcff@proxy:1"]
)
def test_an_unusable_proxy_is_named_and_never_its_password(url: str):
    with pytest.raises(DialFailed, match="proxy") as failure:
        parse_proxy(url)
    assert failure.value.kind is DialKind.BAD_TARGET
    assert "udcff" not in repr(failure.value)


def test_authority():
    assert authority_of("::1", 1) == "[::1]:1"
    assert authority_of("gw", 443) == "gw:443"


class TinyProxy:
    """Answers one CONNECT per connection as it is told, and relays when that was a 200."""

    def __init__(self) -> None:
        self.answer = b"HTTP/1.1 200 Connection established\r\n\r\n"
        self.requests: list[str] = []
        self.port = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.requests.append(request)
        writer.write(self.answer)
        if self.answer.startswith(b"HTTP/1.1 200") and self.answer.endswith(b"\r\n\r\n"):
            host, _, port = request.split()[1].rpartition(":")
            there, back = await asyncio.open_connection(host.strip("[]"), int(port))
            await asyncio.gather(pump(reader, back), pump(there, writer))
        writer.close()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
    except ConnectionError:
        pass
    writer.close()


@pytest.fixture
async def proxy() -> AsyncIterator[TinyProxy]:
    tiny = TinyProxy()
    server = await asyncio.start_server(tiny, "127.0.0.1", 0)
    tiny.port = server.sockets[0].getsockname()[1]
    async with server:
        yield tiny
        server.close()


async def who(call: ServerCall) -> None:
    call.send(call.peer.address.encode())


async def ask_through(proxy: TinyProxy, *, host: str, environment: dict[str, str]) -> bytes:
    pki = shared_pki()
    world = system_world()
    context = server_context(pki.server_secrets)
    server = await serve(who, host=host, tls=lambda: context, world=world)
    try:
        url = f"https://{authority_of(host, server.port)}"
        connection = await dial(
            DialTarget(url, pki.serving_ca.pin, identity=pki.node, environment=environment), world=world
        )
        answer = await connection.unary("/who", b"", timeout_s=10)
        connection.close()
        await connection.wait_closed()
    finally:
        await server.close(drain_ms=0)
    return answer


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_dial_goes_through_the_proxy(proxy: TinyProxy, host: str):
    environment = {"HTTPS_PROXY": f"http://user:pass@127.0.0.1:{proxy.port}"}
    assert await ask_through(proxy, host=host, environment=environment) == host.encode()
    # Once to look at the chain, once to stay.
    assert len(proxy.requests) == 2
    assert proxy.requests[0].startswith(f"CONNECT {authority_of(host, 1)[:-1]}")
    assert "Proxy-Authorization: Basic dXNlcjpwYXNz" in proxy.requests[0]


async def test_no_proxy_is_honoured(proxy: TinyProxy):
    environment = {"HTTPS_PROXY": f"http://127.0.0.1:{proxy.port}", "no_proxy": "127.0.0.0/8"}
    assert await ask_through(proxy, host="127.0.0.1", environment=environment) == b"127.0.0.1"
    assert proxy.requests == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "407 Proxy Authentication Required"),
        (b"HTTP/1.1 200 OK\r\n", "halfway"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 3_000, "halfway"),
        (b"HTTP/1.1 200 OK\r\n\r\nHello", "not a plain tunnel"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "SSH-2.0"),
    ],
)
async def test_a_proxy_that_says_no_is_quoted(proxy: TinyProxy, answer: bytes, words: str):
    proxy.answer = answer
    with pytest.raises(DialFailed, match=words) as failure:
        await ask_through(proxy, host="127.0.0.1", environment={"ALL_PROXY": f"127.0.0.1:{proxy.port}"})
    assert failure.value.kind is DialKind.PROXY


async def test_a_proxy_that_is_not_there_is_named(proxy: TinyProxy):
    with pytest.raises(DialFailed, match="cannot connect to the proxy"):
        await ask_through(proxy, host="127.0.0.1", environment={"ALL_PROXY": "127.0.0.1:1"})
