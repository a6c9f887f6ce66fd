"""Real gateway processes on one database, and FakeDaemons that dial them over real TLS."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from bettercompute.pki import certificates, keyfiles
from bettercompute.pki.identity import DEFAULT_TRUST_DOMAIN, NodeIdentity
from bettercompute.pki.keyfiles import KeyFolder
from bettercompute.protocol import messages
from bettercompute.services import pki_setup
from bettercompute.store.database import Database, Row
from bettercompute.store.limits import Limits
from bettercompute.system import system_world
from bettercompute.testing.fake_daemon import FakeDaemon
from bettercompute.testing.fake_dial import Dial, over_tls
from bettercompute.transport.streams import Connection, DialTarget, Identity
from tests.e2e.conftest import BETTER_COMPUTE

WORLD = system_world()
READY_S = 60.0
STOP_S = 30.0
POLL_S = 0.05


def free_port() -> int:
    """A port that was free a moment ago: it must stay the same over a restart."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclass
class GatewayProcess:
    """One `better-compute serve --role gateway`, with its log."""

    name: str
    config: Path
    log: Path
    port: int
    roles: tuple[str, ...] = ("gateway",)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start it, and return once it admits sessions."""
        self._spawn()
        await until(lambda: self.said("started"), what=f"gateway {self.name}", within_s=READY_S)

    def _spawn(self) -> None:
        roles = [argument for role in self.roles for argument in ("--role", role)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*BETTER_COMPUTE, "serve", "--config", str(self.config), *roles], stdout=log, stderr=log
            )

    def said(self, event: str) -> dict[str, object] | None:
        """Return the first entry of its log with this event."""
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        for line in self.log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if entry.get("event") == event:
                    return dict(entry)
        return None

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(STOP_S)

    def pause(self) -> None:
        """SIGSTOP."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for one that does not obey."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()


@dataclass
class Site:
    """A database, keys, gateways, and daemons that know all of the gateways."""

    folder: Path
    dsn: str
    database: Database
    keys: KeyFolder
    node_key: ec.EllipticCurvePrivateKey
    gateways: list[GatewayProcess] = field(default_factory=list)
    daemons: list[FakeDaemon] = field(default_factory=list)
    identities: dict[str, Identity] = field(default_factory=dict)
    gateway_dsn: str = ""
    """Where the gateways find the database, when that is not where the test does."""
    running: list[asyncio.Task[None]] = field(default_factory=list)

    def add_gateway(
        self, name: str, *, handshakes_per_s: int = 200, roles: tuple[str, ...] = ("gateway",), more: str = ""
    ) -> GatewayProcess:
        """Write the configuration of a gateway; its connections say whose they are by the setting `bc.process`."""
        port = free_port()
        config = self.folder / f"{name}.toml"
        config.write_text(
            f'state_dir = "{self.folder}"\n[database]\ndsn = "{self.gateway_dsn or self.dsn}&bc.process={name}"\n'
            f'[gateway]\nname = "{name}"\nhost = "127.0.0.1"\nport = {port}\nhandshakes_per_s = {handshakes_per_s}\n'
            f'advertise_url = "https://127.0.0.1:{port}"\n{more}'
        )
        gateway = GatewayProcess(name, config, self.folder / f"{name}.log", port, roles)
        self.gateways.append(gateway)
        return gateway

    async def start_gateways(self, *names: str) -> list[GatewayProcess]:
        """Start gateways of these names, together."""
        made = [self.add_gateway(name) for name in names]
        await asyncio.gather(*(gateway.start() for gateway in made))
        return made

    async def join(self, count: int, *, dial: Callable[[Identity], Dial] | None = None) -> list[FakeDaemon]:
        """Make nodes with their rows and certificates, and a daemon for each, which does not run yet."""
        authority = self.keys.authority(keyfiles.NODE_CA)
        key_pem = keyfiles.key_to_pem(self.node_key)
        made, serials = [], []
        for number in range(len(self.daemons), len(self.daemons) + count):
            leaf = certificates.make_node_leaf(
                authority,
                public_key=self.node_key.public_key(),
                identity=NodeIdentity(
                    trust_domain=DEFAULT_TRUST_DOMAIN, site="default", node_id=f"node-{number:04}", role="node"
                ),
                serial=WORLD.ids.random_bytes(certificates.SERIAL_BYTES),
                now_ms=WORLD.clock.now_ms(),
            )
            identity = Identity(certificates.chain_to_pem((leaf.public_bytes(Encoding.DER),)), key_pem)
            self.identities[f"node-{number:04}"] = identity
            dialing = (dial or self.dial_in_turn)(identity)
            made.append(FakeDaemon(f"node-{number:04}", dial=dialing, world=WORLD))
            serials.append(certificates.serial_text(leaf))
        node_ids = [daemon.node_id for daemon in made]
        async with self.database.transaction() as transaction:
            await transaction.query(
                "INSERT INTO nodes (node_id, site, role, attestor)"
                " SELECT unnest($1::text[]), 'default', 'node', 'join-token'",
                node_ids,
            )
            await transaction.query("INSERT INTO node_sessions (node_id) SELECT unnest($1::text[])", node_ids)
            await transaction.query(
                "INSERT INTO node_certs"
                " (serial, node_id, identity_generation, csr_sha256, chain, not_before, not_after)"
                " SELECT u.serial, u.node_id, 1, sha256(u.serial::bytea), '', compute_now() - interval '1 hour',"
                " compute_now() + interval '1 day' FROM unnest($1::text[], $2::text[]) AS u (serial, node_id)",
                serials,
                node_ids,
            )
        self.daemons += made
        return made

    def target(self, url: str, identity: Identity) -> DialTarget:
        serving_ca = self.keys.certificate(keyfiles.SERVING_CA)
        return DialTarget(
            url=url,
            serving_ca_spki_sha256=bytes.fromhex(certificates.spki_sha256(serving_ca)),
            serving_ca_pem=serving_ca.public_bytes(Encoding.PEM),
            identity=identity,
        )

    def dial_in_turn(self, identity: Identity) -> Dial:
        """Dial as bcd does: one gateway after another in an order of one's own, one at each attempt."""
        untried: list[GatewayProcess] = []

        async def dial() -> Connection:
            if not untried:
                untried.extend(sorted(self.gateways, key=lambda _: WORLD.dice.uniform(0, 1)))
            return await over_tls(self.target(untried.pop().url, identity), world=WORLD)()

        return dial

    def dial_to(self, gateway: GatewayProcess) -> Callable[[Identity], Dial]:
        """Dial one gateway only."""
        return lambda identity: over_tls(self.target(gateway.url, identity), world=WORLD)

    async def gateway_id(self, gateway: GatewayProcess) -> str:
        """Return the id that a gateway's process has drawn last."""
        rows = await self.database.query(
            "SELECT name FROM leases WHERE starts_with(name, $1) ORDER BY started_at DESC LIMIT 1", f"{gateway.name}-"
        )
        return str(rows[0]["name"])

    def run(self, daemons: Sequence[FakeDaemon]) -> None:
        """Switch daemons on."""
        self.running += [asyncio.create_task(daemon.run()) for daemon in daemons]

    async def all_connected(self, *, within_s: float) -> float:
        """Wait until every daemon is welcomed; return how long that took."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(within_s):
                for daemon in self.daemons:
                    await daemon.connected()
        except TimeoutError:
            raise AssertionError(f"not all are connected within {within_s} s: {self.why()}") from None
        return time.monotonic() - began

    def why(self) -> dict[str, int]:
        """Return how many daemons are live, and by what the last streams of the others ended."""
        ends = (daemon.endings[-1] if daemon.endings else None for daemon in self.daemons if not daemon.live)
        why = Counter("dialing" if end is None else f"{end.reason}: {end.message}"[:120] for end in ends)
        return {"live": sum(daemon.live for daemon in self.daemons), **why}

    async def rows(self) -> dict[str, Row]:
        """Return the session rows by node."""
        rows = await self.database.query(
            "SELECT s.node_id, s.gateway_id, s.session_id, s.session_epoch, s.duplicate_hellos, n.state"
            " FROM node_sessions s JOIN nodes n USING (node_id)"
        )
        return {row["node_id"]: row for row in rows}

    async def disagreements(self) -> dict[str, str]:
        """Return the nodes whose stream and row do not belong together, and how."""
        found = {}
        rows = await self.rows()
        for daemon in self.daemons:
            row = rows[daemon.node_id]
            if daemon.live and row["session_id"] != daemon.state.session_id:
                found[daemon.node_id] = "a stream without a row"
            elif not daemon.live and row["gateway_id"] is not None:
                found[daemon.node_id] = "a row without a stream"
        return found

    async def until_agreed(self, *, within_s: float) -> None:
        """Wait until every stream has its row and every row its stream."""
        deadline = time.monotonic() + within_s
        while found := await self.disagreements():
            assert time.monotonic() < deadline, found
            await asyncio.sleep(POLL_S)

    async def enqueue(self, node_ids: Sequence[str], *, per_node: int, prefix: str = "c") -> list[str]:
        """Make commands for nodes, and tell the gateways."""
        ids, nodes, bodies = [], [], []
        for node_id in node_ids:
            for number in range(per_node):
                body = messages.CommandBody(
                    command_id=f"{prefix}-{node_id}-{number}",
                    node_id=node_id,
                    kind="inventory.refresh",
                    lane=messages.LANE_CONTROL,
                    timeout_ms=60_000,
                )
                ids.append(body.command_id)
                nodes.append(node_id)
                bodies.append(body.SerializeToString())
        async with self.database.transaction() as transaction:
            await transaction.query(
                "INSERT INTO commands (id, node_id, kind, lane, body, state, created_by, not_after, timeout_ms)"
                " SELECT u.id, u.node_id, 'inventory.refresh', 1, u.body, 1, 'test', compute_now() + interval '1 hour',"
                " 60000 FROM unnest($1::text[], $2::text[], $3::bytea[]) AS u (id, node_id, body)",
                ids,
                nodes,
                bodies,
            )
            await transaction.query("SELECT pg_notify('bc_dispatch', '*')")
        return ids

    async def until_ended(self, command_ids: Sequence[str], *, within_s: float) -> None:
        """Wait until commands have succeeded."""
        deadline = time.monotonic() + within_s
        while True:
            rows = await self.database.query(
                "SELECT state, count(*) AS commands FROM commands WHERE id = ANY ($1::text[]) GROUP BY state",
                list(command_ids),
            )
            states = {row["state"]: row["commands"] for row in rows}
            if states == {5: len(command_ids)}:
                return
            assert time.monotonic() < deadline, (states, await self.left_over(command_ids))
            await asyncio.sleep(POLL_S)

    async def left_over(self, command_ids: Sequence[str]) -> list[Row]:
        """Return some of the commands that have not ended, and where their nodes are."""
        return await self.database.query(
            "SELECT c.id, c.lane, c.seq, c.state, c.attempt, c.not_before, c.held_back, s.gateway_id, s.session_epoch,"
            " s.upgrade_only, n.state AS node_state, compute_now() AS now"
            " FROM commands c JOIN node_sessions s USING (node_id) JOIN nodes n USING (node_id)"
            " WHERE c.id = ANY ($1::text[]) AND c.state < 5 ORDER BY c.seq LIMIT 20",
            list(command_ids),
        )

    async def assert_events_whole(self) -> None:
        """The events stored are those journaled: none lost, none twice, in order."""
        rows = await self.database.query("SELECT node_id, seq FROM node_events ORDER BY node_id, seq")
        stored: dict[str, list[int]] = {}
        for row in rows:
            stored.setdefault(row["node_id"], []).append(row["seq"])
        for daemon in self.daemons:
            assert stored.get(daemon.node_id, []) == list(range(1, daemon.events.last_seq + 1))

    async def assert_no_clones(self) -> None:
        """Nobody was taken for a second machine."""
        assert not await self.database.query("SELECT FROM node_sessions WHERE duplicate_hellos > 0")
        assert not await self.database.query("SELECT FROM outbox WHERE type LIKE 'security.%'")


@contextlib.asynccontextmanager
async def open_site(folder: Path, dsn: str) -> AsyncIterator[Site]:
    """Give a site without gateways; at the end its daemons and gateways are stopped."""
    keys = KeyFolder(folder / "pki")
    pki_setup.initialise(keys, world=WORLD)
    pki_setup.issue_gateway(keys, names=("localhost", "127.0.0.1"), world=WORLD)
    # A statement that waits for a lock for good says so before the test's own time is over.
    limits = Limits(statement_timeout_ms=30_000)
    database = await Database.open(dsn, dice=WORLD.dice, application_name="tests", limits=limits)
    site = Site(folder, dsn, database, keys, certificates.generate_key())
    try:
        yield site
    finally:
        for task in site.running:
            task.cancel()
        await asyncio.gather(*site.running, return_exceptions=True)
        await asyncio.gather(*(asyncio.to_thread(gateway.stop) for gateway in site.gateways))
        await database.close()


async def until(holds: Callable[[], object] | Callable[[], Awaitable[object]], *, what: str, within_s: float) -> None:
    """Wait until something of another process holds, which has no signal to give."""
    deadline = time.monotonic() + within_s
    while True:
        answer = holds()
        if isinstance(answer, Awaitable):
            answer = await answer
        if answer:
            return
        assert time.monotonic() < deadline, f"{what} did not come within {within_s} s"
        await asyncio.sleep(POLL_S)
