"""One database, API and gateways for many runs, and what is asked of them: nodes, commands, and what became of them."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import httpx

from bettercompute.cli.client import ApiClient
from bettercompute.cli.provisioning import write_identity
from bettercompute.errors import BetterComputeError, Unavailable
from bettercompute.pki.keyfiles import KeyFolder
from bettercompute.services import pki_setup
from bettercompute.store import embedded, migrations
from bettercompute.store.database import Database, Row
from bettercompute.system import system_world
from bettercompute.testing.postgres import CHEAP_SETTINGS
from tests.forks import FORKS
from tests.kills.nodes import END_S, POLL_S, Node, ended
from tests.kills.plan import Life
from tests.kills.victims import run_serve
from tests.unit.daemon.put_server import PutServer

WORLD = system_world()
BOUND_S = 90.0
"""No run takes longer, whatever is killed: back-offs of a few seconds, a Hello a second, 5 s polls behind lost news."""


def free_port() -> int:
    """A port that was free a moment ago: it must stay the same over a restart."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclass
class Served:
    """One `better-compute serve`, forked."""

    name: str
    config: Path
    roles: tuple[str, ...]
    ready_url: str
    gateway_url: str = ""
    process: ForkServerProcess | None = None

    @property
    def arms(self) -> Path:
        """Where a kill is laid down for it."""
        return self.config.with_suffix(".arms")

    @property
    def log(self) -> Path:
        """Its log."""
        return self.config.with_suffix(".log")

    def start(self) -> None:
        """Start it; it need not be ready."""
        self.arms.unlink(missing_ok=True)
        self.process = FORKS.Process(target=run_serve, args=(self.config, self.log, self.roles, self.arms), daemon=True)
        self.process.start()

    async def until_ready(self) -> None:
        """Wait until it serves."""
        async with asyncio.timeout(BOUND_S), httpx.AsyncClient(trust_env=False) as client:
            while True:
                assert self.process is not None
                assert self.process.is_alive(), f"{self.name} ended: {self.log.read_text()[-3_000:]}"
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(self.ready_url)).is_success:
                        return
                await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """End it in order."""
        if self.process is None or not self.process.is_alive():
            return
        self.process.terminate()
        async with asyncio.timeout(END_S):
            await ended(self.process)


@dataclass
class Plane:
    """A control plane, and what tests see of it past everything that is killed."""

    folder: Path
    postgres: embedded.EmbeddedPostgres
    database: Database
    api: Served
    client: ApiClient
    put_url: str
    gateways: list[Served] = field(default_factory=list)

    async def add_gateway(self, name: str) -> Served:
        """Start a gateway of its own process and port."""
        port, health = free_port(), free_port()
        config = self.folder / f"{name}.toml"
        config.write_text(
            f'state_dir = "{self.folder}"\n[database]\ndsn = "{self.postgres.dsn}"\n'
            f'[gateway]\nname = "{name}"\nhost = "127.0.0.1"\nport = {port}\n'
            f'advertise_url = "https://127.0.0.1:{port}"\n[health]\nhost = "127.0.0.1"\nport = {health}\n'
        )
        gateway = Served(
            name, config, ("gateway",), f"http://127.0.0.1:{health}/readyz", gateway_url=f"https://127.0.0.1:{port}"
        )
        self.gateways.append(gateway)
        gateway.start()
        await gateway.until_ready()
        return gateway

    async def add_node(self, node_id: str, *, gateway: Served) -> Node:
        """Provision a node; its daemon is not started."""
        folder = self.folder / node_id
        folder.mkdir()
        await asyncio.to_thread(
            write_identity, self.client, node_id=node_id, site=None, role="node", out=folder / "identity"
        )
        node = Node(node_id, folder)
        node.prepare(gateway_url=gateway.gateway_url)
        return node

    async def run(self, node: Node, kind: str, *, name: str) -> str:
        """Ask for a command, whose programs will be told `name`, and return its id."""
        payloads: dict[str, dict[str, Any]] = {
            "gpu.reset": {"gpu_uuids": [name]},
            "logs.collect": {"units": [name], "upload_url": self.put_url},
            "inventory.refresh": {"sections": ["facts", "system"]},
            "daemon.upgrade": {"target_version": "9.9.9"},
        }
        wanted = {"kind": kind, "nodes": [node.node_id], "payload": payloads.get(kind, {}), "timeout_ms": 60_000}
        key = f"{node.node_id}-{kind}-{name}"
        while True:
            try:
                made = await asyncio.to_thread(self.client.post, "/v1/commands", wanted, idempotency_key=key)
            except Unavailable:
                await self.revive()
            else:
                return str(made["commands"][0]["id"])

    async def cancel(self, command_id: str) -> None:
        """Ask for a command's end; it may have ended already."""
        with contextlib.suppress(BetterComputeError):
            await asyncio.to_thread(self.client.post, f"/v1/commands/{command_id}/cancel", {"reason": "killed"})

    async def query(self, sql: str, *arguments: object) -> list[Row]:
        """Read the database, once it answers."""
        while True:
            with contextlib.suppress(Unavailable):
                return await self.database.query(sql, *arguments)
            await self.revive()

    async def revive(self) -> None:
        """Start PostgreSQL when its first process has been killed; the second one waits for the rest of the first."""
        await asyncio.sleep(POLL_S)
        if not self.postgres.running():
            self.postgres.start()

    async def rows(self, command_ids: Sequence[str]) -> dict[str, Row]:
        """Return the commands' rows."""
        rows = await self.query("SELECT * FROM commands WHERE id = ANY ($1::text[])", list(command_ids))
        return {row["id"]: row for row in rows}

    async def until_ended(self, command_ids: Sequence[str]) -> None:
        """Wait until all have ended. The caller bounds the wait."""
        while True:
            rows = await self.query(
                "SELECT count(*) AS open FROM commands WHERE id = ANY ($1::text[]) AND state < 5", list(command_ids)
            )
            if not rows[0]["open"]:
                return
            await asyncio.sleep(POLL_S)


async def stop(node: Node) -> None:
    """End the node's daemon in order and owing nothing: its last life may have begun after all was settled."""
    async with asyncio.timeout(BOUND_S):
        while not await node.stop() or node.journal()[1]:
            node.start(Life())
            await node.until_settled()


@contextlib.asynccontextmanager
async def open_plane(folder: Path) -> AsyncIterator[Plane]:
    """Give a running plane without gateways; at the end everything of it is stopped."""
    async with contextlib.AsyncExitStack() as stack:
        settings = CHEAP_SETTINGS | {"restart_after_crash": "on", "max_connections": "200"}
        postgres = embedded.start(folder / "postgres", settings=settings, initdb_options=("--no-sync",))
        stack.callback(postgres.stop)
        await migrations.migrate(postgres.dsn)
        keys = KeyFolder(folder / "pki")
        pki_setup.initialise(keys, world=WORLD)
        pki_setup.issue_gateway(keys, names=("127.0.0.1",), world=WORLD)
        database = await Database.open(postgres.dsn, dice=WORLD.dice, application_name="tests")
        stack.push_async_callback(database.close)
        port, config = free_port(), folder / "api.toml"
        config.write_text(
            f'state_dir = "{folder}"\n[database]\ndsn = "{postgres.dsn}"\n[api]\nport = {port}\n'
            '[gateway]\nadvertise_url = "https://127.0.0.1:1"\n'
        )
        api = Served("api", config, ("api", "worker"), f"http://127.0.0.1:{port}/readyz")
        stack.push_async_callback(api.stop)
        api.start()
        await api.until_ready()
        token = (folder / "operator-token").read_text().strip()
        client = ApiClient(address=f"http://127.0.0.1:{port}", token=token)
        stack.callback(client.close)
        put = PutServer()
        server = await asyncio.start_server(put.serve, "127.0.0.1", 0)
        stack.push_async_callback(server.wait_closed)
        stack.callback(server.close)
        put_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/bucket/key"
        plane = Plane(folder, postgres, database, api, client, put_url)
        try:
            yield plane
        finally:
            for gateway in plane.gateways:
                await gateway.stop()
            for child in multiprocessing.active_children():
                if child is not api.process:
                    child.kill()


def hurry(nodes: Sequence[Node]) -> None:
    """Let the nodes dial now in place of waiting: as `systemctl reload bcd` does."""
    for node in nodes:
        node.signal(signal.SIGHUP)
