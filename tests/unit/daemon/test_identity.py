"""The identity on disk: whole or none, whenever the power goes, and never a second request where one was sent."""

from __future__ import annotations

import errno
import json
import stat
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from bettercompute.daemon.identity import (
    Identity,
    IdentityStore,
    Issued,
    Machine,
    MachineChange,
    Purpose,
)
from bettercompute.errors import Refused
from bettercompute.pki import certificates, identity_file, keyfiles, trust
from bettercompute.pki.identity import NodeIdentity
from bettercompute.pki.quorum import NO_APPROVERS, ApproverSet, SetChange, make_approver_set
from bettercompute.pki.trust import Trust, TrustContent
from bettercompute.protocol.statuses import Reason
from tests.unit.pki.crash_disk import CrashDisk, PowerLossError

NOW_MS = 1_800_000_000_000
STATE = Path("/var/lib/bcd")
MACHINE = Machine(machine_id="m1", dmi_uuid="u1")
SIGNING = certificates.generate_key()
NODE_CA = certificates.make_node_ca(serial=bytes(16), now_ms=NOW_MS)


KEY_BYTES = certificates.generate_key().public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def quorum_of(epoch: int, *keys: bytes) -> ApproverSet:
    return make_approver_set(keys, epoch=epoch, threshold=1, tiers=[1])


def make_trust(*, held: Trust | None = None, domain: str = "bc.local", approvers: ApproverSet = NO_APPROVERS) -> Trust:
    content = TrustContent(
        trust_domain=domain,
        command_roots=(),
        join_signing_keys=(SIGNING.public_key(),),
        join_encryption_keys=(SIGNING.public_key(),),
        serving_ca_pins=("ab" * 32,) if held is None else ("cd" * 32,),
        approvers=approvers,
    )
    return trust.sign(content, version=1 if held is None else held.version + 1, key=SIGNING, now_ms=NOW_MS)


TRUST = make_trust()


@dataclass
class ControlPlane:
    """Answers a request once and for all: the same request gets the same certificate."""

    node_id: str = "n1"
    trust: Trust = TRUST
    answers: dict[bytes, Issued] = field(default_factory=dict)

    def answer(self, csr_der: bytes) -> Issued:
        if csr_der not in self.answers:
            leaf = certificates.make_node_leaf(
                NODE_CA,
                public_key=certificates.check_csr(csr_der),
                identity=NodeIdentity(trust_domain="bc.local", site="default", node_id=self.node_id, role="node"),
                serial=(len(self.answers) + 1).to_bytes(16, "big"),
                now_ms=NOW_MS,
            )
            self.answers[csr_der] = Issued(
                chain_der=(leaf.public_bytes(Encoding.DER), NODE_CA.certificate.public_bytes(Encoding.DER)),
                trust=self.trust,
                identity_generation=1,
                gateway_urls=("https://gw:443",),
                server_time_ms=NOW_MS,
            )
        return self.answers[csr_der]


def held(store: IdentityStore) -> Identity:
    identity = store.load()
    assert identity is not None
    return identity


def obtain(store: IdentityStore, plane: ControlPlane, *, purpose: Purpose = Purpose.JOIN, label: str = "t") -> Identity:
    request = store.pending(purpose, label=label)
    return store.install(purpose, request, plane.answer(request.csr_der), machine=MACHINE)


def joined(plane: ControlPlane | None = None) -> tuple[CrashDisk, IdentityStore]:
    disk = CrashDisk()
    store = IdentityStore(STATE, disk=disk)
    obtain(store, plane or ControlPlane())
    return disk, store


def test_a_node_that_has_not_joined_has_none(tmp_path):
    store = IdentityStore(tmp_path / "state")
    assert store.load() is None
    store.settle()
    assert not (tmp_path / "state").exists()


def test_an_identity_is_on_disk_as_described(tmp_path):
    store = IdentityStore(tmp_path / "state")
    made = obtain(store, ControlPlane())
    loaded = store.load()
    assert loaded is not None
    assert replace(loaded, key=made.key) == made
    assert loaded.key.private_numbers() == made.key.private_numbers()
    serial = made.record.certificate_serial
    folder = tmp_path / "state" / "identity.d"
    assert sorted(path.name for path in folder.iterdir()) == [serial, "current"]
    assert (folder / "current").readlink() == Path(serial)
    assert sorted(path.name for path in (folder / serial).iterdir()) == ["node.key", "node.pem", "trust-bundle.bin"]
    for path in (tmp_path / "state").rglob("*"):
        if not path.is_symlink():
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    record = json.loads((tmp_path / "state" / "identity.json").read_bytes())
    assert record == {
        "format": 1,
        "certificate_serial": serial,
        "node_id": "n1",
        "site": "default",
        "trust_domain": "bc.local",
        "role": "node",
        "identity_generation": 1,
        "gateway_urls": ["https://gw:443"],
        "applied_generation": 0,
        "server_time_mark_ms": NOW_MS,
        "machine_id": "m1",
        "dmi_uuid": "u1",
        "approvers": None,
    }


def test_a_key_is_not_shown():
    _, store = joined()
    assert "PRIVATE" not in repr(store.load())
    assert "key=" not in repr(store.load())
    assert "key=" not in repr(store.pending(Purpose.RENEW, label="x"))


def test_a_certificate_is_renewed_at_two_thirds():
    _, store = joined()
    identity = store.load()
    assert identity is not None
    assert identity.renew_at_ms == NOW_MS + 16 * 60 * 60 * 1000
    assert identity.not_after_ms == NOW_MS + 24 * 60 * 60 * 1000


def test_a_request_is_asked_again_with_the_same_key():
    _, store = joined()
    first = store.pending(Purpose.RENEW, label="serial")
    assert store.pending(Purpose.RENEW, label="serial").csr_der == first.csr_der
    other = store.pending(Purpose.RENEW, label="another")
    assert other.csr_der != first.csr_der
    assert store.pending(Purpose.JOIN, label="another").csr_der != other.csr_der


@pytest.mark.parametrize("name", ["node.key", "node.csr", "purpose"])
def test_a_damaged_request_is_made_anew(tmp_path, name):
    store = IdentityStore(tmp_path)
    first = store.pending(Purpose.JOIN, label="t")
    (tmp_path / "identity.d" / "pending-join" / name).write_bytes(b"damaged")
    assert store.pending(Purpose.JOIN, label="t").csr_der != first.csr_der


def test_renewal_keeps_the_marks_and_drops_the_old_key():
    plane = ControlPlane()
    disk, store = joined(plane)
    store.raise_marks(applied_generation=7, server_time_ms=NOW_MS + 5)
    old = store.load()
    new = obtain(store, plane, purpose=Purpose.RENEW, label="serial")
    assert old is not None
    assert new.record.certificate_serial != old.record.certificate_serial
    assert (new.record.applied_generation, new.record.server_time_mark_ms) == (7, NOW_MS + 5)
    assert disk.names(STATE / "identity.d") == [new.record.certificate_serial, "current"]


def test_another_node_id_begins_with_its_own_marks():
    _, store = joined()
    store.raise_marks(applied_generation=7)
    assert obtain(store, ControlPlane(node_id="n2"), label="t2").record.applied_generation == 0


def test_marks_only_rise():
    disk, store = joined()
    store.raise_marks(applied_generation=7, server_time_ms=NOW_MS + 10)
    steps = disk.steps
    record = store.raise_marks(applied_generation=6, server_time_ms=NOW_MS)
    assert (record.applied_generation, record.server_time_mark_ms) == (7, NOW_MS + 10)
    assert disk.steps == steps
    assert store.reset_clock(server_time_ms=5).server_time_mark_ms == 5


def test_the_enforced_approvers_outlive_a_rejoin_and_change_only_by_their_own_hand():
    first, second = (quorum_of(epoch, KEY_BYTES) for epoch in (1, 2))
    store = IdentityStore(STATE, disk=CrashDisk())
    plane = ControlPlane(trust=make_trust(approvers=first))
    obtain(store, plane)
    assert held(store).record.approvers == first, "the first set is taken at join"
    plane.trust = make_trust(held=plane.trust, approvers=second)
    obtain(store, plane, label="again")
    assert held(store).record.approvers == first, "a re-join with another set that nobody signed"
    plane.trust = make_trust(held=plane.trust)
    obtain(store, plane, label="third")
    assert held(store).record.approvers == first, "nor does a bundle without a set end it"
    taken = store.take_trust(make_trust(held=held(store).trust, approvers=second).signed)
    assert taken is not None
    assert (taken.approvers, taken.change) == (first, SetChange.NOT_SIGNED)
    assert held(store).record.approvers == first, "nor a newer bundle with a set that nobody signed"
    plane.node_id, plane.trust = "n2", make_trust(held=taken.trust, approvers=second)
    obtain(store, plane, label="elsewhere")
    assert held(store).record.approvers == first, "nor another name, which the control plane gives"


def test_an_approver_set_that_cannot_be_read_is_refused_like_the_rest():
    disk, store = joined()
    path = STATE / "identity.json"
    content = json.loads(disk.read(path) or b"") | {"approvers": {"epoch": 1, "keys": ["AA=="], "threshold": 1}}
    disk.write_synced(path.with_name("next"), json.dumps(content).encode())
    disk.rename(path.with_name("next"), path)
    with pytest.raises(Refused, match="approvers is no approver set"):
        store.load()


def test_a_newer_bundle_replaces_the_one_held():
    _, store = joined()
    newer = make_trust(held=TRUST)
    taken = store.take_trust(newer.signed)
    assert taken is not None
    assert held(store).trust == taken.trust == newer
    assert store.take_trust(TRUST.signed) is None
    assert held(store).trust == newer


def test_an_answer_that_was_held_back_brings_no_older_bundle_back():
    plane = ControlPlane()
    _, store = joined(plane)
    request = store.pending(Purpose.RENEW, label="serial")
    late = plane.answer(request.csr_der)
    newer = make_trust(held=TRUST)
    store.take_trust(newer.signed)
    store.install(Purpose.RENEW, request, late, machine=MACHINE)
    assert held(store).trust == newer


@pytest.mark.parametrize("change", [IdentityStore.raise_marks, lambda store: store.take_trust(TRUST.signed)])
def test_without_an_identity_there_is_nothing_to_change(tmp_path, change):
    with pytest.raises(Refused, match="holds no identity: join first") as caught:
        change(IdentityStore(tmp_path))
    assert caught.value.reason == Reason.NOT_JOINED


@pytest.mark.parametrize(
    ("machine", "change"),
    [
        (MACHINE, MachineChange.NONE),
        (Machine(), MachineChange.NONE),
        (Machine(machine_id="m2"), MachineChange.ONE),
        (Machine(machine_id="m2", dmi_uuid="u1"), MachineChange.ONE),
        (Machine(machine_id="m1", dmi_uuid="u2"), MachineChange.ONE),
        (Machine(machine_id="m2", dmi_uuid="u2"), MachineChange.BOTH),
    ],
)
def test_another_machine_is_noticed(machine, change):
    _, store = joined()
    identity = store.load()
    assert identity is not None
    assert identity.machine_change(machine) == change
    store.adopt(machine)
    adopted = store.load()
    assert adopted is not None
    assert adopted.machine_change(machine) == MachineChange.NONE


def provisioned(folder: Path) -> Identity:
    """What `nodes provision` leaves: the same files, flat."""
    store = IdentityStore(folder / "by-hand")
    identity = obtain(store, ControlPlane(node_id="p1"))
    source = folder / "by-hand" / "identity.d" / identity.record.certificate_serial
    (folder / "given").mkdir()
    for name in ("node.key", "node.pem", "trust-bundle.bin"):
        (folder / "given" / name).write_bytes((source / name).read_bytes())
    record = replace(identity.record, machine_id=None, dmi_uuid=None)
    (folder / "given" / "identity.json").write_bytes(identity_file.encode(record))
    (folder / "given" / "serving-ca.pem").write_bytes(b"-----BEGIN CERTIFICATE-----")
    return identity


def test_a_provisioned_folder_is_taken_over(tmp_path):
    given = provisioned(tmp_path)
    store = IdentityStore(tmp_path / "state")
    imported = store.import_folder(tmp_path / "given", machine=MACHINE)
    assert imported.record == given.record
    loaded = store.load()
    assert loaded is not None
    assert loaded.record == given.record
    assert (tmp_path / "state" / "identity.d" / "current" / "serving-ca.pem").read_bytes().startswith(b"-----BEGIN")
    store.raise_marks(applied_generation=3)
    assert store.import_folder(tmp_path / "given", machine=MACHINE).record.applied_generation == 3


def test_a_damaged_identity_is_repaired_by_importing_it_again(tmp_path):
    provisioned(tmp_path)
    store = IdentityStore(tmp_path / "state")
    store.import_folder(tmp_path / "given", machine=MACHINE)
    (tmp_path / "state" / "identity.d" / "current" / "node.key").write_bytes(b"")
    with pytest.raises(Refused):
        store.load()
    store.import_folder(tmp_path / "given", machine=MACHINE)
    assert store.load() is not None


@pytest.mark.parametrize("name", ["node.key", "node.pem", "trust-bundle.bin", "identity.json"])
def test_a_folder_that_is_not_whole_is_refused_by_name(tmp_path, name):
    provisioned(tmp_path)
    (tmp_path / "given" / name).unlink()
    store = IdentityStore(tmp_path / "state")
    with pytest.raises(Refused, match=f"{name} cannot be used: there is no such file"):
        store.import_folder(tmp_path / "given", machine=MACHINE)
    assert store.load() is None


def damage(state: Path, pattern: str, content: bytes) -> None:
    next(iter(state.glob(pattern))).write_bytes(content)


OTHER_KEY = keyfiles.key_to_pem(certificates.generate_key())
OTHER_CHAIN = certificates.chain_to_pem(
    ControlPlane(node_id="other").answer(certificates.make_csr(certificates.generate_key())).chain_der
)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("identity.d/*/node.key", b"", "node.key cannot be used"),
        ("identity.d/*/node.key", OTHER_KEY, "not the key of node.pem"),
        ("identity.d/*/node.pem", b"", "node.pem cannot be used"),
        ("identity.d/*/node.pem", OTHER_CHAIN, "node.(pem|key) cannot be used: it is not the"),
        ("identity.d/*/trust-bundle.bin", b"\xff", "trust-bundle.bin cannot be used"),
        ("identity.d/*/trust-bundle.bin", make_trust(domain="other").signed, "of another trust domain"),
        ("identity.json", b"", "it is no JSON"),
        ("identity.json", b"[]", "not of format 1"),
        ("identity.json", b"[" * 60_000, "it is no JSON"),
        ("identity.json", b" " * 70_000, "not of format 1"),
        ("identity.json", b'{"format": 2}', "not of format 1: was it written by a newer bcd"),
        ("identity.json", b'{"format": 1}', "certificate_serial is missing"),
    ],
)
def test_a_damaged_file_is_named_with_the_cure(tmp_path, name, content, why):
    obtain(IdentityStore(tmp_path), ControlPlane())
    damage(tmp_path, name, content)
    with pytest.raises(Refused, match=why) as caught:
        IdentityStore(tmp_path).load()
    assert "bcd join" in caught.value.message
    assert obtain(IdentityStore(tmp_path), ControlPlane(), label="new token").record.node_id == "n1"


@pytest.mark.parametrize(
    ("field_name", "value", "why"),
    [
        ("certificate_serial", "../../etc", "not a serial number"),
        ("certificate_serial", "", "certificate_serial is missing"),
        ("node_id", 5, "node_id is missing or not a text"),
        ("node_id", "other", "not the certificate that identity.json describes"),
        ("role", "site", "not the certificate that identity.json describes"),
        ("gateway_urls", [], "gateway_urls is not a list of URLs"),
        ("gateway_urls", "https://gw", "gateway_urls is not a list of URLs"),
        ("gateway_urls", ["http://gw"], "is not a gateway URL"),
        ("applied_generation", -1, "applied_generation is missing or not a whole number"),
        ("applied_generation", True, "applied_generation is missing or not a whole number"),
        ("server_time_mark_ms", None, "server_time_mark_ms is missing or not a whole number"),
        ("machine_id", 5, "machine_id is missing or not a text"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, field_name, value, why):
    obtain(IdentityStore(tmp_path), ControlPlane())
    path = tmp_path / "identity.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field_name: value}))
    with pytest.raises(Refused, match=why):
        IdentityStore(tmp_path).load()


def test_a_field_of_a_later_release_is_ignored(tmp_path):
    obtain(IdentityStore(tmp_path), ControlPlane())
    path = tmp_path / "identity.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "later": {}}))
    assert IdentityStore(tmp_path).load() is not None


# Power loss. Each scenario has a beginning that is safe on disk, and a change that is stopped at every step.

Scenario = tuple[str, Callable[[IdentityStore, ControlPlane], object], Callable[[IdentityStore, ControlPlane], object]]


def nothing(store: IdentityStore, plane: ControlPlane) -> None:
    """Begin without an identity."""


def renew(store: IdentityStore, plane: ControlPlane) -> None:
    identity = store.load()
    assert identity is not None
    obtain(store, plane, purpose=Purpose.RENEW, label=identity.record.certificate_serial)


def rejoin(store: IdentityStore, plane: ControlPlane) -> None:
    identity = store.load()
    assert identity is not None
    obtain(store, plane, purpose=Purpose.REJOIN, label=identity.record.certificate_serial)


def join_elsewhere(store: IdentityStore, plane: ControlPlane) -> None:
    plane.node_id = "n2"
    obtain(store, plane, label="t2")


def write_marks(store: IdentityStore, plane: ControlPlane) -> None:
    store.raise_marks(applied_generation=9)
    store.take_trust(make_trust(held=TRUST).signed)


SCENARIOS: list[Scenario] = [
    ("join", nothing, obtain),
    ("renew", obtain, renew),
    ("re-join", obtain, rejoin),
    ("join elsewhere", obtain, join_elsewhere),
    ("marks", obtain, write_marks),
]


@cache
def begun(scenario: Scenario) -> tuple[CrashDisk, ControlPlane]:
    _, begin, _ = scenario
    disk, plane = CrashDisk(), ControlPlane()
    begin(IdentityStore(STATE, disk=disk), plane)
    return disk, plane


@cache
def steps(scenario: Scenario) -> tuple[str, ...]:
    """What the change does to the disk, step by step."""
    disk, plane = begun(scenario)
    rehearsal = disk.copy(stop_after=-1)
    scenario[2](IdentityStore(STATE, disk=rehearsal), replace(plane, answers=dict(plane.answers)))
    return tuple(rehearsal.log)


def crash(scenario: Scenario, step: int, *, torn: bool, kept: set[int], fail_with: int | None = None) -> None:
    """Stop at `step`, restart on what survived, look, and do the same again."""
    change = scenario[2]
    first_disk, first_plane = begun(scenario)
    disk = first_disk.copy(stop_after=step, torn=torn, fail_with=fail_with)
    plane = replace(first_plane, answers=dict(first_plane.answers))
    store = IdentityStore(STATE, disk=disk)
    before = store.load()
    asked_before = len(plane.answers)
    with pytest.raises((PowerLossError, OSError)):
        change(store, plane)
    survivor = disk.after_crash(kept.__contains__)
    restarted = IdentityStore(STATE, disk=survivor)
    after = restarted.load()
    assert (after is None) == (before is None) or before is None
    if before is not None and after is not None:
        known = {before.record.certificate_serial, *map(serial_of, plane.answers.values())}
        assert after.record.certificate_serial in known
        assert after.record.applied_generation >= before.record.applied_generation
    restarted.settle()
    assert (restarted.load() is None) == (after is None)
    if after is not None:
        assert survivor.link_target(STATE / "identity.d" / "current") == after.record.certificate_serial
    asked = len(plane.answers)
    if after is None or (before is not None and after.record.certificate_serial == before.record.certificate_serial):
        # The change did not take: done again it takes, and asks with the request that may have been sent.
        change(restarted, plane)
        assert len(plane.answers) <= max(asked, asked_before + 1)
    final = IdentityStore(STATE, disk=survivor.after_crash(set().__contains__)).load()
    assert final is not None
    assert final.record.node_id == plane.node_id


def serial_of(issued: Issued) -> str:
    return certificates.serial_text(certificates.load_certificate(issued.chain_der[0]))


by_name = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario[0])
ALL = set(range(200))


@by_name
@pytest.mark.parametrize(
    "kept", [set(), ALL, set(range(0, 200, 2)), set(range(1, 200, 2))], ids=["none", "all", "even", "odd"]
)
def test_power_loss_leaves_an_identity_or_none_and_no_lock_out(scenario, kept):
    for step, what in enumerate(steps(scenario)):
        crash(scenario, step, torn=False, kept=kept)
        if what.startswith("write"):
            crash(scenario, step, torn=True, kept=kept)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SCENARIOS), st.integers(min_value=0), st.booleans(), st.sets(st.integers(0, 60)))
def test_power_loss_with_any_part_of_the_unsynced_kept(scenario, step, torn, kept):
    crash(scenario, step % len(steps(scenario)), torn=torn, kept=kept)


@by_name
def test_a_step_that_fails_leaves_what_was_there(scenario):
    for step, _ in enumerate(steps(scenario)):
        crash(scenario, step, torn=True, kept=ALL, fail_with=errno.ENOSPC)
