"""One dispatch loop per gateway: pending commands are marked for the sessions that have credits, committed, then sent.

Work, not the fleet, drives it: a notification or a session's effect names a node, and only named nodes are asked what
they can take. Two polls stand behind the notifications. Put-backs of BUSY commands go first; cancels, newer specs and
what falls due later have a notification of their own and are looked up a moment after it, many nodes at once, so that a
plain command costs one statement. See docs/delivery.md, "Dispatch"; docs/gateway.md, "Commands".
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import structlog

from bettercompute import telemetry
from bettercompute.delivery.commands import IN_FLIGHT, OutgoingCommand
from bettercompute.errors import BetterComputeError, Unavailable
from bettercompute.gateway.fence import Fence
from bettercompute.gateway.metrics import GatewayMetrics
from bettercompute.gateway.registry import SessionRegistry
from bettercompute.gateway.session import LiveSession
from bettercompute.protocol.statuses import Reason
from bettercompute.session import gateway_side
from bettercompute.session.effects import PutBack
from bettercompute.session.gateway_state import DispatchDemand
from bettercompute.session.inputs import (
    BackOffOver,
    CancelRequested,
    FactsPoisoned,
    MarksFound,
    PutBackCommitted,
    SpecPublished,
)
from bettercompute.store import delivery, sessions
from bettercompute.store.database import Conflict, Database, StatementFailed
from bettercompute.store.delivery import BusyCommand, MarkedCommand
from bettercompute.store.sessions import Lease
from bettercompute.world import World

log = structlog.get_logger("bettercompute.gateway.dispatch")

# Sessions of one transaction: at 10 credits each, at most 5,000 rows.
NODES_MAX = 500
POLL_S = 5.0
# What falls due within two polls is waited for by its own timer, so that the first of them may fail.
AHEAD_MS = 10_000
# Cancels and specs are not urgent by the millisecond; together they are one statement for many nodes.
LOOK_DELAY_S = 0.05
SPEC_WINDOW_MS = 60_000
RETRY_S = 0.5
# As long as the server lets a statement of ours run whose connection is gone, and a second.
UNSURE_MS = 6_000


@dataclass(frozen=True, slots=True)
class _Busy:
    session: LiveSession
    effect: PutBack


class Dispatcher:
    """Marks, sends, puts back, and tells sessions of cancels and newer specs."""

    def __init__(
        self,
        database: Database,
        *,
        lease: Lease,
        fence: Fence,
        registry: SessionRegistry,
        world: World,
        metrics: GatewayMetrics,
    ) -> None:
        self._database = database
        self._lease = lease
        self._fence = fence
        self._registry = registry
        self._world = world
        self._metrics = metrics
        self._named: dict[str, None] = {}
        self._look_at: dict[str, None] = {}
        self._requested_specs: dict[str, LiveSession] = {}
        self._busy: list[_Busy] = []
        self._unsure_until_ms: dict[LiveSession, int] = {}
        self._due: dict[str, asyncio.TimerHandle] = {}
        self._woken = asyncio.Event()
        self._look = asyncio.Event()
        self._poll_now = asyncio.Event()

    def poke(self, node_id: str) -> None:
        """Ask the node's session in the next transaction."""
        if self._registry.get(node_id) is not None:
            self._named[node_id] = None
            self._woken.set()

    def credits_freed(self, session: LiveSession) -> None:
        """Ask a session whose credits or held commands changed, when there was more than it could take."""
        if session.state.held or not session.nothing_pending:
            self.poke(session.node_id)

    def enqueued(self, node_ids: Iterable[str] | None) -> None:
        """Take a notification: these nodes have commands that may go at once, or (None) any node may."""
        if node_ids is None:
            self._poll_now.set()
            return
        for node_id in node_ids:
            self.poke(node_id)

    def notified(self, node_ids: Iterable[str] | None) -> None:
        """Take a notification: these nodes have something to be sent, whatever it is, or (None) any node may."""
        if node_ids is None:
            self._poll_now.set()
            return
        for node_id in node_ids:
            if self._registry.get(node_id) is not None:
                self.poke(node_id)
                self._look_at[node_id] = None
                self._look.set()

    def look_at(self, node_id: str) -> None:
        """Look for cancels and a newer spec of a node, and for commands: a session begins by it."""
        self.notified([node_id])

    def request_spec(self, session: LiveSession) -> None:
        """Read the node's spec, whatever the session was offered before."""
        self._requested_specs[session.node_id] = session
        self._look.set()

    def put_back(self, session: LiveSession, effect: PutBack) -> None:
        """Put a refused command back, and ask again once its back-off is over."""
        self._metrics.busy.inc()
        self._busy.append(_Busy(session, effect))
        self._woken.set()

    async def run(self) -> None:
        """Run the three loops until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._dispatch_loop(), name="dispatch")
            group.create_task(self._look_loop(), name="dispatch-look")
            group.create_task(self._poll_loop(), name="dispatch-poll")

    async def _dispatch_loop(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            while self._busy or self._named:
                if not self._fence.admitting():
                    # The sessions are dropped by whoever watches the fence; what was named belongs to them.
                    self._busy.clear()
                    self._named.clear()
                    break
                if not await self._survive(self._turn()):
                    await asyncio.sleep(self._world.dice.uniform(RETRY_S / 2, RETRY_S))

    async def _turn(self) -> None:
        if self._busy:
            await self._put_back_all()
        if self._named:
            await self._dispatch()

    async def _put_back_all(self) -> None:
        """Put back what is queued; what the store refuses is searched for, and costs only the session that said it."""
        busy, self._busy = self._busy, []
        parts = [busy]
        while parts:
            part = parts.pop()
            try:
                await self._put_back(part)
            except StatementFailed as error:
                if len(part) > 1:
                    middle = len(part) // 2
                    parts += [part[middle:], part[:middle]]
                    continue
                log.warning("poisoned put-back", node_id=part[0].session.node_id, error=error.message)
                part[0].session.give(FactsPoisoned(error.message))
            except BaseException:
                self._busy = [*part, *chain.from_iterable(reversed(parts)), *self._busy]
                raise

    async def _put_back(self, busy: Sequence[_Busy]) -> None:
        rows = [
            BusyCommand(
                key=item.session.key,
                command_id=item.effect.command_id,
                attempt=item.effect.attempt,
                back_off_ms=item.effect.back_off_ms,
                outbox_id=self._world.ids.uuid7(),
            )
            for item in busy
        ]
        rows_back = await delivery.put_back(
            self._database, rows, lease=self._lease, event_type=telemetry.EVENT_COMMAND_FINISHED
        )
        # From the commit on, which is what the back-off counts from: who asks before it is over waits for a poll.
        loop = asyncio.get_running_loop()
        for item in busy:
            item.session.give(PutBackCommitted(item.effect.command_id))
            loop.call_later(item.effect.back_off_ms / 1000, self.poke, item.session.node_id)
            back = rows_back.get(item.effect.command_id)
            if back is not None and back.state in IN_FLIGHT:
                loop.call_later(item.effect.back_off_ms / 1000, item.session.give, BackOffOver(back.command))

    async def _dispatch(self) -> None:
        """Ask whom was named; a row that the store cannot mark is searched for, and its node alone gets nothing."""
        names = list(self._named)[:NODES_MAX]
        for name in names:
            del self._named[name]
        parts = [names]
        while parts:
            part = parts.pop()
            try:
                await self._dispatch_to(part)
            except StatementFailed:
                if len(part) > 1:
                    middle = len(part) // 2
                    parts += [part[middle:], part[:middle]]
                    continue
                # The next poll names it again: the row may have been mended, or ended, by then.
                log.exception("commands of a node cannot be marked", node_id=part[0])
            except BaseException:
                self._named = {**dict.fromkeys(chain.from_iterable(reversed(parts))), **self._named}
                raise

    async def _dispatch_to(self, names: Sequence[str]) -> None:
        live = {name: session for name in names if (session := self._registry.get(name)) is not None}
        demands = []
        for session in live.values():
            demand = gateway_side.wants(session.state)
            if demand is not None:
                demands.append(demand)
            else:  # nothing was asked, so nothing is known
                session.nothing_pending = False
        if not demands:
            return
        try:
            marked = await delivery.dispatch(self._database, demands, lease=self._lease)
        except StatementFailed:
            raise
        except BaseException as error:
            self._named = {**dict.fromkeys(names), **self._named}
            if isinstance(error, Unavailable) and not isinstance(error, Conflict):
                self._note_unsure([live[demand.node_id] for demand in demands])
            raise
        saturated = _saturated(demands, marked)
        for demand in demands:
            session = live[demand.node_id]
            # Of a lane without credits nothing was asked, so nothing is known.
            all_asked = len(demand.lanes) == len(session.state.lanes)
            session.nothing_pending = all_asked and demand.node_id not in saturated
        self._send(demands, marked)

    def _note_unsure(self, sessions: Iterable[LiveSession]) -> None:
        """Look soon for marks of these sessions: the transaction may have been committed, or may be yet."""
        until_ms = self._world.clock.monotonic_ms() + UNSURE_MS
        self._unsure_until_ms.update(dict.fromkeys(sessions, until_ms))
        asyncio.get_running_loop().call_later(RETRY_S, self._poll_now.set)

    async def _find_marks(self) -> None:
        """Give the sessions what was marked for them unheard, until the server can have nothing of it under way."""
        unsure = {session: until for session, until in self._unsure_until_ms.items() if session.ending is None}
        found = await delivery.marked(self._database, [session.key for session in unsure])
        now_ms = self._world.clock.monotonic_ms()
        for session in unsure:
            session.give(MarksFound(tuple(found.get(session.node_id, ()))))
        self._unsure_until_ms = {
            session: until
            for session, until in self._unsure_until_ms.items()
            if session.ending is None and (until > now_ms or session not in unsure)
        }

    def _send(self, demands: Sequence[DispatchDemand], marked: Sequence[MarkedCommand]) -> None:
        by_node: dict[str, list[OutgoingCommand]] = {}
        for item in marked:
            by_node.setdefault(item.node_id, []).append(item.command)
        self._metrics.dispatched.inc(len(marked))
        for demand in demands:
            answer = gateway_side.answered(demand, by_node.get(demand.node_id, ()))
            session = self._registry.get(demand.node_id)
            # A session that ended meanwhile: its next one replays what was marked.
            if session is None or session.state.session_id != demand.session_id:
                continue
            if answer.commands or answer.settled:
                session.give(answer)

    async def _look_loop(self) -> None:
        while True:
            await self._look.wait()
            await asyncio.sleep(LOOK_DELAY_S)
            self._look.clear()
            names, self._look_at = self._look_at, {}
            requested, self._requested_specs = self._requested_specs, {}
            if not await self._survive(self._look_up(names, requested)):
                await asyncio.sleep(self._world.dice.uniform(RETRY_S / 2, RETRY_S))

    async def _look_up(self, names: dict[str, None], requested: dict[str, LiveSession]) -> None:
        try:
            await self._tell_news(list(names), requested)
        except BaseException:
            # Whatever it was, also a conflict: a spec that a daemon asked for is not asked for again.
            self._look_at = {**names, **self._look_at}
            self._requested_specs = {**requested, **self._requested_specs}
            self._look.set()
            raise

    async def _tell_news(self, node_ids: Sequence[str], requested: dict[str, LiveSession]) -> None:
        if node_ids:
            found = await delivery.look_at(self._database, node_ids, ahead_ms=AHEAD_MS)
            for node_id, command_id, reason in found.cancels:
                session = self._registry.get(node_id)
                if session is not None:
                    session.give(CancelRequested(command_id, reason))
            for node_id, due_in_ms in found.due_in_ms.items():
                self._wait_until_due(node_id, due_in_ms)
        generations = {
            node_id: session.state.offered_generation
            for node_id in node_ids
            if (session := self._registry.get(node_id)) is not None
        }
        generations |= dict.fromkeys(requested, 0)
        if not generations:
            return
        specs = await sessions.newer_specs(self._database, generations=generations)
        for node_id, spec in specs.items():
            session = self._registry.get(node_id)
            if session is not None:
                session.give(SpecPublished(spec, requested=requested.get(node_id) is session))

    def _wait_until_due(self, node_id: str, due_in_ms: int) -> None:
        """Ask the node's session when its next command falls due, and look for the one after it."""
        loop = asyncio.get_running_loop()
        due_at_s = loop.time() + due_in_ms / 1000
        waiting = self._due.get(node_id)
        if waiting is not None:
            if waiting.when() <= due_at_s:
                return
            waiting.cancel()
        self._due[node_id] = loop.call_at(due_at_s, self._fell_due, node_id)

    def _fell_due(self, node_id: str) -> None:
        del self._due[node_id]
        self.notified([node_id])

    async def _poll_loop(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._poll_now.wait()
            self._poll_now.clear()
            if len(self._registry):
                await self._survive(self._poll())

    async def _poll(self) -> None:
        if self._unsure_until_ms:
            await self._find_marks()
        gateway_id = self._lease.gateway_id
        names = await delivery.nodes_with_work(self._database, gateway_id=gateway_id, ahead_ms=AHEAD_MS)
        names += await sessions.recently_published_specs(
            self._database, gateway_id=gateway_id, window_ms=SPEC_WINDOW_MS
        )
        self.notified(names)

    async def _survive(self, work: Coroutine[Any, Any, None]) -> bool:
        """Await one turn; a passing fault is logged and told, ours as well: the loop goes on."""
        try:
            await work
        except Conflict:
            return True
        except Unavailable as error:
            if error.reason != Reason.FENCED:
                log.warning("dispatch waits for the database", error=error.message)
            return False
        except BetterComputeError:
            log.exception("dispatch failed")
            return False
        return True


def _saturated(demands: Sequence[DispatchDemand], marked: Sequence[MarkedCommand]) -> frozenset[str]:
    """Return the nodes of which a lane took all pending ones that it could: there may be more behind."""
    held = {(demand.node_id, command_id) for demand in demands for lane in demand.lanes for command_id in lane.held}
    taken = Counter(
        (item.node_id, item.command.lane) for item in marked if (item.node_id, item.command.command_id) not in held
    )
    return frozenset(
        demand.node_id
        for demand in demands
        if any(taken[demand.node_id, lane.lane] >= lane.pending for lane in demand.lanes)
    )
