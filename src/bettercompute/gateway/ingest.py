"""Group commit of the facts of all sessions: collected while the last batch is written, acked after.

One batch at a time, and a second beside it while that would be a full one: of nodes that the first has nothing of, so
that what a node says is written in its order. Each table is one statement of its own, which is its own transaction:
facts are true one by one, and writing one twice changes nothing, so there is nothing to hold together, and locks are
taken in one order. While the database is away a batch is kept and tried again for a bounded time, and sessions are not
read beyond their share; then their sessions close UNAVAILABLE and the daemons say it all again. A batch that PostgreSQL
refuses for what it says is halved until the guilty frame stands alone; only its session ends. See docs/gateway.md,
"Facts"; decisions 0105, 0187.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from bettercompute import telemetry
from bettercompute.delivery.commands import TERMINAL
from bettercompute.delivery.facts import CommandFact, EventsFact, Fact
from bettercompute.errors import Unavailable
from bettercompute.gateway import fact_batch
from bettercompute.gateway.fence import Fence
from bettercompute.gateway.metrics import GatewayMetrics
from bettercompute.session.inputs import FactsCommitted, FactsFailed, FactsPoisoned, GatewayInput
from bettercompute.store import delivery, inventory
from bettercompute.store.database import Conflict, Database, StatementFailed
from bettercompute.world import World

log = structlog.get_logger("bettercompute.gateway.ingest")

# One statement's arrays: large enough that a batch costs what its rows cost, small enough for 5 s of statement timeout.
BATCH_ROWS_MAX = 2_000
BATCH_BYTES_MAX = 8 * 1024 * 1024
# What one session may have waiting before its stream is not read further, and all of them together.
SESSION_BYTES_MAX = 2 * 1024 * 1024
TOTAL_BYTES_MAX = 64 * 1024 * 1024
# Under load a short wait makes fewer, larger batches (-25 % CPU at 1,000/s); when idle it would only add latency.
WINDOW_S = 0.002
WINDOW_FROM_FACTS = 4
# How long a batch is kept for a database that is away.
KEEP_MS = 10_000
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
CONFLICTS_MAX = 5


class FactOwner(Protocol):
    """The session that a fact came over."""

    @property
    def node_id(self) -> str:
        """Return the node."""
        ...

    def give(self, given: GatewayInput) -> None:
        """Take what became of its facts."""
        ...


@dataclass(frozen=True, slots=True)
class Offering:
    """The facts of one frame."""

    owner: FactOwner
    opening: int
    facts: tuple[Fact, ...]
    rows: int
    bytes: int


class Ingest:
    """The one writer of facts of a gateway."""

    def __init__(
        self,
        database: Database,
        *,
        fence: Fence,
        world: World,
        metrics: GatewayMetrics,
        ended: Callable[[Sequence[str]], None] = lambda _: None,
    ) -> None:
        """Call `ended` with the ids of commands whose end has been committed."""
        self._database = database
        self._ended = ended
        self._fence = fence
        self._world = world
        self._metrics = metrics
        self._queue: deque[Offering] = deque()
        self._queued_rows = 0
        # Nodes of the batches that are being written; and what the queue's front had of them when the other was taken.
        self._writing: set[str] = set()
        self._held: dict[str, list[Offering]] = {}
        self._bytes: dict[FactOwner, int] = {}
        self._total_bytes = 0
        self._by_node: dict[str, int] = {}
        # Owners of facts that were not written. What they queued behind those must not overtake them: their sessions
        # end, and the daemons say all of it again.
        self._failed: set[FactOwner] = set()
        self._woken = asyncio.Event()
        self._crowded = asyncio.Event()
        self._progress = asyncio.Event()

    def add(self, owner: FactOwner, *, opening: int, facts: Sequence[Fact]) -> None:
        """Queue the facts of one frame; the owner is told what became of them."""
        size = sum(fact_batch.size_bytes(fact) for fact in facts)
        rows = sum([fact_batch.rows(fact) for fact in facts])
        self._queue.append(Offering(owner, opening, tuple(facts), rows, size))
        self._queued_rows += rows
        self._bytes[owner] = self._bytes.get(owner, 0) + size
        self._by_node[owner.node_id] = self._by_node.get(owner.node_id, 0) + 1
        self._total_bytes += size
        self._rouse()

    def _rouse(self) -> None:
        """Wake whoever has something to write."""
        if self._queue:
            self._woken.set()
        else:
            self._woken.clear()
        if self._queued_rows >= BATCH_ROWS_MAX:
            self._crowded.set()
        else:
            self._crowded.clear()

    def pending(self, node_id: str) -> bool:
        """Return whether facts of a node are not settled yet."""
        return node_id in self._by_node

    async def room(self, owner: FactOwner) -> None:
        """Wait until the owner may bring more: its stream is not read meanwhile, which slows the daemon down."""
        while self._bytes.get(owner, 0) > SESSION_BYTES_MAX or self._total_bytes > TOTAL_BYTES_MAX:
            await self._next_progress()

    async def settled(self, node_id: str) -> None:
        """Wait until every fact queued of a node has been written, or has failed. The caller bounds the wait."""
        while node_id in self._by_node:
            await self._next_progress()

    async def _next_progress(self) -> None:
        self._progress.clear()
        await self._progress.wait()

    async def run(self) -> None:
        """Write batches until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._write_whatever_comes(), name="facts")
            group.create_task(self._write_full_batches(), name="facts beside")

    async def _write_whatever_comes(self) -> None:
        under_load = False
        while True:
            await self._woken.wait()
            if under_load:
                await asyncio.sleep(WINDOW_S)
            batch = self._take()
            under_load = len(batch) >= WINDOW_FROM_FACTS
            await self._settle(batch)

    async def _write_full_batches(self) -> None:
        """Write beside the other: merging and telling take as long as PostgreSQL does, so each waited for the other."""
        while True:
            await self._crowded.wait()
            await self._settle(self._take())

    def _take(self) -> list[Offering]:
        """Return the next batch, which may be empty: of nodes of which nothing is being written."""
        batch: list[Offering] = []
        rows = size = 0
        while self._queue and rows < BATCH_ROWS_MAX and size < BATCH_BYTES_MAX:
            offering = self._queue.popleft()
            self._queued_rows -= offering.rows
            if offering.owner.node_id in self._writing:
                self._held.setdefault(offering.owner.node_id, []).append(offering)
                continue
            batch.append(offering)
            rows += offering.rows
            size += offering.bytes
        self._writing.update([offering.owner.node_id for offering in batch])
        self._rouse()
        return batch

    def _give_back(self, batch: Sequence[Offering]) -> None:
        """Let what was held of a batch's nodes be taken, before all that is queued: it was the queue's front."""
        node_ids = dict.fromkeys([offering.owner.node_id for offering in batch])
        self._writing.difference_update(node_ids)
        for held in [self._held.pop(node_id) for node_id in node_ids if node_id in self._held]:
            self._queue.extendleft(reversed(held))
            self._queued_rows += sum([offering.rows for offering in held])
        self._rouse()

    async def _settle(self, batch: list[Offering]) -> None:
        """Bring a batch to its end, whatever that is, and tell every owner."""
        try:
            await self._commit_or_bisect(batch)
        except Unavailable as error:
            self._tell_failed(batch, error.message)
        except Exception as error:
            # Ours. The sessions end, and the daemons say it all again; the writer goes on.
            log.exception("facts lost to a bug", facts=len(batch))
            self._tell_failed(batch, f"the gateway could not write this: {type(error).__name__}")
        finally:
            for offering in batch:
                self._release(offering)
            self._give_back(batch)
            self._progress.set()

    def _release(self, offering: Offering) -> None:
        self._total_bytes -= offering.bytes
        left = self._bytes[offering.owner] - offering.bytes
        count = self._by_node[offering.owner.node_id] - 1
        if count:
            self._by_node[offering.owner.node_id] = count
        else:
            del self._by_node[offering.owner.node_id]
        if left > 0:
            self._bytes[offering.owner] = left
        else:
            self._bytes.pop(offering.owner, None)
            self._failed.discard(offering.owner)

    def _tell_failed(self, batch: Sequence[Offering], message: str) -> None:
        self._metrics.facts_failed.inc(len(batch))
        for offering in batch:
            self._failed.add(offering.owner)
            offering.owner.give(FactsFailed(message))

    async def _commit_or_bisect(self, batch: list[Offering]) -> None:
        batch = [offering for offering in batch if offering.owner not in self._failed]
        if not batch:
            return
        try:
            acks = await self._commit(batch)
        except StatementFailed as error:
            if len(batch) == 1:
                log.warning("poisoned facts", node_id=batch[0].owner.node_id, error=str(error))
                self._metrics.facts_poisoned.inc()
                self._failed.add(batch[0].owner)
                batch[0].owner.give(FactsPoisoned(error.message))
                return
            middle = len(batch) // 2
            await self._commit_or_bisect(batch[:middle])
            await self._commit_or_bisect(batch[middle:])
            return
        ended: list[str] = []
        for offering in batch:
            committed = _committed(offering, acks)
            ended += committed.command_ids
            offering.owner.give(committed)
            if _gapped(offering, acks):
                # The database is an earlier one than this session began with: the next Hello tells what is missing.
                self._failed.add(offering.owner)
                offering.owner.give(FactsFailed("the events before these are missing in the database"))
        if ended:
            self._ended(ended)

    async def _commit(self, batch: Sequence[Offering]) -> dict[tuple[str, str], int]:
        """Write a batch, again after a conflict or while the database is away, for a bounded time."""
        merged = fact_batch.merge(
            ((offering.owner.node_id, fact) for offering in batch for fact in offering.facts),
            draw_id=self._world.ids.uuid7,
        )
        give_up_at_ms = self._world.clock.monotonic_ms() + KEEP_MS
        conflicts = 0
        retry_s = FIRST_RETRY_S
        while True:
            if not all(self._fence.holds(offering.opening) for offering in batch):
                raise Unavailable("the gateway is fenced: nothing was written")
            try:
                return await self._write(merged)
            except Conflict:
                conflicts += 1
                if conflicts == CONFLICTS_MAX:
                    raise
            except Unavailable as error:
                if self._world.clock.monotonic_ms() >= give_up_at_ms:
                    raise
                log.warning("facts wait for the database", facts=len(batch), error=error.message)
                await asyncio.sleep(self._world.dice.uniform(retry_s / 2, retry_s))
                retry_s = min(LAST_RETRY_S, retry_s * 2)

    async def _write(self, merged: fact_batch.FactBatch) -> dict[tuple[str, str], int]:
        started_ms = self._world.clock.monotonic_ms()
        acks: dict[tuple[str, str], int] = {}
        if merged.events:
            acks = await delivery.store_events(self._database, merged.event_news())
        if merged.statuses:
            await delivery.store_statuses(self._database, list(merged.statuses.values()))
        if merged.output:
            # Before the ends: who follows a command reads no further once it has ended.
            await delivery.store_output(self._database, merged.output)
        if merged.commands:
            counts = await delivery.store_command_news(
                self._database, list(merged.commands.values()), event_type=telemetry.EVENT_COMMAND_FINISHED
            )
            self._metrics.facts_late.inc(counts.late)
            self._metrics.facts_backwards.inc(counts.backwards)
        if merged.sections:
            await inventory.store_sections(self._database, list(merged.sections.values()))
        if merged.hashes:
            await inventory.record_hashes(self._database, merged.hashes)
        self._metrics.batch_seconds.observe((self._world.clock.monotonic_ms() - started_ms) / 1000)
        self._metrics.facts_written.inc(len(merged.commands) + len(merged.events) + len(merged.statuses))
        return acks


def _gapped(offering: Offering, acks: dict[tuple[str, str], int]) -> bool:
    """Return whether events of an offering were left out, for there is a gap before them."""
    return any(
        fact.last_seq > acks.get((offering.owner.node_id, fact.journal_id), fact.last_seq)
        for fact in offering.facts
        if isinstance(fact, EventsFact)
    )


def _committed(offering: Offering, acks: dict[tuple[str, str], int]) -> FactsCommitted:
    """Return what the daemon of one offering may forget."""
    command_ids = [
        fact.command_id for fact in offering.facts if isinstance(fact, CommandFact) and fact.state in TERMINAL
    ]
    journal_id = ""
    acked_event_seq = 0
    for fact in offering.facts:
        if isinstance(fact, EventsFact):
            journal_id = fact.journal_id
            acked_event_seq = max(acked_event_seq, acks.get((offering.owner.node_id, journal_id), 0))
    return FactsCommitted(
        command_ids=tuple(dict.fromkeys(command_ids)), journal_id=journal_id, acked_event_seq=acked_event_seq
    )
