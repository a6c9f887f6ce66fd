"""A gateway for the daemon's tests, in memory: it says what a test tells it to, and gives out what it was told."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from google.protobuf.message import Message

from bettercompute.daemon.config import Config
from bettercompute.daemon.identity import IdentityStore, Issued, Machine, Purpose
from bettercompute.pki import certificates, join_token, signatures, trust
from bettercompute.pki.certificates import Authority
from bettercompute.pki.identity import NodeIdentity
from bettercompute.pki.trust import CommandRoot, TrustContent
from bettercompute.protocol import messages, service
from bettercompute.protocol.envelopes import join_response_input
from bettercompute.protocol.kinds import pack_payload
from bettercompute.protocol.statuses import PUSHBACK_TRAILER, REASON_TRAILER
from bettercompute.system import system_world
from bettercompute.transport.calls import DialTarget, ServerCall
from bettercompute.transport.memory import MemoryConnection, MemoryServer

NODE_ID = "n1"
TIMEOUT_S = 30
# The same for all deliveries of a command: an id stands for one body.
NOT_AFTER_MS = system_world().clock.now_ms() + 3_600_000


@dataclass(frozen=True)
class ControlPlane:
    """The keys that issue a node's identity."""

    node_ca: Authority
    signing: ec.EllipticCurvePrivateKey


def control_plane() -> ControlPlane:
    """Make keys as `pki init` does."""
    return ControlPlane(
        node_ca=certificates.make_node_ca(serial=bytes(16), now_ms=system_world().clock.now_ms()),
        signing=certificates.generate_key(),
    )


def join(
    config: Config,
    *,
    keys: ControlPlane | None = None,
    gateway_urls: tuple[str, ...] = ("https://gw-a:443", "https://gw-b:443"),
    serving_ca_pins: tuple[str, ...] = ("ab" * 32,),
    age_ms: int = 0,
    command_roots: tuple[CommandRoot, ...] = (),
) -> None:
    """Put an identity into the state folder, as a Join would have `age_ms` ago."""
    now_ms = system_world().clock.now_ms() - age_ms
    keys = keys or control_plane()
    config.state_dir.mkdir(parents=True, exist_ok=True)
    store = IdentityStore(config.state_dir)
    request = store.pending(Purpose.JOIN, label="t")
    content = TrustContent(
        trust_domain="bc.local",
        command_roots=command_roots,
        join_signing_keys=(keys.signing.public_key(),),
        join_encryption_keys=(keys.signing.public_key(),),
        serving_ca_pins=serving_ca_pins,
    )
    leaf = certificates.make_node_leaf(
        keys.node_ca,
        public_key=certificates.check_csr(request.csr_der),
        identity=NodeIdentity(trust_domain="bc.local", site="default", node_id=NODE_ID, role="node"),
        serial=bytes(15) + b"\1",
        now_ms=now_ms,
    )
    issued = Issued(
        chain_der=(leaf.public_bytes(Encoding.DER), keys.node_ca.certificate.public_bytes(Encoding.DER)),
        trust=trust.sign(content, version=1, key=keys.signing, now_ms=now_ms),
        identity_generation=1,
        gateway_urls=gateway_urls,
        server_time_ms=now_ms,
    )
    store.install(Purpose.JOIN, request, issued, machine=Machine())


def token_of(keys: ControlPlane) -> str:
    """Return a join token of this control plane, as `token create` prints it."""
    return join_token.format_token(
        join_token.JoinToken(
            secret=bytes(32),
            gateway_urls=("https://gw-a:443",),
            serving_ca_pins=("ab" * 32,),
            join_signing_key=keys.signing.public_key(),
            join_encryption_key=keys.signing.public_key(),
        )
    )


def admit(
    keys: ControlPlane, *, node_id: str = NODE_ID, site: str = "default", generation: int = 2
) -> Callable[[ServerCall, messages.JoinRequest], None]:
    """Answer each Join as JoinService does: the same request gets the same certificate."""

    def answer(call: ServerCall, request: messages.JoinRequest) -> None:
        now_ms = system_world().clock.now_ms()
        named = NodeIdentity(trust_domain="bc.local", site=site, node_id=node_id, role="node")
        leaf = certificates.make_node_leaf(
            keys.node_ca,
            public_key=certificates.check_csr(request.csr),
            identity=named,
            serial=hashlib.sha256(request.csr).digest()[:16],
            now_ms=now_ms,
        )
        content = TrustContent(
            trust_domain="bc.local",
            command_roots=(),
            join_signing_keys=(keys.signing.public_key(),),
            join_encryption_keys=(keys.signing.public_key(),),
            serving_ca_pins=("ab" * 32,),
        )
        body = messages.JoinResponseBody(
            node_id=node_id,
            site=site,
            trust_domain="bc.local",
            certificate_chain=(
                leaf.public_bytes(Encoding.DER),
                keys.node_ca.certificate.public_bytes(Encoding.DER),
            ),
            trust=messages.SignedTrustBundle.FromString(
                trust.sign(content, version=1, key=keys.signing, now_ms=now_ms).signed
            ),
            gateway_urls=("https://gw-a:443",),
            server_time_ms=now_ms,
            csr_sha256=hashlib.sha256(request.csr).digest(),
            identity_generation=generation,
            role=messages.AGENT_ROLE_NODE,
        ).SerializeToString()
        signature = signatures.sign(keys.signing, join_response_input(body))
        call.send(messages.JoinResponse(body=body, signature=signature).SerializeToString())
        call.finish(0)

    return answer


class FakeSession:
    """One Session stream, after its Hello."""

    def __init__(self, call: ServerCall, hello: messages.Hello) -> None:
        self.hello = hello
        self.metadata: Mapping[str, str] = call.metadata
        self._call = call
        self._frames: asyncio.Queue[messages.AgentFrame | None] = asyncio.Queue()
        self.over = asyncio.Event()

    async def serve(self) -> None:
        """Read until the daemon ends the stream, or the test does."""
        while not self.over.is_set():
            receive = asyncio.ensure_future(self._call.receive())
            over = asyncio.ensure_future(self.over.wait())
            await asyncio.wait({receive, over}, return_when=asyncio.FIRST_COMPLETED)
            over.cancel()
            if not receive.done():
                receive.cancel()
                return
            data = receive.result()
            self._frames.put_nowait(None if data is None else messages.AgentFrame.FromString(data))
            if data is None:
                self._call.finish(0)
                return

    def send(self, **frame: Message) -> None:
        self._call.send(messages.ServerFrame(**frame).SerializeToString())  # type: ignore[arg-type]

    def send_bytes(self, data: bytes) -> None:
        """Send what need not be a frame."""
        self._call.send(data)

    def welcome(self, **changes: object) -> None:
        """Say Welcome: 100 ms heartbeats, the usual credits, the host's own time."""
        values: dict[str, object] = {
            "session_id": "s1",
            "epoch": self.hello.last_epoch + 1,
            "protocol_version": 1,
            "heartbeat_interval_ms": 100,
            "lane_credits": [
                messages.LaneCredits(lane=messages.LANE_CONTROL, credits=8),
                messages.LaneCredits(lane=messages.LANE_BULK, credits=2),
            ],
            "server_time_ms": system_world().clock.now_ms(),
            "gateway_id": "fake",
        }
        self.send(welcome=messages.Welcome(**(values | changes)))  # type: ignore[arg-type]

    def command(self, command_id: str, *, payload: Message | None = None, **changes: object) -> None:
        """Deliver a command, an `inventory.refresh` unless told otherwise."""
        values: dict[str, object] = {
            "command_id": command_id,
            "node_id": NODE_ID,
            "kind": "inventory.refresh",
            "lane": 1,
            "timeout_ms": 30_000,
            "not_after_ms": NOT_AFTER_MS,
            "trust_domain": "bc.local",
        }
        body = messages.CommandBody(**(values | changes))  # type: ignore[arg-type]
        body.payload.CopyFrom(pack_payload(payload or messages.InventoryRefreshPayload()))
        self.send(command=messages.Command(body=body.SerializeToString(), attempt=1))

    def end(self, status: int, message: str, *, reason: str = "", pushback_ms: int | None = None) -> None:
        """End the stream with a status."""
        trailers = {REASON_TRAILER: reason} if reason else {}
        if pushback_ms is not None:
            trailers[PUSHBACK_TRAILER] = str(pushback_ms)
        self._call.finish(status, message, trailers)
        self.over.set()

    async def frame(self, case: str) -> Message:
        """Return the next frame of this case, passing over others."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                frame = await self._frames.get()
                assert frame is not None, f"the daemon ended the stream before a frame {case}"
                if frame.WhichOneof("frame") == case:
                    found: Message = getattr(frame, case)
                    return found

    async def update(self, command_id: str, *states: int) -> messages.CommandUpdate:
        """Return the next update of a command that has one of these states."""
        while True:
            update = await self.frame("update")
            assert isinstance(update, messages.CommandUpdate)
            if update.command_id == command_id and update.state in states:
                return update

    async def ended(self) -> None:
        """Wait until the daemon has ended the stream in order."""
        async with asyncio.timeout(TIMEOUT_S):
            while await self._frames.get() is not None:
                pass


def refuse_join(call: ServerCall, _: messages.JoinRequest) -> None:
    """Answer a Join as JoinService does when only a person can help."""
    call.finish(16, "of an older identity: join anew with a new token", {REASON_TRAILER: "old-generation"})


class FakeGateway:
    """Takes streams; `session` gives them out one after the other."""

    def __init__(self) -> None:
        self.server = MemoryServer(self.handle, world=system_world())
        self.targets: list[DialTarget] = []
        self.connections: list[MemoryConnection] = []
        self.fail: Exception | None = None
        self.joins: list[messages.JoinRequest] = []
        self.join: Callable[[ServerCall, messages.JoinRequest], object] = refuse_join
        self._sessions: asyncio.Queue[FakeSession] = asyncio.Queue()

    async def dial(self, target: DialTarget) -> MemoryConnection:
        self.targets.append(target)
        if self.fail is not None:
            failure, self.fail = self.fail, None
            raise failure
        self.connections.append(self.server.connect())
        return self.connections[-1]

    async def session(self) -> FakeSession:
        """Return the next stream, its Hello read."""
        return await asyncio.wait_for(self._sessions.get(), TIMEOUT_S)

    async def handle(self, call: ServerCall) -> None:
        """Serve one Session stream, or answer a Join as `join` says."""
        first = await call.receive()
        assert first is not None
        if call.path == service.JOIN:
            self.joins.append(messages.JoinRequest.FromString(first))
            self.join(call, self.joins[-1])
            return
        assert call.path == service.SESSION
        frame = messages.AgentFrame.FromString(first)
        session = FakeSession(call, frame.hello)
        self._sessions.put_nowait(session)
        await session.serve()


def state_config(tmp_path: Path) -> Config:
    """A configuration whose state folder is the test's."""
    return Config(state_dir=tmp_path / "state")
