"""An approver's key file: for its owner only, never replaced, and no use once others could have read it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bettercompute.cli import approver_keys
from bettercompute.cli.better_compute import app

RUNNER = CliRunner()


def test_a_key_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "alice.key"
    done = RUNNER.invoke(app, ["pki", "approvers", "keygen", "--out", str(path)])
    assert done.exit_code == 0, done.output
    made = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert set(made) == {"alice.key", "alice.key.pub"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"PRIVATE" not in made["alice.key.pub"]
    again = RUNNER.invoke(app, ["pki", "approvers", "keygen", "--out", str(path)])
    assert (again.exit_code, "a key is never replaced" in again.output) == (2, True)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == made


def test_a_key_that_others_could_have_read_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "alice.key"
    approver_keys.make(path)
    approver_keys.read(path)
    path.chmod(0o640)
    with pytest.raises(typer.Exit):
        approver_keys.read(path)
    assert "may be read by others (mode 640)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("pki", "approvers", "propose"), "name the approvers"),
        (("pki", "approvers", "propose", "--approver", "alice"), "write NAME=FILE"),
        (("pki", "approvers", "propose", "--approver", "a={file}", "--nobody"), "or --nobody"),
        (("pki", "approvers", "propose", "--approver", "a={file}"), "holds no PEM public key"),
        (("approve", "b1", "--refuse"), "needs --reason"),
    ],
)
def test_mistakes_are_said(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    (tmp_path / "file").write_text("no key")
    filled = [part.replace("{file}", str(tmp_path / "file")) for part in arguments]
    done = RUNNER.invoke(app, filled, env={"BETTER_COMPUTE_API": "http://127.0.0.1:1", "BETTER_COMPUTE_TOKEN": ""})
    assert done.exit_code == 2, done.output
    assert says in done.output
