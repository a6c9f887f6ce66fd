"""All that one simulation consists of, for those who act on it: the work, the faults and the checks."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from bettercompute.errors import BetterComputeError
from bettercompute.store.database import Database
from bettercompute.store.signing import Signing
from bettercompute.testing.sim import ledger
from bettercompute.testing.sim.cluster import Cluster, GatewayHost, WorkerHost
from bettercompute.testing.sim.fleet import Registrar
from bettercompute.testing.sim.invariants import TransactionRules, Verdict
from bettercompute.testing.sim.ledger import Change, Ledger
from bettercompute.testing.sim.machine import SimulatedClock
from bettercompute.testing.sim.network import Network
from bettercompute.testing.sim.node import Node, NodeParts
from bettercompute.testing.sim.postgres import Notification, SimulatedServer
from bettercompute.testing.sim.process import SimulatedProcess
from bettercompute.testing.sim.scenario import Scenario
from bettercompute.testing.sim.taps import FrameRules
from bettercompute.world import World

FOR_EVER = 2**63


@dataclass(slots=True)
class Stage:
    """One simulation."""

    scenario: Scenario
    rng: random.Random
    server: SimulatedServer
    database_clock: SimulatedClock
    network: Network
    cluster: Cluster
    registrar: Registrar
    ledger: Ledger
    verdict: Verdict
    transactions: TransactionRules
    frames: FrameRules
    operator: Database
    operator_process: SimulatedProcess
    world: World
    node_parts: NodeParts
    copy_kept: bool = False
    """Whether there is a copy of the database that may come back: one at a time."""
    signing: Signing | None = None
    """What signs intent; None: this installation signs nothing."""
    nodes: list[Node] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    story: list[str] = field(default_factory=list)
    """What befell it, a line each."""
    trace: hashlib._Hash = field(default_factory=hashlib.sha256)
    running_faults: set[asyncio.Future[None]] = field(default_factory=set)
    certificate_ends: dict[str, int] = field(default_factory=dict)
    """When each certificate that was issued ends, by serial, also where the database has lost it since."""

    @property
    def gateways(self) -> Sequence[GatewayHost]:
        """Return the gateways."""
        return list(self.cluster.gateways.values())

    @property
    def workers(self) -> Sequence[WorkerHost]:
        """Return the workers."""
        return list(self.cluster.workers.values())

    def tell(self, line: str) -> None:
        """Add a line to the story."""
        told = f"{self.server.now_ms()} {line}"
        self.story.append(told)
        self.trace.update(told.encode())

    async def mend(self, node: Node, *, why: str = "") -> None:
        """Let an operator make a token for a node that cannot help itself, which then joins anew; `why` is the only
        reason that counts, if it is given.
        """
        only, why = why, self._lost_identity(node)
        while why and only in ("", why):
            try:
                token = await self.registrar.new_token(self.operator, node.node_id)
            except BetterComputeError:
                await asyncio.sleep(5)
                why = self._lost_identity(node)
            else:
                self.tell(f"{node.node_id} joins anew: its certificate {why}")
                node.rejoin(token)
                return

    def _lost_identity(self, node: Node) -> str:
        """Return why a node needs a new identity, or nothing."""
        standing = self.ledger.row("nodes", node.node_id)
        if node.joining:
            # As the daemon is told: the token is known, and names a node that is not the one it may make any more.
            void = "make another token" in node.why or not self.registrar.knows_token(node.node_id)
            return "was to be had for a token that is gone" if void else ""
        if standing is None:
            return "is of a node that was forgotten"
        if standing["revoked_at"] is not None:
            return "was revoked"
        # The copy of a disk is taken for a duplicate, and so is what is told from it. Nothing else may be.
        copied = node.node_id in self.frames.copied
        if copied and standing["quarantined_at"] is not None:
            return "was quarantined beside its copy"
        row = self.ledger.row("node_certs", node.serial)
        if row is None:  # it was lost with the database, and a proof by it is none
            return "has expired" if self.certificate_ends.get(node.serial, FOR_EVER) <= self.server.now_ms() else ""
        if row["revoked_at"] is not None:
            return "was revoked"
        if row["not_after"] <= self.server.now_ms():
            return "has expired"
        # The copy of a disk renews as the original does, and shuts it out. Nothing else may do that.
        return "was superseded by that of its copy" if copied and row["superseded_at"] is not None else ""

    def went_back(self) -> None:
        """Judge by the database as it is now: one of an earlier time."""
        before = self.ledger.rows
        self.ledger.rows = {}
        ledger.reload(self.ledger, self.server)
        if any(before[table] != rows for table, rows in self.ledger.rows.items() if table != "leases"):
            self.frames.met["commits-lost-with-the-database"] += 1
        self.transactions.went_back()
        self.frames.went_back()

    def committed(self, client: str, heard: list[Notification]) -> None:
        """Judge a transaction and add it to the trace."""
        changes: list[Change] = self.ledger.take(heard)
        if changes:
            self.certificate_ends |= {
                str(change.key[0]): change.new["not_after"]
                for change in changes
                if change.table == "node_certs" and change.new is not None
            }
            self.trace.update(f"{self.server.now_ms()} {client} {changes}".encode())
            self.transactions.judge(client, changes)
