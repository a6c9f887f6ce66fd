"""kill -9 of each part in the middle of a command: it still ends exactly once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from bettercompute.cli.client import ApiClient
from bettercompute.errors import BetterComputeError
from bettercompute.store import embedded
from tests.e2e.conftest import BCD, BETTER_COMPUTE, READY_S, Stack, until

# Whole processes start and end here, several in one test, beside whatever else the machine does.
pytestmark = pytest.mark.timeout(300)

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
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(running.stop)
        until(lambda: state_of(stack.client, provisioned[0]) == "connected", what="the node's session")
        yield running


def state_of(client: ApiClient, node_id: str) -> str:
    return str(client.get(f"/v1/nodes/{node_id}")["state"])


def facts_of(client: ApiClient, node_id: str) -> list[str]:
    facts = client.get(f"/v1/nodes/{node_id}")["inventory"]["facts"]["facts"]
    return [fact["value"] for fact in facts]


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
    until(lambda: node.run_count() == 2, what="the second collection")
    second = node.wait_held()
    # The collector of the killed daemon does not run beside its retry.
    assert len(node.collectors()) == 1
    until(lambda: command_of(stack.client, command_id)["state"] == "running", what="the running command")
    node.let_go(second)
    ended = until_ended(stack.client, command_id)
    assert (ended["state"], ended["attempt"]) == ("succeeded", 2)
    assert node.run_count() == 2
    until(lambda: facts_of(stack.client, node_id) == ["free"], what="the facts that were collected")


def test_a_cancel_ends_the_running_program(stack: Stack, provisioned: tuple[str, Path], node: Node) -> None:
    node_id, _ = provisioned
    command_id = start_command(stack.client, node_id)
    gate = node.wait_held()
    told = stack.run("commands", "cancel", command_id, "--reason", "not today")
    assert "asked for its end" in told.stdout
    ended = until_ended(stack.client, command_id)
    assert ended["state"] == "cancelled"
    assert not node.collectors()
    os.close(gate)
    late = stack.run("commands", "cancel", command_id, check=False)
    assert (late.returncode, "too late" in late.stdout) == (1, True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class ControlPlane:
    """`better-compute serve`, all roles, over a database that is a process of its own."""

    def __init__(self, folder: Path, *, postgres: embedded.EmbeddedPostgres) -> None:
        self.postgres = postgres
        gateway_port, api_port = free_port(), free_port()
        self.config, self.log = folder / "control-plane.toml", folder / "serve.log"
        self.config.write_text(
            f'state_dir = "{folder}"\n[database]\ndsn = "{postgres.dsn}"\n[api]\nport = {api_port}\n'
            f'[gateway]\nhost = "127.0.0.1"\nport = {gateway_port}\n'
        )
        for arguments in (("pki", "init"), ("pki", "issue-gateway", "--san", "127.0.0.1"), ("db", "migrate")):
            subprocess.run([*BETTER_COMPUTE, *arguments, "--config", str(self.config)], check=True, capture_output=True)
        self.gateway_url, self.api_url = f"https://127.0.0.1:{gateway_port}", f"http://127.0.0.1:{api_port}"
        self.process = self.start()

    @property
    def token(self) -> str:
        return (self.config.parent / "operator-token").read_text().strip()

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*BETTER_COMPUTE, "serve", "--config", str(self.config)], stdout=log, stderr=log
            )
        return self.process

    def until_ready(self) -> None:
        until(self.answers, what="the control plane")

    def answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        with contextlib.suppress(BetterComputeError):
            return bool(ApiClient(address=f"{self.api_url}", token="").get("/readyz"))
        return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(READY_S)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(READY_S)

    def provision(self, node_id: str, out: Path) -> None:
        subprocess.run(
            [*BETTER_COMPUTE, "nodes", "provision", node_id, "--out", str(out)],
            env={**os.environ, "BETTER_COMPUTE_API": self.api_url, "BETTER_COMPUTE_TOKEN": self.token},
            check=True,
            capture_output=True,
        )


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane that each test may kill and must leave running."""
    folder = tmp_path_factory.mktemp("plane")
    with contextlib.ExitStack() as stack:
        postgres = embedded.start(folder / "postgres", settings={"fsync": "off"}, initdb_options=("--no-sync",))
        stack.callback(postgres.stop)
        running = ControlPlane(folder, postgres=postgres)
        stack.callback(running.stop)
        running.until_ready()
        yield running


@dataclass(frozen=True)
class Held:
    """A node in the middle of a command: its inventory is being collected and waits at `gate`."""

    control: ControlPlane
    client: ApiClient
    node: Node
    command_id: str
    gate: int


@pytest.fixture
def held(control: ControlPlane, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Held]:
    """A connected node that runs a command until the test lets it go."""
    node_id = request.node.name.replace("_", "-")
    control.provision(node_id, tmp_path / "identity")
    with contextlib.ExitStack() as stack:
        client = ApiClient(address=control.api_url, token=control.token)
        stack.callback(client.close)
        node = Node(tmp_path, identity=tmp_path / "identity", gateway_url=control.gateway_url)
        stack.callback(node.stop)
        until(lambda: state_of(client, node_id) == "connected", what="the node's session")
        command_id = start_command(client, node_id)
        yield Held(control, client, node, command_id, node.wait_held())


def test_kill_of_the_gateway(held: Held) -> None:
    held.control.kill()
    held.control.start()
    held.control.until_ready()
    until(lambda: command_of(held.client, held.command_id)["state"] == "running", what="the running command")
    held.node.let_go(held.gate)
    ended = until_ended(held.client, held.command_id)
    assert (ended["state"], held.node.run_count()) == ("succeeded", 1)


def test_kill_of_postgresql(held: Held) -> None:
    postgres = held.control.postgres
    os.kill(postgres.process_id, signal.SIGKILL)
    held.node.let_go(held.gate)
    until(lambda: not postgres.running(), what="the database's end")
    postgres.start()
    held.control.until_ready()
    ended = until_ended(held.client, held.command_id)
    assert (ended["state"], held.node.run_count()) == ("succeeded", 1)


def test_the_result_is_kept_while_nobody_listens(held: Held) -> None:
    held.control.kill()
    held.node.let_go(held.gate)
    until(lambda: not held.node.collectors(), what="the collector's end")
    held.node.kill()
    held.control.start()
    held.node.start()
    held.control.until_ready()

    def ended() -> bool:
        # The kill may have come before the result was durable: then the retry-safe kind runs again.
        gate = held.node.held()
        if gate is not None:
            held.node.let_go(gate)
        return command_of(held.client, held.command_id)["state"] == "succeeded"

    until(ended, what="the command's end")
    assert held.node.run_count() in (1, 2)
