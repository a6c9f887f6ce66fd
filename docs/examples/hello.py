"""A node without bcd: it says Hello, is welcomed, and answers one command. Usage: hello.py GATEWAY IDENTITY_DIR."""

import json
import queue
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import grpc

from bettercompute.agent.v1 import session_pb2 as agent
from bettercompute.agent.v1 import session_pb2_grpc
from bettercompute.common.v1 import common_pb2 as common

gateway, identity = sys.argv[1].removeprefix("https://"), Path(sys.argv[2])
credentials = grpc.ssl_channel_credentials(
    root_certificates=(identity / "serving-ca.pem").read_bytes(),
    private_key=(identity / "node.key").read_bytes(),
    certificate_chain=(identity / "node.pem").read_bytes(),
)
hello = agent.Hello(node_id=json.loads((identity / "identity.json").read_text())["node_id"], proto_min=1, proto_max=1)
hello.role, hello.boot_id, hello.journal_id = common.AGENT_ROLE_NODE, str(uuid.uuid4()), str(uuid.uuid4())
updates: queue.SimpleQueue[agent.CommandUpdate] = queue.SimpleQueue()


def frames() -> Iterator[agent.AgentFrame]:
    yield agent.AgentFrame(hello=hello)
    while True:
        try:
            yield agent.AgentFrame(update=updates.get(timeout=10))
        except queue.Empty:  # silent for three of these, and the gateway ends the session
            yield agent.AgentFrame(heartbeat=agent.Heartbeat())


with grpc.secure_channel(gateway, credentials) as channel:
    for frame in session_pb2_grpc.AgentGatewayStub(channel).Session(frames()):
        if frame.HasField("welcome"):
            print(f"welcome: session {frame.welcome.session_id}, epoch {frame.welcome.epoch}", flush=True)
        elif frame.HasField("command"):
            body = agent.CommandBody.FromString(frame.command.body)
            print(f"command: {body.kind}, attempt {frame.command.attempt}", flush=True)
            for state in (common.COMMAND_STATE_ACKED, common.COMMAND_STATE_RUNNING, common.COMMAND_STATE_SUCCEEDED):
                updates.put(agent.CommandUpdate(command_id=body.command_id, state=state, attempt=frame.command.attempt))
        elif frame.HasField("ack") and frame.ack.command_ids:
            print("ack: the result is stored", flush=True)
            break
