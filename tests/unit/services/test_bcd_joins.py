"""bcd's half of Join against JoinService itself, over the transport's calls in memory."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bettercompute.daemon.dial import DialSettings
from bettercompute.daemon.identity import Identity, IdentityStore, Machine
from bettercompute.daemon.join import JoinSettings, join
from bettercompute.daemon.join_attempt import Dial
from bettercompute.daemon.rejoin import RejoinParts, rejoin
from bettercompute.errors import BetterComputeError, Unavailable
from bettercompute.pki import discovery, join_token
from bettercompute.pki.join_token import JoinToken
from bettercompute.protocol import messages, service
from bettercompute.protocol.statuses import REASON_TRAILER, SERVER_TIME_TRAILER, Status
from bettercompute.services.attestors.discovery import discovered_node_id
from bettercompute.store import certificates as stored_certificates
from bettercompute.store import nodes
from bettercompute.store.database import Database
from bettercompute.testing import postgres
from bettercompute.transport.memory import MemoryServer
from bettercompute.transport.streams import Connection, DialTarget, ServerCall
from tests.unit.pki.crash_disk import CrashDisk, PowerLossError
from tests.unit.services.joining import Node, Plane, make_plane

NOW_MS = 1_900_000_000_000
HOUR_MS = 3_600_000
MAC = "00:00:5e:00:53:01"
STATE = Path("/var/lib/bcd")


class Site:
    """JoinService, and a gateway that relays to it."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.now_ms = NOW_MS
        self.lose_answers = 0
        self.server = MemoryServer(self._relay, world=plane.world)

    async def _relay(self, call: ServerCall) -> None:
        assert call.path == service.JOIN
        data = await call.receive()
        assert data is not None
        try:
            answer = await self.plane.join.join(messages.JoinRequest.FromString(data), source=call.peer.address)
        except BetterComputeError as error:
            trailers = {REASON_TRAILER: str(error.reason), SERVER_TIME_TRAILER: str(self.now_ms)}
            call.finish(error.status, error.message, trailers)
            return
        if self.lose_answers:
            self.lose_answers -= 1
            call.finish(Status.UNAVAILABLE, "the answer was lost")
            return
        call.send(answer.SerializeToString())
        call.finish(Status.OK)

    async def dial(self, _: DialTarget) -> Connection:
        return self.server.connect()

    async def moved_to(self, now_ms: int) -> None:
        self.now_ms = now_ms
        await postgres.freeze_clock(self.plane.database, now_ms=now_ms)

    def token(self, secret: bytes, attestor: str = "join-token") -> str:
        keys = self.plane.keys
        return join_token.format_token(
            JoinToken(
                secret=secret,
                gateway_urls=("https://gw",),
                serving_ca_pins=(keys.serving_ca_pin,),
                join_signing_key=keys.join_signing.public_key(),
                join_encryption_key=keys.join_encryption.public_key(),
                attestor=attestor,
            )
        )

    async def join(self, store: IdentityStore, token: str, **changes: object) -> Identity:
        settings = JoinSettings(token=token, daemon_version="0.1.0", **changes)  # type: ignore[arg-type]  # by name
        return await join(store, settings, world=self.plane.world, dial=self.dial)

    def rejoin_parts(self, store: IdentityStore, *, dial: Dial | None = None) -> RejoinParts:
        """A daemon whose own idea of the time is a day old."""
        return RejoinParts(
            world=self.plane.world,
            identities=store,
            machine=Machine(machine_id="m1"),
            hardware=messages.HardwareClaims,
            settings=DialSettings,
            server_time_ms=lambda told_ms: NOW_MS if told_ms is None else told_ms,
            dial=dial or self.dial,
        )

    async def good(self, identity: Identity) -> bool:
        """Say whether the control plane takes this identity now."""
        record = identity.record
        stored = await stored_certificates.find(self.plane.database, serial=record.certificate_serial)
        node = await nodes.get(self.plane.database, node_id=record.node_id)
        if stored is None or node is None:
            return False
        current = stored.identity_generation == node.identity_generation == record.identity_generation
        return current and stored.revoked_at_ms is None and stored.superseded_at_ms is None


@pytest.fixture
async def site(database: Database, tmp_path: Path) -> AsyncIterator[Site]:
    await postgres.freeze_clock(database, now_ms=NOW_MS)
    made = Site(await make_plane(database, tmp_path))
    yield made
    await made.server.close()


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Waiting takes no time here, and is written down."""
    waits: list[float] = []

    async def sleep(delay_s: float) -> None:
        waits.append(delay_s)

    monkeypatch.setattr("bettercompute.daemon.join_attempt.asyncio.sleep", sleep)
    return waits


async def test_a_daemon_joins_the_service(site: Site, tmp_path: Path) -> None:
    store = IdentityStore(tmp_path / "state")
    identity = await site.join(store, site.token(await site.plane.token(node_id="n1")))
    assert identity.record.node_id == "n1"
    assert identity.trust.content.serving_ca_pins == (site.plane.keys.serving_ca_pin,)
    loaded = store.load()
    assert loaded is not None
    assert loaded.record == identity.record


async def test_a_credential_is_challenged_waits_for_the_node_to_be_gone_and_is_used(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.plane.joined(Node(), node_id="n1")
    await site.plane.database.query(
        "UPDATE node_sessions SET gateway_id = 'g', session_id = 's', session_epoch = 1, last_seen = compute_now()"
    )
    waits: list[float] = []

    async def sleep(delay_s: float) -> None:
        waits.append(delay_s)
        await site.moved_to(site.now_ms + int(delay_s * 1000))

    monkeypatch.setattr("bettercompute.daemon.join_attempt.asyncio.sleep", sleep)
    secret = await site.plane.token(node_id="n1", attestor="provisioned", machine={"serial": "S1"})
    identity = await site.join(
        IdentityStore(tmp_path / "state"),
        site.token(secret, "provisioned"),
        hardware=messages.HardwareClaims(serial="S1"),
    )
    assert (identity.record.node_id, identity.record.identity_generation) == ("n1", 2)
    assert waits == [15.0] * 4, "exactly as long as it was told, each time"


async def test_a_deferred_join_is_given_up_in_the_end(site: Site, tmp_path: Path, slept: list[float]) -> None:
    await site.plane.joined(Node(), node_id="n1")
    await site.plane.database.query(
        "UPDATE node_sessions SET gateway_id = 'g', session_id = 's', session_epoch = 1, last_seen = compute_now()"
    )
    secret = await site.plane.token(node_id="n1", attestor="provisioned", machine={"serial": "S1"})
    with pytest.raises(Unavailable, match="the join is deferred: node n1 has a live session"):
        await site.join(
            IdentityStore(tmp_path / "state"),
            site.token(secret, "provisioned"),
            hardware=messages.HardwareClaims(serial="S1"),
            give_up_after_ms=14_000,
        )
    assert slept == []


async def test_a_machine_that_a_site_agent_saw_joins_as_a_ramdisk(site: Site, tmp_path: Path) -> None:
    plane, agent = site.plane, Node()
    agent_secret = await plane.token(node_id="site-1", role="site", site="oslo")
    body = plane.verified(
        await plane.join.join(agent.join_request(agent_secret, plane.keys, role="site"), source="s"), agent
    )
    secret = plane.world.ids.random_bytes(32)
    assertion = messages.site.DiscoveryAssertion(
        site_node_id="site-1",
        site="oslo",
        mac_address=MAC,
        nonce_sha256=hashlib.sha256(secret).digest(),
        issued_at_ms=NOW_MS,
        not_after_ms=NOW_MS + 600_000,
    )
    identity = await site.join(
        IdentityStore(tmp_path / "state"),
        site.token(secret),
        role="ramdisk",
        attestor="discovery",
        evidence=discovery.sign_assertion(assertion, key=agent.key, chain_der=list(body.certificate_chain)),
        hardware=messages.HardwareClaims(mac_addresses=[MAC]),
    )
    assert identity.record.node_id == discovered_node_id(site="oslo", mac_address=MAC)
    assert (identity.record.site, identity.record.role) == ("oslo", "ramdisk")


async def test_an_expired_node_comes_back_through_lost_answers(site: Site, tmp_path: Path, slept: list[float]) -> None:
    store = IdentityStore(tmp_path / "state")
    before = await site.join(store, site.token(await site.plane.token(node_id="n1")))
    await site.moved_to(NOW_MS + 30 * HOUR_MS)
    site.lose_answers = 3
    after = await rejoin(before, site.rejoin_parts(store))
    assert (after.record.node_id, after.record.identity_generation) == ("n1", 2)
    assert len(slept) == 3
    assert await site.good(after)


async def crashing(site: Site, *, step: int | None, kept: set[int], days_off: int = 0) -> int:
    """Join a node, let it expire, lose power before a step of its re-join, start it again: it must be good again.

    Returns how many steps a re-join has.
    """
    plane = site.plane
    await site.moved_to(NOW_MS)
    disk = CrashDisk()
    before = await site.join(IdentityStore(STATE, disk=disk), site.token(await plane.token()))
    now_ms = NOW_MS + 30 * HOUR_MS
    await site.moved_to(now_ms)
    disk = disk.copy(stop_after=-1 if step is None else step)
    if step is None:
        await rejoin(before, site.rejoin_parts(IdentityStore(STATE, disk=disk)))
        return len(disk.log)
    with pytest.raises(PowerLossError):
        await rejoin(before, site.rejoin_parts(IdentityStore(STATE, disk=disk)))
    store = IdentityStore(STATE, disk=disk.after_crash(kept.__contains__))
    store.settle()
    held = store.load()
    assert held is not None, f"no identity after step {step}"
    if held.record.identity_generation == 1:
        await site.moved_to(now_ms + days_off * 24 * HOUR_MS)
        held = await rejoin(held, site.rejoin_parts(store))
    assert await site.good(held), f"locked out after step {step}"
    assert (held.record.node_id, held.record.identity_generation) == (before.record.node_id, 2)
    return 0


EVERYTHING = set(range(200))


@pytest.mark.parametrize("kept", [set(), pytest.param(EVERYTHING, marks=pytest.mark.long)], ids=["none", "all"])
async def test_power_loss_at_each_step_of_a_re_join_leaves_a_good_identity(site: Site, kept: set[int]) -> None:
    steps = await crashing(site, step=None, kept=kept)
    assert steps > 10
    for step in range(steps):
        await crashing(site, step=step, kept=kept)


async def test_one_that_was_off_for_another_day_after_the_power_loss_comes_back_too(site: Site) -> None:
    steps = await crashing(site, step=None, kept=set())
    for step in range(0, steps, 3):
        await crashing(site, step=step, kept=set(), days_off=2)


async def test_a_killed_re_join_is_asked_for_with_the_same_request(site: Site, tmp_path: Path) -> None:
    store = IdentityStore(tmp_path / "state")
    before = await site.join(store, site.token(await site.plane.token(node_id="n1")))
    await site.moved_to(NOW_MS + 30 * HOUR_MS)
    hanging, asked = asyncio.Event(), asyncio.Event()

    async def hang(_: DialTarget) -> Connection:
        asked.set()
        await hanging.wait()
        raise AssertionError("it was killed")

    killed = asyncio.ensure_future(rejoin(before, site.rejoin_parts(store, dial=hang)))
    await asked.wait()
    killed.cancel()
    await asyncio.gather(killed, return_exceptions=True)
    request = (store.state_dir / "identity.d/pending-rejoin/node.csr").read_bytes()
    after = await rejoin(before, site.rejoin_parts(IdentityStore(store.state_dir)))
    stored = await stored_certificates.find(site.plane.database, serial=after.record.certificate_serial)
    assert stored is not None
    assert stored.csr_sha256 == hashlib.sha256(request).digest()
    assert not (store.state_dir / "identity.d/pending-rejoin").exists()
