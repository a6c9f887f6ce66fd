"""A test that hangs costs its own time: its neighbours pass, and its teardown ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

INI = """
[pytest]
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
filterwarnings = error
timeout = 2
"""
TESTS = """
import asyncio, gc, socket, threading

async def test_hangs_with_what_it_opened():
    async def serve(reader, writer):
        await asyncio.Event().wait()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    opened = await asyncio.open_connection(*server.sockets[0].getsockname())
    await asyncio.Event().wait()

def test_next():
    gc.collect()

async def test_hangs_in_its_end_too():
    await asyncio.to_thread(threading.Event().wait, 20)

def test_last():
    gc.collect()
"""


@pytest.mark.long
def test_neighbours_of_a_test_that_hangs_pass(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(INI)
    (tmp_path / "conftest.py").write_text("from tests.failures import *\n")
    (tmp_path / "test_them.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rpfE"],
        cwd=tmp_path,
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    _, _, summary = done.stdout.partition(" short test summary info ")
    told = {line.partition(" - ")[0] for line in summary.splitlines()[1:] if "::" in line}
    assert told == {
        "FAILED test_them.py::test_hangs_with_what_it_opened",
        "PASSED test_them.py::test_next",
        "FAILED test_them.py::test_hangs_in_its_end_too",
        "ERROR test_them.py::test_hangs_in_its_end_too",
        "PASSED test_them.py::test_last",
    }, done.stdout
