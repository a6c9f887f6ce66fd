"""The key files of a rotation: whenever the power goes, every key in use is found, and the step can be finished."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bettercompute.pki import certificates, keyfiles
from bettercompute.pki.keyfiles import KeyFolder
from bettercompute.pki.rotation import KeyStage, Purpose, TrustedKey
from bettercompute.services import rotation_files
from bettercompute.services.keys import ServiceKeys, authorities, load_service_keys
from bettercompute.services.pki_setup import initialise
from bettercompute.system import system_world
from tests.unit.pki.crash_disk import CrashDisk, PowerLossError

WORLD = system_world()
STATE = Path("/state/pki")


def public_keys(keys: ServiceKeys) -> dict[Purpose, set[str]]:
    return {
        Purpose.COMMAND_ROOT: {certificates.spki_sha256(root) for root in keys.command_roots},
        Purpose.JOIN_SIGNING: {certificates.spki_sha256(key.public_key()) for key in keys.join_signing_keys},
        Purpose.SERVING_CA: {certificates.spki_sha256(ca) for ca in keys.serving_cas},
        Purpose.NODE_CA: {certificates.spki_sha256(ca.certificate) for ca in keys.node_cas},
    }


def worker_keys(folder: KeyFolder) -> set[str]:
    return {certificates.spki_sha256(worker.certificate) for worker in authorities(folder, keyfiles.WORKER)}


def at(stage: KeyStage, key: TrustedKey) -> TrustedKey:
    return TrustedKey(
        purpose=key.purpose,
        key_sha256=key.key_sha256,
        public_der=key.public_der,
        companion_der=key.companion_der,
        stage=stage,
    )


class Rehearsal:
    """A folder at the beginning of each stage, on a disk that can lose power."""

    def __init__(self, purpose: Purpose) -> None:
        self.purpose = purpose
        self.disks: list[CrashDisk] = []
        disk = CrashDisk()
        initialise(KeyFolder(STATE, disk=disk), world=WORLD)
        held = load_service_keys(KeyFolder(STATE, disk=disk)).by_purpose()
        self.own = next(keys[0] for keys in held if keys[0].purpose is purpose)
        self.disks.append(disk.after_crash(lambda _: True))
        self.new = rotation_files.prepare(KeyFolder(STATE, disk=disk), purpose, world=WORLD)
        self.disks.append(disk.after_crash(lambda _: True))
        rotation_files.put_in_place(KeyFolder(STATE, disk=disk), purpose)
        self.disks.append(disk.after_crash(lambda _: True))

    def copy(self, stage: int, *, stop_before: int | None = None) -> CrashDisk:
        disk = self.disks[stage].after_crash(lambda _: True)
        disk.stop_before, disk.torn = stop_before, True
        return disk


@pytest.mark.parametrize("purpose", Purpose, ids=str)
def test_power_loss_at_every_step(purpose: Purpose) -> None:
    rehearsal = Rehearsal(purpose)
    old, new = rehearsal.own, rehearsal.new
    acts: list[Callable[[KeyFolder], object]] = [
        lambda folder: rotation_files.prepare(folder, purpose, world=WORLD),
        lambda folder: rotation_files.put_in_place(folder, purpose),
        lambda folder: rotation_files.drop_previous(folder, purpose),
    ]
    # What has to be found whatever happens: the key in use, and after `prepare` the next one too.
    needed = [{old.key_sha256}, {old.key_sha256, new.key_sha256}, {new.key_sha256}]
    for stage, act in enumerate(acts):
        counted = rehearsal.copy(stage)
        act(KeyFolder(STATE, disk=counted))
        for step in range(counted.steps):
            for kept in (set(), set(range(100))):
                disk = rehearsal.copy(stage, stop_before=step)
                with pytest.raises(PowerLossError):
                    act(KeyFolder(STATE, disk=disk))
                folder = KeyFolder(STATE, disk=disk.after_crash(kept.__contains__))
                found = load_service_keys(folder)
                assert needed[stage] <= public_keys(found)[purpose]
                act(folder)
                found = load_service_keys(folder)
                assert needed[stage] <= public_keys(found)[purpose]
    folder = KeyFolder(STATE, disk=rehearsal.copy(2))
    rotation_files.drop_previous(folder, purpose)
    assert public_keys(load_service_keys(folder))[purpose] == {new.key_sha256}
    assert rotation_files.next_key_sha256(folder, purpose) == new.key_sha256


def test_a_pair_is_found_whatever_names_its_halves_have() -> None:
    rehearsal = Rehearsal(Purpose.JOIN_SIGNING)
    current, previous = at(KeyStage.CURRENT, rehearsal.new), at(KeyStage.PREVIOUS, rehearsal.own)
    counted = rehearsal.copy(1)
    rotation_files.put_in_place(KeyFolder(STATE, disk=counted), Purpose.JOIN_SIGNING)
    for step in range(counted.steps):
        disk = rehearsal.copy(1, stop_before=step)
        with pytest.raises(PowerLossError):
            rotation_files.put_in_place(KeyFolder(STATE, disk=disk), Purpose.JOIN_SIGNING)
        folder = KeyFolder(STATE, disk=disk.after_crash(lambda _: False))
        keys = load_service_keys(folder).in_use((current, previous))
        assert certificates.spki_sha256(keys.join_signing.public_key()) == current.key_sha256
        assert keys.answering(keys.join_encryption.public_key()) is keys.join_signing
        # Bundles and renewals: by the key that nodes know which were away.
        assert certificates.spki_sha256(keys.answering(None).public_key()) == previous.key_sha256


def test_a_worker_key_comes_with_its_root() -> None:
    rehearsal = Rehearsal(Purpose.COMMAND_ROOT)
    prepared = KeyFolder(STATE, disk=rehearsal.copy(1))
    before = worker_keys(prepared)
    assert len(before) == 2
    assert rotation_files.prepare(prepared, Purpose.COMMAND_ROOT, world=WORLD) == rehearsal.new
    assert worker_keys(prepared) == before
    done = KeyFolder(STATE, disk=rehearsal.copy(2))
    rotation_files.drop_previous(done, Purpose.COMMAND_ROOT)
    chain = certificates.chain_from_pem(done.pem(keyfiles.WORKER))
    root = done.certificate(keyfiles.COMMAND_ROOT)
    certificates.verify_chain(chain, roots=[root], use=certificates.Use.INTENT, now_ms=WORLD.clock.now_ms())


def test_while_a_ca_is_rotated_its_file_lists_both(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "pki")
    initialise(folder, world=WORLD)
    old = folder.certificate(keyfiles.NODE_CA)
    rotation_files.prepare(folder, Purpose.NODE_CA, world=WORLD)
    assert [len(certificates.chain_from_pem(folder.pem(name))) for name in (keyfiles.NODE_CA, keyfiles.SERVING_CA)] == [
        2,
        1,
    ]
    assert folder.certificate(keyfiles.NODE_CA) == old
    rotation_files.put_in_place(folder, Purpose.NODE_CA)
    assert len(certificates.chain_from_pem(folder.pem(keyfiles.NODE_CA))) == 2
    assert folder.authority(keyfiles.NODE_CA).certificate != old
    rotation_files.drop_previous(folder, Purpose.NODE_CA)
    assert len(certificates.chain_from_pem(folder.pem(keyfiles.NODE_CA))) == 1
