"""A node with the production daemon: agent, executor, identity and the SQLite journal, on a folder of its own.

Only its handlers are played: they take their time and say that they began. A kill leaves the folder as it is; what the
kernel would have let go (the lock) is let go here.
"""

from __future__ import annotations

import asyncio
import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from bettercompute import __version__
from bettercompute.daemon.agent import Agent
from bettercompute.daemon.config import Config
from bettercompute.daemon.group_commit import Journal
from bettercompute.daemon.handlers import Handler, HandlerContext
from bettercompute.daemon.identity import IdentityStore, Issued, Machine, Purpose
from bettercompute.daemon.inventory.host import HostRoot
from bettercompute.daemon.join import JoinSettings, join
from bettercompute.daemon.journal import DATABASE_NAME
from bettercompute.daemon.journal_files import FolderLock
from bettercompute.daemon.journal_records import JournalLimits
from bettercompute.daemon.node_round import CurrentConfig
from bettercompute.daemon.node_round import NodeParts as DaemonParts
from bettercompute.daemon.notify import SystemdNotifier
from bettercompute.errors import BetterComputeError
from bettercompute.pki import certificates
from bettercompute.protocol.statuses import Reason
from bettercompute.testing.sim.bcd_parts import FullableDisk, PlayedHandler
from bettercompute.testing.sim.machine import SimulatedClock, make_world
from bettercompute.testing.sim.node import DURATIONS_S, EVENT_TYPE, NodeParts
from bettercompute.testing.sim.process import SimulatedProcess
from bettercompute.transport.calls import Connection, DialTarget
from bettercompute.world import Clock

# Small, so that the bound is reached sometimes and copies are quick.
LIMITS = JournalLimits(max_bytes=4 * 1024 * 1024, reserve_bytes=512 * 1024, ballast_bytes=64 * 1024)

# As systemd does.
RESTART_S = 10.0

# How many bits of a file a damage flips.
FLIPS = (1, 1, 2, 8)


@dataclass(slots=True)
class BcdNode:
    """One host with bcd."""

    name: str
    node_id: str
    parts: NodeParts
    clock: SimulatedClock
    token: str = ""
    """The join token with which it joins anew before it runs."""
    starts: int = 0
    boots: int = 1
    disk_full: bool = False
    has_disk: bool = True
    process: SimulatedProcess | None = None
    agent: Agent | None = None
    disk: FullableDisk | None = None
    """Its journal, while it holds the folder."""
    failure: str = ""
    """Why the daemon ended by itself last."""
    beside: BcdNode | None = None
    """Whose folder it uses; None: its own."""
    rival: BcdNode | None = None
    """A second daemon on this one's folder."""

    @classmethod
    def make(cls, node_id: str, *, parts: NodeParts, clock: SimulatedClock) -> BcdNode:
        """Join a node and put it on a disk of its own."""
        node = cls(node_id, node_id, parts, clock)
        for path, content in (("proc/sys/kernel/random/boot_id", "boot-1\n"), ("etc/machine-id", f"{node_id}\n")):
            file = node.root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        node.state_dir.mkdir(parents=True, exist_ok=True)
        node._join_first()
        return node

    @property
    def serial(self) -> str:
        """Return the serial of the certificate that is on its disk."""
        identity = IdentityStore(self.state_dir).load()
        return "" if identity is None else identity.record.certificate_serial

    @property
    def _disk_name(self) -> str:
        return (self.beside or self).name

    @property
    def state_dir(self) -> Path:
        """Return where the daemon keeps what it must not lose."""
        return self.parts.folder / self._disk_name / "state"

    @property
    def root(self) -> Path:
        """Return the machine as its collectors see it."""
        return self.parts.folder / self._disk_name / "root"

    @property
    def joining(self) -> bool:
        """Return whether it waits to join anew by its token."""
        return bool(self.token)

    @property
    def live(self) -> bool:
        """Return whether it has a session."""
        round_ = None if self.agent is None else self.agent.round
        return round_ is not None and round_.shell.outlook.state == "connected"

    @property
    def _state(self) -> Any:
        round_ = None if self.agent is None else self.agent.round
        return None if round_ is None or not hasattr(round_, "driver") else round_.driver.state

    @property
    def idle(self) -> bool:
        """Return whether it owes nothing."""
        state = self._state
        return state is not None and not self._owed_commands() and state.acked_event_seq == state.last_event_seq

    def _owed_commands(self) -> list[str]:
        """Return what runs, or has ended and is not acked. What an earlier process left waits to be sent again."""
        state = self._state
        return sorted(
            entry.command_id
            for entry in state.entries.values()
            if not entry.acked and (entry.done or entry.process_id == state.facts.process_id)
        )

    @property
    def owed(self) -> str:
        """Return what it waits for, in words."""
        state = self._state
        if state is None:
            return "nothing: it does not run"
        return f"commands {self._owed_commands()}, events {state.acked_event_seq} to {state.last_event_seq}"

    @property
    def why(self) -> str:
        """Return why it has no session, in words."""
        round_ = None if self.agent is None else self.agent.round
        return self.failure if round_ is None else str(round_.shell.outlook)

    @property
    def journal(self) -> tuple[str, int]:
        """Return its journal's id and last event."""
        state = self._state
        return ("", 0) if state is None else (state.journal_id, state.last_event_seq)

    def start(self) -> None:
        """Start the daemon."""
        self.starts += 1
        process = self.process = self.parts.new_process(f"{self.name}#{self.starts}")
        self.agent = process.run(self._agent, process)
        process.spawn(self._run(self.agent, process))

    async def _run(self, agent: Agent, process: SimulatedProcess) -> None:
        """Run it as its service manager does: again after a while when it ends."""
        try:
            if self.token:
                await self._join_anew(process)
            await agent.run()
        except Exception as error:  # noqa: BLE001 - told to whoever looks at this node
            self.failure = f"{type(error).__name__}: {error}"
            reason = error.reason if isinstance(error, BetterComputeError) else ""
            if reason == Reason.REVOKED:
                self.token = ""  # what it was good for was revoked since: only a new one helps, as the refusal says
            if reason == FolderLock.HELD and self.parts.rules is not None:
                self.parts.rules.met["second-daemon-refused"] += 1
        self.disk = None  # it has closed its files and given up the folder
        await asyncio.sleep(RESTART_S)
        if self.process is process and process.alive:
            self._end()
            self.start()

    async def _join_anew(self, process: SimulatedProcess) -> None:
        """Do what `bcd rejoin TOKEN` does."""
        world = make_world(f"{self.parts.seed} {process.name} join", clock=self.clock)
        settings = JoinSettings(token=self.token, daemon_version=__version__, rejoin=True)
        dial = functools.partial(self._dial, world.clock)
        await join(IdentityStore(self.state_dir), settings, world=world, dial=dial)
        self.token = ""

    def _agent(self, process: SimulatedProcess) -> Agent:
        rules = self.parts.rules

        def began(context: HandlerContext) -> None:
            if rules is not None:
                rules.began(self.node_id, context.command_id, context.kind, who=process.name)
                rules.said.began(self.name, context.command_id)

        handlers: dict[str, Handler] = {kind: PlayedHandler(kind, began) for kind in DURATIONS_S}
        world = make_world(f"{self.parts.seed} {process.name}", clock=self.clock)
        parts = DaemonParts(
            world=world,
            config=CurrentConfig(Config(state_dir=self.state_dir)),
            environment={},
            identities=IdentityStore(self.state_dir),
            notifier=SystemdNotifier({}),
            root=lambda: replace(HostRoot.live(), folder=self.root),
            handlers=handlers,
            dial=functools.partial(self._dial, world.clock),
        )
        return Agent(
            parts,
            config_path=self.state_dir / "config.toml",
            open_journal=functools.partial(Journal.open, limits=LIMITS, database=self._open_disk, in_thread=False),
        )

    def _open_disk(self, folder: Path, *, limits: JournalLimits) -> FullableDisk:
        if any(other is not None and other.disk is not None for other in (self.beside, self.rival)):
            assert self.parts.rules is not None, "only faults start a second daemon"
            self.parts.rules.opened_twice(self.node_id)
        wrote = None
        if self.parts.rules is not None:
            said = self.parts.rules.said
            said.runs_on(self.name, disk=self._disk_name)
            wrote = functools.partial(said.wrote, self._disk_name)
        self.disk = FullableDisk(folder, limits=limits, full=lambda: self.disk_full, wrote=wrote)
        return self.disk

    async def _dial(self, clock: Clock, target: DialTarget) -> Connection:
        process, shown = self.process, target.identity
        assert process is not None
        chain: tuple[bytes, ...] = ()  # who joins has none yet
        if shown is not None:
            found = x509.load_pem_x509_certificates(shown.certificate_chain_pem)
            chain = tuple(certificate.public_bytes(Encoding.DER) for certificate in found)
        gateway = target.url.removeprefix("https://").partition(":")[0]
        return await self.parts.dial(
            gateway, node_id=self.node_id, machine=self.name, process=process, clock=clock, chain=chain
        )

    def end(self) -> None:
        """Kill it for good, and with it what else runs on its disk: what comes next is done to the disk."""
        if self.rival is not None:
            self.rival.end()
            self.rival = None
        self._end()

    def _end(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.agent = None
        self._let_go()
        self.parts.network.cut(process=self.process)

    def _let_go(self) -> None:
        """Let go what the kernel takes from a killed process, and leave its files as they are, log and all."""
        if self.disk is None:
            return  # it held no folder, and another daemon may
        (self.state_dir / "lock").unlink(missing_ok=True)
        files = {path: path.read_bytes() for path in self.state_dir.glob(f"{DATABASE_NAME}*")}
        self.disk.close()
        self.disk = None
        for path in self.state_dir.glob(f"{DATABASE_NAME}*"):
            path.unlink()
        for path, content in files.items():
            path.write_bytes(content)

    def restart(self, *, reboot: bool) -> None:
        """Kill it and start it again; a second daemon on its folder may be faster."""
        self._end()
        if reboot:
            self.boots += 1
            (self.root / "proc/sys/kernel/random/boot_id").write_text(f"boot-{self.boots}\n")
        self.start()

    def lose_journal(self) -> None:
        """Come back with an empty journal."""
        self.end()
        for path in self.state_dir.glob(f"{DATABASE_NAME}*"):
            path.unlink()
        self.start()

    def remember(self) -> None:
        """Take a copy of the journal's files."""
        copies = self._copies()
        shutil.rmtree(copies, ignore_errors=True)
        copies.mkdir()
        for path in self.state_dir.glob(f"{DATABASE_NAME}*"):
            shutil.copy2(path, copies / path.name)

    def roll_back(self) -> None:
        """Put the copy in the place of the journal."""
        copies = self._copies()
        self.end()
        for path in self.state_dir.glob(f"{DATABASE_NAME}*"):
            path.unlink()
        for path in copies.iterdir():
            shutil.copy2(path, self.state_dir / path.name)
        self.start()

    def _copies(self) -> Path:
        return self.state_dir.with_name("copy")

    def fill_disk(self, full: bool) -> None:
        """Fill the disk, or make room."""
        self.disk_full = full
        rules = self.parts.rules
        if full and rules is not None:
            rules.busy_expected.add(self.node_id)

    def clone(self, name: str) -> BcdNode:
        """Start another machine with a copy of its disk."""
        twin = BcdNode(name, self.node_id, self.parts, self.clock, token=self.token, boots=self.boots)
        if self.parts.rules is not None:
            self.parts.rules.said.copied(name, of=self.name)
        shutil.copytree(self.root, twin.root)
        shutil.copytree(
            self.state_dir,
            twin.state_dir,
            symlinks=True,
            ignore=lambda _, names: [name for name in names if name.endswith(".sock")],
        )
        twin.start()
        return twin

    def second_daemon(self, name: str) -> Callable[[], None]:
        """Start another daemon on the same state folder, and again whenever it ends; return what ends it."""
        rival = self.rival = BcdNode(name, self.node_id, self.parts, self.clock, boots=self.boots, beside=self)
        rival.start()

        def end() -> None:
            if self.rival is rival:
                rival.end()
                self.rival = None

        return end

    def damage_journal(self) -> None:
        """Flip some bits of the journal's files."""
        self.end()
        for path in sorted(self.state_dir.glob(f"{DATABASE_NAME}*")):
            content = bytearray(path.read_bytes())
            for _ in range(self.parts.rng.choice(FLIPS) if content else 0):
                content[self.parts.rng.randrange(len(content))] ^= 1 << self.parts.rng.randrange(8)
            path.write_bytes(content)
        self.start()

    def rejoin(self, token: str) -> None:
        """Take a new identity, through a gateway."""
        self.end()
        self.token = token
        self.start()

    def _join_first(self) -> None:
        registrar = self.parts.registrar
        store = IdentityStore(self.state_dir)
        request = store.pending(Purpose.JOIN, label="first")
        joined = registrar.join(
            self.node_id,
            public_key=certificates.check_csr(request.csr_der),
            life_ms=registrar.certificate_life_ms,
        )
        urls = tuple(f"https://{name}:443" for name in self.parts.gateways)
        issued = Issued(
            chain_der=joined.chain,
            trust=registrar.trust(),
            identity_generation=1,
            gateway_urls=urls,
            server_time_ms=registrar.now_ms(),
        )
        store.install(Purpose.JOIN, request, issued, machine=Machine())

    def record_event(self, payload_json: str) -> None:
        """Let something happen."""
        process, round_ = self.process, None if self.agent is None else self.agent.round
        running = process is not None and process.alive and not process.paused
        if process is not None and running and round_ is not None and hasattr(round_, "driver"):
            process.run(round_.driver.record_event, EVENT_TYPE, payload_json)
