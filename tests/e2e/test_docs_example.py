"""The quickstart's gRPC client, run as a reader runs it: with nothing of ours but what protoc makes of proto/."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from grpc_tools import protoc

from tests.e2e.conftest import WAIT_S, Stack, until

ROOT = Path(__file__).resolve().parents[2]
WELL_KNOWN = Path(protoc.__file__).parent / "_proto"


@pytest.fixture
def generated(tmp_path: Path) -> Path:
    """The code that a reader generates."""
    target = tmp_path / "gen"
    target.mkdir()
    sources = sorted(str(path) for path in (ROOT / "proto" / "bettercompute").rglob("*.proto"))
    roots = [f"-I{ROOT / 'proto'}", f"-I{WELL_KNOWN}"]
    assert protoc.main(["protoc", *roots, f"--python_out={target}", f"--grpc_python_out={target}", *sources]) == 0
    # Here our own package `bettercompute` is installed too, and would be found instead of a folder without this.
    (target / "bettercompute" / "__init__.py").touch()
    return target


def test_it_is_welcomed_runs_a_command_and_hears_that_it_is_stored(
    stack: Stack, provisioned: tuple[str, Path], generated: Path
) -> None:
    node_id, identity = provisioned
    client = subprocess.Popen(
        [sys.executable, str(ROOT / "docs" / "examples" / "hello.py"), stack.ready["gateway"], str(identity)],
        env={**os.environ, "PYTHONPATH": str(generated)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: stack.client.get(f"/v1/nodes/{node_id}")["state"] == "connected", what="the node")
        ran = stack.run("run", "inventory.refresh", "--node", node_id)
        output, _ = client.communicate(timeout=WAIT_S)
    finally:
        client.kill()
        client.wait()
    assert client.returncode == 0
    assert [line.partition(":")[0] for line in output.splitlines()] == ["welcome", "command", "ack"]
    assert "1 of 1 succeeded" in ran.stdout
