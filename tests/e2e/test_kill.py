"""kill -9 of each part in the middle of a command: it still ends exactly once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from bettercompute.cli.client import ApiClient
from bettercompute.store import embedded
from tests.e2e.conftest import BCD, BETTER_COMPUTE, READY_S, Stack, until

FACT = """#!/bin/sh
echo run >> {runs}
read -r value < {gate}
printf '{{"held": "%s"}}' "$value"
"""


class Node:
    """A real `bcd` whose inventory collection the test holds by a FIFO."""

    def __init__(self, folder: Path, *, identity: Path, gateway_url: str) -> None:
        self.gate, self.runs, self.log = folder / "gate", folder / "runs", folder / "bcd.log"
        os.mkfifo(self.gate)
        facts = folder / "facts"
        facts.mkdir(mode=0o755)
        fact = facts / "held"
        fact.write_text(FACT.format(runs=self.runs, gate=self.gate))
        fact.chmod(0o755)
        self.config = folder / "bcd.toml"
        self.config.write_text(
            f'state_dir = "{folder / "state"}"\nidentity_import = "{identity}"\ngateway_url = ["{gateway_url}"]\n'
            f'[inventory]\nfacts_dir = "{facts}"\nfact_timeout_ms = 60000\n[reboot]\nallowed = false\n'
        )
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*BCD, "node", "--config", str(self.config)], stdout=log, stderr=log)
        return self.process

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(READY_S)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(READY_S)

    def held(self) -> int | None:
        """Return the FIFO's writing end once a collector reads from it, else None."""
        with contextlib.suppress(OSError):
            return os.open(self.gate, os.O_WRONLY | os.O_NONBLOCK)
        return None

    def wait_held(self) -> int:
        descriptor = until(self.held, what="the held collector")
        assert isinstance(descriptor, int)
        return descriptor

    @staticmethod
    def let_go(descriptor: int) -> None:
        os.write(descriptor, b"free\n")
        os.close(descriptor)

    def run_count(self) -> int:
        return len(self.runs.read_text().splitlines())

    def collectors(self) -> list[psutil.Process]:
        """The processes that still run the fact program, whoever their parent is."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(str(self.config.parent / "facts") in part for part in process.cmdline()):
                    found.append(process)
        return found


@pytest.fixture
def node(stack: Stack, provisioned: tuple[str, Path], tmp_path: Path) -> Iterator[Node]:
    running = Node(tmp_path, identity=provisioned[1], gateway_url=stack.ready["gateway"])
    until(lambda: state_of(stack.client, provisioned[0]) == "connected", what="the node's session")
    yield running
    running.stop()


def state_of(client: ApiClient, node_id: str) -> str:
    return str(client.get(f"/v1/nodes/{node_id}")["state"])


def start_command(client: ApiClient, node_id: str) -> str:
    made = client.post("/v1/commands", {"kind": "inventory.refresh", "nodes": [node_id], "timeout_ms": 60_000})
    return str(made["commands"][0]["id"])


def command_of(client: ApiClient, command_id: str) -> dict[str, object]:
    shown = client.get(f"/v1/commands/{command_id}")
    assert isinstance(shown, dict)
    return shown


def until_ended(client: ApiClient, command_id: str) -> dict[str, object]:
    ended = until(
        lambda: (shown := command_of(client, command_id))["finished_at"] is not None and shown, what="the command's end"
    )
    assert isinstance(ended, dict)
    return ended


def test_kill_of_bcd(stack: Stack, provisioned: tuple[str, Path], node: Node) -> None:
    node_id, _ = provisioned
    command_id = start_command(stack.client, node_id)
    first = node.wait_held()
    node.kill()
    os.close(first)
    node.start()
    second = node.wait_held()
    # The collector of the killed daemon does not run beside its retry.
    assert len(node.collectors()) == 1
    assert command_of(stack.client, command_id)["state"] == "running"
    node.let_go(second)
    ended = until_ended(stack.client, command_id)
    assert (ended["state"], ended["attempt"]) == ("succeeded", 2)
    assert node.run_count() == 2
    facts = stack.client.get(f"/v1/nodes/{node_id}")["inventory"]["facts"]["facts"]
    assert [fact["value"] for fact in facts] == ["free"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class ControlPlane:
    """`better-compute serve`, all roles, over a database that is a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.postgres = embedded.start(folder / "postgres", settings={"fsync": "off"}, initdb_options=("--no-sync",))
        gateway_port, api_port = free_port(), free_port()
        self.config = folder / "control-plane.toml"
        self.config.write_text(
            f'state_dir = "{folder}"\n[database]\ndsn = "{self.postgres.dsn}"\n[api]\nport = {api_port}\n'
            f'[gateway]\nhost = "127.0.0.1"\nport = {gateway_port}\n'
        )
        self.log = folder / "serve.log"
        for arguments in (("pki", "init"), ("pki", "issue-gateway", "--san", "127.0.0.1"), ("db", "migrate")):
            subprocess.run([*BETTER_COMPUTE, *arguments, "--config", str(self.config)], check=True, capture_output=True)
        self.gateway_url, self.api_url = f"https://127.0.0.1:{gateway_port}", f"http://127.0.0.1:{api_port}"
        self.token_path = folder / "operator-token"
        self.process = self.start()
        self.client = ApiClient(address=self.api_url, token=self.token_path.read_text().strip())

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*BETTER_COMPUTE, "serve", "--config", str(self.config)], stdout=log, stderr=log
            )
        until(self.answers, what="the control plane")
        return self.process

    def answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.api_url}/readyz", trust_env=False).is_success
        return False

    def stop(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(READY_S)
        self.postgres.stop()


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[tuple[ControlPlane, Node]]:
    """A control plane that the test may kill, with one connected node `n1`."""
    (tmp_path / "plane").mkdir()
    running = ControlPlane(tmp_path / "plane")
    environment = {
        **os.environ,
        "BETTER_COMPUTE_API": running.api_url,
        "BETTER_COMPUTE_TOKEN": running.token_path.read_text().strip(),
    }
    identity = tmp_path / "identity"
    subprocess.run(
        [*BETTER_COMPUTE, "nodes", "provision", "n1", "--out", str(identity)],
        env=environment,
        check=True,
        capture_output=True,
    )
    (tmp_path / "node").mkdir()
    node = Node(tmp_path / "node", identity=identity, gateway_url=running.gateway_url)
    until(lambda: state_of(running.client, "n1") == "connected", what="the node's session")
    yield running, node
    node.stop()
    running.stop()


def test_kill_of_the_gateway(plane: tuple[ControlPlane, Node]) -> None:
    control, node = plane
    command_id = start_command(control.client, "n1")
    gate = node.wait_held()
    control.process.send_signal(signal.SIGKILL)
    control.process.wait(READY_S)
    control.start()
    until(lambda: command_of(control.client, command_id)["state"] == "running", what="the running command")
    node.let_go(gate)
    ended = until_ended(control.client, command_id)
    assert (ended["state"], node.run_count()) == ("succeeded", 1)


def test_kill_of_postgresql(plane: tuple[ControlPlane, Node]) -> None:
    control, node = plane
    command_id = start_command(control.client, "n1")
    gate = node.wait_held()
    os.kill(control.postgres.process_id, signal.SIGKILL)
    node.let_go(gate)
    until(lambda: not control.postgres.running(), what="the database's end")
    control.postgres.start()
    until(control.answers, what="the control plane with its database")
    ended = until_ended(control.client, command_id)
    assert (ended["state"], node.run_count()) == ("succeeded", 1)


def test_the_result_is_kept_while_nobody_listens(plane: tuple[ControlPlane, Node]) -> None:
    control, node = plane
    command_id = start_command(control.client, "n1")
    gate = node.wait_held()
    control.process.send_signal(signal.SIGKILL)
    control.process.wait(READY_S)
    node.let_go(gate)
    until(lambda: not node.collectors(), what="the collector's end")
    node.kill()
    control.start()
    node.start()
    ended = until_ended(control.client, command_id)
    assert ended["state"] == "succeeded"
    # Twice where the kill came before the result was durable: the kind is retry-safe, and the command ended once.
    assert node.run_count() in (1, 2)
