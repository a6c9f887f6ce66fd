"""Renewing the certificate: when, with which proof, and what a lost answer or a refusal leads to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from bettercompute.daemon import renewal as renewal_module
from bettercompute.daemon.dial import DialSettings, GatewayLink
from bettercompute.daemon.identity import Identity, IdentityStore, Machine
from bettercompute.daemon.renewal import Renewal, RenewalParts
from bettercompute.errors import BetterComputeError, Refused, Unavailable
from bettercompute.pki import certificates, signatures
from bettercompute.pki.identity import identity_of
from bettercompute.protocol import messages, service
from bettercompute.protocol.envelopes import join_response_input, renew_pop_input, sha256
from bettercompute.system import system_world
from bettercompute.transport.calls import ServerCall
from bettercompute.transport.memory import MemoryServer
from bettercompute.transport.streams import CallRefused
from tests.unit.daemon.fake_gateway import NODE_ID, ControlPlane, control_plane, join, state_config

HOUR_MS = 3_600_000


@dataclass
class Services:
    """JoinService as a gateway relays to it; `refuse` ends calls with a status instead, one each."""

    keys: ControlPlane
    requests: list[messages.RenewRequest] = field(default_factory=list)
    refuse: list[tuple[int, str, dict[str, str]]] = field(default_factory=list)
    defer: bool = False
    trust: bytes = b""

    async def handle(self, call: ServerCall) -> None:
        assert call.path == service.RENEW
        data = await call.receive()
        assert data is not None
        request = messages.RenewRequest.FromString(data)
        self.requests.append(request)
        if self.refuse:
            status, message, trailers = self.refuse.pop(0)
            call.finish(status, message, trailers)
            return
        call.send(self.answer(request).SerializeToString())
        call.finish(0)

    def answer(self, request: messages.RenewRequest) -> messages.RenewResponse:
        now_ms = system_world().clock.now_ms()
        presented = certificates.load_certificate(request.certificate_chain[0])
        proven = renew_pop_input(csr=request.csr, node_id=NODE_ID, client_time_ms=request.client_time_ms)
        signatures.verify(request.proof, presented.public_key(), proven)  # type: ignore[arg-type]
        leaf = certificates.make_node_leaf(
            self.keys.node_ca,
            public_key=certificates.check_csr(request.csr),
            identity=identity_of(presented),
            serial=bytes(15) + bytes([1 + len(self.requests)]),
            now_ms=now_ms,
        )
        body = messages.JoinResponseBody(
            node_id=NODE_ID,
            site="default",
            trust_domain="bc.local",
            certificate_chain=(
                leaf.public_bytes(Encoding.DER),
                self.keys.node_ca.certificate.public_bytes(Encoding.DER),
            ),
            gateway_urls=("https://gw-a:443",),
            server_time_ms=now_ms,
            csr_sha256=sha256(request.csr),
            identity_generation=1,
            role=messages.AGENT_ROLE_NODE,
        )
        body.trust.ParseFromString(self.trust)
        if self.defer:
            body.deferral.retry_after_seconds = 7
        serialized = body.SerializeToString()
        signature = signatures.sign(self.keys.signing, join_response_input(serialized))
        return messages.RenewResponse(body=serialized, signature=signature)


@dataclass(frozen=True)
class BenchClock:
    """Goes as the bench's time does."""

    read: Callable[[], int]

    def now_ms(self) -> int:
        return self.read()

    def monotonic_ms(self) -> int:
        return self.read()


@dataclass
class Bench:
    services: Services
    identities: IdentityStore
    renewal: Renewal
    server_time_ms: int
    told: list[int | None] = field(default_factory=list)
    renewed: asyncio.Queue[Identity] = field(default_factory=asyncio.Queue)
    rejoins: list[str] = field(default_factory=list)
    """The certificates by which the node wanted to come back."""
    rejoin_outcomes: list[BetterComputeError | None] = field(default_factory=list)
    needs_rejoin: list[tuple[str, str]] = field(default_factory=list)

    def identity(self) -> Identity:
        found = self.identities.load()
        assert found is not None
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    keys = control_plane()
    config = state_config(tmp_path)
    join(config, keys=keys)
    identities = IdentityStore(config.state_dir)
    services = Services(keys)
    server = MemoryServer(services.handle, world=system_world())

    async def load() -> Identity:
        return made.identity()

    async def dial(_):
        return server.connect()

    def server_time_ms(told: int | None) -> int:
        made.told.append(told)
        return made.server_time_ms

    def renewed(identity: Identity) -> None:
        made.renewed.put_nowait(identity)

    async def rejoin(identity: Identity) -> Identity:
        made.rejoins.append(identity.record.certificate_serial)
        outcome = made.rejoin_outcomes.pop(0) if made.rejoin_outcomes else None
        if outcome is not None:
            raise outcome
        return await made.renewal.renew(identity)

    def needs_rejoin(reason: str, message: str) -> None:
        made.needs_rejoin.append((reason, message))

    parts = RenewalParts(
        world=replace(system_world(), clock=BenchClock(lambda: made.server_time_ms)),
        link=GatewayLink(world=system_world(), identity=load, settings=DialSettings, dial=dial),
        identities=identities,
        machine=Machine(machine_id="m1"),
        load_identity=load,
        server_time_ms=server_time_ms,
        renewed=renewed,
        rejoin=rejoin,
        needs_rejoin=needs_rejoin,
    )
    made = Bench(services, identities, Renewal(parts), system_world().clock.now_ms())
    services.trust = made.identity().trust.signed
    return made


async def test_a_renewal_proves_the_present_key_and_installs_the_new_identity(bench: Bench) -> None:
    before = bench.identity()
    renewed = await bench.renewal.renew(before)
    assert renewed.record.certificate_serial != before.record.certificate_serial
    assert renewed.key.public_key() != before.key.public_key()
    assert bench.identity().record == renewed.record
    assert renewed.record.machine_id == "m1"
    [request] = bench.services.requests
    assert request.client_time_ms == bench.server_time_ms
    assert not (bench.identities.state_dir / "identity.d/pending-renew").exists()


async def test_a_lost_answer_is_asked_for_with_the_same_request(bench: Bench) -> None:
    bench.services.refuse.append((14, "the answer was lost", {}))
    with pytest.raises(CallRefused, match="the answer was lost"):
        await bench.renewal.renew(bench.identity())
    await bench.renewal.renew(bench.identity())
    first, second = bench.services.requests
    assert first.csr == second.csr


async def test_a_deferral_is_a_wait(bench: Bench) -> None:
    bench.services.defer = True
    with pytest.raises(Unavailable, match="the renewal is deferred") as caught:
        await bench.renewal.renew(bench.identity())
    assert caught.value.pushback_ms == 7_000


async def test_an_answer_that_somebody_else_signed_is_refused(bench: Bench) -> None:
    before = bench.identity()
    bench.services.keys = ControlPlane(bench.services.keys.node_ca, certificates.generate_key())
    with pytest.raises(BetterComputeError):
        await bench.renewal.renew(before)
    assert bench.identity().record == before.record


async def test_it_waits_for_two_thirds_of_the_life_and_retries_as_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        bench.server_time_ms += int(seconds * 1000)
        await real_sleep(0)

    monkeypatch.setattr("bettercompute.daemon.renewal.asyncio.sleep", sleep)
    monkeypatch.setattr(renewal_module, "WAKE_MAX_MS", HOUR_MS)
    bench.services.refuse += [
        (8, "busy", {"grpc-retry-pushback-ms": "1234", "x-bc-server-time": "5"}),
        (16, "the proof is too old", {"x-bc-reason": "bad-proof", "x-bc-server-time": "6000"}),
    ]
    begun_ms = bench.server_time_ms
    task = asyncio.create_task(bench.renewal.run())
    await asyncio.wait_for(bench.renewed.get(), 30)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert 15.9 * HOUR_MS < bench.services.requests[0].client_time_ms - begun_ms < 16.5 * HOUR_MS
    assert 1.234 in waits
    first, second = [told for told in bench.told if told is not None]
    assert first == 5 + 1234, "a refusal's server time dates the next proof, by when it is made"
    # The loop may have gone on to its next wait already.
    assert second - 6000 in {int(wait * 1000) for wait in waits}


@pytest.fixture
def passing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Waiting takes no time here, moves the server's, and is written down."""
    waits: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        bench.server_time_ms += int(seconds * 1000)
        await real_sleep(0)

    monkeypatch.setattr("bettercompute.daemon.renewal.asyncio.sleep", sleep)
    return waits


async def kept(bench: Bench, times: int = 1) -> list[Identity]:
    """Let it keep the identity until it has replaced it."""
    task = asyncio.create_task(bench.renewal.run())
    try:
        return [await asyncio.wait_for(bench.renewed.get(), 30) for _ in range(times)]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_expired_certificate_is_not_renewed_but_come_back_by(bench: Bench, passing: list[float]) -> None:
    bench.server_time_ms += 25 * HOUR_MS
    before = bench.identity().record.certificate_serial
    await kept(bench)
    assert bench.rejoins == [before]
    assert all(wait_s >= 60 for wait_s in passing), "it waits after it, not before"


async def test_what_a_gateway_says_of_the_expiry_ends_the_wait(bench: Bench) -> None:
    serial = bench.identity().record.certificate_serial
    bench.renewal.expired("another")
    keeping = asyncio.create_task(kept(bench))
    await asyncio.sleep(0)
    bench.renewal.expired(serial)
    await keeping
    assert bench.rejoins == [serial]


async def test_a_renewal_that_is_refused_for_its_age_becomes_a_re_join(bench: Bench, passing: list[float]) -> None:
    bench.server_time_ms += 23 * HOUR_MS
    bench.services.refuse.append((16, "it has expired", {"x-bc-reason": "certificate-expired"}))
    await kept(bench)
    assert len(bench.rejoins) == 1
    assert passing[0] == 0


@pytest.mark.parametrize("ahead_h", [20, 25], ids=["due", "over"])
async def test_by_a_clock_that_is_ahead_no_certificate_is_replaced_at_once(
    bench: Bench, passing: list[float], ahead_h: int
) -> None:
    bench.server_time_ms += ahead_h * HOUR_MS
    await kept(bench, times=3)
    assert len(bench.services.requests) <= 4
    # A wait that ends a millisecond early is made up for by one of a millisecond.
    waits = [wait_s for wait_s in passing if wait_s > 0.01]
    assert len(waits) >= 2
    assert all(60 <= wait_s <= 300 for wait_s in waits)


async def test_who_hears_that_each_new_certificate_has_expired_rests_between_them(
    bench: Bench, passing: list[float]
) -> None:
    task = asyncio.create_task(bench.renewal.run())
    serial = bench.identity().record.certificate_serial
    try:
        for _ in range(3):
            await asyncio.sleep(0)
            bench.renewal.expired(serial)
            serial = (await asyncio.wait_for(bench.renewed.get(), 30)).record.certificate_serial
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert len(bench.rejoins) == 3
    assert sum(60 <= wait_s <= 300 for wait_s in passing) >= 2


def told(status: int, reason: str) -> CallRefused:
    return CallRefused(status=status, message="as told", trailers={"x-bc-reason": reason})


async def test_only_the_services_word_calls_for_a_person_and_it_is_asked_again(
    bench: Bench, passing: list[float]
) -> None:
    bench.server_time_ms += 25 * HOUR_MS
    bench.rejoin_outcomes = [
        Unavailable("no gateway"),
        told(16, "bad-proof"),
        Refused("by another key", status=16, reason="bad-proof"),
        told(13, "bug"),
        told(16, "old-generation"),
    ]
    await kept(bench)
    assert bench.needs_rejoin == [("old-generation", "as told")]
    assert len(set(bench.rejoins[:6])) == 1
    assert all(60 <= wait_s <= 300 for wait_s in passing[:4])
    assert 600 <= passing[4] <= 1200


async def test_one_that_is_still_good_by_whom_issued_it_is_renewed(bench: Bench, passing: list[float]) -> None:
    serial = bench.identity().record.certificate_serial
    bench.renewal.expired(serial)
    bench.rejoin_outcomes = [told(9, "conflict")]
    await kept(bench)
    assert bench.rejoins == [serial], "a gateway lied, and is not believed twice"
    assert bench.needs_rejoin == []


async def test_an_identity_that_an_operator_replaced_is_kept_from_then_on(bench: Bench) -> None:
    entered, go = asyncio.Event(), asyncio.Event()

    async def handle(call: ServerCall) -> None:
        if not entered.is_set():
            entered.set()
            await go.wait()
        await bench.services.handle(call)

    server = MemoryServer(handle, world=system_world())

    async def dial(_):
        return server.connect()

    bench.renewal._parts.link._dial = dial
    bench.server_time_ms += 23 * HOUR_MS
    keeping = asyncio.create_task(kept(bench))
    await entered.wait()
    asked_by = bench.identity().record.certificate_serial
    replacement = await bench.renewal.renew(bench.identity())
    bench.renewal.replaced()
    go.set()
    [renewed] = await keeping
    assert replacement.record.certificate_serial not in {asked_by, renewed.record.certificate_serial}
    presented = [certificates.load_certificate(request.certificate_chain[0]) for request in bench.services.requests]
    assert certificates.serial_text(presented[-1]) == replacement.record.certificate_serial


async def test_an_answer_that_came_too_late_does_not_undo_another_identity(bench: Bench) -> None:
    before = bench.identity()
    await bench.renewal.renew(before)
    with pytest.raises(Refused, match="was given another identity meanwhile") as caught:
        await bench.renewal.renew(before)
    assert caught.value.reason == "conflict"
