"""The reference: a bare h2 echo server on uvloop, without gRPC, calls, bounds or database, as a process of its own.

It answers each message with the same bytes. SIGUSR1 makes it swallow all but the first of a stream, which it answers
as a gateway answers Hello, while heartbeats get no answer: that is less than an echo server does, and the harder thing
to compare with. TLS is the gateway's own (1.3, client certificates verified, no tickets), and it has the same tricks
(one read buffer, silenced loggers, a tuned collector), so that what is compared is what this project adds and not what
h2 and OpenSSL cost anybody. With `--server transport` it is this project's own transport with nothing above it, which
tells what of the distance is the transport's and what the gateway's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import h2.config
import h2.connection
import h2.events
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the file also runs by its path

from bench.stack import BenchStack
from bettercompute.pki import keyfiles
from bettercompute.pki.keyfiles import KeyFolder
from bettercompute.services.pki_setup import GATEWAY
from bettercompute.system import system_world
from bettercompute.transport.h2_bounds import silence_hot_paths
from bettercompute.transport.streams import ServerCall, ServerSecrets, serve, server_context, tune_collector

READ_BYTES = 64 * 1024
PING_S = 20.0
ANSWER_HEADERS = [(":status", "200"), ("content-type", "application/grpc")]


class Echo(asyncio.BufferedProtocol):
    """One connection."""

    buffer = memoryview(bytearray(READ_BYTES))
    silent = False
    """Swallow what is not the first message of a stream."""

    def __init__(self) -> None:
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        self._answered: set[int] = set()
        self._transport: asyncio.Transport | None = None
        self._ping: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say the preface."""
        self._transport = cast("asyncio.Transport", transport)
        self._h2.initiate_connection()
        self._flush()
        self._schedule_ping()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the PINGs."""
        del exc
        self._transport = None
        if self._ping is not None:
            self._ping.cancel()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Lend the buffer of all."""
        del sizehint
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Answer what was read."""
        for event in self._h2.receive_data(self.buffer[:nbytes]):
            if isinstance(event, h2.events.RequestReceived):
                self._h2.send_headers(event.stream_id, ANSWER_HEADERS)
            elif isinstance(event, h2.events.DataReceived):
                self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                if not self.silent or event.stream_id not in self._answered:
                    self._answered.add(event.stream_id)
                    self._h2.send_data(event.stream_id, event.data)
            elif isinstance(event, h2.events.ConnectionTerminated) and self._transport is not None:
                self._transport.close()
        self._flush()

    def eof_received(self) -> bool:
        """Let the transport close."""
        return False

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data and self._transport is not None:
            self._transport.write(data)

    def _schedule_ping(self) -> None:
        self._ping = asyncio.get_running_loop().call_later(PING_S, self._send_ping)

    def _send_ping(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._h2.ping(b"bench-pi")
        self._flush()
        self._schedule_ping()


async def _serve_bare(port: int, context: ssl.SSLContext) -> None:
    await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", port, ssl=context, backlog=1024)


async def _serve_transport(port: int, context: ssl.SSLContext) -> None:
    async def answer(call: ServerCall) -> None:
        first = await call.receive()
        if first is not None:
            call.send(first)
        while await call.receive() is not None:
            pass

    await serve(answer, port=port, tls=lambda: context, world=system_world())


SERVERS = {"bare": _serve_bare, "transport": _serve_transport}


async def _serve(server: str, port: int, context: ssl.SSLContext) -> None:
    await SERVERS[server](port, context)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, setattr, Echo, "silent", True)
    tune_collector()
    print("ready", flush=True)
    await asyncio.Event().wait()


@contextlib.contextmanager
def reference(running: BenchStack, *, server: str = "bare") -> Iterator[tuple[int, str]]:
    """Run the reference with the stack's keys until the block ends, and give its process id and url."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    arguments = ["--pki", str(running.keys.folder), "--port", str(port), "--server", server]
    process = subprocess.Popen([sys.executable, str(Path(__file__)), *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise SystemExit("the reference did not start")
        yield process.pid, f"https://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate()


def main() -> None:
    """Serve until terminated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--pki", type=Path, required=True, help="the folder of the installation's keys")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--server", choices=sorted(SERVERS), default="bare")
    wanted = parser.parse_args()
    silence_hot_paths()
    keys = KeyFolder(wanted.pki)
    secrets = ServerSecrets(
        certificate_chain_pem=keys.pem(GATEWAY),
        private_key_pem=keyfiles.key_to_pem(keys.key(GATEWAY)),
        client_ca_pem=keys.pem(keyfiles.NODE_CA),
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_serve(wanted.server, wanted.port, server_context(secrets)))


if __name__ == "__main__":
    main()
