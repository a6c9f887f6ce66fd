"""`pki rotate-...`: what a stage asks of the API, and what it says of nodes that it left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bettercompute.cli import rotation
from bettercompute.cli.better_compute import app
from bettercompute.cli.client import ApiClient
from bettercompute.pki.keyfiles import KeyFolder
from bettercompute.services.pki_setup import initialise
from bettercompute.system import system_world


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    initialise(KeyFolder(tmp_path / "pki"), world=system_world())
    return tmp_path / "pki"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What was asked of an API that leaves behind whoever is excepted."""
    found: list[tuple[str, Any]] = []

    def post(_: ApiClient, path: str, body: Any) -> dict[str, Any]:
        found.append((path, body))
        return {"trust_version": 3, "keys": [], "left_behind": body.get("except_nodes", [])}

    monkeypatch.setattr(ApiClient, "post", post)
    monkeypatch.setenv("BETTER_COMPUTE_TOKEN", "bct1_00")
    monkeypatch.setattr(rotation, "_catch_up", lambda *_: None)
    return found


def stage(folder: Path, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(
        app, ["pki", "rotate-serving-ca", "--dir", str(folder), "--api", "http://127.0.0.1:1", *arguments]
    )
    return done.exit_code, done.stderr


def test_nodes_that_are_left_behind_are_told(folder: Path, asked: list[tuple[str, Any]]) -> None:
    code, told = stage(folder, "--stage", "retire", "--except", "n1", "--except", "n2")
    assert (code, asked) == (0, [("/v1/pki/keys/serving-ca/retire", {"except_nodes": ["n1", "n2"]})])
    assert "left behind: n1, n2; if one of these comes after all and is turned away" in told
    code, told = stage(folder, "--stage", "switch")
    assert (code, asked[-1][1]["except_nodes"], "left behind" in told) == (0, [], False)


def test_prepare_waits_for_nobody(folder: Path, asked: list[tuple[str, Any]]) -> None:
    code, told = stage(folder, "--stage", "prepare", "--except", "n1")
    assert (code, asked) == (2, [])
    assert "--except goes with the stages switch and retire" in told
