"""A control plane and daemons in the test's own process, over real TLS and a real database, and the real command line.

Restarted at will, and cheap: a daemon of its own process would cost a second each.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from bettercompute.cli.client import ApiClient
from bettercompute.daemon.agent import Agent
from bettercompute.daemon.config import Config as DaemonConfig
from bettercompute.daemon.handlers import HandlerContext
from bettercompute.daemon.identity import IdentityStore
from bettercompute.daemon.inventory.host import HostRoot
from bettercompute.daemon.join import JoinSettings, join
from bettercompute.daemon.node_round import CurrentConfig, NodeParts
from bettercompute.daemon.notify import SystemdNotifier
from bettercompute.pki.keyfiles import KeyFolder
from bettercompute.protocol import messages
from bettercompute.server.app import ALL_ROLES, Running, control_plane
from bettercompute.server.config import ApiSection, Config, GatewaySection, PkiSection
from bettercompute.services import pki_setup
from bettercompute.system import system_world
from tests.e2e.conftest import BETTER_COMPUTE

WORLD = system_world()
WAIT_S = 60.0


@dataclass
class Counted:
    """Runs a kind by counting it."""

    kind: str
    result: messages.ProtoMessage
    runs: int = 0
    on_run: Callable[[], object] = lambda: None

    async def run(self, _: HandlerContext) -> bytes:
        self.runs += 1
        self.on_run()
        return self.result.SerializeToString()


@dataclass
class Node:
    """A daemon of this process."""

    node_id: str
    config: DaemonConfig
    root: Path
    refreshes: Counted = field(default_factory=lambda: Counted("inventory.refresh", messages.InventoryRefreshResult()))
    resets: Counted = field(default_factory=lambda: Counted("gpu.reset", messages.GpuResetResult()))
    running: tuple[Agent, asyncio.Task[None]] | None = None

    def start(self) -> None:
        parts = NodeParts(
            world=WORLD,
            config=CurrentConfig(self.config),
            environment={},
            identities=IdentityStore(self.config.state_dir),
            notifier=SystemdNotifier({}),
            root=lambda: replace(HostRoot.live(), folder=self.root),
            handlers={handler.kind: handler for handler in (self.refreshes, self.resets)},
        )
        agent = Agent(parts, config_path=self.root / "config.toml")
        self.running = agent, asyncio.create_task(agent.run())

    async def stop(self) -> None:
        if self.running is not None:
            agent, task = self.running
            self.running = None
            agent.stop.set()
            await asyncio.wait_for(task, WAIT_S)


@dataclass
class Site:
    """A control plane that can be restarted under its nodes."""

    folder: Path
    dsn: str
    config: Config
    keys: KeyFolder
    nodes: dict[str, Node] = field(default_factory=dict)
    stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    plane: Running | None = None

    async def start(self) -> None:
        self.plane = await self.stack.enter_async_context(
            control_plane(self.config, dsn=self.dsn, roles=ALL_ROLES, world=WORLD)
        )

    async def restart(self) -> None:
        """As after a crash: what is on disk and in the database is all that is left."""
        await self.stack.aclose()
        await self.start()

    @contextlib.contextmanager
    def api(self) -> Iterator[ApiClient]:
        assert self.plane is not None
        client = ApiClient(address=self.plane.api_url or "", token=self.plane.operator_token or "")
        try:
            yield client
        finally:
            client.close()

    async def ask(self, method: str, path: str, *body: Any, **query: Any) -> Any:
        with self.api() as client:
            return await asyncio.to_thread(lambda: getattr(client, method)(path, *body, **query))

    async def run(self, *arguments: str) -> tuple[int, str, str]:
        """Run `better-compute`; return its exit code and what it printed and remarked."""
        assert self.plane is not None
        process = await asyncio.create_subprocess_exec(
            *BETTER_COMPUTE,
            *arguments,
            env={
                **os.environ,
                "BETTER_COMPUTE_API": self.plane.api_url or "",
                "BETTER_COMPUTE_TOKEN": self.plane.operator_token or "",
            },
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(WAIT_S):
            printed, told = await process.communicate()
        assert process.returncode is not None
        return process.returncode, printed.decode(), told.decode()

    async def join(self, node_id: str) -> Node:
        token = (await self.ask("post", "/v1/tokens", {"node_id": node_id, "ttl_ms": 600_000}))["token"]
        home = self.folder / node_id
        root = home / "root"
        files = {"proc/sys/kernel/random/boot_id": f"boot-{node_id}\n", "etc/machine-id": f"{node_id}\n"}
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(content)
        node = Node(node_id, DaemonConfig(state_dir=home / "state", host_root=root), root)
        settings = JoinSettings(token=token, daemon_version="0.1.0")
        await join(IdentityStore(node.config.state_dir), settings, world=WORLD)
        node.start()
        self.nodes[node_id] = node
        return node

    async def all_run(self) -> None:
        """Have every node that is up connect and run a signed command."""
        up = sorted(node.node_id for node in self.nodes.values() if node.running is not None)
        made = await self.ask("post", "/v1/commands", {"kind": "inventory.refresh", "nodes": up})
        async with asyncio.timeout(WAIT_S):
            cursor = None
            ended: dict[str, str] = {}
            while len(ended) < len(up):
                path = f"/v1/batches/{made['batch_id']}"
                batch = await self.ask("get", path, wait_ms=5_000, since=cursor, size=len(up))
                cursor = batch["cursor"]
                ended |= {
                    item["node_id"]: f"{item['state']} {item['message']}"
                    for item in batch["items"]
                    if item["state"] not in {"pending", "dispatched", "acked", "running"}
                }
        assert not {node: state for node, state in ended.items() if not state.startswith("succeeded")}

    async def restart_nodes(self, node_ids: list[str]) -> None:
        await asyncio.gather(*(self.nodes[node_id].stop() for node_id in node_ids))
        for node_id in node_ids:
            self.nodes[node_id].start()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
async def in_process_site(dsn: str, tmp_path: Path) -> AsyncIterator[Site]:
    port = free_port()
    config = Config(
        state_dir=str(tmp_path / "plane"),
        api=ApiSection(host="127.0.0.1", port=0),
        gateway=GatewaySection(name="gw", host="127.0.0.1", port=port, advertise_url=f"https://127.0.0.1:{port}"),
        pki=PkiSection(command_signing=True),
    )
    keys = KeyFolder(config.pki_path)
    pki_setup.initialise(keys, world=WORLD)
    pki_setup.issue_gateway(keys, names=["127.0.0.1"], world=WORLD)
    made = Site(tmp_path, dsn, config, keys)
    await made.start()
    yield made
    await asyncio.gather(*(node.stop() for node in made.nodes.values()))
    await made.stack.aclose()
