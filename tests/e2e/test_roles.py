"""Roles in processes of their own: the api and the worker hold the keys, the gateway relays and holds none of them."""

from __future__ import annotations

import contextlib
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bettercompute.cli.client import ApiClient
from bettercompute.cli.provisioning import write_identity
from bettercompute.errors import BetterComputeError
from bettercompute.pki.keyfiles import KeyFolder
from bettercompute.services import pki_setup
from bettercompute.store.roles import GATEWAY
from bettercompute.system import system_world
from tests.e2e.conftest import BCD, BETTER_COMPUTE, READY_S, until

START_S = 120.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Site:
    """An api with the worker under `keys`, and a gateway under `gateway`, over a database that outlives both."""

    def __init__(self, folder: Path, *, dsn: str, of_api: str = "") -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self.clients: list[ApiClient] = []
        self.api_port, self.internal_port, self.gateway_port = free_port(), free_port(), free_port()
        self.gateway_url = f"https://127.0.0.1:{self.gateway_port}"
        self.keys = KeyFolder(folder / "keys" / "pki")
        world = system_world()
        pki_setup.initialise(self.keys, world=world)
        # The api's leaf names the api alone, the gateway's the gateway alone: neither can be the other.
        pki_setup.issue_gateway(self.keys, names=["localhost"], world=world)
        self.api_config = self.write(
            "keys",
            f'[database]\ndsn = "{dsn}"\n[api]\nport = {self.api_port}\n'
            f'[gateway]\nadvertise_url = "{self.gateway_url}"\n'
            f'[internal]\nhost = "127.0.0.1"\nport = {self.internal_port}\ngateway_names = ["127.0.0.1"]\n{of_api}',
        )
        self.gateway_config = self.write(
            "gateway",
            f'[database]\ndsn = "{dsn}&role={GATEWAY}"\n[gateway]\nhost = "127.0.0.1"\nport = {self.gateway_port}\n'
            f'services_url = "https://localhost:{self.internal_port}"\n',
        )
        pki_setup.issue_gateway(self.keys, names=["127.0.0.1"], world=world, out=KeyFolder(folder / "gateway" / "pki"))
        # The gateway's process reaches the database under the role that can make no command.
        subprocess.run([*BETTER_COMPUTE, "db", "roles", "--config", self.api_config], check=True, timeout=READY_S)

    def write(self, name: str, text: str) -> str:
        home = self.folder / name
        home.mkdir(exist_ok=True)
        path = home / "config.toml"
        path.write_text(f'state_dir = "{home}"\n{text}')
        return str(path)

    def spawn(self, *command: str, log: str, stdin: str | None = None) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE, stdout=output, stderr=output
            )
        if stdin is not None:
            assert process.stdin is not None
            process.stdin.write(stdin.encode())
            process.stdin.close()
        self.processes.append(process)
        return process

    def start_api(self) -> subprocess.Popen[bytes]:
        roles = ("--role", "api", "--role", "worker")
        return self.spawn(*BETTER_COMPUTE, "serve", *roles, "--config", self.api_config, log="api.log")

    def start_gateway(self) -> subprocess.Popen[bytes]:
        return self.spawn(
            *BETTER_COMPUTE, "serve", "--role", "gateway", "--config", self.gateway_config, log="gateway.log"
        )

    def said(self, log: str, words: str) -> bool:
        return words in (self.folder / log).read_text()

    def answers(self) -> bool:
        for process in self.processes:
            assert process.poll() in (None, 0, -signal.SIGKILL), f"a process ended: look into {self.folder}"
        with contextlib.suppress(BetterComputeError):
            return bool(ApiClient(address=f"http://127.0.0.1:{self.api_port}", token="").get("/readyz"))
        return False

    def client(self) -> ApiClient:
        """Return a client of the api, which has answered."""
        token = (self.folder / "keys" / "operator-token").read_text().strip()
        opened = ApiClient(address=f"http://127.0.0.1:{self.api_port}", token=token)
        self.clients.append(opened)
        return opened

    def node_config(self, name: str, more: str = "") -> str:
        return self.write(name, f"{more}[reboot]\nallowed = false\n")

    def stop(self) -> None:
        for client in self.clients:
            client.close()
        for process in reversed(self.processes):
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            process.wait(READY_S)


@pytest.fixture
def site(tmp_path: Path, dsn: str) -> Iterator[Site]:
    made = Site(tmp_path, dsn=dsn)
    yield made
    made.stop()


def connected(client: ApiClient, node_id: str) -> tuple[str, int]:
    """Return id and epoch of the node's session once it is connected."""

    def session() -> Any:
        shown = client.get(f"/v1/nodes/{node_id}")
        return shown["session"] if shown["state"] == "connected" else None

    found = until(session, what=f"{node_id}'s session")
    return found["session_id"], found["epoch"]


def refresh(client: ApiClient, *node_ids: str) -> set[str]:
    """Run inventory.refresh on nodes and return how it ended."""
    made = client.post("/v1/commands", {"kind": "inventory.refresh", "nodes": list(node_ids), "timeout_ms": 60_000})
    ids = [command["id"] for command in made["commands"]]

    def ended() -> list[Any] | None:
        commands = [client.get(f"/v1/commands/{command_id}") for command_id in ids]
        return commands if all(command["finished_at"] for command in commands) else None

    return {command["state"] for command in until(ended, what="the inventories")}


def knock(site: Site, folder: KeyFolder, *, certificate: str | None) -> str:
    """Ask the internal listener for the trust bundle with a certificate of `folder`; return what came of it."""
    context = ssl.create_default_context(cafile=str(site.keys.path("serving-ca.pem")))
    if certificate is not None:
        context.load_cert_chain(folder.path(f"{certificate}.pem"), folder.path(f"{certificate}.key"))
    url = f"https://localhost:{site.internal_port}/internal/v1/trust-bundle"
    with httpx.Client(verify=context, trust_env=False, timeout=30) as client:
        try:
            return f"HTTP {client.get(url).status_code}"
        except httpx.TransportError:
            return "refused"


@pytest.mark.timeout(300)  # a dozen processes, on a machine that runs other tests too
def test_a_gateway_without_keys_serves_nodes_and_the_api_may_be_away(site: Site) -> None:
    bundle = KeyFolder(site.folder / "gateway" / "pki")
    assert bundle.names() == ["gateway"]
    api, gateway = site.start_api(), site.start_gateway()
    until(site.answers, what="the api", timeout_s=START_S)
    client = site.client()

    # One node joins by a token over the gateway, another comes with an identity from the api.
    token = client.post("/v1/tokens", {"node_id": "joined", "ttl_ms": 600_000})["token"]
    joined = site.node_config("joined")
    joining = site.spawn(*BCD, "join", "--config", joined, log="join.log", stdin=token)
    write_identity(client, node_id="provisioned", site=None, role="node", out=site.folder / "identity")
    provisioned = site.node_config("provisioned", f'identity_import = "{site.folder / "identity"}"\n')
    site.spawn(*BCD, "node", "--config", provisioned, log="provisioned.log")
    assert joining.wait(READY_S) == 0, (site.folder / "join.log").read_text()
    site.spawn(*BCD, "node", "--config", joined, log="joined.log")
    before = {node_id: connected(client, node_id) for node_id in ("joined", "provisioned")}
    assert refresh(client, "joined", "provisioned") == {"succeeded"}

    # Only a gateway's certificate opens the way to the join service.
    assert knock(site, bundle, certificate="gateway") == "HTTP 200"
    assert knock(site, site.keys, certificate="gateway") == "HTTP 403"
    identity = KeyFolder(site.folder / "identity")
    assert [knock(site, identity, certificate=name) for name in ("node", None)] == ["refused", "refused"]

    # Without the api nobody joins, which is said; who has joined stays.
    token = client.post("/v1/tokens", {"node_id": "late", "ttl_ms": 600_000})["token"]
    api.kill()
    api.wait(READY_S)
    late = ("join", "--config", site.node_config("late"))
    first = site.spawn(*BCD, *late, log="late.log", stdin=token)
    words = "this gateway cannot reach the join service now: try again"
    until(lambda: site.said("late.log", words), what="the words of an UNAVAILABLE join")
    site.start_api()
    first.kill()
    first.wait(READY_S)
    until(site.answers, what="the api that is back", timeout_s=START_S)
    second = site.spawn(*BCD, *late, log="late.log", stdin=token)
    assert second.wait(READY_S) == 0, (site.folder / "late.log").read_text()
    assert gateway.poll() is None
    assert {node_id: connected(client, node_id) for node_id in before} == before, "the very same sessions"
    assert refresh(client, "joined", "provisioned") == {"succeeded"}


def test_a_gateway_with_a_wrong_folder_says_what_is_missing(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        f'state_dir = "{tmp_path}"\n[database]\ndsn = "postgresql:///none?host=/nonexistent"\n'
        '[gateway]\nservices_url = "https://localhost:1"\n'
    )
    ended = subprocess.run(
        [*BETTER_COMPUTE, "serve", "--role", "gateway", "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=READY_S,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "error: a gateway with services_url needs gateway.pem, gateway.key, serving-ca.pem, node-ca.pem in "
        f"{tmp_path}/pki, which lacks gateway.pem, gateway.key, serving-ca.pem, node-ca.pem: where the CAs' keys are, "
        f"run `better-compute pki issue-gateway --san NAME --out DIR` and copy DIR to {tmp_path}/pki\n"
    )
