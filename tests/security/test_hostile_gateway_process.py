"""A real `bcd node` process over real TLS, against a gateway that holds a valid serving certificate and lies.

The process outlives every attack, runs the one command that a worker signed, once, and tells in its status report and
in `bcd status` what it refused and how often.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from bettercompute.daemon.config import Config
from bettercompute.pki import certificates, intent, trust
from bettercompute.pki.certificates import Authority
from bettercompute.pki.intent import IntentSigner
from bettercompute.pki.trust import CommandRoot, TrustContent
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import pack_payload
from bettercompute.system import system_world
from bettercompute.transport.streams import ServerSecrets, serve, server_context
from tests.e2e.test_bcd_process import Bcd, serving
from tests.unit.daemon.fake_gateway import NODE_ID, ControlPlane, FakeGateway, FakeSession, control_plane, join

DAY_MS = 24 * 3_600_000
SUCCEEDED = messages.COMMAND_STATE_SUCCEEDED
REJECTED = messages.COMMAND_STATE_REJECTED


def worker(root: Authority) -> IntentSigner:
    now_ms = system_world().clock.now_ms()
    key = certificates.generate_key()
    leaf = certificates.make_worker_leaf(root, public_key=key.public_key(), serial=bytes(15) + b"\3", now_ms=now_ms)
    return intent.make_signer(key=key, leaf=leaf, root=root.certificate, now_ms=now_ms)


@dataclass
class Attacked:
    """A node that takes signed intent only, its gateway, and the keys of both sides."""

    bcd: Bcd
    keys: ControlPlane
    pin: str
    root: Authority
    signer: IntentSigner
    stranger: IntentSigner
    narrow: IntentSigner
    runs: Path
    """The node's one program adds a line to it at each run."""

    def body(self, command_id: str, **changes: object) -> messages.CommandBody:
        now_ms = system_world().clock.now_ms()
        fields: dict[str, object] = {
            "command_id": command_id,
            "node_id": NODE_ID,
            "kind": "inventory.refresh",
            "lane": messages.LANE_CONTROL,
            "payload": pack_payload(messages.InventoryRefreshPayload(sections=["facts"])),
            "timeout_ms": 30_000,
            "issued_at_ms": now_ms,
            "not_after_ms": now_ms + 3_600_000,
            "trust_domain": "bc.local",
        }
        return messages.CommandBody(**{**fields, **changes})  # type: ignore[arg-type]  # test data

    def bundle(self, version: int, **changes: object) -> messages.SignedTrustBundle:
        signing = changes.pop("signing", self.keys.signing)
        fields: dict[str, object] = {
            "trust_domain": "bc.local",
            "command_roots": (CommandRoot(certificate=self.root.certificate),),
            "join_signing_keys": (signing.public_key(),),  # type: ignore[attr-defined]
            "join_encryption_keys": (self.keys.signing.public_key(),),
            "serving_ca_pins": (self.pin,),
        }
        content = TrustContent(**{**fields, **changes})  # type: ignore[arg-type]  # test data
        signed = trust.sign(content, version=version, key=signing, now_ms=1)  # type: ignore[arg-type]
        return messages.SignedTrustBundle.FromString(signed.signed)

    def run_count(self) -> int:
        return len(self.runs.read_text().splitlines()) if self.runs.exists() else 0

    async def session(self, **welcome: object) -> FakeSession:
        """Take the next stream and say Welcome to it."""
        session = await self.bcd.gateway.session()
        session.welcome(**welcome)
        return session


def signed(body: messages.CommandBody, signer: IntentSigner | None) -> messages.Command:
    data = body.SerializeToString()
    command = messages.Command(body=data, attempt=1)
    if signer is not None:
        command.signature.MergeFromString(signer.sign_command(data))
    return command


@pytest.fixture
async def attacked(tmp_path: Path) -> AsyncIterator[Attacked]:
    """A provisioned node with command-signing roots, and a gateway with a certificate of the CA that it pins."""
    now_ms = system_world().clock.now_ms()
    gateway, keys = FakeGateway(), control_plane()
    ca = certificates.make_serving_ca(serial=bytes(16), now_ms=now_ms)
    root, narrow, other = (certificates.make_command_root(serial=bytes(16), now_ms=now_ms) for _ in range(3))
    leaf = serving(ca)
    context = server_context(
        ServerSecrets(
            leaf.certificate_chain_pem,
            leaf.private_key_pem,
            client_ca_pem=keys.node_ca.certificate.public_bytes(Encoding.PEM),
        )
    )
    server = await serve(gateway.handle, tls=lambda: context, world=system_world())
    state, facts, runs = tmp_path / "state", tmp_path / "facts", tmp_path / "runs"
    facts.mkdir(mode=0o700)
    config = tmp_path / "config.toml"
    config.write_text(f'state_dir = "{state}"\n[inventory]\nfacts_dir = "{facts}"\nfact_timeout_ms = 60000\n')
    pin = certificates.spki_sha256(ca.certificate)
    join(
        Config(state_dir=state),
        keys=keys,
        gateway_urls=(f"https://127.0.0.1:{server.port}",),
        serving_ca_pins=(pin,),
        command_roots=(
            CommandRoot(certificate=root.certificate),
            CommandRoot(certificate=narrow.certificate, allowed_kinds=("logs.collect",)),
        ),
    )
    bcd = Bcd(gateway, config, facts, tmp_path / "bcd.log")
    bcd.hold_with(f'echo run >> {runs}; echo \'{{"rack": "r1"}}\'')
    yield Attacked(bcd, keys, pin, root, worker(root), worker(other), worker(narrow), runs)
    for process in bcd.processes:
        if process.returncode is None:
            process.kill()
        await process.wait()
    await server.close()


async def test_a_process_outlives_its_hostile_gateway(attacked: Attacked) -> None:
    bcd = attacked.bcd
    daemon = await bcd.start()
    expected: dict[str, int] = {}

    def expect(refusal: str, times: int = 1) -> None:
        expected[refusal] = expected.get(refusal, 0) + times

    # A first session forges: commands, specs and bundles, none of which says more than a refusal.
    session = await attacked.session()
    past_ms = system_world().clock.now_ms() - 1
    altered = signed(attacked.body("c1"), attacked.signer)
    altered.body += messages.CommandBody(timeout_ms=9).SerializeToString()
    forged = {
        "bad-signature": [
            signed(attacked.body("x1"), None),
            signed(attacked.body("x2"), attacked.stranger),
            signed(attacked.body("x3", issued_at_ms=2**63 - 1), None),
            altered,
        ],
        "kind-not-allowed": [signed(attacked.body("x4"), attacked.narrow)],
        "wrong-node": [
            signed(attacked.body("x5", node_id="n2"), attacked.signer),
            signed(attacked.body("x6", trust_domain="other.local"), attacked.signer),
        ],
        "expired": [signed(attacked.body("x7", not_after_ms=past_ms), attacked.signer)],
        "unsupported": [signed(attacked.body("x8", kind="node.melt"), attacked.signer)],
        "invalid": [signed(attacked.body("x9", timeout_ms=0), attacked.signer)],
    }
    for reason, frames in forged.items():
        for frame in frames:
            session.send(command=frame)
            update = await session.update(messages.CommandBody.FromString(frame.body).command_id, REJECTED)
            assert messages.CommandRejectReason.Name(update.reject_reason).endswith(reason.upper().replace("-", "_"))
            expect(f"command: {reason}")
    session.send(command=messages.Command(body=b"\xff", attempt=1))
    expect("command: unreadable")
    session.send(
        desired=messages.DesiredState(body=messages.DesiredStateBody(issued_at_ms=2**63 - 1).SerializeToString())
    )
    expect("desired-state: bad-signature")
    session.send(welcome=messages.Welcome(session_id="s2", epoch=99))
    expect("welcome: second-welcome")
    session.send(cancel=messages.Cancel(command_id="x" * 100))
    expect("cancel: not-remembered")
    report = await refusals(session, until="welcome: second-welcome")
    assert {name: count for name, count in report.items() if name.startswith("command")} == {
        name: count for name, count in expected.items() if name.startswith("command")
    }
    # A message that is no frame ends the session and nothing else.
    session.send_bytes(b"\xff\xff\xff")
    expect("frame: invalid-frame")

    # Bundles: older, by a stranger's key, of another installation, unsigned.
    unsigned = messages.SignedTrustBundle(body=attacked.bundle(9).body)
    for bundle, reason in (
        (attacked.bundle(1), "not-newer"),
        (attacked.bundle(9, signing=certificates.generate_key()), "bad-proof"),
        (attacked.bundle(9, trust_domain="other.local"), "bad-proof"),
        (unsigned, "bad-proof"),
    ):
        session = await attacked.session(trust=bundle)
        await session.frame("heartbeat")
        session.end(14, "elsewhere", reason="draining", pushback_ms=0)
        expect(f"trust-bundle: {reason}")

    # Time, epochs, a stream that begins with a command.
    await attacked.session(server_time_ms=past_ms - 365 * DAY_MS)
    expect("welcome: server-time-backwards")
    await attacked.session(server_time_ms=past_ms + 365 * DAY_MS)
    expect("welcome: server-time-outside-certificate")
    session = await attacked.session(
        server_time_ms=past_ms + 30 * DAY_MS, epoch=2**64 - 1, request_sections=["cpu"] * 999
    )
    expect("welcome: epoch-out-of-range")
    session.send(command=signed(attacked.body("x10"), attacked.signer))  # by this lie it is too late
    await session.update("x10", REJECTED)
    expect("command: expired")
    session.end(16, "so it is said", reason="revoked", pushback_ms=0)
    session = await bcd.gateway.session()
    assert session.hello.last_epoch < 2**63
    session.send(command=signed(attacked.body("c1"), attacked.signer))
    expect("welcome: not-welcome")
    assert attacked.run_count() == 0

    # An honest gateway: the clock is as it was, the command runs, once, whatever is repeated afterwards.
    session = await attacked.session()
    command = signed(attacked.body("c1"), attacked.signer)
    session.send(command=command)
    update = await session.update("c1", SUCCEEDED)
    for attempt in range(2, 5):
        command.attempt = attempt
        session.send(command=command)
        again = await session.update("c1", SUCCEEDED)
        assert again.result == update.result
    expect("command: repeated", 3)
    assert attacked.run_count() == 1
    assert daemon.returncode is None
    reported = await refusals(session, until="command: repeated", times=3)
    code, out, _ = await bcd.run("status", "--json")
    status = json.loads(out)
    assert code == 0
    assert status["refusals"] == expected
    assert reported == expected
    held = {condition["type"] for condition in status["conditions"]}
    assert not held & {"IdentityRevoked", "TrustBundleRefused", "SpecRefused", "ClockUnconfirmed", "NeedsRejoin"}

    # Not after a kill -9 either.
    daemon.kill()
    await daemon.wait()
    await bcd.start()
    session = await attacked.session()
    session.send(command=command)
    assert (await session.update("c1", SUCCEEDED)).result == update.result
    assert attacked.run_count() == 1


async def refusals(session: FakeSession, *, until: str, times: int = 1) -> dict[str, int]:
    """Return what a status report says was refused, once it names this one so often."""
    async with asyncio.timeout(30):
        while True:
            report = await session.frame("status")
            assert isinstance(report, messages.StatusReport)
            told = {f"{item.what}: {item.reason}": item.count for item in report.refusals}
            if told.get(until, 0) >= times:
                return told
