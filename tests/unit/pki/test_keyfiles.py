"""Durable small files: every place holds the old or the new content, whenever the power goes."""

from __future__ import annotations

import base64
import errno
import stat
from pathlib import Path

import pytest

from bettercompute.errors import Refused
from bettercompute.pki import certificates, keyfiles
from bettercompute.pki.keyfiles import Disk, KeyFolder, LocalDisk
from tests.unit.pki.crash_disk import CrashDisk, PowerLossError

ROOT = Path("/state")


@pytest.fixture(params=["local", "memory"])
def disk_and_folder(request, tmp_path) -> tuple[Disk, Path]:
    """The real disk and the one in memory keep one contract."""
    if request.param == "local":
        return LocalDisk(), tmp_path
    disk = CrashDisk()
    disk.make_folder(ROOT)
    return disk, ROOT


def test_a_disk_reads_what_was_written(disk_and_folder):
    disk, folder = disk_and_folder
    disk.write_synced(folder / "a", b"one")
    disk.write_synced(folder / "a", b"two")
    assert disk.read(folder / "a") == b"two"
    assert disk.read(folder / "b") is None
    assert disk.read(folder / "a" / "b") is None
    assert disk.names(folder) == ["a"]
    assert disk.names(folder / "none") == []
    assert disk.is_folder(folder)
    assert not disk.is_folder(folder / "a")


def test_a_disk_removes_twice(disk_and_folder):
    disk, folder = disk_and_folder
    disk.make_folder(folder / "sub")
    disk.make_folder(folder / "sub")
    disk.write_synced(folder / "sub" / "a", b"")
    with pytest.raises(OSError, match="not empty"):
        disk.remove_folder(folder / "sub")
    for _ in range(2):
        disk.remove(folder / "sub" / "a")
        disk.remove_folder(folder / "sub")
    disk.sync_folder(folder)
    assert disk.names(folder) == []


def test_a_disk_follows_its_links(disk_and_folder):
    disk, folder = disk_and_folder
    keyfiles.place_folder(disk, folder / "1", {"f": b"one"})
    keyfiles.place_folder(disk, folder / "2", {"f": b"two"})
    for target, content in (("1", b"one"), ("2", b"two")):
        keyfiles.replace_link(disk, folder / "current", target)
        assert disk.link_target(folder / "current") == target
        assert disk.read(folder / "current" / "f") == content
    assert disk.link_target(folder / "1") is None
    assert disk.link_target(folder / "none") is None
    with pytest.raises(FileExistsError):
        disk.link(folder / "current", "1")


def test_a_disk_renames_over_a_file_but_not_over_a_full_folder(disk_and_folder):
    disk, folder = disk_and_folder
    keyfiles.replace_file(disk, folder / "a", b"one")
    keyfiles.replace_file(disk, folder / "a", b"two")
    assert disk.read(folder / "a") == b"two"
    keyfiles.place_folder(disk, folder / "1", {"f": b"one"})
    with pytest.raises(OSError, match="not empty"):
        keyfiles.place_folder(disk, folder / "1", {"f": b"other"})
    with pytest.raises(FileNotFoundError):
        disk.rename(folder / "none", folder / "b")


def stops(change) -> list[tuple[int, bool]]:
    """Every step at which `change(disk)` can be stopped, whole or in the middle of a write."""
    rehearsal = CrashDisk()
    change(rehearsal)
    return [(step, torn) for step in range(rehearsal.steps) for torn in (False, True)]


def prepare(disk: CrashDisk) -> None:
    keyfiles.make_folders(disk, ROOT)
    keyfiles.replace_file(disk, ROOT / "file", b"old")


def replace(disk: CrashDisk) -> None:
    prepare(disk)
    keyfiles.replace_file(disk, ROOT / "file", b"new content")


@pytest.mark.parametrize(("step", "torn"), stops(replace))
@pytest.mark.parametrize("kept", [{0, 2, 4, 6, 8}, {1, 3, 5, 7, 9}, set(range(50)), set()])
def test_a_replaced_file_is_old_or_new(step, torn, kept):
    done = CrashDisk()
    prepare(done)
    disk = CrashDisk(stop_before=step, torn=torn)
    with pytest.raises(PowerLossError):
        replace(disk)
    found = disk.after_crash(kept.__contains__)
    content = found.read(ROOT / "file")
    assert content in ((b"old", b"new content") if step >= done.steps else (b"old", None))
    replace(found)
    assert found.read(ROOT / "file") == b"new content"


def test_a_replaced_file_survives_losing_everything_unsynced():
    disk = CrashDisk()
    replace(disk)
    assert disk.after_crash(set().__contains__).read(ROOT / "file") == b"new content"


def test_files_are_for_their_owner_only(tmp_path):
    folder = KeyFolder(tmp_path / "state" / "pki")
    folder.write_key("join-signing", certificates.generate_key())
    for path in (tmp_path / "state", tmp_path / "state" / "pki"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in (tmp_path / "state" / "pki").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_planted_in_the_place_of_a_file_is_not_followed(tmp_path):
    target = tmp_path / "target"
    target.write_bytes(b"untouched")
    (tmp_path / "a").symlink_to(target)
    LocalDisk().write_synced(tmp_path / "a", b"secret")
    assert target.read_bytes() == b"untouched"
    assert (tmp_path / "a").read_bytes() == b"secret"


def test_a_file_beyond_the_bound_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(keyfiles, "FILE_BYTES_MAX", 10)
    (tmp_path / "a").write_bytes(b"x" * 11)
    with pytest.raises(OSError, match="more than 10 bytes") as caught:
        LocalDisk().read(tmp_path / "a")
    assert caught.value.errno == errno.EFBIG


def test_keys_come_back(tmp_path):
    folder = KeyFolder(tmp_path)
    authority = certificates.make_node_ca(serial=bytes(16), now_ms=1_000_000_000_000)
    key = certificates.generate_key()
    folder.write_authority(keyfiles.NODE_CA, authority)
    folder.write_key(keyfiles.JOIN_SIGNING, key)
    assert folder.names() == ["join-signing", "node-ca"]
    read = folder.authority(keyfiles.NODE_CA)
    assert read.certificate == authority.certificate
    assert read.key.private_numbers() == authority.key.private_numbers()
    assert folder.key(keyfiles.JOIN_SIGNING).private_numbers() == key.private_numbers()
    public_pem = folder.pem(keyfiles.JOIN_SIGNING)
    assert keyfiles.public_key_from_pem(public_pem, name="x") == key.public_key()


def test_a_key_of_another_certificate_is_refused(tmp_path):
    folder = KeyFolder(tmp_path)
    folder.write_authority(keyfiles.NODE_CA, certificates.make_node_ca(serial=bytes(16), now_ms=10**12))
    (tmp_path / "node-ca.key").write_bytes(keyfiles.key_to_pem(certificates.generate_key()))
    with pytest.raises(Refused, match=r"node-ca\.key cannot be used: it is not the key of node-ca\.pem"):
        folder.authority(keyfiles.NODE_CA)


@pytest.mark.parametrize("read", [KeyFolder.authority, KeyFolder.key, KeyFolder.certificate, KeyFolder.pem])
def test_a_missing_key_names_the_file_and_the_cure(tmp_path, read):
    with pytest.raises(Refused, match=r"worker\.(key|pem) cannot be used: .* run `better-compute pki init`"):
        read(KeyFolder(tmp_path), keyfiles.WORKER)


@pytest.mark.parametrize("read", [KeyFolder.authority, KeyFolder.key, KeyFolder.certificate])
def test_a_damaged_key_names_the_file(tmp_path, read):
    for name in ("worker.key", "worker.pem"):
        (tmp_path / name).write_bytes(b"-----BEGIN NONSENSE-----")
    with pytest.raises(Refused, match=r"worker\.(key|pem) cannot be used: it holds no"):
        read(KeyFolder(tmp_path), keyfiles.WORKER)


def test_a_folder_in_the_place_of_a_key_names_the_file(tmp_path):
    (tmp_path / "worker.key").mkdir()
    with pytest.raises(Refused, match=r"worker\.key cannot be used: Is a directory"):
        KeyFolder(tmp_path).key(keyfiles.WORKER)


def test_a_key_of_an_algorithm_that_nobody_has_is_a_mistake_of_the_file():
    unknown = base64.b64encode(bytes.fromhex("300b300506032a030403020001")).decode()
    for read in (keyfiles.public_key_from_pem, keyfiles.key_from_pem):
        what = "PUBLIC" if read is keyfiles.public_key_from_pem else "PRIVATE"
        with pytest.raises(Refused, match="x cannot be used"):
            read(f"-----BEGIN {what} KEY-----\n{unknown}\n-----END {what} KEY-----\n".encode(), name="x")
