"""What is measured, as real processes: `better-compute serve` on an embedded PostgreSQL with fsync, real TLS between.

The bench's own process plays the daemons and the operators, so its processor time never counts for the gateway. Nodes
are made in bulk: their rows by three statements, their certificates by the installation's own node CA.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding

from bench.measure import Shares
from bettercompute.pki import certificates, keyfiles
from bettercompute.pki.identity import DEFAULT_TRUST_DOMAIN, ROLE_NODE, NodeIdentity
from bettercompute.pki.keyfiles import KeyFolder
from bettercompute.services import pki_setup
from bettercompute.store import embedded, leases, migrations
from bettercompute.store.database import Database
from bettercompute.system import system_world
from bettercompute.transport.streams import DialTarget, Identity
from bettercompute.world import World

READY_S = 30.0
STOP_S = 20.0
# Enqueues at once, as several operators and the API would have them.
POOL_SIZE = 16
# Prepared on each connection before anything is measured: an API that has run for a minute has done so.
ENQUEUE_STATEMENTS = ("commands.draw_seqs", "commands.insert", "hints.tell")
SERVING_NAMES = ("localhost", "127.0.0.1")
SERVE = (sys.executable, "-m", "bettercompute.cli.better_compute", "serve")


@dataclass(slots=True, kw_only=True)
class BenchStack:
    """A database with its gateway process. `url` and `target` stay the same over a restart."""

    folder: Path
    dsn: str
    database_process_id: int
    port: int
    api_port: int
    world: World
    keys: KeyFolder
    roles: tuple[str, ...]
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Return what nodes dial."""
        return f"https://127.0.0.1:{self.port}"

    @property
    def api_url(self) -> str:
        """Return the operators' API; for stacks with that role."""
        return f"http://127.0.0.1:{self.api_port}"

    @property
    def process_id(self) -> int:
        """Return the gateway's process."""
        assert self.process is not None, "the gateway has been started"
        return self.process.pid

    def start(self) -> None:
        """Start the gateway's process."""
        roles = [argument for role in self.roles for argument in ("--role", role)]
        config = str(self.folder / "better-compute.toml")
        with (self.folder / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*SERVE, "--config", config, "--log-level", "warning", *roles], stdout=log, stderr=subprocess.STDOUT
            )

    def stop(self, *, kill: bool = False) -> None:
        """End the gateway's process, in order or by SIGKILL."""
        process, self.process = self.process, None
        if process is None:
            return
        if kill:
            process.kill()
        else:
            process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)

    async def listening(self) -> None:
        """Wait until the gateway takes connections, which is soon followed by its lease."""
        await _listens(self.port, what="the gateway")

    async def ready(self, database: Database) -> None:
        """Wait until the gateway holds a lease, and the API listens where there is one."""
        deadline = time.monotonic() + READY_S
        while not any(lease.live for lease in await leases.list_all(database)):
            if time.monotonic() > deadline or (self.process is not None and self.process.poll() is not None):
                log = (self.folder / "serve.log").read_text(encoding="utf-8", errors="replace")
                raise SystemExit(f"the gateway did not become ready; its log ends:\n{log[-2_000:]}")
            await asyncio.sleep(0.05)
        # The lease is there a moment before the listener admits by it.
        await asyncio.sleep(0.5)
        if "api" in self.roles:
            await _listens(self.api_port, what="the API")

    def shares(self) -> Shares:
        """Return a meter of gateway, database and this process."""
        return Shares(gateway=self.process_id, database=self.database_process_id)

    @contextlib.asynccontextmanager
    async def database(self) -> AsyncIterator[Database]:
        """Give the bench's own connections, once the gateway is ready."""
        database = await Database.open(
            self.dsn,
            dice=self.world.dice,
            application_name="bench",
            pool_size=POOL_SIZE,
            rehearsed=ENQUEUE_STATEMENTS,
        )
        try:
            await self.ready(database)
            yield database
        finally:
            await database.close()

    def target(self, identity: Identity) -> DialTarget:
        """Return where a node of this stack dials."""
        serving_ca = self.keys.certificate(keyfiles.SERVING_CA)
        return DialTarget(
            url=self.url,
            serving_ca_spki_sha256=bytes.fromhex(certificates.spki_sha256(serving_ca)),
            serving_ca_pem=serving_ca.public_bytes(Encoding.PEM),
            identity=identity,
        )


async def _listens(port: int, *, what: str) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} does not listen within {READY_S:g} s")
        await asyncio.sleep(0.02)


@dataclass(frozen=True, slots=True)
class BenchNode:
    """A joined node."""

    node_id: str
    target: DialTarget


@contextlib.contextmanager
def stack(
    *, roles: Sequence[str] = ("gateway",), handshakes_per_s: int = 10_000, streams: int = 10_000
) -> Iterator[BenchStack]:
    """Run a stack until the block ends. Called by the main thread, outside the event loop.

    The handshake rate is far above what one core bears, so that the bench and not the bucket sets the pace.
    """
    folder = Path(tempfile.mkdtemp(prefix="better-compute-bench-"))
    world = system_world()
    try:
        server = embedded.start(folder / "postgres")
        try:
            asyncio.run(migrations.migrate(server.dsn))
            keys = KeyFolder(folder / "pki")
            pki_setup.initialise(keys, world=world)
            pki_setup.issue_gateway(keys, names=SERVING_NAMES, world=world)
            with socket.create_server(("127.0.0.1", 0)) as probe, socket.create_server(("127.0.0.1", 0)) as other:
                port, api_port = int(probe.getsockname()[1]), int(other.getsockname()[1])
            (folder / "better-compute.toml").write_text(
                f'state_dir = "{folder}"\n'
                f'[database]\ndsn = "{server.dsn}"\n'
                f'[api]\nhost = "127.0.0.1"\nport = {api_port}\n'
                f'[gateway]\nname = "bench"\nhost = "127.0.0.1"\nport = {port}\n'
                f'advertise_url = "https://127.0.0.1:{port}"\n'
                f"max_streams = {streams}\nhandshakes_per_s = {handshakes_per_s}\n",
                encoding="utf-8",
            )
            running = BenchStack(
                folder=folder,
                dsn=server.dsn,
                database_process_id=server.process_id,
                port=port,
                api_port=api_port,
                world=world,
                keys=keys,
                roles=tuple(roles),
            )
            running.start()
            try:
                yield running
            finally:
                running.stop()
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def add_nodes(running: BenchStack, database: Database, *, count: int, prefix: str) -> list[BenchNode]:
    """Join nodes in bulk and return them."""
    world, node_ca = running.world, running.keys.authority(keyfiles.NODE_CA)
    # One key for all: making keys is no part of any figure.
    key = certificates.generate_key()
    key_pem = keyfiles.key_to_pem(key)
    made, serials = [], []
    for number in range(count):
        node_id = f"{prefix}-{number:05}"
        leaf = certificates.make_node_leaf(
            node_ca,
            public_key=key.public_key(),
            identity=NodeIdentity(trust_domain=DEFAULT_TRUST_DOMAIN, site="default", node_id=node_id, role=ROLE_NODE),
            serial=world.ids.random_bytes(certificates.SERIAL_BYTES),
            now_ms=world.clock.now_ms(),
        )
        chain = certificates.chain_to_pem((leaf.public_bytes(Encoding.DER),))
        made.append(BenchNode(node_id, running.target(Identity(chain, key_pem))))
        serials.append(certificates.serial_text(leaf))
    node_ids = [node.node_id for node in made]
    async with database.transaction() as transaction:
        await transaction.query(
            "INSERT INTO nodes (node_id, site, role, attestor) SELECT unnest($1::text[]), 'default', 'node', 'bench'",
            node_ids,
        )
        await transaction.query("INSERT INTO node_sessions (node_id) SELECT unnest($1::text[])", node_ids)
        await transaction.query(
            "INSERT INTO node_certs (serial, node_id, identity_generation, csr_sha256, chain, not_before, not_after)"
            " SELECT serial, node_id, 1, sha256(serial::bytea), '', compute_now() - interval '1 hour',"
            " compute_now() + interval '1 day' FROM unnest($1::text[], $2::text[]) AS made (serial, node_id)",
            serials,
            node_ids,
        )
    await database.query("ANALYZE nodes, node_sessions, node_certs")
    return made
