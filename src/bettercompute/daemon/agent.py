"""`bcd node`: from the configuration to the last byte of an orderly end.

A node runs in rounds. A journal that turns out damaged while in use ends the round, not the process: the next one
begins with a new journal. What only a person can cure (no identity, another machine's identity, a wrong configuration)
ends the process with a sentence; everything else is waited for. See docs/daemon.md, "Under systemd", "How it is made".
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import structlog

from bettercompute import __version__
from bettercompute.daemon import config as configuration
from bettercompute.daemon import logs, machine
from bettercompute.daemon.control import ControlServer, Rejoined, RejoinRequest
from bettercompute.daemon.group_commit import Journal
from bettercompute.daemon.identity import Identity
from bettercompute.daemon.journal_files import FolderLock
from bettercompute.daemon.maintenance import Joining, join_with, rejoined
from bettercompute.daemon.node_round import NodeParts, NodeRound, boot_id_of
from bettercompute.errors import Bug, Refused, Unavailable
from bettercompute.protocol.statuses import Reason, refuse

log = structlog.get_logger("bcd")

# How often a journal that cannot be opened is tried again. Ending instead would only make somebody restart us.
JOURNAL_RETRY_S = 10.0


class Agent:
    """A node's whole life in this process. `stop` may be set at any time."""

    def __init__(
        self,
        parts: NodeParts,
        *,
        config_path: Path,
        adopt: bool = False,
        open_journal: Callable[..., Awaitable[Journal]] = Journal.open,
    ) -> None:
        self.stop = asyncio.Event()
        self._renamed = asyncio.Event()
        self._rejoining = asyncio.Lock()
        self.round: NodeRound | None = None
        self._parts = parts
        self._config_path = config_path
        self._adopt = adopt
        self._open = open_journal

    async def run(self) -> None:
        """Run until told to stop; raise what only a person can cure."""
        with self._signals():
            watchdog = asyncio.create_task(self._tell_watchdog())
            try:
                while not self.stop.is_set():
                    await self._run_round()
            finally:
                watchdog.cancel()
                log.info("bcd ends")

    def reload(self) -> None:
        """Read the configuration again, or say why it stays as it is; and wait no longer for the next dial."""
        config = self._parts.config
        self._parts.notifier.reloading(self._parts.world.clock.monotonic_ms() * 1000)
        try:
            read = configuration.load(self._config_path)
        except Refused as refusal:
            log.warning("the configuration was not taken", why=refusal.message)
        else:
            if read.state_dir != config.value.state_dir:
                log.warning("state_dir changes only with a restart", kept=str(config.value.state_dir))
            config.value = replace(read, state_dir=config.value.state_dir)
            logs.set_up(config.value.log)
            log.info("the configuration was read again", file=str(self._config_path))
        if self.round is not None:
            self.round.dial_now()
        self._parts.notifier.ready()

    async def _run_round(self) -> None:
        journal = await self._open_journal()
        if journal is None:
            return
        try:
            identity = await self._identity()
            self._renamed.clear()
            self.round = NodeRound(self._parts, journal=journal, identity=identity, boot_id=boot_id_of(self._parts))
            control = ControlServer(self._parts.config.value.state_dir, self._rejoin)
            try:
                await self.round.start()
                await control.start()
                self._parts.notifier.ready()
                log.info("bcd runs", node_id=identity.record.node_id, version=__version__)
                await self._until_ended(self.round, journal)
            finally:
                await control.close()
                await self.round.close()
        finally:
            await journal.close()

    async def _until_ended(self, running: NodeRound, journal: Journal) -> None:
        stopped = asyncio.ensure_future(self.stop.wait())
        damaged = asyncio.ensure_future(journal.damaged.wait())
        failed = asyncio.ensure_future(running.failed())
        renamed = asyncio.ensure_future(self._renamed.wait())
        try:
            await asyncio.wait({stopped, damaged, failed, renamed}, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                self._parts.notifier.stopping()
            if journal.failure is not None:
                raise Bug(journal.damage) from journal.failure
            if damaged.done():
                log.error("beginning anew", why=journal.damage)
            elif failed.done():
                failed.result()
        finally:
            for task in (stopped, damaged, failed, renamed):
                task.cancel()
            await asyncio.gather(stopped, damaged, failed, renamed, return_exceptions=True)

    async def _rejoin(self, request: RejoinRequest) -> Rejoined:
        """Join anew by a token that an operator handed over; a node of another name begins another round."""
        if self._rejoining.locked():
            raise refuse(Reason.CONFLICT, "another re-join of this node is under way: wait for it, or end it")
        running, parts = self.round, self._parts
        assert running is not None, "the control socket lives inside a round"
        async with self._rejoining:
            log.info("joining anew by a token that was handed over")
            joining = Joining(
                config=parts.config.value,
                token=request.token,
                role=request.role,
                node_id=request.node_id,
                attestor=request.attestor,
                evidence=bytes.fromhex(request.evidence_hex),
                rejoin=True,
                environment=parts.environment,
                world=parts.world,
                dial=parts.dial,
            )
            before = running.life.present
            identity = await join_with(parts.identities, joining, root=parts.root())
            names = [(known.node.spiffe_id, known.record.role) for known in (before, identity)]
            if self.round is running and names[0] == names[1]:
                running.life.replaced(identity)
            else:
                log.warning("this node has another name now: beginning anew", node_id=identity.record.node_id)
                self._renamed.set()
            return rejoined(identity)

    async def _open_journal(self) -> Journal | None:
        """Open the journal, waiting while its disk is full or read-only; None when told to stop meanwhile."""
        while not self.stop.is_set():
            try:
                return await self._open(self._parts.config.value.state_dir, world=self._parts.world)
            except Unavailable as error:
                if error.reason == FolderLock.HELD:
                    raise
                log.warning("the journal cannot be opened yet", why=error.message, retry_s=JOURNAL_RETRY_S)
                self._parts.notifier.status(error.message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(JOURNAL_RETRY_S):
                    await self.stop.wait()
        return None

    async def _identity(self) -> Identity:
        """Return the identity, taken over from a provisioned folder if there is none yet, on the machine it is for."""
        identities, config = self._parts.identities, self._parts.config.value
        found = machine.read_machine(self._parts.root())
        await asyncio.to_thread(identities.settle)
        identity = await asyncio.to_thread(identities.load)
        if identity is None and config.identity_import is not None:
            identity = await asyncio.to_thread(identities.import_folder, config.identity_import, machine=found)
            log.info("identity imported", folder=str(config.identity_import), node_id=identity.record.node_id)
        if identity is None:
            raise refuse(
                Reason.NOT_JOINED,
                f"this node has no identity in {config.state_dir}: join it with a token from `better-compute token "
                "create` (`bcd join`), or set identity_import to a folder made by `better-compute nodes provision`",
            )
        warning = machine.check_machine(identity, found, adopt=self._adopt)
        if warning:
            log.warning(warning, adopted=self._adopt)
        if self._adopt:
            await asyncio.to_thread(identities.adopt, found)
        return identity

    async def _tell_watchdog(self) -> None:
        interval_s = self._parts.notifier.watchdog_s
        while interval_s is not None:
            self._parts.notifier.alive()
            await asyncio.sleep(interval_s)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        actions = {signal.SIGTERM: self.stop.set, signal.SIGINT: self.stop.set, signal.SIGHUP: self.reload}
        for number, action in actions.items():
            loop.add_signal_handler(number, action)
        try:
            yield
        finally:
            for number in actions:
                loop.remove_signal_handler(number)
