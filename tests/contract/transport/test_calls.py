"""What a call promises, over sockets and in memory alike."""

from __future__ import annotations

import asyncio

import pytest

from bettercompute.errors import Bug, Refused, Unavailable
from bettercompute.protocol.statuses import Reason, Status, refuse
from bettercompute.transport.streams import CallEnded, ClientCall, EndKind, Limits, ServerCall, by_path

MIB = 1024 * 1024


async def echo(call: ServerCall) -> None:
    while (message := await call.receive()) is not None:
        call.send(message)


def send_many(call: ServerCall | ClientCall, *, count: int, size: int) -> None:
    for _ in range(count):
        call.send(b"x" * size)


class Probe:
    """A handler that hands its calls to the test and waits for it."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[ServerCall] = asyncio.Queue()

    async def __call__(self, call: ServerCall) -> None:
        self.calls.put_nowait(call)
        await call.wait_closed()


async def test_messages_come_back_whole_and_in_order(connect):
    connection = await connect(echo)
    call = await connection.call("/service/Echo")
    sizes = [0, 1, 5, 16 * 1024, 70_000, 2 * MIB, 3, 5 * MIB]
    for index, size in enumerate(sizes):
        call.send(bytes([index]) * size)
        assert await call.receive() == bytes([index]) * size
    call.half_close()
    assert await call.receive() is None
    assert (call.status, call.status_message, dict(call.trailers)) == (0, "", dict(call.trailers))


async def test_both_sides_send_at_once_more_than_any_window(connect):
    connection = await connect(echo)
    call = await connection.call("/service/Echo")
    for index in range(64):
        call.send(bytes([index]) * 100_000)
    call.half_close()
    for index in range(64):
        message = await call.receive()
        assert message is not None
        assert message[:1] == bytes([index])
        assert len(message) == 100_000
    assert await call.receive() is None
    assert call.status == Status.OK


async def test_path_metadata_and_peer_arrive(connect):
    probe = Probe()
    connection = await connect(probe)
    await connection.call("/service/Method", {"x-bc-attempt": "3"})
    call = await probe.calls.get()
    assert call.path == "/service/Method"
    assert call.metadata["x-bc-attempt"] == "3"
    assert call.peer.address == "127.0.0.1"
    assert call.peer.certificate_chain


async def test_half_close_is_heard_and_the_answer_still_comes(connect):
    probe = Probe()
    connection = await connect(probe)
    call = await connection.call("/m")
    call.send(b"last")
    call.half_close()
    server = await probe.calls.get()
    assert await server.receive() == b"last"
    assert await server.receive() is None
    assert await server.receive() is None
    server.send(b"answer")
    server.finish(Status.OK, trailers={"x-bc-server-time": "7"})
    assert await call.receive() == b"answer"
    assert await call.receive() is None
    assert call.trailers["x-bc-server-time"] == "7"


async def test_a_status_without_messages_carries_text_and_trailers(connect):
    probe = Probe()
    connection = await connect(probe)
    call = await connection.call("/m")
    server = await probe.calls.get()
    server.finish(Status.RESOURCE_EXHAUSTED, "full: 100 % → später", {"x-bc-reason": "streams"})
    server.finish(Status.OK)
    assert await call.receive() is None
    assert call.status == Status.RESOURCE_EXHAUSTED
    assert call.status_message == "full: 100 % → später"
    assert call.trailers["x-bc-reason"] == "streams"
    await server.wait_closed()
    assert server.ended


async def test_status_comes_after_what_was_queued_before_it(connect):
    probe = Probe()
    connection = await connect(probe)
    call = await connection.call("/m")
    server = await probe.calls.get()
    for _ in range(10):
        server.send(b"x" * 50_000)
    server.finish(Status.ABORTED, "superseded")
    assert [len(await call.receive() or b"") for _ in range(10)] == [50_000] * 10
    assert await call.receive() is None
    assert call.status == Status.ABORTED


async def test_after_its_end_neither_side_can_send(connect):
    probe = Probe()
    connection = await connect(probe)
    call = await connection.call("/m")
    server = await probe.calls.get()
    server.finish(Status.OK)
    with pytest.raises(CallEnded):
        server.send(b"late")
    assert await call.receive() is None
    with pytest.raises(CallEnded):
        call.send(b"late")
    with pytest.raises(CallEnded):
        await server.receive()


async def test_cancel_reaches_the_server_and_ends_both(connect):
    probe = Probe()
    connection = await connect(probe)
    call = await connection.call("/m")
    server = await probe.calls.get()
    call.cancel()
    with pytest.raises(CallEnded) as here:
        await call.receive()
    assert here.value.kind is EndKind.CANCELLED
    with pytest.raises(CallEnded) as there:
        await server.receive()
    assert there.value.kind is EndKind.CANCELLED
    await server.wait_closed()
    with pytest.raises(CallEnded):
        server.send(b"late")


async def test_messages_that_came_before_a_cut_are_still_read(connect):
    probe = Probe()
    connection = await connect(probe)
    call = await connection.call("/m")
    server = await probe.calls.get()
    call.send(b"fact")
    await call.drained()
    first = await server.receive()
    call.send(b"second fact")
    await call.drained()
    server.send(b"seen")
    assert await call.receive() == b"seen"
    connection.close()
    await server.wait_closed()
    assert first == b"fact"
    assert await server.receive() == b"second fact"
    with pytest.raises(CallEnded):
        await server.receive()


async def test_closing_the_connection_ends_every_call_at_both_ends(connect):
    probe = Probe()
    connection = await connect(probe)
    calls = [await connection.call("/m") for _ in range(3)]
    servers = [await probe.calls.get() for _ in range(3)]
    connection.close()
    for call in calls:
        with pytest.raises(CallEnded) as end:
            await call.receive()
        assert end.value.kind is EndKind.CLOSED_HERE
    for server in servers:
        await server.wait_closed()
    await connection.wait_closed()
    assert connection.closed.is_set()
    assert connection.end is not None
    with pytest.raises(CallEnded):
        await connection.call("/m")


async def test_a_slow_reader_ends_its_call_and_no_other(connect):
    probe = Probe()
    connection = await connect(probe, limits=Limits(outbound_messages_max=8, outbound_bytes_max=10 * MIB))
    slow = await connection.call("/slow")
    server = await probe.calls.get()
    with pytest.raises(Refused) as refusal:
        send_many(server, count=9, size=MIB)
    assert (refusal.value.status, refusal.value.reason) == (Status.RESOURCE_EXHAUSTED, Reason.SLOW_CONSUMER)
    assert server.ended
    while await slow.receive() is not None:
        pass
    assert slow.status == Status.RESOURCE_EXHAUSTED
    assert slow.trailers["x-bc-reason"] == "slow-consumer"
    other = await connection.call("/other")
    (await probe.calls.get()).finish(Status.OK)
    assert await other.receive() is None


async def test_queue_is_bounded_in_bytes_too(connect):
    probe = Probe()
    connection = await connect(probe, limits=Limits(outbound_bytes_max=6 * MIB))
    await connection.call("/slow")
    server = await probe.calls.get()
    server.send(b"x" * 5 * MIB)
    assert server.queued_bytes >= 5 * MIB
    with pytest.raises(Refused, match="slow reader"):
        server.send(b"x" * 2 * MIB)


async def test_a_clients_full_queue_refuses_the_message_and_the_call_goes_on(connect):
    probe = Probe()
    connection = await connect(probe, limits=Limits(outbound_messages_max=4))
    call = await connection.call("/m")
    server = await probe.calls.get()
    with pytest.raises(Refused):
        send_many(call, count=100, size=100_000)
    for _ in range(4):
        assert await server.receive() is not None
    await call.drained()
    call.send(b"next")


async def test_too_large_a_message_is_not_sent(connect):
    connection = await connect(echo)
    call = await connection.call("/m")
    with pytest.raises(Refused, match="limit is 5242880"):
        call.send(bytes(5 * MIB + 1))
    call.send(b"fine")
    assert await call.receive() == b"fine"


async def test_a_path_may_have_a_lower_limit(connect):
    connection = await connect(echo, limits=Limits(message_bytes_max_by_path={"/join": 64}))
    call = await connection.call("/join")
    call.send(b"x" * 65)
    assert await call.receive() is None
    assert call.status == Status.INVALID_ARGUMENT
    assert "65 bytes; the limit is 64" in call.status_message
    assert call.trailers["x-bc-reason"] == "frame-too-large"
    assert await connection.unary("/other", b"x" * 65, timeout_s=10) == b"x" * 65


async def test_drained_waits_for_the_reader(connect):
    probe = Probe()
    connection = await connect(probe)
    call = await connection.call("/m")
    server = await probe.calls.get()
    server.send(b"x" * 2 * MIB)
    drained = asyncio.ensure_future(server.drained())
    await asyncio.sleep(0)
    assert await call.receive() == b"x" * 2 * MIB
    await drained
    assert server.queued_bytes == 0


async def test_what_a_handler_raises_becomes_the_status(connect):
    async def refused(call: ServerCall) -> None:
        raise refuse(Reason.HANDSHAKES, "too many handshakes", pushback_ms=1500)

    async def unavailable(call: ServerCall) -> None:
        raise Unavailable("the database is away")

    connection = await connect(by_path({"/refused": refused, "/unavailable": unavailable}))
    with pytest.raises(Refused) as refusal:
        await connection.unary("/refused", b"", timeout_s=10)
    assert (refusal.value.status, refusal.value.reason, refusal.value.pushback_ms) == (8, "handshakes", 1500)
    assert refusal.value.message == "too many handshakes"
    with pytest.raises(Refused) as refusal:
        await connection.unary("/unavailable", b"", timeout_s=10)
    assert (refusal.value.status, refusal.value.pushback_ms) == (14, None)
    with pytest.raises(Refused, match="unknown method /nothing") as refusal:
        await connection.unary("/nothing", b"", timeout_s=10)
    assert refusal.value.status == Status.UNIMPLEMENTED


@pytest.mark.parametrize("error", [Bug("an invariant"), ValueError("secret detail")])
async def test_our_own_faults_say_nothing_of_themselves(connect, error):
    async def broken(call: ServerCall) -> None:
        raise error

    connection = await connect(broken)
    with pytest.raises(Refused) as refusal:
        await connection.unary("/m", b"", timeout_s=10)
    assert (refusal.value.status, refusal.value.message, refusal.value.reason) == (13, "internal error", "bug")


async def test_unary_gives_up_in_time_and_cancels(connect):
    probe = Probe()
    connection = await connect(probe)
    with pytest.raises(Refused) as refusal:
        await connection.unary("/m", b"", timeout_s=0.2)
    assert refusal.value.status == Status.DEADLINE_EXCEEDED
    server = await probe.calls.get()
    await server.wait_closed()


async def test_unary_wants_exactly_one_answer(connect):
    async def none(call: ServerCall) -> None:
        return

    async def two(call: ServerCall) -> None:
        call.send(b"1")
        call.send(b"2")

    connection = await connect(by_path({"/none": none, "/two": two}))
    with pytest.raises(CallEnded, match="no message"):
        await connection.unary("/none", b"", timeout_s=10)
    with pytest.raises(CallEnded, match="more than one"):
        await connection.unary("/two", b"", timeout_s=10)


async def test_more_calls_than_the_limit_are_refused_at_the_client(connect):
    probe = Probe()
    connection = await connect(probe, limits=Limits(streams_max=4))
    calls = [await connection.call("/m") for _ in range(4)]
    with pytest.raises(CallEnded) as end:
        await connection.call("/m")
    assert end.value.kind is EndKind.REFUSED_STREAM
    (await probe.calls.get()).finish(Status.OK)
    assert await calls[0].receive() is None
    await connection.call("/m")


async def test_server_going_away_lets_open_calls_finish_and_takes_no_new_ones(connect):
    probe = Probe()
    connection = await connect(probe)
    call = await connection.call("/m")
    server_call = await probe.calls.get()
    server = connect.servers[0]
    server.announce_close()
    server_call.send(b"still here")
    assert await call.receive() == b"still here"
    with pytest.raises(CallEnded) as end:
        await connection.call("/m")
    assert end.value.kind is EndKind.GOING_AWAY
    server_call.finish(Status.OK)
    assert await call.receive() is None
    assert call.status == Status.OK
    await connection.wait_closed()


async def test_server_close_cancels_handlers_and_tells_their_clients(connect):
    probe = Probe()
    connection = await connect(probe)
    call = await connection.call("/m")
    await probe.calls.get()
    await connect.servers[0].close(drain_ms=0)
    assert await call.receive() is None
    assert call.status == Status.UNAVAILABLE
    assert call.trailers["x-bc-reason"] == "stopping"
    await connection.wait_closed()


async def test_last_heard_moves(connect):
    connection = await connect(echo)
    before = connection.last_heard_ms
    await connection.unary("/m", b"x", timeout_s=10)
    assert connection.last_heard_ms >= before
