"""Join as the daemon does it: what is sent, what is believed, when it is asked again, and with which request."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from bettercompute.daemon.identity import Identity, IdentityStore, Machine
from bettercompute.daemon.join import JoinSettings, join
from bettercompute.errors import Refused, Unavailable
from bettercompute.pki import certificates, join_token, signatures, trust
from bettercompute.pki.identity import NodeIdentity
from bettercompute.pki.join_token import JoinToken
from bettercompute.pki.trust import TrustContent
from bettercompute.protocol import messages, service
from bettercompute.protocol.envelopes import join_response_input
from bettercompute.protocol.statuses import Reason, Status
from bettercompute.system import system_world
from bettercompute.transport.streams import NO_METADATA, DialFailed, DialKind, DialTarget

NOW_MS = 1_800_000_000_000
WORLD = system_world()
SIGNING, ENCRYPTION, OTHER = (certificates.generate_key() for _ in range(3))
NODE_CA = certificates.make_node_ca(serial=bytes(16), now_ms=NOW_MS)
CONTENT = TrustContent(
    trust_domain="bc.local",
    command_roots=(),
    join_signing_keys=(SIGNING.public_key(),),
    join_encryption_keys=(ENCRYPTION.public_key(),),
    serving_ca_pins=("ab" * 32,),
)
TOKEN = JoinToken(
    secret=bytes(range(32)),
    gateway_urls=("https://gw1", "https://gw2"),
    serving_ca_pins=("ab" * 32, "cd" * 32),
    join_signing_key=SIGNING.public_key(),
    join_encryption_key=ENCRYPTION.public_key(),
)
SETTINGS = JoinSettings(
    token=join_token.format_token(TOKEN),
    daemon_version="0.1.0",
    hardware=messages.HardwareClaims(hostname="host"),
    machine=Machine(machine_id="m1"),
)
Reply = messages.JoinResponse | BaseException
BodyChange = Callable[[messages.JoinResponseBody], object]


@dataclass
class ControlPlane:
    """Stands behind the dial: answers as it is told, then truly."""

    replies: list[Reply] = field(default_factory=list)
    dials: list[Exception] = field(default_factory=list)
    targets: list[DialTarget] = field(default_factory=list)
    requests: list[messages.JoinRequest] = field(default_factory=list)
    open_connections: int = 0
    change: BodyChange = lambda _: None
    trust_version: int = 1

    async def dial(self, target: DialTarget) -> Any:
        self.targets.append(target)
        if self.dials:
            raise self.dials.pop(0)
        self.open_connections += 1
        return FakeConnection(self)

    def body(self, request: messages.JoinRequest) -> messages.JoinResponseBody:
        public_key = certificates.check_csr(request.csr)
        identity = NodeIdentity(trust_domain="bc.local", site="default", node_id="n1", role="node")
        leaf = certificates.make_node_leaf(
            NODE_CA, public_key=public_key, identity=identity, serial=hashlib.md5(request.csr).digest(), now_ms=NOW_MS
        )
        bundle = trust.sign(CONTENT, version=self.trust_version, key=SIGNING, now_ms=NOW_MS)
        return messages.JoinResponseBody(
            node_id="n1",
            site="default",
            trust_domain="bc.local",
            certificate_chain=[leaf.public_bytes(Encoding.DER), NODE_CA.certificate.public_bytes(Encoding.DER)],
            trust=messages.SignedTrustBundle.FromString(bundle.signed),
            gateway_urls=["https://gw"],
            server_time_ms=NOW_MS,
            csr_sha256=hashlib.sha256(request.csr).digest(),
            identity_generation=1,
            role=messages.AGENT_ROLE_NODE,
        )

    def answer(self, data: bytes) -> bytes:
        request = messages.JoinRequest.FromString(data)
        self.requests.append(request)
        reply = self.replies.pop(0) if self.replies else self.truly(request)
        if isinstance(reply, BaseException):
            raise reply
        return reply.SerializeToString()

    def truly(self, request: messages.JoinRequest) -> messages.JoinResponse:
        proof = join_token.open_proof(ENCRYPTION, request.sealed_token, csr_der=request.csr, role="node", now_ms=NOW_MS)
        assert proof.secret == TOKEN.secret
        body = self.body(request)
        self.change(body)
        return sign(body)


def sign(body: messages.JoinResponseBody, key: Any = SIGNING) -> messages.JoinResponse:
    data = body.SerializeToString()
    return messages.JoinResponse(body=data, signature=signatures.sign(key, join_response_input(data)))


@dataclass
class FakeConnection:
    plane: ControlPlane

    async def unary(
        self, path: str, request: bytes, *, metadata: Mapping[str, str] = NO_METADATA, timeout_s: float
    ) -> bytes:
        assert (path, metadata) == (service.JOIN, NO_METADATA)
        assert timeout_s > 0
        return self.plane.answer(request)

    def close(self) -> None:
        self.plane.open_connections -= 1


@pytest.fixture
def store(tmp_path) -> IdentityStore:
    return IdentityStore(tmp_path / "state")


@pytest.fixture
def slept(monkeypatch) -> list[float]:
    """Waiting takes no time here, and is written down."""
    waits: list[float] = []

    async def sleep(delay_s: float) -> None:
        waits.append(delay_s)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return waits


async def joined(store: IdentityStore, plane: ControlPlane, **changes: Any) -> Identity:
    return await join(store, replace(SETTINGS, **changes), world=WORLD, dial=plane.dial)


def refusal(status: Status, reason: Reason, pushback_ms: int | None = None) -> Refused:
    return Refused("as told", status=status, reason=reason, pushback_ms=pushback_ms)


async def test_a_join_ends_with_an_identity_on_disk(store):
    plane = ControlPlane()
    identity = await joined(store, plane)
    assert (identity.record.node_id, identity.record.gateway_urls) == ("n1", ("https://gw",))
    assert identity.record.server_time_mark_ms == NOW_MS
    assert identity.record.machine_id == "m1"
    loaded = store.load()
    assert loaded is not None
    assert loaded.record == identity.record
    [request] = plane.requests
    assert (request.attestor, request.daemon_version, request.hardware.hostname) == ("join-token", "0.1.0", "host")
    assert TOKEN.secret not in request.SerializeToString()
    [target] = plane.targets
    assert target.identity is None
    assert target.serving_ca_spki_sha256 == bytes.fromhex("ab" * 32)
    assert plane.open_connections == 0


async def test_the_configuration_says_where(store):
    plane = ControlPlane()
    await joined(
        store,
        plane,
        gateway_url=("https://192.0.2.1:8443",),
        server_name="gw.example",
        environment={"HTTPS_PROXY": "http://proxy"},
    )
    [target] = plane.targets
    assert (target.url, target.server_name) == ("https://192.0.2.1:8443", "gw.example")
    assert target.environment == {"HTTPS_PROXY": "http://proxy"}


async def test_another_pin_is_tried_when_the_first_does_not_match(store):
    plane = ControlPlane(dials=[DialFailed(DialKind.PIN_MISMATCH, "another CA")])
    await joined(store, plane)
    assert [target.serving_ca_spki_sha256[:1] for target in plane.targets] == [b"\xab", b"\xcd"]
    assert plane.targets[0].url == plane.targets[1].url


async def test_another_gateway_is_tried_when_the_first_cannot_be_reached(store, slept):
    plane = ControlPlane(dials=[DialFailed(DialKind.CONNECT, "refused")])
    await joined(store, plane)
    assert {target.url for target in plane.targets} == set(TOKEN.gateway_urls)
    assert slept == []


@pytest.mark.parametrize("kind", [DialKind.PIN_MISMATCH, DialKind.BAD_TARGET, DialKind.SERVER_NAME])
async def test_what_only_people_can_cure_is_not_waited_for(store, slept, kind):
    plane = ControlPlane(dials=[DialFailed(kind, "another CA")] * 4)
    with pytest.raises(Refused, match="another CA"):
        await joined(store, plane)
    assert slept == []


async def test_a_refusal_s_pushback_is_the_next_delay(store, slept):
    plane = ControlPlane(
        replies=[
            refusal(Status.RESOURCE_EXHAUSTED, Reason.HANDSHAKES, 1234),
            Unavailable("draining", pushback_ms=500),
        ]
    )
    await joined(store, plane)
    assert slept == [1.234, 0.5]
    assert len({request.csr for request in plane.requests}) == 1


async def test_without_a_pushback_delays_are_drawn_from_a_growing_window(store, slept):
    plane = ControlPlane(replies=[Unavailable("the connection was lost")] * 5)
    await joined(store, plane)
    assert all(0 <= delay_s <= 2**attempt for attempt, delay_s in enumerate(slept))
    assert len(slept) == 5


async def test_a_join_gives_up_in_the_end(store, slept):
    plane = ControlPlane(replies=[refusal(Status.RESOURCE_EXHAUSTED, Reason.HANDSHAKES, 60_000)])
    with pytest.raises(Unavailable, match="as told"):
        await joined(store, plane, give_up_after_ms=59_000)
    assert slept == []
    await joined(store, plane)
    assert len({request.csr for request in plane.requests}) == 1


async def test_a_refusal_that_waiting_does_not_cure_ends_at_once(store, slept):
    plane = ControlPlane(replies=[refusal(Status.PERMISSION_DENIED, Reason.TOKEN_USED)])
    with pytest.raises(Refused, match="as told") as caught:
        await joined(store, plane)
    assert caught.value.reason == Reason.TOKEN_USED
    assert slept == []
    assert store.load() is None


async def test_a_lost_answer_is_asked_for_again_after_a_restart(store, slept):
    plane = ControlPlane(replies=[asyncio.CancelledError()])
    with pytest.raises(asyncio.CancelledError):
        await joined(store, plane)
    await joined(IdentityStore(store.state_dir), plane)
    assert len({request.csr for request in plane.requests}) == 1


async def test_a_deferral_is_waited_out_with_the_same_request(store, slept):
    plane = ControlPlane()

    def defer(request: messages.JoinRequest) -> messages.JoinResponse:
        deferral = messages.JoinDeferral(retry_after_seconds=7, message="an operator must approve")
        csr_sha256 = hashlib.sha256(request.csr).digest()
        return sign(messages.JoinResponseBody(deferral=deferral, csr_sha256=csr_sha256))

    answers = iter([defer, plane.truly])

    def answer(request: messages.JoinRequest) -> messages.JoinResponse:
        return next(answers)(request)

    plane.truly = answer  # type: ignore[method-assign]  # first one, then the other
    await joined(store, plane)
    assert slept == [7.0]
    assert len({request.csr for request in plane.requests}) == 1


async def test_a_deferral_at_once_is_no_busy_loop(store, slept):
    plane = ControlPlane(change=lambda body: body.deferral.SetInParent())
    with pytest.raises(Unavailable, match="the join is deferred"):
        await joined(store, plane, give_up_after_ms=500)
    assert len(plane.requests) == 1


async def test_a_challenge_of_a_token_is_not_understood(store, slept):
    def challenge(body: messages.JoinResponseBody) -> None:
        body.deferral.challenge = b"?"

    with pytest.raises(Refused, match="upgrade bcd") as caught:
        await joined(store, ControlPlane(change=challenge))
    assert caught.value.reason == Reason.ATTESTATION


async def test_a_challenge_is_of_a_bounded_size(store, slept):
    def challenge(body: messages.JoinResponseBody) -> None:
        body.deferral.challenge = bytes(1025)

    with pytest.raises(Refused, match="its challenge has 1025 bytes, and 1024 are the limit"):
        await joined(store, ControlPlane(change=challenge))


def other_leaf(body: messages.JoinResponseBody) -> None:
    csr = certificates.make_csr(OTHER)
    body.certificate_chain[0] = ControlPlane().body(messages.JoinRequest(csr=csr)).certificate_chain[0]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda b: setattr(b, "csr_sha256", bytes(32)), "it answers another certificate request"),
        (other_leaf, "its certificate is for another key"),
        (lambda b: b.ClearField("certificate_chain"), "its chain has 0 certificates"),
        (lambda b: b.certificate_chain.extend([b"x"] * 4), "its chain has 6 certificates"),
        (lambda b: b.certificate_chain.pop(), "no root"),
        (lambda b: setattr(b, "node_id", "n2"), "its body of another node"),
        (lambda b: setattr(b, "site", "s2"), "its body of another node"),
        (lambda b: setattr(b, "trust_domain", "other"), "its body of another node"),
        (lambda b: setattr(b, "role", messages.AGENT_ROLE_SITE), "it gives role node, and node was asked for"),
        (lambda b: setattr(b, "server_time_ms", NOW_MS + 25 * 3_600_000), "not valid at the server's time"),
        (lambda b: setattr(b, "server_time_ms", 0), "not valid at the server's time"),
        (lambda b: b.ClearField("gateway_urls"), "it names no gateway"),
        (lambda b: b.gateway_urls.append("http://gw"), "is not a gateway URL"),
        (lambda b: b.ClearField("trust"), "not pinned here"),
        (lambda b: setattr(b.trust, "body", b"x"), "does not verify"),
    ],
)
async def test_an_answer_that_is_not_right_is_refused(store, change, why):
    with pytest.raises(Refused, match=why):
        await joined(store, ControlPlane(change=change))
    assert store.load() is None


async def test_an_answer_by_another_key_is_refused(store):
    plane = ControlPlane()
    truly = plane.truly
    plane.truly = lambda request: sign(messages.JoinResponseBody.FromString(truly(request).body), OTHER)  # type: ignore[method-assign]  # a gateway that forges
    with pytest.raises(Refused, match="not pinned here"):
        await joined(store, plane)


async def test_an_answer_to_somebody_else_is_refused(store):
    body = ControlPlane().body(messages.JoinRequest(csr=certificates.make_csr(OTHER)))
    plane = ControlPlane(replies=[sign(body)])
    with pytest.raises(Refused, match="it answers another certificate request"):
        await joined(store, plane)


async def test_a_node_that_has_joined_is_not_joined_over(store):
    await joined(store, ControlPlane())
    with pytest.raises(Refused, match="has joined already, as n1") as caught:
        await joined(store, ControlPlane())
    assert caught.value.reason == Reason.CONFLICT


async def test_a_re_join_keeps_a_newer_bundle_of_the_same_installation(store):
    await joined(store, ControlPlane(trust_version=5))
    again = await joined(store, ControlPlane(trust_version=4), rejoin=True)
    assert again.trust.version == 5
    newer = await joined(store, ControlPlane(trust_version=6), rejoin=True)
    assert newer.trust.version == 6


async def test_a_damaged_identity_is_cured_by_joining(store):
    await joined(store, ControlPlane())
    (store.state_dir / "identity.json").write_bytes(b"damaged")
    assert (await joined(store, ControlPlane())).record.node_id == "n1"


@pytest.mark.parametrize(("changes", "why"), [({"token": "nonsense"}, "malformed"), ({"role": "king"}, "not a role")])
async def test_what_cannot_work_is_refused_before_anything_is_sent(store, changes, why):
    plane = ControlPlane()
    with pytest.raises(Refused, match=why):
        await joined(store, plane, **changes)
    assert plane.targets == []


def test_a_token_is_not_shown():
    assert SETTINGS.token not in repr(SETTINGS)
