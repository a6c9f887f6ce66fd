"""The .proto files are linted and break nothing, and the committed code is what they generate. All of it offline."""

import filecmp
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from proto.generate import GEN_DIR, generate

from bettercompute.protocol import messages

ROOT = Path(__file__).resolve().parents[2]
BUF = Path(sysconfig.get_path("scripts")) / "buf"

COMMANDS = {
    "lint": ["lint"],
    "breaking changes": ["breaking", "--against", "proto/baseline.binpb"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_buf_finds_nothing(name, tmp_path):
    environment = {**os.environ, "BUF_CACHE_DIR": str(tmp_path), "HTTPS_PROXY": "http://127.0.0.1:1"}
    done = subprocess.run(
        [BUF, *COMMANDS[name]], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"{name}:\n{done.stdout}{done.stderr}"


def test_breaking_changes_would_be_found(tmp_path):
    """The baseline holds the frozen packages, so that the check above has something to say."""
    changed = tmp_path / "proto"
    for source in (ROOT / "proto" / "bettercompute").rglob("*.proto"):
        target = changed / source.relative_to(ROOT / "proto")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(
            source.read_text().replace("uint64 approver_set_epoch = 18;", "uint64 approver_set_epoch = 17;")
        )
    (tmp_path / "buf.yaml").write_text((ROOT / "buf.yaml").read_text())
    done = subprocess.run(
        [BUF, "breaking", "--against", str(ROOT / "proto" / "baseline.binpb")],
        cwd=tmp_path,
        env={**os.environ, "BUF_CACHE_DIR": str(tmp_path / "cache"), "HTTPS_PROXY": "http://127.0.0.1:1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "session.proto" in done.stdout


def test_committed_code_is_what_the_sources_generate(tmp_path):
    generate(tmp_path / "gen")
    fresh = {path.relative_to(tmp_path / "gen") for path in (tmp_path / "gen").rglob("*") if path.is_file()}
    committed = {
        path.relative_to(GEN_DIR) for path in GEN_DIR.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert committed == fresh, "run `make proto`"
    _, different, unreadable = filecmp.cmpfiles(tmp_path / "gen", GEN_DIR, sorted(map(str, fresh)), shallow=False)
    assert (different, unreadable) == ([], []), "run `make proto`"


@pytest.mark.parametrize(
    ("message", "field", "number"),
    [
        (messages.Hello, "approver_set_epoch", 18),
        (messages.Hello, "approver_set_sha256", 19),
        (messages.StatusReport, "approver_set_epoch", 10),
        (messages.StatusReport, "approver_set_sha256", 11),
        (messages.TrustBundle, "approver_set_epoch", 8),
    ],
)
def test_published_numbers_stay(message, field, number):
    assert message.DESCRIPTOR.fields_by_name[field].number == number
