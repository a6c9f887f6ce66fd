"""Real processes: a development stack as an operator starts it, and what tests ask of it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import uvloop

from bettercompute.cli import better_compute
from bettercompute.cli.client import ApiClient

READY_S = 60.0
WAIT_S = 45.0
BETTER_COMPUTE = (sys.executable, "-m", "bettercompute.cli.better_compute")
BCD = (sys.executable, "-m", "bettercompute.cli.bcd")


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run on the loop that the product runs on: FakeDaemons share two cores with what they test."""
    return {"uvloop": uvloop.new_event_loop}


def run_here(
    main: Callable[[], None],
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a command line whole, from its arguments to its exit code, without half a second of a new interpreter."""
    printed, told = io.StringIO(), io.StringIO()
    code = 0
    with (
        mock.patch.dict(os.environ, environment or {}),
        mock.patch.object(sys, "argv", list(arguments)),
        mock.patch.object(sys, "stdin", io.StringIO()),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(told),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    done = subprocess.CompletedProcess(arguments, code, printed.getvalue(), told.getvalue())
    assert not check or code == 0, f"{' '.join(arguments)} exited with {code}: {done.stderr}"
    return done


@dataclass(frozen=True)
class Stack:
    """A running `better-compute dev --json`: its ready line, and a client with its token."""

    ready: dict[str, Any]
    client: ApiClient
    process: subprocess.Popen[str]

    @property
    def environment(self) -> dict[str, str]:
        """What the command line finds the stack by."""
        return {
            **os.environ,
            "BETTER_COMPUTE_API": self.ready["api"],
            "BETTER_COMPUTE_TOKEN": self.ready["operator_token"],
        }

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `better-compute` against the stack."""
        return run_here(better_compute.main, "better-compute", *arguments, environment=self.environment, check=check)


@contextlib.contextmanager
def dev_stack(*arguments: str) -> Iterator[Stack]:
    """Run a development stack until the block ends."""
    process = subprocess.Popen([*BETTER_COMPUTE, "dev", "--json", *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"the stack ended with {process.wait(READY_S)}"
        ready = json.loads(line)
        client = ApiClient(address=ready["api"], token=ready["operator_token"])
        yield Stack(ready, client, process)
        client.close()
    finally:
        process.terminate()
        process.communicate(timeout=READY_S)


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """One stack without nodes for all tests of this process that only add nodes of their own."""
    with dev_stack() as running:
        yield running


def until(found: Callable[[], Any], *, what: str, timeout_s: float = WAIT_S) -> Any:
    """Return the first truthy answer of `found`, or fail saying what never came."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.02
    while True:
        answer = found()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"{what} did not come within {timeout_s} s"
        # Another process is awaited, which has no signal to give us; asking it often takes its time away.
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.4, 0.3)


@pytest.fixture
def provisioned(stack: Stack, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[str, Path]:
    """A node of the session's stack that this test alone uses: its id and the folder of its identity."""
    node_id = f"n{os.getpid()}-{abs(hash(request.node.nodeid)) % 10**9}"
    stack.run("nodes", "provision", node_id, "--out", str(tmp_path / "identity"))
    return node_id, tmp_path / "identity"
