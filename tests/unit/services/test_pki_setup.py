"""`pki init` writes everything or nothing, and never over what is there."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from bettercompute.errors import Refused
from bettercompute.pki import certificates, keyfiles
from bettercompute.pki.certificates import Use
from bettercompute.pki.keyfiles import KeyFolder
from bettercompute.protocol.statuses import Reason
from bettercompute.services.keys import load_service_keys
from bettercompute.services.pki_setup import initialise, issue_gateway
from bettercompute.system import system_world
from tests.unit.pki.crash_disk import CrashDisk, PowerLossError

WORLD = system_world()
NAMES = ("command-root", "join-encryption", "join-signing", "node-ca", "serving-ca", "worker")


def test_all_keys_are_made_and_readable_by_their_owner_only(tmp_path):
    folder = KeyFolder(tmp_path / "state" / "pki")
    assert initialise(folder, world=WORLD) == NAMES
    files = sorted(path.name for path in folder.folder.iterdir())
    assert files == sorted(f"{name}.{ending}" for name in NAMES for ending in ("key", "pem"))
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.folder.iterdir())
    keys = load_service_keys(folder)
    now_ms = WORLD.clock.now_ms()
    worker_chain = certificates.chain_from_pem(folder.pem(keyfiles.WORKER))
    worker = certificates.verify_chain(worker_chain, roots=[keys.command_root], use=Use.INTENT, now_ms=now_ms)
    assert worker.public_key() == folder.key(keyfiles.WORKER).public_key()
    public = keyfiles.public_key_from_pem(folder.pem(keyfiles.JOIN_SIGNING), name="join-signing")
    assert public == keys.join_signing.public_key()


def test_keys_that_are_there_are_not_overwritten(tmp_path):
    folder = KeyFolder(tmp_path)
    initialise(folder, world=WORLD)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(Refused, match="holds keys already") as caught:
        initialise(folder, world=WORLD)
    assert caught.value.reason == Reason.CONFLICT
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_power_loss_leaves_all_keys_or_none():
    state = Path("/state/pki")
    rehearsal = CrashDisk()
    initialise(KeyFolder(state, disk=rehearsal), world=WORLD)
    for step in range(rehearsal.steps):
        for kept in (set(), set(range(100))):
            disk = CrashDisk(stop_before=step, torn=True)
            with pytest.raises(PowerLossError):
                initialise(KeyFolder(state, disk=disk), world=WORLD)
            folder = KeyFolder(state, disk=disk.after_crash(kept.__contains__))
            assert folder.names() in ([], list(NAMES))
            if not folder.names():
                initialise(folder, world=WORLD)
            load_service_keys(folder)


def test_a_gateway_gets_a_leaf_below_the_serving_ca(tmp_path):
    folder = KeyFolder(tmp_path)
    initialise(folder, world=WORLD)
    for _ in range(2):
        leaf = issue_gateway(folder, names=["gw.example.org", "127.0.0.1"], world=WORLD)
        chain = certificates.chain_from_pem(folder.pem("gateway"))
        assert len(chain) == 2
        roots = [folder.certificate(keyfiles.SERVING_CA)]
        assert certificates.verify_chain(chain, roots=roots, use=Use.SERVER, now_ms=WORLD.clock.now_ms()) == leaf
        assert folder.key("gateway").public_key() == leaf.public_key()


def test_without_a_serving_ca_there_is_no_leaf(tmp_path):
    with pytest.raises(Refused, match=r"serving-ca\.key cannot be used: there is no such file: run"):
        issue_gateway(KeyFolder(tmp_path), names=["gw"], world=WORLD)
