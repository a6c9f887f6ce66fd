"""A gRPC client that shares nothing with us but the .proto files: it says Hello, is welcomed and runs a command."""

import queue
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from bettercompute.protocol import messages
from tests.e2e.conftest import WAIT_S, Stack, until

SESSION = "/bettercompute.agent.v1.AgentGateway/Session"


class ForeignSession:
    """The Session stream through grpcio."""

    def __init__(self, stack: Stack, identity: Path) -> None:
        credentials = grpc.ssl_channel_credentials(
            root_certificates=(identity / "serving-ca.pem").read_bytes(),
            private_key=(identity / "node.key").read_bytes(),
            certificate_chain=(identity / "node.pem").read_bytes(),
        )
        self.channel = grpc.secure_channel(stack.ready["gateway"].removeprefix("https://"), credentials)
        self._outgoing: queue.SimpleQueue[messages.AgentFrame | None] = queue.SimpleQueue()
        method = self.channel.stream_stream(
            SESSION,
            request_serializer=messages.AgentFrame.SerializeToString,
            response_deserializer=messages.ServerFrame.FromString,
        )
        self.call = method(self._frames(), timeout=WAIT_S)

    def _frames(self) -> Iterator[messages.AgentFrame]:
        while (frame := self._outgoing.get()) is not None:
            yield frame

    def send(self, **frame: object) -> None:
        self._outgoing.put(messages.AgentFrame(**frame))  # type: ignore[arg-type]

    def next(self, case: str) -> messages.ServerFrame:
        """Return the next frame of this case; Acks in between are passed over."""
        for frame in self.call:
            if frame.WhichOneof("frame") == case:
                return frame
            assert frame.WhichOneof("frame") == "ack"
        raise AssertionError(f"the stream ended before {case}")

    def close(self) -> None:
        self._outgoing.put(None)
        self.channel.close()


def hello(node_id: str) -> messages.Hello:
    return messages.Hello(
        node_id=node_id,
        role=messages.AGENT_ROLE_NODE,
        boot_id="boot-1",
        journal_id="journal-1",
        proto_min=1,
        proto_max=1,
        daemon_version="9.9.9",
        capabilities=["foreign"],
    )


def test_hello_welcome_and_a_command(stack: Stack, provisioned: tuple[str, Path]) -> None:
    node_id, identity = provisioned
    session = ForeignSession(stack, identity)
    session.send(hello=hello(node_id))
    welcome = session.next("welcome").welcome
    assert (welcome.epoch, welcome.protocol_version, welcome.upgrade_required) == (1, 1, False)
    assert {lane.lane: lane.credits for lane in welcome.lane_credits} == {
        messages.LANE_CONTROL: 8,
        messages.LANE_BULK: 2,
    }
    made = stack.client.post("/v1/commands", {"kind": "inventory.refresh", "nodes": [node_id]})
    command = session.next("command").command
    body = messages.CommandBody.FromString(command.body)
    assert (body.command_id, body.node_id, body.kind) == (made["commands"][0]["id"], node_id, "inventory.refresh")
    assert command.attempt == 1
    result = messages.InventoryRefreshResult(sections=[messages.RefreshedSection(name="cpu")]).SerializeToString()
    for state in (messages.COMMAND_STATE_ACKED, messages.COMMAND_STATE_RUNNING):
        session.send(update=messages.CommandUpdate(command_id=body.command_id, state=state, attempt=1))
    session.send(
        update=messages.CommandUpdate(
            command_id=body.command_id, state=messages.COMMAND_STATE_SUCCEEDED, attempt=1, result=result
        )
    )
    ended = until(
        lambda: (shown := stack.client.get(f"/v1/commands/{body.command_id}"))["state"] == "succeeded" and shown,
        what="the command's end",
    )
    assert ended["result"] == {"sections": [{"name": "cpu"}]}
    node = stack.client.get(f"/v1/nodes/{node_id}")
    assert (node["state"], node["session"]["daemon_version"]) == ("connected", "9.9.9")
    assert {"key": "bc.dev/cap.foreign", "value": "1", "source": "system"} in node["labels"]
    session.close()
    until(lambda: stack.client.get(f"/v1/nodes/{node_id}")["state"] == "disconnected", what="the disconnect")


def test_a_hello_for_another_node_is_refused(stack: Stack, provisioned: tuple[str, Path]) -> None:
    _, identity = provisioned
    session = ForeignSession(stack, identity)
    session.send(hello=hello("somebody-else"))
    with pytest.raises(grpc.RpcError) as refused:
        session.next("welcome")
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    trailers = dict(session.call.trailing_metadata())
    assert trailers["x-bc-reason"] == "node-mismatch"
    session.close()
