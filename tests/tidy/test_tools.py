"""Lint, format, types and import contracts, run as tests so that nothing lands without them."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(sysconfig.get_path("scripts"))

COMMANDS = {
    "ruff check": [str(SCRIPTS / "ruff"), "check", "--no-cache", "."],
    "ruff format": [str(SCRIPTS / "ruff"), "format", "--no-cache", "--check", "."],
    "mypy": [sys.executable, "-m", "mypy", "--no-error-summary"],
    "import contracts": [str(SCRIPTS / "lint-imports"), "--no-cache"],
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", COMMANDS)
def test_tool_finds_nothing(name: str) -> None:
    done = subprocess.run(COMMANDS[name], cwd=ROOT, capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, f"{name}:\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
