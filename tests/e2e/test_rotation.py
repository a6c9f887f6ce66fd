"""Rotations under real nodes: who joined before, in or after one, restarted or not, connects and runs what is signed.

The control plane and the daemons run in this process, over real TLS and a real database; the steps are the command
line's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
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
from bettercompute.pki import rotation
from bettercompute.pki.keyfiles import KeyFolder
from bettercompute.pki.rotation import Purpose
from bettercompute.protocol import messages
from bettercompute.server.app import ALL_ROLES, Running, control_plane
from bettercompute.server.config import ApiSection, Config, GatewaySection, PkiSection
from bettercompute.services import pki_setup, rotation_files
from bettercompute.system import system_world
from tests.e2e.conftest import BETTER_COMPUTE

WORLD = system_world()
WAIT_S = 60.0
COMMANDS = {
    Purpose.COMMAND_ROOT: "rotate-command-root",
    Purpose.JOIN_SIGNING: "rotate-join-keys",
    Purpose.SERVING_CA: "rotate-serving-ca",
    Purpose.NODE_CA: "rotate-node-ca",
}


class Refreshed:
    """Runs `inventory.refresh` by doing nothing."""

    kind = "inventory.refresh"

    async def run(self, _: HandlerContext) -> bytes:
        return messages.InventoryRefreshResult().SerializeToString()


@dataclass
class Node:
    """A daemon of this process."""

    node_id: str
    config: DaemonConfig
    root: Path
    running: tuple[Agent, asyncio.Task[None]] | None = None

    def start(self) -> None:
        handler = Refreshed()
        parts = NodeParts(
            world=WORLD,
            config=CurrentConfig(self.config),
            environment={},
            identities=IdentityStore(self.config.state_dir),
            notifier=SystemdNotifier({}),
            root=lambda: replace(HostRoot.live(), folder=self.root),
            handlers={handler.kind: handler},
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

    async def ask(self, method: str, path: str, *body: Any, **query: Any) -> Any:
        assert self.plane is not None
        client = ApiClient(address=self.plane.api_url or "", token=self.plane.operator_token or "")
        try:
            return await asyncio.to_thread(lambda: getattr(client, method)(path, *body, **query))
        finally:
            client.close()

    async def pki(self, purpose: Purpose, stage: str) -> None:
        """Run a stage as an operator does, waiting as it says."""
        assert self.plane is not None
        arguments = ["pki", COMMANDS[purpose], "--stage", stage, "--dir", str(self.keys.folder)]
        environment = {
            **os.environ,
            "BETTER_COMPUTE_API": self.plane.api_url or "",
            "BETTER_COMPUTE_TOKEN": self.plane.operator_token or "",
        }
        async with asyncio.timeout(WAIT_S):
            while True:
                process = await asyncio.create_subprocess_exec(
                    *BETTER_COMPUTE,
                    *arguments,
                    env=environment,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                )
                _, told = await process.communicate()
                if process.returncode == 0:
                    return
                # Nodes come for the bundle within seconds, in no order that anybody could await.
                assert b"do not hold" in told or b"signed under" in told, told.decode()

    async def join(self, node_id: str) -> Node:
        token = (await self.ask("post", "/v1/tokens", {"node_id": node_id, "ttl_ms": 600_000}))["token"]
        home = self.folder / node_id
        root = home / "root"
        files = {"proc/sys/kernel/random/boot_id": f"boot-{node_id}\n", "etc/machine-id": f"{node_id}\n"}
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(content)
        node = Node(node_id, DaemonConfig(state_dir=home / "state"), root)
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
        for node_id in node_ids:
            await self.nodes[node_id].stop()
            self.nodes[node_id].start()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
async def site(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(rotation, "SETTLE_MS", 0)
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


async def whole_rotation(site: Site, purpose: Purpose, *, away: bool) -> None:
    """Go through the stages with nodes that join at each, half of which are restarted at each stage after that."""
    restarting: list[str] = []

    async def stage(name: str) -> None:
        await site.restart_nodes(restarting)
        for kind in ("stays", "restarts"):
            await site.join(f"{name}-{kind}")
        restarting.append(f"{name}-restarts")
        await site.all_run()

    await stage("before")
    if away:
        await (await site.join("away")).stop()
    await site.pki(purpose, "prepare")
    await stage("prepared")
    await site.pki(purpose, "switch")
    if purpose is Purpose.SERVING_CA:
        pki_setup.issue_gateway(site.keys, names=["127.0.0.1"], world=WORLD)
    await stage("switched")
    if purpose is not Purpose.NODE_CA:
        await site.pki(purpose, "retire")
    await stage("retired")
    if away:
        site.nodes["away"].start()
        await site.all_run()


async def test_the_command_root_under_nodes_that_join_at_every_stage(site: Site) -> None:
    await whole_rotation(site, Purpose.COMMAND_ROOT, away=True)


@pytest.mark.long
@pytest.mark.parametrize("purpose", [Purpose.JOIN_SIGNING, Purpose.SERVING_CA, Purpose.NODE_CA], ids=str)
async def test_the_other_keys_under_nodes_that_join_at_every_stage(site: Site, purpose: Purpose) -> None:
    await whole_rotation(site, purpose, away=False)


@pytest.mark.parametrize(
    "purpose",
    [Purpose.COMMAND_ROOT, *(pytest.param(key, marks=pytest.mark.long) for key in list(Purpose)[1:])],
    ids=str,
)
async def test_a_crash_between_any_two_steps_locks_nobody_out(site: Site, purpose: Purpose) -> None:
    await site.join("node-1")
    await site.all_run()

    async def crash() -> None:
        await site.restart()
        await site.all_run()

    # The next key lies in the folder, and the API was not told.
    new = rotation_files.prepare(site.keys, purpose, world=WORLD)
    await crash()
    # It was told, and its answer was lost.
    prepared = {"public_der": new.public_der.hex(), "companion_der": new.companion_der.hex()}
    await site.ask("post", f"/v1/pki/keys/{purpose}/prepare", prepared)
    await crash()
    await site.pki(purpose, "prepare")
    trust = await site.ask("get", "/v1/pki/trust")
    [key] = [key for key in trust["keys"] if key["purpose"] == purpose and key["stage"] == "next"]

    async def held() -> bool:
        [node] = (await site.ask("get", "/v1/pki/trust/nodes"))["items"]
        return bool(node["trust_version"] >= key["first_version"])

    async with asyncio.timeout(WAIT_S):
        while not await held():  # noqa: ASYNC110 - asked of the API, which has no event for it
            await asyncio.sleep(0.1)
    # Switched, and the files not renamed.
    await site.ask("post", f"/v1/pki/keys/{purpose}/switch", {"key_sha256": new.key_sha256})
    await crash()
    await site.pki(purpose, "switch")
    if purpose is Purpose.SERVING_CA:
        pki_setup.issue_gateway(site.keys, names=["127.0.0.1"], world=WORLD)
    await crash()
    if purpose is Purpose.NODE_CA:
        return
    # Retired, and the files not removed.
    await site.ask("post", f"/v1/pki/keys/{purpose}/retire", {})
    await crash()
    await site.pki(purpose, "retire")
    await crash()
    trust = await site.ask("get", "/v1/pki/trust")
    assert sorted(key["stage"] for key in trust["keys"] if key["purpose"] == purpose) == ["current", "retired"]
