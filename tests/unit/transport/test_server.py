"""The listener over real sockets: who waits where, what strangers cost, and that others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

import h2.connection
import h2.events
import pytest
from hpack import Encoder
from hyperframe.frame import HeadersFrame, PingFrame, RstStreamFrame, SettingsFrame

from bettercompute.system import system_world
from bettercompute.transport import tls
from bettercompute.transport.client import SocketConnection
from bettercompute.transport.streams import (
    CallEnded,
    Connection,
    DialTarget,
    EndKind,
    Handler,
    Limits,
    Server,
    ServerCall,
    dial,
    serve,
    server_context,
    tune_collector,
)
from tests.contract.transport.authority import shared_pki
from tests.unit.transport.wire import GRPC_HEADERS

PKI = shared_pki()
WORLD = system_world()
CONTEXT = server_context(PKI.server_secrets)


async def echo(call: ServerCall) -> None:
    while (message := await call.receive()) is not None:
        call.send(message)


Start = Callable[..., Awaitable[Server]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    servers: list[Server] = []

    async def start_server(handler: Handler = echo, **options: object) -> Server:
        servers.append(await serve(handler, tls=lambda: CONTEXT, world=WORLD, **options))  # type: ignore[arg-type]
        return servers[-1]

    yield start_server
    for server in servers:
        await server.close(drain_ms=0)


class RawClient:
    """A TLS client that speaks HTTP/2 only as told: it answers nothing by itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.h2 = h2.connection.H2Connection()
        self.h2.initiate_connection()
        self.flush()

    @property
    def reading(self) -> asyncio.ReadTransport:
        return cast("asyncio.ReadTransport", self.writer.transport)

    def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())

    def open_call(self) -> int:
        stream_id = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream_id, GRPC_HEADERS)
        self.flush()
        return stream_id

    async def goaway(self) -> h2.events.ConnectionTerminated | None:
        """Read to the end, and return the GOAWAY that came."""
        data = b""
        try:
            while piece := await self.reader.read(1 << 16):
                data += piece
        except (ConnectionError, ssl.SSLError):
            # A reset makes the reader forget to give out what came before it.
            data += bytes(vars(self.reader)["_buffer"])
        events = self.h2.receive_data(data)
        return next((event for event in events if isinstance(event, h2.events.ConnectionTerminated)), None)

    async def close(self) -> None:
        self.writer.transport.abort()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await self.writer.wait_closed()


Raw = Callable[[Server], Awaitable[RawClient]]


@pytest.fixture
async def raw() -> AsyncIterator[Raw]:
    clients: list[RawClient] = []

    async def connect_raw(server: Server) -> RawClient:
        sock = socket.socket()
        # Without this the kernel would read ahead for megabytes.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", server.port))
        context = tls.probe_context()
        streams = await asyncio.open_connection(sock=sock, ssl=context, server_hostname="x", limit=1 << 16)
        clients.append(RawClient(*streams))
        return clients[-1]

    yield connect_raw
    for client in clients:
        await client.close()


async def connect(server: Server, *, anonymous: bool = False, limits: Limits | None = None) -> Connection:
    target = DialTarget(
        f"https://127.0.0.1:{server.port}",
        PKI.serving_ca.pin,
        serving_ca_pem=PKI.serving_ca.pem,
        identity=None if anonymous else PKI.node,
    )
    return await dial(target, world=WORLD, limits=limits or Limits())


async def assert_serves(server: Server) -> None:
    async with asyncio.timeout(30):
        connection = await connect(server)
        assert await connection.unary("/echo", b"hello", timeout_s=30) == b"hello"
        connection.close()
        await connection.wait_closed()


async def assert_serves_with(server: Server, condition: Callable[[], bool]) -> None:
    """Let a whole dial and a call pass, and check that `condition` still holds."""
    connection = await connect(server)
    call = await connection.call("/other")
    assert await call.receive() is not None
    connection.close()
    await connection.wait_closed()
    assert condition()


async def until(condition: Callable[[], bool]) -> None:
    """Give other tasks turns until `condition` holds."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the server signals nobody of what is awaited
            await asyncio.sleep(0.001)


def raw_connection(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port))


def client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    handshake = tls.probe_context().wrap_bio(incoming, outgoing, server_hostname="gateway.test")
    with contextlib.suppress(ssl.SSLWantReadError):
        handshake.do_handshake()
    return outgoing.read()


def closed_by_server(sock: socket.socket) -> bool:
    sock.settimeout(5)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


# Before TLS


async def test_silent_and_half_spoken_connections_wait_apart_from_handshakes(start: Start):
    server = await start(limits=Limits(handshakes_max=1))
    hello = client_hello()
    with contextlib.ExitStack() as stack:
        for said in (b"", hello[:1], hello[:4], hello[:5], hello[:100], hello[:-1]):
            sock = stack.enter_context(raw_connection(server))
            sock.sendall(said)
        await until(lambda: server.waiting_count == 6)
        assert server.handshake_count == 0
        await assert_serves(server)


async def test_a_client_hello_in_pieces_is_served(start: Start):
    server = await start()
    hello = client_hello()
    with raw_connection(server) as sock:
        for index in range(0, len(hello), 40):
            sock.sendall(hello[index : index + 40])
            await asyncio.sleep(0)
        await until(lambda: server.handshake_count == 1)
        assert server.waiting_count == 0


async def test_the_oldest_silent_connection_is_dropped_first(start: Start):
    server = await start(limits=Limits(waiting_max=3))
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(raw_connection(server))
        await until(lambda: server.waiting_count == 1)
        others = [stack.enter_context(raw_connection(server)) for _ in range(3)]
        assert await asyncio.to_thread(closed_by_server, first)
        assert server.waiting_count == 3
        await assert_serves(server)
        assert others


async def test_silence_ends_after_the_deadline(start: Start):
    server = await start(limits=Limits(handshake_ms=50))
    with raw_connection(server) as silent, raw_connection(server) as half:
        half.sendall(client_hello()[:10])
        assert await asyncio.to_thread(closed_by_server, silent)
        assert await asyncio.to_thread(closed_by_server, half)


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\xff\xff"]
)
async def test_what_is_not_tls_is_dropped_at_once(start: Start, said: bytes):
    server = await start()
    with raw_connection(server) as sock:
        sock.sendall(said)
        assert await asyncio.to_thread(closed_by_server, sock)
    with raw_connection(server) as sock:
        sock.sendall(b"\x16\x03")
        sock.shutdown(socket.SHUT_WR)
        assert await asyncio.to_thread(closed_by_server, sock)
    assert server.waiting_count == 0


async def test_more_handshakes_than_places_wait_their_turn(start: Start):
    server = await start(limits=Limits(handshakes_max=2, handshake_ms=400))
    with contextlib.ExitStack() as stack:
        # These never finish theirs.
        for _ in range(4):
            stack.enter_context(raw_connection(server)).sendall(client_hello())
        await until(lambda: server.handshake_count == 2)
        assert server.waiting_count == 2
        await until(lambda: server.waiting_count == 0)
        await assert_serves(server)


async def test_a_closed_door_and_an_unwelcome_address(start: Start):
    server = await start(admit=lambda address: address != "127.0.0.1")
    with raw_connection(server) as sock:
        assert await asyncio.to_thread(closed_by_server, sock)
    server = await start()
    server.accepting = False
    with raw_connection(server) as sock:
        assert await asyncio.to_thread(closed_by_server, sock)
    server.accepting = True
    await assert_serves(server)


async def test_connections_are_bounded(start: Start):
    server = await start(limits=Limits(connections_max=1))
    connection = await connect(server)
    with raw_connection(server) as sock:
        assert await asyncio.to_thread(closed_by_server, sock)
    connection.close()
    await connection.wait_closed()
    await until(lambda: server.connection_count == 0)
    await assert_serves(server)


async def test_strangers_are_bounded_and_members_are_not(start: Start):
    server = await start(limits=Limits(anonymous_connections_max=1))
    first = await connect(server, anonymous=True)
    second = await connect(server, anonymous=True)
    await second.wait_closed()
    assert second.end is not None
    assert "without a certificate" in second.end.message
    await until(lambda: server.anonymous_count == 1)
    await assert_serves(server)
    first.close()
    await first.wait_closed()
    await until(lambda: server.anonymous_count == 0)


async def test_out_of_descriptors_the_listener_pauses_and_goes_on(start: Start, monkeypatch: pytest.MonkeyPatch):
    server = await start()
    real = server._listener

    class Exhausted:
        def fileno(self) -> int:
            return real.fileno()

        def getsockname(self) -> object:
            return real.getsockname()

        def accept(self) -> None:
            server._listener = real
            raise OSError(24, "Too many open files")

    server._listener = Exhausted()  # type: ignore[assignment]
    await assert_serves(server)
    server._listener = real


# Liveness


async def test_a_connection_without_a_call_is_closed(start: Start):
    server = await start(limits=Limits(first_call_ms=50))
    connection = await connect(server)
    await connection.wait_closed()
    assert connection.end is not None
    assert connection.end.kind is EndKind.GOING_AWAY
    assert "no request within 50 ms" in connection.end.message


async def test_a_connection_whose_calls_have_ended_may_stay_a_while(start: Start):
    server = await start(limits=Limits(idle_ms=60, ping_interval_ms=20, pings_unanswered_max=500))
    connection = await connect(server)
    assert await connection.unary("/echo", b"x", timeout_s=30) == b"x"
    await connection.wait_closed()
    assert connection.end is not None
    assert "no call for" in connection.end.message


async def test_pings_keep_an_idle_call_alive_and_last_heard_fresh(start: Start):
    # As many unanswered as a busy machine may take to give both ends a turn.
    limits = Limits(idle_ms=40, ping_interval_ms=20, pings_unanswered_max=500)
    server = await start(limits=limits)
    connection = await connect(server, limits=limits)
    call = await connection.call("/echo")
    heard = connection.last_heard_ms
    await until(lambda: connection.last_heard_ms > heard + 150)
    call.send(b"still")
    assert await call.receive() == b"still"
    connection.close()
    await connection.wait_closed()


async def test_a_peer_that_answers_no_ping_is_given_up(start: Start, raw: Raw):
    server = await start(limits=Limits(ping_interval_ms=20, pings_unanswered_max=3))
    client = await raw(server)
    client.open_call()
    await until(lambda: server.call_count == 1)
    assert await client.goaway() is None
    await until(lambda: server.connection_count == 0 and server.call_count == 0)


def rapid_resets() -> bytes:
    encoder = Encoder()
    frames = b""
    for index in range(1, 3_000, 2):
        headers = HeadersFrame(index, data=encoder.encode(GRPC_HEADERS), flags=["END_HEADERS"])
        frames += headers.serialize() + RstStreamFrame(index, error_code=8).serialize()
    return frames


FLOODS = {
    "PING": PingFrame(0, opaque_data=b"12345678").serialize() * 5_000,
    "SETTINGS": SettingsFrame(0, settings={3: 1}).serialize() * 5_000,
    "resets": rapid_resets(),
}


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_is_told_to_calm_down_while_others_are_served(start: Start, raw: Raw, flood: str):
    server = await start()
    clients = [await raw(server) for _ in range(4)]
    for client in clients:
        client.writer.write(FLOODS[flood])
    await assert_serves(server)
    for client in clients:
        goaway = await client.goaway()
        assert goaway is not None
        assert goaway.error_code == 11
        assert goaway.additional_data is not None
        # Of a stranger's calls that are reset at once the call or the reset spends the last token.
        billed = [flood, "calls without a certificate"] if flood == "resets" else [flood]
        assert any(what.encode() in goaway.additional_data for what in billed)
    await until(lambda: server.connection_count == 0)


async def test_a_client_that_never_reads_is_not_read_either(start: Start, raw: Raw):
    """Back-pressure: while replies wait for the network nothing more is read, and both go on when the client reads."""
    heard: list[bytes] = []

    async def talk(call: ServerCall) -> None:
        for _ in range(70):
            call.send(bytes(100_000))
        while (message := await call.receive()) is not None:
            heard.append(message)

    server = await start(talk)
    client = await raw(server)
    client.reading.pause_reading()
    client.h2.increment_flow_control_window(2**30)
    client.h2.increment_flow_control_window(2**30, client.open_call())
    client.flush()
    await until(lambda: server.call_count == 1)
    link = next(iter(server._links))
    # The kernel's buffers fill in steps.
    queued = 8_000_000
    while not link._paused or link.core.queued_bytes(1) < queued:
        queued = link.core.queued_bytes(1)
        await assert_serves_with(server, lambda: not heard)
    assert link.core.queued_bytes(1) > 5_000_000
    client.h2.send_data(1, b"\x00\x00\x00\x00\x05hello", end_stream=True)
    client.flush()
    await assert_serves_with(server, lambda: not heard)
    assert link._paused
    client.reading.resume_reading()
    read = 0
    while read < 7_000_000:
        read += len(await client.reader.read(1 << 16))
    await until(lambda: heard == [b"hello"])


async def test_clients_that_vanish_leave_nothing(start: Start, raw: Raw):
    server = await start()
    clients = [await raw(server) for _ in range(10)]
    for client in clients:
        client.open_call()
    await until(lambda: server.call_count == 10)
    for client in clients:
        await client.close()
    await until(lambda: server.connection_count == 0 and server.call_count == 0)
    assert server._allowance.used == 0


def refuses_calls(connection: Connection) -> bool:
    return cast("SocketConnection", connection)._link.core.going_away is not None


async def test_close_gives_calls_time_to_end(start: Start):
    started = asyncio.Event()
    release = asyncio.Event()

    async def slow(call: ServerCall) -> None:
        started.set()
        await release.wait()
        call.send(b"done")

    server = await start(slow)
    connection = await connect(server)
    answer = asyncio.ensure_future(connection.unary("/m", b"", timeout_s=10))
    await started.wait()
    closing = asyncio.ensure_future(server.close(drain_ms=10_000))
    await until(lambda: refuses_calls(connection))
    with pytest.raises(CallEnded):
        await connection.call("/m")
    release.set()
    assert await answer == b"done"
    await closing
    await connection.wait_closed()


async def test_a_port_that_is_taken_is_an_os_error(start: Start):
    server = await start()
    with pytest.raises(OSError, match="in use"):
        await start(port=server.port)


def test_the_collector_is_tuned_and_can_be_put_back():
    before = gc.get_threshold()
    try:
        tune_collector()
        assert gc.get_threshold() == (20_000, 50, 1_000)
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
