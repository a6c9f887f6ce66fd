"""A store that takes PUTs over TLS, as a presigned address leads to: what it was sent, and what it answers."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding

from bettercompute.pki import certificates, keyfiles
from bettercompute.system import system_world


@dataclass
class PutServer:
    """The requests it took, each as its head and its body."""

    port: int = 0
    answer: str = "200 OK"
    requests: list[tuple[str, bytes]] = field(default_factory=list)
    stalled: asyncio.Event = field(default_factory=asyncio.Event)
    stalls: bool = False

    @property
    def url(self) -> str:
        """A presigned address."""
        return f"https://127.0.0.1:{self.port}/bucket/key?X-Signature=secret"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take one request."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if self.stalls:
                self.stalled.set()
                await reader.read(-1)
                return
            lengths = [line for line in head.lower().split("\r\n") if line.startswith("content-length:")]
            body = await reader.readexactly(int(lengths[0].partition(":")[2]))
            self.requests.append((head, body))
            writer.write(f"HTTP/1.1 {self.answer}\r\ncontent-length: 6\r\nconnection: close\r\n\r\ninside".encode())
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def put_server(folder: Path) -> AsyncIterator[tuple[PutServer, Path]]:
    """Give a server on 127.0.0.1 and the file of the authority that vouches for it."""
    now_ms = system_world().clock.now_ms()
    ca = certificates.make_serving_ca(serial=bytes(16), now_ms=now_ms)
    key = certificates.generate_key()
    leaf = certificates.make_serving_leaf(
        ca, public_key=key.public_key(), names=("127.0.0.1",), serial=bytes(15) + b"\3", now_ms=now_ms
    )
    ca_file, chain_file, key_file = folder / "store-ca.pem", folder / "store.pem", folder / "store.key"
    ca_file.write_bytes(ca.certificate.public_bytes(Encoding.PEM))
    chain_file.write_bytes(leaf.public_bytes(Encoding.PEM))
    key_file.write_bytes(keyfiles.key_to_pem(key))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain_file, key_file)
    made = PutServer()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=context)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made, ca_file
    finally:
        server.close()
