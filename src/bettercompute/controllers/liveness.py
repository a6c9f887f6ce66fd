"""The Liveness controller: the transitions that nobody reports.

A gateway writes `connected` and `disconnected`; its own death, and what it hung on, are found here from the rows. After
the database or this controller was away nothing is judged for 5 minutes: ages that nobody could flush are no evidence.
None of the transitions releases anything, and each is written only onto the row exactly as it was read. See
docs/sessions.md, "Liveness"; decisions 0107.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from bettercompute import telemetry
from bettercompute.session import liveness as rules
from bettercompute.session.liveness import Connectivity, NodeLiveness, Transition, Watch
from bettercompute.store import controller_runs, leases
from bettercompute.store import liveness as store
from bettercompute.store.database import Database
from bettercompute.store.liveness import AwayNode, OverdueSession
from bettercompute.world import World

log = structlog.get_logger("bettercompute.controllers.liveness")

NAME = "liveness"
INTERVAL_MS = 5_000
PAGE = 500


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one page."""

    lost: tuple[tuple[OverdueSession, Transition], ...]
    away: tuple[tuple[AwayNode, Transition], ...]
    retired_gateways: frozenset[str]


def decide(overdue: Sequence[OverdueSession], away: Sequence[AwayNode], watch: Watch, *, monotonic_ms: int) -> Decision:
    """Return the transitions of sessions and nodes as they were read; none during a grace."""
    of_sessions = rules.transitions([_session(session) for session in overdue], watch, monotonic_ms=monotonic_ms)
    of_nodes = rules.transitions([_node(node) for node in away], watch, monotonic_ms=monotonic_ms)
    lost = tuple((session, found) for session, found in zip(overdue, of_sessions, strict=True) if found is not None)
    return Decision(
        lost=lost,
        away=tuple((node, found) for node, found in zip(away, of_nodes, strict=True) if found is not None),
        retired_gateways=frozenset(session.gateway_id for session, found in lost if found.retire_lease),
    )


def _session(session: OverdueSession) -> NodeLiveness:
    return NodeLiveness(
        connectivity=Connectivity.CONNECTED,
        gateway_lease_expired_ms=session.lease_expired_ms,
        last_seen_age_ms=session.last_seen_age_ms,
        heartbeat_interval_ms=session.heartbeat_interval_ms,
    )


def _node(node: AwayNode) -> NodeLiveness:
    return NodeLiveness(connectivity=Connectivity.DISCONNECTED, disconnected_age_ms=node.disconnected_age_ms)


class LivenessController:
    """Reads what may be over, decides, writes."""

    name = NAME
    interval_ms = INTERVAL_MS

    def __init__(self, database: Database, *, world: World, holder: str) -> None:
        self._database = database
        self._world = world
        self._holder = holder
        self._watch: Watch | None = None

    async def reconcile(self) -> bool:
        """Make one pass over everything that may be over."""
        watch = await self._look_at_the_clock()
        after = ""
        while True:
            overdue = await store.overdue(
                self._database,
                after=after,
                page_size=PAGE,
                lost_after_ms=rules.GATEWAY_LOST_AFTER_MS,
                stale_after_ms=rules.stale_after_ms(rules.HEARTBEAT_INTERVAL_MS),
            )
            await self._write_lost(decide(overdue, (), watch, monotonic_ms=self._world.clock.monotonic_ms()))
            if len(overdue) < PAGE:
                break
            after = overdue[-1].node_id
        away = await store.long_disconnected(
            self._database, page_size=PAGE, unreachable_after_ms=rules.UNREACHABLE_AFTER_MS
        )
        decision = decide((), away, watch, monotonic_ms=self._world.clock.monotonic_ms())
        await self._write_away(decision)
        return len(decision.away) == PAGE

    async def _look_at_the_clock(self) -> Watch:
        """Note that somebody watches, and whether nobody did for a while."""
        monotonic_ms = self._world.clock.monotonic_ms()
        last = await controller_runs.get(self._database, name=NAME)
        now_ms = await controller_runs.now_ms(self._database)
        if self._watch is None:
            self._watch = Watch(database_ms=None if last is None else last.ran_at_ms)
            if last is not None and last.grace_until_ms is not None and last.grace_until_ms > now_ms:
                # A former process began a grace that is not over.
                left_ms = min(rules.GRACE_MS, last.grace_until_ms - now_ms)
                self._watch = Watch(database_ms=last.ran_at_ms, quiet_until_ms=monotonic_ms + left_ms)
        before = self._watch
        watch = rules.watched(before, database_ms=now_ms, monotonic_ms=monotonic_ms)
        quiet = rules.in_grace(watch, monotonic_ms=monotonic_ms)
        if quiet and watch.quiet_until_ms != before.quiet_until_ms:
            log.warning("nobody was watching: no transitions for a while", grace_ms=rules.GRACE_MS)
        grace_until_ms = None
        if quiet and watch.quiet_until_ms is not None:
            grace_until_ms = now_ms + watch.quiet_until_ms - monotonic_ms
        await controller_runs.record(self._database, name=NAME, holder=self._holder, grace_until_ms=grace_until_ms)
        # Not before it could write: of a read-only standby it sees the clock, while nobody can flush an age.
        self._watch = watch
        return watch

    async def _write_lost(self, decision: Decision) -> None:
        if not decision.lost:
            return
        lost = [
            store.Lost(
                session=session,
                reason=found.reason,
                outbox_id=self._world.ids.uuid7(),
                payload={
                    "nodeId": session.node_id,
                    "gatewayId": session.gateway_id,
                    "sessionId": session.session_id,
                    "epoch": session.session_epoch,
                    "reason": found.reason,
                },
            )
            for session, found in decision.lost
        ]
        async with self._database.transaction() as transaction:
            for name in sorted(decision.retired_gateways):
                await leases.retire(transaction, name=name, expired_for_ms=rules.GATEWAY_LOST_AFTER_MS)
            marked = await store.mark_disconnected(transaction, lost, event_type=telemetry.EVENT_NODE_DISCONNECTED)
        log.info("nodes disconnected", nodes=len(marked), gateways=sorted(decision.retired_gateways))

    async def _write_away(self, decision: Decision) -> None:
        if not decision.away:
            return
        away = [
            store.Away(
                node=node,
                reason=found.reason,
                outbox_id=self._world.ids.uuid7(),
                payload={"nodeId": node.node_id, "epoch": node.session_epoch, "reason": found.reason},
            )
            for node, found in decision.away
        ]
        marked = await store.mark_unreachable(self._database, away, event_type=telemetry.EVENT_NODE_UNREACHABLE)
        log.info("nodes unreachable", nodes=len(marked))
