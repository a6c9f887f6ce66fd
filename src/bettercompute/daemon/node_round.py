"""One round of `bcd node`: everything that lives between the opening of a journal and its closing, put together.

The order matters: what an earlier process left running is ended before the session's rules are started, and those judge
its entries before a gateway is dialed. Whatever ends the round, processes end before the stream and the stream before
the journal. See docs/daemon.md, "How it is made".
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from bettercompute import __version__
from bettercompute.daemon import journal_owner, machine
from bettercompute.daemon.attest import NodeAttestor
from bettercompute.daemon.conditions import Conditions, StatusReporter
from bettercompute.daemon.config import Config
from bettercompute.daemon.desired import DOCUMENT, SpecOwner
from bettercompute.daemon.dial import Dial, DialSettings, GatewayLink
from bettercompute.daemon.driver import Driver
from bettercompute.daemon.executor import Executor, ExecutorParts
from bettercompute.daemon.group_commit import Journal
from bettercompute.daemon.handlers import REGISTRY, Handler
from bettercompute.daemon.identity import Identity, IdentityStore
from bettercompute.daemon.identity_life import IdentityLife, IdentityParts
from bettercompute.daemon.inventory.capabilities import capabilities, drivers
from bettercompute.daemon.inventory.facts import FactSettings
from bettercompute.daemon.inventory.host import HostRoot
from bettercompute.daemon.inventory.load import node_load
from bettercompute.daemon.inventory.pressure import PressureMeter
from bettercompute.daemon.inventory_held import HeldInventory
from bettercompute.daemon.journal_records import UNBATCHED_DOCUMENT, DropProcess, PutDocument, unbatched_of
from bettercompute.daemon.node_spec import NodeSpec
from bettercompute.daemon.notify import SystemdNotifier
from bettercompute.daemon.process_groups import process_space
from bettercompute.daemon.programs import end_left_running
from bettercompute.daemon.shell import NodeShell, Outlook, ShellParts
from bettercompute.daemon.status import DaemonStatus, StatusServer
from bettercompute.pki.identity import agent_role
from bettercompute.protocol import messages
from bettercompute.protocol.versions import PROTOCOL_VERSION
from bettercompute.session import clock as session_clock
from bettercompute.session import daemon_side
from bettercompute.session.authority import Authority
from bettercompute.session.daemon_state import Advertised, DaemonFacts, DaemonSession, JournalFacts
from bettercompute.session.effects import DaemonEffect
from bettercompute.session.inputs import InventoryCollected
from bettercompute.world import World

log = structlog.get_logger("bcd")

# How long the first dial waits for the inventory: a Hello without hashes asks for none, and the sections follow late.
FIRST_COLLECTION_S = 5.0

SERVING_CA_DOCUMENT = "serving-ca"


@dataclass(slots=True)
class CurrentConfig:
    """The configuration as it is now; a reload replaces it."""

    value: Config

    @property
    def facts(self) -> FactSettings:
        """The `[inventory]` table, as handlers read it."""
        return self.value.facts


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """What a round is given."""

    world: World
    config: CurrentConfig
    environment: Mapping[str, str]
    identities: IdentityStore
    notifier: SystemdNotifier
    root: Callable[[], HostRoot] = HostRoot.live
    handlers: Mapping[str, Handler] = field(default_factory=lambda: REGISTRY)
    dial: Dial | None = None


class NodeRound:
    """A node between the opening of its journal and its closing."""

    def __init__(self, parts: NodeParts, *, journal: Journal, identity: Identity, boot_id: str) -> None:
        self.life = IdentityLife(
            identity,
            IdentityParts(
                world=parts.world,
                identities=parts.identities,
                root=parts.root,
                boot_id=boot_id,
                settings=self._dial_settings,
                dial=parts.dial,
            ),
        )
        self._parts = parts
        self._journal = journal
        self._boot_id = boot_id
        record, documents = identity.record, journal.contents.documents
        self.conditions = Conditions(parts.world.clock.now_ms)
        self.inventory = HeldInventory(state_dir=self._state_dir, root=parts.root)
        self.spec = NodeSpec(
            SpecOwner(
                node_id=record.node_id, trust_domain=record.trust_domain, floor_generation=record.applied_generation
            ),
            kept=documents.get(DOCUMENT, b""),
            write=journal.write,
            identities=parts.identities,
            config=lambda: parts.config.value,
            dice=parts.world.dice,
        )
        self.desired = self.spec.desired
        self.link = GatewayLink(
            world=parts.world,
            identity=self.life.load,
            settings=self._dial_settings,
            serving_ca_pem=documents.get(SERVING_CA_DOCUMENT),
            dial=parts.dial,
        )
        self.shell = NodeShell(
            ShellParts(
                world=parts.world,
                link=self.link,
                identities=parts.identities,
                inventory=self.inventory,
                desired=self.desired,
                conditions=self.conditions,
                advertised=self._advertised,
                authority=self._authority,
                reload_identity=self.life.load,
                load=self._load,
            )
        )
        self._attestor = NodeAttestor(
            boot_id=boot_id,
            identity=lambda: self.life.present,
            spec=lambda: self.desired.held,
            inventory=lambda: self.inventory.hashes,
            now_ms=self._server_time_ms,
        )
        self.driver: Driver
        self.executor: Executor
        self._status = StatusServer(self._state_dir, self.status)
        self._tasks: list[asyncio.Task[None]] = []
        self._keeping: set[asyncio.Future[None]] = set()
        self.link.on_serving_ca = self._keep_serving_ca

    async def start(self) -> None:
        """End what was left running, judge what was left unfinished, and begin to dial."""
        journal, world = self._journal, self._parts.world
        space = process_space(self._boot_id)
        left = await end_left_running(journal.contents.processes, space=space)
        await journal.write(*(DropProcess(mark.process_group) for mark in journal.contents.processes))
        await journal_owner.settle(journal, name=self.life.present.node.spiffe_id, draw_id=world.ids.uuid7)
        first_collection = asyncio.create_task(self.inventory.collect(), name="first inventory")
        await asyncio.wait({first_collection}, timeout=FIRST_COLLECTION_S)
        state, effects = self._session()
        self.driver = Driver(state, world=world, journal=journal, shell=self.shell)
        self.executor = Executor(
            ExecutorParts(
                world=world,
                journal=journal,
                config=self._parts.config,
                state_dir=self._state_dir,
                space=space,
                inventory=self.inventory,
                sign=self._attestor.update,
                tell=self.driver.give,
                crowded=self.driver.crowded,
            ),
            self._parts.handlers,
        )
        self.shell.driver, self.shell.executor = self.driver, self.executor
        self.driver.on_step = self.shell.stepped
        self.shell.on_outlook = self._outlook_changed
        self.inventory.on_change = lambda _: self.driver.give(InventoryCollected(self.inventory.hashes))
        reporter = StatusReporter(
            self.conditions,
            meter=PressureMeter(self._parts.root()),
            sections=lambda: self.desired.states,
            attest=self._attestor.report,
            now_ms=world.clock.now_ms,
            tell=self.driver.give,
        )
        self.spec.on_change = self.shell.spec_changed
        journal.on_health = reporter.journal_health
        reporter.journal_health(journal.health)
        reporter.report_soon()
        await self._status.start()
        self._record_start(left=len(left))
        collect = self.inventory.collect
        self._tasks = [
            asyncio.create_task(self.driver.run(effects), name="session"),
            asyncio.create_task(self.spec.collect_regularly(first_collection, collect), name="inventory"),
            asyncio.create_task(self.spec.report_regularly(reporter.report_soon), name="status"),
            asyncio.create_task(self.desired.run(), name="desired state"),
            asyncio.create_task(reporter.watch_pressure(), name="pressure"),
            asyncio.create_task(self.life.keep(driver=self.driver, shell=self.shell, link=self.link), name="identity"),
        ]

    async def failed(self) -> None:
        """Return never, or raise what ended a part of the round that must not end."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def close(self) -> None:
        """End in order: processes, stream, loops, socket. The journal is closed by whoever opened it."""
        self._journal.wait_no_longer()
        if self._tasks:
            await self.executor.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, *self._keeping, return_exceptions=True)
            await self.shell.close()
        await self._status.close()

    def dial_now(self) -> None:
        """Wait no longer for the next dial: an operator asked, or the way to the gateways changed."""
        self.shell.dial_now()

    def status(self) -> DaemonStatus:
        """Return how the node is, for `bcd status`."""
        outlook, state, record = self.shell.outlook, self.driver.state, self.life.present.record
        clock = self._parts.world.clock
        wait_ms = 0 if outlook.next_dial_at_ms is None else max(0, outlook.next_dial_at_ms - clock.monotonic_ms())
        connected = outlook.state == "connected"
        return DaemonStatus(
            state=outlook.state,
            reason="" if connected else outlook.reason,
            reason_code="" if connected else outlook.reason_code,
            node_id=record.node_id,
            site=record.site,
            role=record.role,
            version=__version__,
            pid=os.getpid(),
            gateway_url=self.link.url,
            gateway_id=outlook.gateway_id if connected else "",
            epoch=state.epoch,
            since_ms=outlook.since_ms,
            next_dial_in_ms=wait_ms,
            certificate_not_after_ms=self.life.present.not_after_ms,
            applied_generation=self.desired.applied_generation,
            running_commands=self.executor.running_ids,
            unacked_results=sum(1 for entry in state.entries.values() if entry.done),
            unacked_events=state.last_event_seq - state.acked_event_seq,
            journal_id=state.journal_id,
            journal_bytes=self._journal.disk_bytes(),
            conditions=self.conditions.shown(),
            inventory={name: digest.hex() for name, digest in sorted(self.inventory.hashes.items())},
            refusals={f"{what}: {reason}": count for (what, reason), count in sorted(state.refused.items())},
        )

    # What the session is started with.

    @property
    def _state_dir(self) -> Path:
        return self._parts.config.value.state_dir

    def _session(self) -> tuple[DaemonSession, tuple[DaemonEffect, ...]]:
        record, contents = self.life.present.record, self._journal.contents
        facts = DaemonFacts(
            node_id=record.node_id,
            role=agent_role(record.role),
            boot_id=self._boot_id,
            process_id=self._parts.world.ids.uuid7(),
            daemon_version=__version__,
            proto_min=PROTOCOL_VERSION.min,
            proto_max=PROTOCOL_VERSION.max,
            trust_domain=record.trust_domain,
        )
        meta = contents.meta
        held = JournalFacts(
            journal_id=meta.journal_id,
            entries={entry.command_id: entry for entry in contents.commands},
            cancelled=contents.cancelled,
            last_epoch=meta.last_epoch,
            last_event_seq=meta.last_event_seq,
            acked_event_seq=meta.acked_event_seq,
            hello_nonce=meta.hello_nonce,
            previous_hello_nonce=meta.previous_hello_nonce,
            mark_ms=max(meta.time_mark_ms, record.server_time_mark_ms),
            # The mark never passes confirmed time by more than an hour, and a Join confirms: it outlives the journal.
            confirmed_ms=max(meta.confirmed_ms, record.server_time_mark_ms) or None,
            full=not self._journal.health.accepting,
            unbatched=unbatched_of(contents.documents.get(UNBATCHED_DOCUMENT, b"")),
        )
        return daemon_side.start(
            facts,
            self._advertised(),
            held,
            authority=self._authority(),
            now_ms=self._parts.world.clock.monotonic_ms(),
        )

    def _authority(self) -> Authority:
        return Authority.of(self.life.present.trust.content, self.life.present.record.approvers)

    def _advertised(self) -> Advertised:
        sections, spec = self.inventory.sections, self.desired.held
        return Advertised(
            capabilities=tuple(capabilities(sections, self._parts.config.value.reboot)),
            drivers=tuple(drivers(sections)),
            inventory_hashes=self.inventory.hashes,
            observed_generation=spec.observed_generation,
            applied_generation=spec.applied_generation,
            spec_sha256=spec.spec_sha256,
            trust_version=self.life.present.trust.version,
        )

    def _dial_settings(self) -> DialSettings:
        config = self._parts.config.value
        return DialSettings(
            gateway_url=config.gateway_url,
            server_name=config.gateway_server_name,
            environment=self._parts.environment,
        )

    def _record_start(self, *, left: int) -> None:
        contents, record = self._journal.contents, self.driver.record_event
        record(
            "daemon.started", json.dumps({"version": __version__, "boot_id": self._boot_id, "ended_processes": left})
        )
        if contents.set_aside:
            log.error("the journal was damaged and set aside", why=contents.set_aside)
            record("journal.set-aside", json.dumps({"why": contents.set_aside}))
            self.conditions.set("JournalReplaced", holds=True, reason="damaged", message=contents.set_aside)
        if left:
            log.warning("processes that an earlier bcd left running were ended", process_groups=left)

    def _keep_serving_ca(self, pem: bytes) -> None:
        keeping = asyncio.ensure_future(self._journal.write(PutDocument(SERVING_CA_DOCUMENT, pem)))
        self._keeping.add(keeping)
        keeping.add_done_callback(self._serving_ca_kept)

    def _serving_ca_kept(self, keeping: asyncio.Future[None]) -> None:
        self._keeping.discard(keeping)
        if not keeping.cancelled() and (error := keeping.exception()) is not None:
            log.warning("the serving CA was not kept: the next start looks it up again", error=str(error))

    # What happens while it lives.

    def _server_time_ms(self) -> int:
        """Return confirmed server time, or the best there is."""
        judged, now_ms = self.driver.state.clock, self._parts.world.clock.monotonic_ms()
        confirmed_ms = session_clock.confirmed_time(judged, now_ms=now_ms)
        return session_clock.session_time(judged, now_ms=now_ms) if confirmed_ms is None else confirmed_ms

    def _load(self) -> messages.NodeLoad:
        state = self.driver.state
        return node_load(
            self._parts.root(),
            running_commands=len(self.executor.running_ids),
            pending_events=state.last_event_seq - state.acked_event_seq,
            journal_bytes=self._journal.disk_bytes(),
        )

    def _outlook_changed(self, outlook: Outlook) -> None:
        self._parts.notifier.status(
            f"connected to {self.link.url}" if outlook.state == "connected" else f"{outlook.state}: {outlook.reason}"
        )


def boot_id_of(parts: NodeParts) -> str:
    """Return the name of this boot."""
    return machine.read_boot_id(parts.root(), parts.config.value.reboot.boot_id_file)
