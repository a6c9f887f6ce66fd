"""Rotations over a real database: what each step publishes, what it waits for, and who can still join and renew."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from bettercompute.errors import Refused, Unavailable
from bettercompute.pki import certificates, rotation, signatures, trust
from bettercompute.pki.keyfiles import KeyFolder
from bettercompute.pki.rotation import KeyStage, Purpose
from bettercompute.pki.trust import Trust
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import join_response_input
from bettercompute.protocol.statuses import Reason
from bettercompute.server.keys import worker_signing
from bettercompute.services import rotation_files
from bettercompute.services.installation import publish_trust
from bettercompute.services.join import JoinService
from bettercompute.services.keys import KeyRing
from bettercompute.services.pki_setup import initialise
from bettercompute.services.provision import ProvisionService
from bettercompute.services.rotating import Rotated, RotationService
from bettercompute.store import audit, leases
from bettercompute.store import trust as stored_trust
from bettercompute.store.database import Database
from bettercompute.store.leases import Health, HeldCertificates, NewLease
from bettercompute.store.signing import Signing
from bettercompute.system import system_world
from tests.unit.services.joining import INSTALLATION, Node, Plane

WORLD = system_world()
SIGNED = dataclasses.replace(INSTALLATION, command_signing=True)
UNKNOWN_KEY = bytes.fromhex("300b300506032a030403020001")  # a SubjectPublicKeyInfo of an algorithm that nobody has


@dataclass
class Site:
    """A control plane whose keys are rotated, and one key folder."""

    database: Database
    folder: KeyFolder
    ring: KeyRing
    signing: Signing
    rotating: RotationService
    plane: Plane

    async def prepare(self, purpose: Purpose) -> Rotated:
        new = rotation_files.prepare(self.folder, purpose, world=WORLD)
        return await self.rotating.prepare(
            purpose=purpose, public_der=new.public_der, companion_der=new.companion_der, asked_by="ops"
        )

    async def switch(self, purpose: Purpose, *, excepted: Sequence[str] = ()) -> Rotated:
        key_sha256 = rotation_files.next_key_sha256(self.folder, purpose)
        rotated = await self.rotating.switch(purpose=purpose, key_sha256=key_sha256, asked_by="ops", excepted=excepted)
        rotation_files.put_in_place(self.folder, purpose)
        return rotated

    async def retire(self, purpose: Purpose, *, excepted: Sequence[str] = ()) -> Rotated:
        await self.database.query("UPDATE trust_keys SET changed_at = changed_at - interval '1 hour'")
        rotated = await self.rotating.retire(purpose=purpose, asked_by="ops", excepted=excepted)
        rotation_files.drop_previous(self.folder, purpose)
        return rotated

    async def bundle(self) -> Trust:
        stored = await stored_trust.current(self.database)
        assert stored is not None
        return trust.read_own(stored.signed_bundle)

    async def hold(self, node_id: str, *, version: int, connected: bool = True) -> None:
        """Have a node hold a version."""
        await self.database.query(
            "UPDATE node_sessions SET trust_version = $2, session_id = 's', session_epoch = 1,"
            " last_seen = compute_now(), gateway_id = CASE WHEN $3 THEN 'gw' END WHERE node_id = $1",
            node_id,
            version,
            connected,
        )

    async def gateway(
        self, name: str, *, serving_ca_sha256: str | None = None, node_cas_sha256: Sequence[str] = ()
    ) -> None:
        """Have a gateway say what it shows and believes."""
        lease = NewLease(name=name, token="t", advertise_url="u", internal_url="", version="0", stream_limit=1)
        await leases.claim(self.database, lease)
        held = HeldCertificates(
            serving_not_after_ms=0, serving_ca_sha256=serving_ca_sha256, node_cas_sha256=tuple(node_cas_sha256)
        )
        health = Health(wall_ms=0, revocations_age_ms=0, certificates=held)
        assert await leases.renew(self.database, name=name, token="t", stream_count=0, health=health)


@pytest.fixture
async def site(database: Database, tmp_path: Path) -> Site:
    folder = KeyFolder(tmp_path / "pki")
    initialise(folder, world=WORLD)
    ring = KeyRing(folder)
    await publish_trust(database, keys=ring.read(), installation=SIGNED, world=WORLD)
    signing = worker_signing(folder, world=WORLD)
    return Site(
        database=database,
        folder=folder,
        ring=ring,
        signing=signing,
        rotating=RotationService(database, keys=ring.read, installation=SIGNED, signing=signing, world=WORLD),
        plane=Plane(
            database=database,
            world=WORLD,
            keys=ring.read(),
            folder=folder,
            join=JoinService(database, keys=ring, installation=SIGNED, world=WORLD),
            provision=ProvisionService(database, keys=ring, installation=SIGNED, world=WORLD),
        ),
    )


async def test_the_command_root(site: Site) -> None:
    old = await stored_trust.key_in_use(site.database, Purpose.COMMAND_ROOT)
    await site.plane.joined(Node(), node_id="n1")
    await site.hold("n1", version=1)
    assert (await site.prepare(Purpose.COMMAND_ROOT)).version == 2
    assert (await site.prepare(Purpose.COMMAND_ROOT)).version == 2
    assert len((await site.bundle()).content.command_roots) == 2
    with pytest.raises(Refused, match=r"1 connected nodes do not hold trust version 2.*: n1;") as caught:
        await site.switch(Purpose.COMMAND_ROOT)
    assert caught.value.reason == Reason.CONFLICT
    # A node that is away hears of it in Welcome.
    await site.hold("n1", version=1, connected=False)
    # The order of roots means nothing, so nobody has to come for it.
    assert (await site.switch(Purpose.COMMAND_ROOT)).version == 2
    assert (await site.switch(Purpose.COMMAND_ROOT)).version == 2
    new = await stored_trust.key_in_use(site.database, Purpose.COMMAND_ROOT)
    assert new != old
    # The process that runs since before the rotation signs under the new root.
    assert (await site.signing.signer(site.database)).root_sha256 == new
    with pytest.raises(Refused, match="less than 60 s ago"):
        await site.rotating.retire(purpose=Purpose.COMMAND_ROOT, asked_by="ops")
    retired = await site.retire(Purpose.COMMAND_ROOT)
    assert retired.version == 3
    [root] = (await site.bundle()).content.command_roots
    assert certificates.spki_sha256(root.certificate) == new
    acts = [entry.action for entry in await audit.list_page(site.database, page_size=10, target="pki/command-root")]
    assert acts == ["pki.retire", "pki.switch", "pki.prepare"]


async def test_a_process_without_the_new_worker_key_signs_nothing(site: Site, tmp_path: Path) -> None:
    other = KeyFolder(tmp_path / "other")
    other.create({path.name: path.read_bytes() for path in site.folder.folder.iterdir()})
    signing = worker_signing(other, world=WORLD)
    await site.prepare(Purpose.COMMAND_ROOT)
    await site.switch(Purpose.COMMAND_ROOT)
    with pytest.raises(Unavailable, match="lacks that root's worker key"):
        await signing.signer(site.database)
    lagging = RotationService(
        site.database, keys=KeyRing(other).read, installation=SIGNED, signing=signing, world=WORLD
    )
    with pytest.raises(Unavailable, match="lacks that root's worker key"):
        await lagging.switch(purpose=Purpose.COMMAND_ROOT, key_sha256="0" * 64, asked_by="ops")
    # It starts nevertheless, and takes nothing from anybody.
    again = await publish_trust(site.database, keys=KeyRing(other).read(), installation=SIGNED, world=WORLD)
    assert len(trust.read_own(again.signed_bundle).content.command_roots) == 2
    await site.retire(Purpose.COMMAND_ROOT)
    with pytest.raises(Refused, match="copy from before a rotation"):
        await publish_trust(site.database, keys=KeyRing(other).read(), installation=SIGNED, world=WORLD)


async def test_a_database_from_before_the_rotation(site: Site) -> None:
    await site.plane.joined(Node(), node_id="n1")
    await site.prepare(Purpose.COMMAND_ROOT)
    await site.switch(Purpose.COMMAND_ROOT)
    await site.retire(Purpose.COMMAND_ROOT)
    # Restored: the rows of the founding, and nodes that hold more than is published.
    await site.database.query("DELETE FROM trust_bundles WHERE version > 1")
    await site.database.query("DELETE FROM trust_keys WHERE purpose = 'command-root' AND stage = 'current'")
    await site.database.query("UPDATE trust_keys SET stage = 'current' WHERE purpose = 'command-root'")
    await site.hold("n1", version=40)
    bundle = await publish_trust(site.database, keys=KeyRing(site.folder).read(), installation=SIGNED, world=WORLD)
    assert bundle.version == 41
    own = certificates.spki_sha256(site.folder.certificate("command-root"))
    assert await stored_trust.key_in_use(site.database, Purpose.COMMAND_ROOT) == own
    assert len(trust.read_own(bundle.signed_bundle).content.command_roots) == 2


async def test_the_join_keys(site: Site) -> None:
    plane, purpose = site.plane, Purpose.JOIN_SIGNING
    first = site.ring.read()
    early = await plane.token()
    away = Node()
    joined = await plane.joined(away, node_id="away")
    await site.prepare(purpose)
    with pytest.raises(Refused, match=r"1 nodes do not hold trust version 2.*: away;"):
        await site.switch(purpose)
    await site.hold("away", version=2, connected=False)
    await site.switch(purpose)
    second = site.ring.read()
    assert second.join_signing != first.join_signing
    # A token of before is answered by the key that it pins, a new one by the new.
    for secret, keys in ((early, first), (await plane.token(), second)):
        node = Node()
        plane.keys = keys
        response = await plane.join.join(node.join_request(secret, keys), source="s")
        plane.verified(response, node)
    # A renewal, and every bundle, by the one that everybody knows.
    request = away.renew_request(joined, next_node=Node(), client_time_ms=WORLD.clock.now_ms())
    renewed = await plane.join.renew(request, peer_chain=list(joined.certificate_chain))
    signatures.verify(renewed.signature, first.join_signing.public_key(), join_response_input(renewed.body))
    bundle = await site.bundle()
    known = [first.join_signing.public_key()]
    assert trust.accept(bundle.signed, held=None, trust_domain="bc.local", pinned_keys=known) is not None
    late = await plane.token()
    await site.hold("away", version=bundle.version, connected=False)
    await site.database.query("UPDATE node_sessions SET trust_version = $1", bundle.version)
    await site.retire(purpose)
    with pytest.raises(Refused) as caught:
        await plane.join.join(Node().join_request(late, first), source="s")
    assert caught.value.reason in {Reason.TOKEN_MALFORMED, Reason.TOKEN_REVOKED}
    retired = await site.bundle()
    newer = trust.accept(
        retired.signed,
        held=bundle,
        trust_domain="bc.local",
        pinned_keys=bundle.content.join_signing_keys,
    )
    assert newer is not None
    assert newer.content.join_signing_keys == (second.join_signing.public_key(),)


async def test_a_step_leaves_behind_whom_an_operator_names_and_says_so(site: Site) -> None:
    for node_id in ("n1", "n2", "n3"):
        await site.plane.joined(Node(), node_id=node_id)
        await site.hold(node_id, version=1, connected=False)
    await site.prepare(Purpose.SERVING_CA)
    await site.hold("n3", version=2)
    with pytest.raises(Refused, match=r"1 nodes do not hold trust version 2.*: n2; .*--except NODE"):
        await site.switch(Purpose.SERVING_CA, excepted=["n1"])
    # n3 is not behind, and n4 is nobody.
    switched = await site.switch(Purpose.SERVING_CA, excepted=["n1", "n2", "n3", "n4"])
    assert switched.left_behind == ("n1", "n2")
    assert (await site.switch(Purpose.SERVING_CA, excepted=["n1", "n2"])).left_behind == ()
    with pytest.raises(Refused, match="2 nodes still depend on the previous serving-ca: n1, n2;"):
        await site.retire(Purpose.SERVING_CA)
    assert (await site.retire(Purpose.SERVING_CA, excepted=["n1", "n2"])).left_behind == ("n1", "n2")
    acts = [(entry.action, entry.details) for entry in await audit.list_page(site.database, page_size=2)]
    assert acts == [
        ("pki.retire", {"trustVersion": 3, "leftBehind": ["n1", "n2"]}),
        ("pki.switch", {"trustVersion": 2, "leftBehind": ["n1", "n2"]}),
    ]


async def test_the_node_ca(site: Site) -> None:
    node = Node()
    joined = await site.plane.joined(node, node_id="n1")
    old_ca = site.ring.held().node_ca.certificate
    await site.gateway("gw-1", node_cas_sha256=[certificates.spki_sha256(old_ca)])
    await site.prepare(Purpose.NODE_CA)
    with pytest.raises(Refused, match=r"1 gateways do not know the next node-ca .*: gw-1; copy node-ca.pem"):
        await site.switch(Purpose.NODE_CA)
    believed = [site.folder.certificate("node-ca"), site.folder.certificate("node-ca-next")]
    await site.gateway("gw-1", node_cas_sha256=[certificates.spki_sha256(one) for one in believed])
    await site.switch(Purpose.NODE_CA)
    await site.database.query("UPDATE node_certs SET issued_at = issued_at - interval '2 hours'")
    # A certificate of the old CA renews, and gets one of the new.
    request = node.renew_request(joined, next_node=Node(), client_time_ms=WORLD.clock.now_ms())
    renewed = await site.plane.join.renew(request, peer_chain=list(joined.certificate_chain))
    body = messages.JoinResponseBody.FromString(renewed.body)
    new_ca = site.folder.certificate("node-ca")
    assert new_ca != old_ca
    certificates.verify_chain(
        list(body.certificate_chain), roots=[new_ca], use=certificates.Use.CLIENT, now_ms=WORLD.clock.now_ms()
    )
    with pytest.raises(Refused, match="1 nodes still depend on the previous node-ca: n1;"):
        await site.retire(Purpose.NODE_CA)
    await site.database.query("UPDATE node_certs SET revoked_at = compute_now(), revocation_reason = 'lost'")
    # One that a restore has forgotten is in use, too.
    await site.hold("n1", version=1)
    with pytest.raises(Refused, match="1 nodes still depend on the previous node-ca: n1;"):
        await site.retire(Purpose.NODE_CA)
    await site.hold("n1", version=1, connected=False)
    await site.retire(Purpose.NODE_CA)
    assert [ca.certificate for ca in site.ring.read().node_cas] == [new_ca]


async def test_the_serving_ca(site: Site) -> None:
    await site.plane.joined(Node(), node_id="n1")
    old = site.ring.read().serving_ca_pin
    await site.prepare(Purpose.SERVING_CA)
    assert len((await site.bundle()).content.serving_ca_pins) == 2
    with pytest.raises(Refused, match="n1"):
        await site.switch(Purpose.SERVING_CA)
    await site.hold("n1", version=2, connected=False)
    await site.switch(Purpose.SERVING_CA)
    await site.gateway("gw-1", serving_ca_sha256=old)
    with pytest.raises(Refused, match="1 gateways show a certificate of the previous serving-ca: gw-1;"):
        await site.retire(Purpose.SERVING_CA)
    await site.gateway("gw-1", serving_ca_sha256=certificates.spki_sha256(site.folder.certificate("serving-ca")))
    await site.plane.token()
    await site.database.query("UPDATE join_tokens SET created_at = created_at - interval '3 hours'")
    with pytest.raises(Refused, match="1 join tokens that are good pin the previous serving-ca alone: "):
        await site.retire(Purpose.SERVING_CA)
    await site.database.query("UPDATE join_tokens SET revoked_at = compute_now(), revoked_by = 'ops'")
    await site.retire(Purpose.SERVING_CA)
    [pin] = (await site.bundle()).content.serving_ca_pins
    assert pin != old
    assert pin == certificates.spki_sha256(site.folder.certificate("serving-ca"))


@pytest.mark.parametrize(
    ("purpose", "public_der"),
    [(Purpose.COMMAND_ROOT, b"no"), (Purpose.JOIN_SIGNING, b"no"), (Purpose.JOIN_SIGNING, UNKNOWN_KEY)],
    ids=["root", "join", "unknown"],
)
async def test_what_is_no_key_is_refused(site: Site, purpose: Purpose, public_der: bytes) -> None:
    with pytest.raises(Refused, match=r"the new command-root|a new join key") as caught:
        await site.rotating.prepare(purpose=purpose, public_der=public_der, companion_der=b"", asked_by="ops")
    assert caught.value.reason == Reason.BAD_REQUEST


async def test_a_leaf_is_no_ca_and_what_is_not_held_here_is_not_put_in_use(site: Site) -> None:
    leaf = site.folder.certificate("worker").public_bytes(Encoding.DER)
    for purpose in (Purpose.COMMAND_ROOT, Purpose.NODE_CA):  # of node CAs no bundle speaks, which would look again
        with pytest.raises(Refused, match=f"the new {purpose} is not a CA"):
            await site.rotating.prepare(purpose=purpose, public_der=leaf, asked_by="ops")
    now_ms = WORLD.clock.now_ms()
    ended = certificates.make_node_ca(serial=bytes(16), now_ms=now_ms - certificates.AUTHORITY_LIFETIME_MS)
    with pytest.raises(Refused, match="not valid now"):
        await site.rotating.prepare(
            purpose=Purpose.NODE_CA, public_der=ended.certificate.public_bytes(Encoding.DER), asked_by="ops"
        )
    keys = await stored_trust.keys(site.database)
    assert not any(rotation.in_stage(keys, purpose, KeyStage.NEXT) for purpose in Purpose)
    foreign = certificates.make_node_ca(serial=bytes(16), now_ms=now_ms).certificate
    await site.rotating.prepare(purpose=Purpose.NODE_CA, public_der=foreign.public_bytes(Encoding.DER), asked_by="ops")
    with pytest.raises(Refused, match="does not hold the node-ca"):
        await site.rotating.switch(
            purpose=Purpose.NODE_CA, key_sha256=certificates.spki_sha256(foreign), asked_by="ops"
        )


async def test_a_bundle_over_its_bound_is_not_published(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "MAX_TRUST_BUNDLE_BYTES", 900)
    with pytest.raises(Refused, match=r"this cannot be published: .* bytes, the limit is 900") as caught:
        await site.prepare(Purpose.COMMAND_ROOT)
    assert caught.value.reason == Reason.CONFLICT
    keys = await stored_trust.keys(site.database)
    assert not rotation.in_stage(keys, Purpose.COMMAND_ROOT, KeyStage.NEXT)
    assert (await site.bundle()).version == 1
