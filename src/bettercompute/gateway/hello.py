"""The Hello transaction's shell: lock, read, decide, write.

The row is locked by a statement of its own and everything else is read by a later one, so that nothing committed while
the lock was waited for is missed. `session.hello.decide` makes the plan; it is written in at most two more statements.
Each statement checks the lease. What this gateway holds queued of the node's facts is committed before. Whatever goes
wrong, the stream is closed: there is no stream without a row. See docs/sessions.md, "The Hello transaction"; decisions
0105.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from bettercompute import telemetry
from bettercompute.delivery.commands import TERMINAL
from bettercompute.errors import Refused, Unavailable
from bettercompute.gateway import fact_batch
from bettercompute.gateway.ingest import Ingest
from bettercompute.gateway.metrics import GatewayMetrics
from bettercompute.gateway.server_time import ServerTime
from bettercompute.protocol import messages
from bettercompute.session import hello as hello_rules
from bettercompute.session import opening
from bettercompute.session.hello_plan import (
    CertificateFacts,
    GatewayFacts,
    HelloFacts,
    HelloPlan,
    HelloRefusal,
    PublishedEvent,
    RefusalWrites,
)
from bettercompute.store import delivery, sessions
from bettercompute.store.database import Database, StatementFailed, Transaction
from bettercompute.store.sessions import Lease, OutboxRow, SessionKey
from bettercompute.world import World

log = structlog.get_logger("bettercompute.gateway.hello")

FACTS_WAIT_S = 5.0
# The median of this many Hello times tells refused daemons when to come back.
RECENT_HELLOS = 64
FIRST_GUESS_MS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedHello:
    """A Hello that was refused, with what it committed nevertheless."""

    refused: Refused
    writes: RefusalWrites | None
    serials: tuple[str, ...] = ()
    """Revoked by it."""


class HelloTransactions:
    """Runs the Hello transactions of one gateway id, at most 64 at a time."""

    def __init__(
        self,
        database: Database,
        *,
        lease: Lease,
        ingest: Ingest,
        server_time: ServerTime,
        world: World,
        metrics: GatewayMetrics,
        pending_max: int,
        uncertain: Callable[[SessionKey], None],
    ) -> None:
        self._database = database
        self._lease = lease
        self._ingest = ingest
        self._server_time = server_time
        self._world = world
        self._metrics = metrics
        self._pending_max = pending_max
        self._uncertain = uncertain
        self._pending = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._recent_ms: deque[float] = deque(maxlen=RECENT_HELLOS)
        self._median_ms = FIRST_GUESS_MS

    @property
    def pending(self) -> int:
        """Return how many Hellos run or wait."""
        return self._pending

    async def idle(self) -> None:
        """Wait until no Hello runs or waits. The caller bounds the wait."""
        await self._idle.wait()

    def admit(self) -> None:
        """Refuse a Hello while the bound of pending ones is reached."""
        opening.admit_hello(
            pending=self._pending,
            recent_hello_ms=self._median_ms,
            drawn=self._world.dice.uniform(0, 1),
            pending_max=self._pending_max,
        )

    async def run(
        self, hello: messages.Hello, *, certificate: CertificateFacts, gateway: GatewayFacts
    ) -> HelloPlan | RefusedHello:
        """Commit a Hello and return its plan, or its refusal. Raises the database's refusal when it did not commit.

        Whether it did may be unknown, for instance when the connection broke at COMMIT; then `uncertain` is told of the
        session that may be in the row, without a stream.
        """
        self._pending += 1
        self._idle.clear()
        self._metrics.hellos_pending.set(self._pending)
        started_ms = self._world.clock.monotonic_ms()
        written: list[SessionKey] = []

        async def transact(transaction: Transaction) -> HelloPlan | RefusedHello:
            written.clear()
            result = await self._transact(transaction, hello, certificate=certificate, gateway=gateway)
            if isinstance(result, HelloPlan):
                row = result.row
                written.append(SessionKey(node_id=result.node_id, session_id=row.session_id, epoch=row.session_epoch))
            return result

        try:
            await self._settle_facts(hello.node_id)
            return await self._database.retrying(transact)
        except (Unavailable, StatementFailed) as error:
            log.warning("hello not committed", node_id=hello.node_id, error=error.message)
            for key in written:
                self._uncertain(key)
            raise opening.refuse_database(drawn=self._world.dice.uniform(0, 1)) from error
        finally:
            took_ms = self._world.clock.monotonic_ms() - started_ms
            self._recent_ms.append(opening.hello_time_ms(took_ms=took_ms, pending=self._pending))
            self._median_ms = sorted(self._recent_ms)[len(self._recent_ms) // 2]
            self._metrics.hello_seconds.observe(took_ms / 1000)
            self._pending -= 1
            self._metrics.hellos_pending.set(self._pending)
            if not self._pending:
                self._idle.set()

    async def _settle_facts(self, node_id: str) -> None:
        try:
            async with asyncio.timeout(FACTS_WAIT_S):
                await self._ingest.settled(node_id)
        except TimeoutError:
            raise Unavailable(f"facts of node {node_id} wait for the database since {FACTS_WAIT_S} s") from None

    async def _transact(
        self,
        transaction: Transaction,
        hello: messages.Hello,
        *,
        certificate: CertificateFacts,
        gateway: GatewayFacts,
    ) -> HelloPlan | RefusedHello:
        await sessions.lock_for_hello(transaction, lease=self._lease, node_id=certificate.node_id)
        read = await sessions.read_hello(
            transaction,
            lease=self._lease,
            certificate=certificate,
            reported_ids=[update.command_id for update in hello.done_results],
        )
        self._server_time.read(read.now_ms)
        facts = HelloFacts(
            now_ms=read.now_ms,
            certificate=read.certificate,
            gateway=gateway,
            row=read.row,
            node=read.node,
            commands=read.commands,
            inventory_hashes=read.inventory_hashes,
        )
        decision = hello_rules.decide(facts, hello)
        if isinstance(decision, HelloRefusal):
            return await self._write_refusal(transaction, certificate.node_id, decision)
        await self._write_plan(transaction, decision, facts)
        return decision

    async def _write_refusal(self, transaction: Transaction, node_id: str, refusal: HelloRefusal) -> RefusedHello:
        writes = refusal.writes
        if writes is None:
            return RefusedHello(refused=refusal.refused, writes=None)
        serials = await sessions.refuse_hello(
            transaction, lease=self._lease, node_id=node_id, writes=writes, outbox=self._outbox(writes.events)
        )
        return RefusedHello(refused=refusal.refused, writes=writes, serials=serials)

    async def _write_plan(self, transaction: Transaction, plan: HelloPlan, facts: HelloFacts) -> None:
        if plan.results:
            merged = fact_batch.merge(((plan.node_id, fact) for fact in plan.results), draw_id=self._world.ids.uuid7)
            await delivery.store_command_news(
                transaction, list(merged.commands.values()), event_type=telemetry.EVENT_COMMAND_FINISHED
            )
        kinds = {command.command_id: command.kind for command in facts.commands}
        ends = tuple(
            PublishedEvent(
                name=telemetry.EVENT_COMMAND_FINISHED,
                node_id=plan.node_id,
                attributes={
                    "commandId": end.command_id,
                    "kind": kinds.get(end.command_id, ""),
                    "state": int(end.state),
                    "reason": end.reason,
                },
            )
            for end in plan.ends
        )
        await sessions.apply_hello(
            transaction,
            plan,
            lease=self._lease,
            outbox=self._outbox(plan.events + ends),
            finished=[
                *(end.command_id for end in plan.ends),
                *(fact.command_id for fact in plan.results if fact.state in TERMINAL),
            ],
        )

    def _outbox(self, events: tuple[PublishedEvent, ...]) -> list[OutboxRow]:
        return [OutboxRow(outbox_id=self._world.ids.uuid7(), event=event) for event in events]
