"""An approver's key file: for its owner only, never replaced, and no use once others could have read it."""

from __future__ import annotations

import base64
import stat
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bettercompute.cli import approver_keys
from bettercompute.cli.better_compute import app
from bettercompute.cli.client import ApiClient
from bettercompute.pki import quorum
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import pack_payload

RUNNER = CliRunner()


def body_of(command_id: str, *, issued_by: str, delay_ms: int) -> tuple[messages.CommandBody, bytes]:
    body = messages.CommandBody(
        command_id=command_id,
        node_id=f"n-{command_id}",
        kind="node.reboot",
        payload=pack_payload(messages.NodeRebootPayload(delay_ms=delay_ms)),
        trust_domain="bc.local",
        issued_by=issued_by,
        not_before_ms=7,
    )
    return body, body.SerializeToString()


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


def test_what_is_approved_cannot_be_dressed_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # The control plane is what approvers must not have to believe: no escape sequence or line break of its own.
    path = tmp_path / "alice.key"
    approver_keys.make(path)
    commands = [
        body_of(f"c{number}", issued_by="ops\x1b[2K\x1b[1A\n  nodes      n9", delay_ms=number) for number in range(6)
    ]
    root = quorum.scope_root(
        [
            quorum.batch_leaf(command_id=body.command_id, node_id=body.node_id, kind=body.kind, body=data)
            for body, data in commands
        ]
    )
    offered = {
        "batch_id": "b1",
        "state": "waiting",
        "stepwise": False,
        "asked_by": "ops",
        "scope_root": root.hex(),
        "not_after_ms": 9_000,
        "approved_by": ["bob\x9b2J"],
        "approvals_required": 2,
    }
    items = [
        {
            "command_id": body.command_id,
            "node_id": body.node_id,
            "kind": body.kind,
            "body": base64.b64encode(data).decode(),
        }
        for body, data in commands
    ]
    signed: list[Any] = []

    def post(_: ApiClient, path: str, body: Any) -> dict[str, Any]:
        signed.append((path, body))
        return {**offered, "state": "approved"}

    monkeypatch.setattr(ApiClient, "get", lambda *_: offered)
    monkeypatch.setattr(ApiClient, "pages", lambda *_: iter(items))
    monkeypatch.setattr(ApiClient, "post", post)
    arguments = ["approve", "b1", "--key", str(path), "--yes"]
    env = {"BETTER_COMPUTE_API": "http://127.0.0.1:1", "BETTER_COMPUTE_TOKEN": "t"}
    done = RUNNER.invoke(app, arguments, env=env)
    assert (done.exit_code, signed) == (2, []), "a payload that is not shown is not signed"
    assert "read them all, with --all" in done.output
    done = RUNNER.invoke(app, [*arguments, "--all"], env=env)
    assert (done.exit_code, len(signed)) == (0, 1), done.output
    assert all(f'"delay_ms": {number}' in done.output for number in range(6))
    assert "begins     not before 1970-01-01" in done.output
    assert all(one.isprintable() or one == "\n" for one in done.output)
    assert [line.split()[1] for line in done.output.splitlines() if line.startswith("  nodes")] == ["n-c0,"]
