"""A running node gets another identity: by its expired certificate, or by a token that an operator hands over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from bettercompute.daemon import control
from bettercompute.daemon.agent import Agent
from bettercompute.daemon.config import Config
from bettercompute.daemon.control import Rejoined, RejoinRequest
from bettercompute.daemon.identity import IdentityStore
from bettercompute.daemon.inventory.host import HostRoot
from bettercompute.daemon.node_round import CurrentConfig, NodeParts
from bettercompute.daemon.notify import SystemdNotifier
from bettercompute.daemon.status import DaemonStatus, ask
from bettercompute.errors import BetterComputeError, Refused, Unavailable
from bettercompute.pki import certificates, signatures
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import x509pop_input
from bettercompute.protocol.statuses import REASON_TRAILER, SERVER_TIME_TRAILER
from bettercompute.system import system_world
from bettercompute.transport.calls import DialFailed, DialKind, DialTarget, ServerCall
from bettercompute.transport.memory import MemoryConnection
from tests.unit.daemon.fake_gateway import (
    NODE_ID,
    TIMEOUT_S,
    ControlPlane,
    FakeGateway,
    admit,
    control_plane,
    join,
    state_config,
    token_of,
)

HOUR_MS = 3_600_000
EXPIRED = DialFailed(DialKind.CERTIFICATE_EXPIRED, "the gateway says that this node's certificate has expired")


class Node:
    """A whole node against a gateway in memory."""

    def __init__(self, tmp_path: Path, *, age_ms: int) -> None:
        self.root = tmp_path / "root"
        for name, content in {"proc/sys/kernel/random/boot_id": "boot-1\n", "etc/machine-id": "m1\n"}.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(content)
        self.config: Config = state_config(tmp_path)
        self.keys: ControlPlane = control_plane()
        join(self.config, keys=self.keys, age_ms=age_ms)
        self.gateway = FakeGateway()
        self.dialed: list[str] = []
        """The certificates that gateways took, one for each dial."""
        self.identities = IdentityStore(self.config.state_dir)
        self.expired = self.identity().record.certificate_serial if age_ms else ""
        self.agent: Agent | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        parts = NodeParts(
            world=system_world(),
            config=CurrentConfig(self.config),
            environment={},
            identities=self.identities,
            notifier=SystemdNotifier({}),
            root=lambda: replace(HostRoot.live(), folder=self.root),
            dial=self.dial,
        )
        self.agent = Agent(parts, config_path=self.root / "config.toml")
        self._task = asyncio.create_task(self.agent.run())

    async def kill(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def ended(self) -> None:
        assert self._task is not None
        await asyncio.wait_for(self._task, TIMEOUT_S)

    async def status(self) -> DaemonStatus:
        return await asyncio.to_thread(ask, self.config.state_dir)

    def identity(self):
        found = self.identities.load()
        assert found is not None
        return found

    async def dial(self, target: DialTarget) -> MemoryConnection:
        """Refuse what TLS would: a certificate that has expired."""
        if shown_by(target) not in {"", self.expired}:
            self.dialed.append(shown_by(target))
        if self.expired and shown_by(target) == self.expired:
            raise EXPIRED
        return await self.gateway.dial(target)

    async def hand_over(self, **changes: str) -> Rejoined:
        request = RejoinRequest(
            **{"token": token_of(self.keys), "role": "node", "node_id": "", "attestor": "join-token", **changes}
        )
        return await asyncio.to_thread(control.ask, self.config.state_dir, request)


def shown_by(target: DialTarget) -> str:
    """Return the serial of the certificate that a dial shows; empty for none."""
    if target.identity is None:
        return ""
    chain = certificates.chain_from_pem(target.identity.certificate_chain_pem)
    return certificates.serial_text(certificates.load_certificate(chain[0]))


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    made = Node(tmp_path, age_ms=0)
    yield made
    await made.kill()


@pytest.fixture
async def old_node(tmp_path: Path) -> AsyncIterator[Node]:
    """A node whose certificate expired six hours ago."""
    made = Node(tmp_path, age_ms=30 * HOUR_MS)
    yield made
    await made.kill()


async def condition(node: Node, name: str) -> DaemonStatus:
    """Wait until a condition holds."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            with contextlib.suppress(Unavailable):  # it is starting
                status = await node.status()
                if any(held.type == name for held in status.conditions):
                    return status


async def test_an_expired_certificate_leads_to_a_session_without_anybodys_help(old_node: Node) -> None:
    before = old_node.identity()
    old_node.gateway.join = admit(old_node.keys)
    old_node.start()
    session = await old_node.gateway.session()
    [request] = old_node.gateway.joins
    assert (request.attestor, request.node_id, request.sealed_token) == ("x509pop", NODE_ID, "")
    evidence = messages.X509PopEvidence.FromString(request.evidence)
    assert tuple(evidence.certificate_chain) == before.chain_der
    assert abs(evidence.client_time_ms - system_world().clock.now_ms()) < 60_000
    signed = x509pop_input(csr=request.csr, node_id=NODE_ID, client_time_ms=evidence.client_time_ms)
    signatures.verify(evidence.proof, before.key.public_key(), signed)
    assert session.hello.node_id == NODE_ID
    after = old_node.identity()
    assert after.record.identity_generation == 2
    assert old_node.dialed[-1] == after.record.certificate_serial != before.record.certificate_serial
    session.welcome()
    told: list[str] = []
    while "identity.rejoined" not in told:
        events = await session.frame("events")
        assert isinstance(events, messages.EventBatch)
        told += [event.type for event in events.events]
    assert not (await old_node.status()).needs_rejoin


async def test_a_proof_is_dated_anew_by_what_the_refusal_says(old_node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    admitted, server_ms = admit(old_node.keys), system_world().clock.now_ms() + 7 * HOUR_MS
    dated: list[int] = []

    def answer(call: ServerCall, request: messages.JoinRequest) -> None:
        dated.append(messages.X509PopEvidence.FromString(request.evidence).client_time_ms)
        if len(dated) == 1:
            trailers = {REASON_TRAILER: "bad-proof", SERVER_TIME_TRAILER: str(server_ms)}
            call.finish(16, "the proof is 25200000 ms from server time", trailers)
        else:
            admitted(call, request)

    old_node.gateway.join = answer
    old_node.start()
    await old_node.gateway.session()
    first, second = dated
    assert abs(first - system_world().clock.now_ms()) < 60_000
    assert 0 <= second - server_ms < 60_000
    assert len({request.csr for request in old_node.gateway.joins}) == 1


async def test_where_coming_back_is_refused_a_person_is_asked_for_in_status_and_log(old_node: Node) -> None:
    with structlog.testing.capture_logs() as logs:
        old_node.start()
        status = await condition(old_node, "NeedsRejoin")
    assert status.needs_rejoin
    [held] = [held for held in status.conditions if held.type == "NeedsRejoin"]
    assert held.reason == "old-generation"
    assert held.message.endswith("re-join this machine with a new token: `bcd rejoin`")
    [entry] = [entry for entry in logs if entry["event"] == "NEEDS_REJOIN"]
    assert (entry["log_level"], entry["reason"]) == ("error", "old-generation")
    # And a token that is handed over helps at once, without a restart.
    old_node.gateway.join = admit(old_node.keys, generation=3)
    await old_node.hand_over()
    session = await old_node.gateway.session()
    session.welcome()
    await session.frame("heartbeat")
    status = await old_node.status()
    assert (status.connected, status.needs_rejoin) == (True, False)


async def test_a_token_handed_over_dials_anew_and_leaves_what_runs_alone(node: Node) -> None:
    node.gateway.join = admit(node.keys)
    node.start()
    session = await node.gateway.session()
    session.welcome()
    await session.frame("heartbeat")
    assert node.agent is not None
    round_before = node.agent.round
    assert await node.hand_over() == Rejoined(node_id=NODE_ID, site="default", role="node")
    again = await node.gateway.session()
    assert again.hello.journal_id == session.hello.journal_id
    assert node.agent.round is round_before
    assert node.dialed[-1] == node.identity().record.certificate_serial
    assert node.gateway.joins[0].attestor == "join-token"


async def test_a_token_for_another_node_begins_anew_as_that_one(node: Node) -> None:
    node.gateway.join = admit(node.keys, node_id="n2", site="oslo")
    node.start()
    session = await node.gateway.session()
    session.welcome()
    assert await node.hand_over(node_id="n2") == Rejoined(node_id="n2", site="oslo", role="node")
    again = await node.gateway.session()
    assert again.hello.node_id == "n2"
    again.welcome()
    await again.frame("heartbeat")
    status = await node.status()
    assert (status.node_id, status.site, status.connected) == ("n2", "oslo", True)


async def refused(node: Node, why: str, **changes: str) -> BetterComputeError:
    with pytest.raises((Refused, Unavailable), match=why) as caught:
        await node.hand_over(**changes)
    return caught.value


async def test_a_token_that_is_refused_leaves_the_node_as_it_is(node: Node) -> None:
    node.start()
    session = await node.gateway.session()
    session.welcome()
    await session.frame("heartbeat")
    before = node.identity().record
    error = await refused(node, "join anew with a new token")
    assert (error.status, error.reason) == (16, "old-generation")
    await refused(node, "the join token is malformed", token="nonsense")
    await refused(node, "is not a role", role="king")
    await refused(node, "attestor tpm is not supported by this version of bcd", attestor="tpm")
    assert node.identity().record == before
    assert (await node.status()).connected


async def test_one_token_at_a_time_and_who_hangs_up_gives_up(node: Node) -> None:
    entered, go = asyncio.Event(), asyncio.Event()
    admitted = admit(node.keys)

    async def later(call: ServerCall, request: messages.JoinRequest) -> None:
        entered.set()
        await go.wait()
        admitted(call, request)

    waiting: list[asyncio.Task[None]] = []
    node.gateway.join = lambda call, request: waiting.append(asyncio.ensure_future(later(call, request)))
    node.start()
    await node.gateway.session()
    reader, writer = await asyncio.open_unix_connection(node.config.state_dir / control.SOCKET_NAME)
    asked = {"token": token_of(node.keys), "role": "node", "node_id": "", "attestor": "join-token"}
    writer.write(json.dumps({"rejoin": asked}).encode() + b"\n")
    await asyncio.wait_for(entered.wait(), TIMEOUT_S)
    await refused(node, "another re-join of this node is under way")
    writer.close()
    assert await reader.read() == b""
    assert node.agent is not None
    async with asyncio.timeout(TIMEOUT_S):
        async with node.agent._rejoining:
            pass
    go.set()
    node.gateway.join = admitted
    first, second = [(await node.hand_over()), node.gateway.joins]
    assert first.node_id == NODE_ID
    assert len({request.csr for request in second}) == 1, "the same token asks with the same request"
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_daemon_that_stops_says_so_to_whoever_waits(node: Node) -> None:
    entered = asyncio.Event()
    node.gateway.join = lambda *_: entered.set()
    node.start()
    await node.gateway.session()
    asking = asyncio.ensure_future(refused(node, "bcd is stopping: hand it the token again when it runs"))
    await asyncio.wait_for(entered.wait(), TIMEOUT_S)
    assert node.agent is not None
    node.agent.stop.set()
    await asking
    await node.ended()


@pytest.mark.parametrize(
    "asked",
    [
        b"nonsense\n",
        b"[]\n",
        b"{}\n",
        b'{"rejoin": {}}\n',
        b'{"rejoin": 7}\n',
        b'{"rejoin": {"token": 7, "role": "node", "node_id": "", "attestor": ""}}\n',
        b'{"rejoin": {"token": "", "role": "", "node_id": "", "attestor": "", "evidence_hex": "x"}}\n',
        b'{"rejoin": {"token": "", "role": "", "node_id": "", "attestor": "", "later": "x"}}\n',
        b"[" * 10_000 + b"\n",
    ],
    ids=range(9),
)
def test_a_request_that_is_none_is_refused_in_words(asked: bytes) -> None:
    with pytest.raises(Refused, match="does not understand the request"):
        control.parse_request(asked)


async def test_what_asks_for_nothing_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def rejoin(_: RejoinRequest) -> Rejoined:
        raise AssertionError("nobody asked")

    monkeypatch.setattr(control, "ASKED_TIMEOUT_S", 0.05)
    server = control.ControlServer(tmp_path, rejoin)
    await server.start()
    assert (tmp_path / control.SOCKET_NAME).stat().st_mode & 0o777 == 0o600
    for sent in (b"", b"half", b"x" * control.REQUEST_BYTES_MAX * 2):
        reader, writer = await asyncio.open_unix_connection(tmp_path / control.SOCKET_NAME)
        writer.write(sent)
        if sent == b"":
            writer.write_eof()
        with contextlib.suppress(ConnectionError):  # it may hang up before it has read everything
            assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b""
        writer.close()
    await server.close()


def answering(tmp_path: Path, answer: bytes) -> Any:
    """Let a foreign daemon answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    return asyncio.start_unix_server(serve, path=tmp_path / control.SOCKET_NAME)


@pytest.mark.parametrize("answer", [b"", b"nonsense", b"[]", b"{}", b'{"error": "x"}', b'{"node_id": "n", "later": 1}'])
async def test_a_foreign_answer_is_said(tmp_path: Path, answer: bytes) -> None:
    request = RejoinRequest(token="t", role="node", node_id="", attestor="join-token")
    async with await answering(tmp_path, answer):
        with pytest.raises(Unavailable, match="its answer cannot be read"):
            await asyncio.to_thread(control.ask, tmp_path, request)


def test_a_daemon_that_takes_no_token_is_said(tmp_path: Path) -> None:
    request = RejoinRequest(token="t", role="node", node_id="", attestor="join-token")
    with pytest.raises(Unavailable, match="it takes no token now"):
        control.ask(tmp_path, request)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / control.SOCKET_NAME))
    listener.close()
    with pytest.raises(Unavailable, match="it takes no token now"):
        control.ask(tmp_path, request)
    assert "token='t'" not in repr(request)
