"""Every refusal: status, reason and a sentence that says what to do.

See docs/sessions.md, "Opening"; docs/protocol.md, "Errors outside frames".
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from bettercompute.errors import Refused
from bettercompute.gateway import accept
from bettercompute.gateway.config import GatewayConfig
from bettercompute.protocol import messages, service
from bettercompute.protocol.statuses import Reason, Status, refuse
from bettercompute.session import opening
from bettercompute.transport.memory import MemoryServer
from tests.contract.gateway.rig import WAIT_S, Daemon, make_gateway


async def refused(daemon: Daemon) -> tuple[int, str, str]:
    end = await daemon.end()
    assert daemon.call.trailers.get("x-bc-server-time", "").isdigit()
    assert daemon.frames == []
    return end


async def test_the_first_frame_must_be_hello(rig):
    daemon = await rig.dial(await rig.add_node("node-a"))
    daemon.send(messages.AgentFrame(heartbeat=messages.Heartbeat()))
    assert await refused(daemon) == (
        Status.INVALID_ARGUMENT,
        "not-hello",
        "the first frame is 'heartbeat': it must be hello",
    )


async def test_a_first_frame_of_an_unknown_case_is_no_hello(rig):
    daemon = await rig.dial(await rig.add_node("node-a"))
    daemon.call.send(b"")
    status, reason, _ = await refused(daemon)
    assert (status, reason) == (Status.INVALID_ARGUMENT, "not-hello")


async def test_an_undecodable_first_frame(rig):
    daemon = await rig.dial(await rig.add_node("node-a"))
    daemon.call.send(b"\xff\xff\xff")
    status, reason, message = await refused(daemon)
    assert (status, reason) == (Status.INVALID_ARGUMENT, "invalid-frame")
    assert "AgentFrame" in message


async def test_a_half_closed_stream_without_hello(rig):
    daemon = await rig.dial(await rig.add_node("node-a"))
    daemon.call.half_close()
    status, reason, _ = await refused(daemon)
    assert (status, reason) == (Status.INVALID_ARGUMENT, "not-hello")


async def test_no_first_frame_in_time(rig, monkeypatch):
    monkeypatch.setattr(accept, "FIRST_FRAME_S", 0.05)
    daemon = await rig.dial(await rig.add_node("node-a"))
    status, reason, message = await refused(daemon)
    assert (status, reason) == (Status.INVALID_ARGUMENT, "not-hello")
    assert "no first frame within" in message


async def test_another_nodes_id(rig):
    daemon = await rig.dial(await rig.add_node("node-a"))
    daemon.say_hello(node_id="node-b")
    status, reason, message = await refused(daemon)
    assert (status, reason) == (Status.PERMISSION_DENIED, "node-mismatch")
    assert "'node-b'" in message
    assert "'node-a'" in message


async def test_a_role_that_is_not_the_certificates(rig):
    daemon = await rig.dial(await rig.add_node("node-a"))
    daemon.say_hello(role=messages.AGENT_ROLE_SITE)
    status, reason, message = await refused(daemon)
    assert (status, reason) == (Status.PERMISSION_DENIED, "role-mismatch")
    assert "site" in message
    assert "node" in message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"role": messages.AGENT_ROLE_UNSPECIFIED}, "role"),
        ({"boot_id": ""}, "boot_id"),
        ({"journal_id": ""}, "journal_id"),
    ],
)
async def test_what_every_hello_needs(rig, fields, named):
    daemon = await rig.dial(await rig.add_node("node-a"))
    daemon.say_hello(**fields)
    status, reason, message = await refused(daemon)
    assert (status, reason) == (Status.INVALID_ARGUMENT, "bad-hello")
    assert named in message


async def test_a_hello_that_the_store_could_not_take(rig):
    daemon = await rig.dial(await rig.add_node("node-a"))
    daemon.say_hello(boot_id="boot\0")
    status, reason, message = await refused(daemon)
    assert (status, reason) == (Status.INVALID_ARGUMENT, "invalid-frame")
    assert "boot_id" in message


async def test_a_second_hello_ends_the_session(rig):
    daemon = await rig.connect(await rig.add_node("node-a"))
    daemon.say_hello()
    status, reason, _ = await daemon.end()
    assert (status, reason) == (Status.INVALID_ARGUMENT, "second-hello")


async def test_an_undecodable_frame_ends_the_session(rig):
    daemon = await rig.connect(await rig.add_node("node-a"))
    daemon.call.send(b"\xff\xff\xff")
    status, reason, _ = await daemon.end()
    assert (status, reason) == (Status.INVALID_ARGUMENT, "invalid-frame")
    await rig.until_row("node-a", state="disconnected")


async def test_a_frame_that_the_store_could_not_take_ends_only_its_session(rig):
    daemon = await rig.connect(await rig.add_node("node-a"))
    other = await rig.connect(await rig.add_node("node-b"))
    daemon.update("c\0", messages.COMMAND_STATE_ACKED)
    assert (await daemon.end())[0] == Status.INVALID_ARGUMENT
    assert other.call.status is None


async def test_no_certificate(rig):
    daemon = await rig.dial(None)
    status, reason, message = await refused(daemon)
    assert (status, reason) == (Status.UNAUTHENTICATED, "no-certificate")
    assert "bcd join" in message


async def test_a_certificate_of_another_trust_domain(rig):
    daemon = await rig.dial(rig.make_node("node-a", trust_domain="elsewhere.org"))
    status, reason, message = await refused(daemon)
    assert (status, reason) == (Status.UNAUTHENTICATED, "bad-certificate")
    assert "elsewhere.org" in message


async def test_a_node_that_has_not_joined(rig):
    daemon = await rig.dial(rig.make_node("node-a"))
    daemon.say_hello()
    status, reason, message = await refused(daemon)
    assert (status, reason) == (Status.PERMISSION_DENIED, "not-joined")
    assert "token create" in message


async def test_a_certificate_of_an_older_generation(rig):
    node = await rig.add_node("node-a")
    await rig.database.query("UPDATE nodes SET identity_generation = 2")
    daemon = await rig.dial(node)
    daemon.say_hello()
    assert (await refused(daemon))[:2] == (Status.UNAUTHENTICATED, "old-generation")


async def test_a_superseded_certificate_is_refused_and_published(rig):
    node = await rig.add_node("node-a")
    await rig.database.query("UPDATE node_certs SET first_used_at = compute_now(), superseded_at = compute_now()")
    daemon = await rig.dial(node)
    daemon.say_hello()
    assert (await refused(daemon))[:2] == (Status.UNAUTHENTICATED, "superseded-certificate")
    [event] = await rig.database.query("SELECT type FROM outbox")
    assert event["type"] == "security.node.superseded-certificate"


async def test_an_unknown_method_and_a_tunnel(rig):
    node = await rig.add_node("node-a")
    connection = rig.server.connect(certificate_chain=node.chain)
    for path, named in (("/bettercompute.agent.v1.AgentGateway/Nothing", "Nothing"), (service.TUNNEL, "tunnels")):
        with pytest.raises(Refused) as caught:
            await connection.unary(path, b"", timeout_s=WAIT_S)
        assert (caught.value.status, caught.value.reason) == (Status.UNIMPLEMENTED, "unknown-method")
        assert named in caught.value.message


async def test_a_draining_gateway_tells_when_to_come_back(rig):
    node = await rig.add_node("node-a")
    await rig.drain()
    daemon = await rig.dial(node)
    assert (await refused(daemon))[:2] == (Status.UNAVAILABLE, "draining")
    assert 1_000 <= int(daemon.call.trailers["grpc-retry-pushback-ms"]) <= 5_000


async def test_a_gateway_that_has_not_started(rig):
    gateway = make_gateway(rig.database, rig.world, rig.services, GatewayConfig())
    server = MemoryServer(gateway.handler, world=rig.world)
    daemon = await rig.dial(await rig.add_node("node-a"), server=server)
    assert (await refused(daemon))[:2] == (Status.UNAVAILABLE, "starting")
    await server.close(drain_ms=0)


class TestFull:
    """A gateway that holds one stream and takes one handshake."""

    @pytest.fixture
    def config(self) -> GatewayConfig:
        return GatewayConfig(name="gw", streams_max=1)

    async def test_the_stream_limit(self, rig):
        await rig.connect(await rig.add_node("node-a"))
        daemon = await rig.dial(await rig.add_node("node-b"))
        assert (await refused(daemon))[:2] == (Status.RESOURCE_EXHAUSTED, "streams")
        assert int(daemon.call.trailers["grpc-retry-pushback-ms"]) >= 30_000

    async def test_the_stream_limit_while_another_gateway_has_room(self, rig):
        await rig.start_another()
        await rig.gateway.neighbours.read()
        await rig.connect(await rig.add_node("node-a"))
        daemon = await rig.dial(await rig.add_node("node-b"))
        assert (await refused(daemon))[:2] == (Status.RESOURCE_EXHAUSTED, "streams")
        assert 1_000 <= int(daemon.call.trailers["grpc-retry-pushback-ms"]) <= 5_000

    async def test_a_stream_that_has_ended_makes_room(self, rig):
        first = await rig.connect(await rig.add_node("node-a"))
        first.connection.close()
        await rig.until(lambda: rig.gateway.life.streams == 0)
        await rig.connect(await rig.add_node("node-b"))


class TestBucket:
    """A gateway whose handshake bucket empties at once."""

    @pytest.fixture
    def config(self) -> GatewayConfig:
        return GatewayConfig(name="gw", handshakes_per_s=1)

    async def test_the_bucket_gives_appointments(self, rig):
        await rig.connect(await rig.add_node("node-a"))
        for number in (1, 2):
            daemon = await rig.dial(await rig.add_node(f"node-{number}"), metadata={"x-bc-attempt": "0"})
            assert (await refused(daemon))[:2] == (Status.RESOURCE_EXHAUSTED, "handshakes")
            pushback_ms = int(daemon.call.trailers["grpc-retry-pushback-ms"])
            assert number * 1_000 * 0.85 <= pushback_ms <= number * 1_000 * 1.1

    async def test_who_kept_two_appointments_in_vain_is_held_until_there_is_a_token(self, rig):
        await rig.connect(await rig.add_node("node-a"))
        held = await rig.dial(await rig.add_node("node-b"), metadata={"x-bc-attempt": "2"})
        held.say_hello()
        another = await rig.dial(await rig.add_node("node-c"), metadata={"x-bc-attempt": "1"})
        assert (await refused(another))[:2] == (Status.RESOURCE_EXHAUSTED, "handshakes")
        await held.receive("welcome")

    async def test_join_shares_the_bucket(self, rig):
        await rig.connect(await rig.add_node("node-a"))
        with pytest.raises(Refused) as caught:
            await rig.server.connect().unary(service.JOIN, b"", timeout_s=WAIT_S)
        assert (caught.value.status, caught.value.reason) == (Status.RESOURCE_EXHAUSTED, "handshakes")
        assert caught.value.pushback_ms is not None


async def test_the_bound_of_pending_hellos(rig, monkeypatch):
    def full(**_: object) -> None:
        raise refuse(Reason.HELLOS, "64 Hello transactions are pending", pushback_ms=500)

    monkeypatch.setattr(opening, "admit_hello", full)
    daemon = await rig.dial(await rig.add_node("node-a"))
    daemon.say_hello()
    assert (await refused(daemon))[:2] == (Status.RESOURCE_EXHAUSTED, "hellos")
    assert daemon.call.trailers["grpc-retry-pushback-ms"] == "500"


async def test_join_and_renew_are_relayed(rig):
    connection = rig.server.connect(address="2001:db8::7")
    answer = await connection.unary(
        service.JOIN, messages.JoinRequest(csr=b"csr").SerializeToString(), timeout_s=WAIT_S
    )
    assert messages.JoinResponse.FromString(answer).body == b"identity"
    [(request, source)] = rig.services.joins
    assert (request.csr, source) == (b"csr", "2001:db8::7")
    node = await rig.add_node("node-a")
    answer = await rig.server.connect(certificate_chain=node.chain).unary(
        service.RENEW, messages.RenewRequest(csr=b"csr").SerializeToString(), timeout_s=WAIT_S
    )
    assert messages.RenewResponse.FromString(answer).body == b"renewed"
    assert tuple(rig.services.renewals[0][1]) == node.chain


async def test_a_refused_join_is_passed_on(rig):
    rig.services.failure = refuse(Reason.TOKEN_USED, "the join token was used")
    with pytest.raises(Refused) as caught:
        await rig.server.connect().unary(service.JOIN, b"", timeout_s=WAIT_S)
    assert (caught.value.status, caught.value.reason) == (Status.PERMISSION_DENIED, "token-used")


async def test_renew_needs_a_certificate(rig):
    with pytest.raises(Refused) as caught:
        await rig.server.connect().unary(service.RENEW, b"", timeout_s=WAIT_S)
    assert (caught.value.status, caught.value.reason) == (Status.UNAUTHENTICATED, "no-certificate")


async def test_a_large_join_is_refused_by_its_size(rig):
    request = messages.JoinRequest(evidence=b"x" * 70_000).SerializeToString()
    with pytest.raises(Refused) as caught:
        await rig.server.connect().unary(service.JOIN, request, timeout_s=WAIT_S)
    assert (caught.value.status, caught.value.reason) == (Status.INVALID_ARGUMENT, "frame-too-large")


async def test_a_join_or_renewal_has_one_request(rig):
    node = await rig.add_node("node-a")
    for path, message in ((service.JOIN, messages.JoinRequest()), (service.RENEW, messages.RenewRequest())):
        call = await rig.server.connect(certificate_chain=node.chain).call(path)
        for _ in range(2):
            call.send(message.SerializeToString())
        call.half_close()
        assert await call.receive() is None
        assert (call.status, call.trailers["x-bc-reason"]) == (Status.INVALID_ARGUMENT, "bad-request")
        assert "second request" in call.status_message
    assert (rig.services.joins, rig.services.renewals) == ([], [])


async def test_a_join_that_is_not_half_closed_is_no_whole_request(rig, monkeypatch):
    monkeypatch.setattr(accept, "FIRST_FRAME_S", 0.05)
    call = await rig.server.connect().call(service.JOIN)
    call.send(messages.JoinRequest().SerializeToString())
    assert await call.receive() is None
    assert (call.status, call.trailers["x-bc-reason"]) == (Status.INVALID_ARGUMENT, "bad-request")
    assert "half-close" in call.status_message
    assert rig.services.joins == []


async def test_an_overloaded_loop_admits_nobody(rig):
    life = rig.gateway.life
    real = life.condition
    life.condition = lambda **kwargs: replace(real(**kwargs), loop_lag_ms=opening.LOOP_LAG_MAX_MS + 1)
    daemon = await rig.dial(await rig.add_node("node-a"))
    assert (await refused(daemon))[:2] == (Status.UNAVAILABLE, "overloaded")


async def test_two_hellos_of_a_node_within_a_second_are_delayed_not_refused(rig):
    node = await rig.add_node("node-a")
    started = asyncio.get_running_loop().time()
    epochs = [(await rig.connect(node)).welcome.epoch for _ in range(2)]
    assert epochs == [1, 2]
    assert asyncio.get_running_loop().time() - started >= 0.9
