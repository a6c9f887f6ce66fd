"""The development stack's folder: locked, and nothing of a killed one stays behind."""

import fcntl
import tempfile
from pathlib import Path

import pytest

from bettercompute.errors import Refused
from bettercompute.server import dev


def test_a_named_folder_is_kept_and_taken_by_one(tmp_path: Path) -> None:
    with dev.dev_folder(tmp_path / "stack") as folder:
        (folder / "kept").touch()
        with pytest.raises(Refused, match="another development stack runs"), dev.dev_folder(folder):
            raise AssertionError("never entered")
    assert (tmp_path / "stack" / "kept").exists()


def test_a_temporary_folder_is_removed_and_so_is_what_a_killed_stack_left(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, alive = (tmp_path / f"{dev.TEMPORARY_PREFIX}{name}" for name in ("killed", "alive"))
    sockets = tmp_path / "bc-pg-x"
    for folder in (killed, alive):
        (folder / "postgres").mkdir(parents=True)
        (folder / "lock").touch()
    sockets.mkdir()
    (killed / "postgres" / "socket-folder").write_text(f"{sockets}\n")
    with (alive / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with dev.dev_folder(None) as folder:
            assert folder.parent == tmp_path
            assert folder.stat().st_mode & 0o777 == 0o700
        assert (killed.exists(), sockets.exists(), alive.exists(), folder.exists()) == (False, False, True, False)
