"""The journal's folder and files: who may have it, where it must not be, and the seal and ballast beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bettercompute.daemon import journal_files
from bettercompute.daemon.journal_files import Ballast, FolderLock, Seal, file_system_of, prepare_folder
from bettercompute.errors import Refused, Unavailable

MOUNTINFO = """\
21 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
22 21 0:40 / /srv rw,relatime shared:1 - nfs4 filer:/export rw
23 22 8:2 / /srv/local\\040disk rw - xfs /dev/sdb1 rw
24 21 0:41 / /mnt rw - tmpfs tmpfs rw
25 21 0:42 / /mnt rw master:2 - fuse.sshfs host: rw
nonsense
"""


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("/var/lib/bcd", "ext4"),
        ("/srv", "nfs4"),
        ("/srv/bcd", "nfs4"),
        ("/srv/local disk/x", "xfs"),
        ("/mnt/x", "fuse.sshfs"),
    ],
)
def test_the_file_system_is_that_of_the_deepest_and_latest_mount(tmp_path: Path, folder: str, expected: str) -> None:
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(MOUNTINFO)
    assert file_system_of(Path(folder), mountinfo) == expected


def test_an_unreadable_mount_table_tells_nothing(tmp_path: Path) -> None:
    assert file_system_of(tmp_path, tmp_path / "missing") == ""


@pytest.mark.parametrize("kind", ["nfs4", "fuse.ceph-fuse", "pvfs2", "wekafs"])
def test_a_network_file_system_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(journal_files, "file_system_of", lambda *_: kind)
    with pytest.raises(Refused, match=rf"network file system \({kind}\).*local disk") as caught:
        prepare_folder(tmp_path / "state")
    assert caught.value.reason == "network-file-system"


def test_the_folder_is_made_private_or_tightened(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "state"
    prepare_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    prepare_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_what_can_never_be_a_folder_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for folder in (tmp_path / "file", tmp_path / "file" / "state", tmp_path / "dangling"):
        with pytest.raises(Refused, match=f"state_dir {folder} is no folder, or lies below a file") as caught:
            prepare_folder(folder)
        assert caught.value.reason == "state-dir-no-folder"


def test_one_daemon_per_folder(tmp_path: Path) -> None:
    lock = FolderLock.take(tmp_path)
    with pytest.raises(Unavailable, match=rf"another bcd \(process {os.getpid()}\) holds the state folder") as caught:
        FolderLock.take(tmp_path)
    assert caught.value.reason == "state-dir-locked"
    lock.release()
    lock.release()
    FolderLock.take(tmp_path).release()


def test_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from bettercompute.daemon.journal_files import FolderLock\n"
        "FolderLock.take(pathlib.Path(sys.argv[1]))\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"locked\n"
        with pytest.raises(Unavailable):
            FolderLock.take(tmp_path)
    finally:
        child.kill()
        child.wait(timeout=30)
        child.stdin.close()
        child.stdout.close()
    FolderLock.take(tmp_path).release()


def test_the_seal_survives_a_torn_write(tmp_path: Path) -> None:
    seal = Seal(tmp_path / "seal")
    assert seal.read() is None
    birth = b"b" * 16
    seal.create(birth, 0)
    for commits in range(1, 6):
        seal.write(birth, commits)
        assert Seal(seal.path).read() == (birth, commits)
    seal.close()
    data = bytearray(seal.path.read_bytes())
    newest = 5 % 2 * 4096
    data[newest + 20] ^= 1
    seal.path.write_bytes(data)
    assert seal.read() == (birth, 4)
    seal.path.write_bytes(bytes(len(data)))
    assert seal.read() is None


def test_the_ballast_is_taken_and_freed(tmp_path: Path) -> None:
    ballast = Ballast(tmp_path / "ballast", 1_000_000)
    assert not ballast.held()
    assert ballast.take()
    assert ballast.held()
    assert ballast.path.stat().st_blocks * 512 >= 1_000_000, "space that is only promised is no ballast"
    assert ballast.free()
    assert not ballast.free()


def test_the_ballast_never_takes_the_last_space(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    ballast = Ballast(tmp_path / "ballast", free.f_bavail * free.f_frsize * 2 // 3)
    assert not ballast.take()
    assert not ballast.path.exists()
