"""Everything that belongs to one gateway id: its lease, its sessions, and the loops that serve them.

A retired id never serves again; the gateway then drops this life and begins another under a new id. `LiveSession`
finds its surroundings here. The watch ticks for the lease's thread, measures the loop's lag, and drops what an older
opening of the fence has left before the next one admits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import structlog

from bettercompute.delivery.facts import Fact
from bettercompute.delivery.lanes import DEFAULT_CREDITS
from bettercompute.gateway.config import GatewayConfig
from bettercompute.gateway.disconnects import DisconnectWriter
from bettercompute.gateway.dispatch import Dispatcher
from bettercompute.gateway.fence import Fence
from bettercompute.gateway.handover import Handover
from bettercompute.gateway.hello import HelloTransactions
from bettercompute.gateway.hints import Hints
from bettercompute.gateway.ingest import Ingest
from bettercompute.gateway.lease import LeaseConnection, LeaseKeeper, LeaseName, LeaseTask, LeaseThread
from bettercompute.gateway.lease_row import StoreLeaseConnection
from bettercompute.gateway.liveness import LivenessLoop
from bettercompute.gateway.metrics import GatewayMetrics
from bettercompute.gateway.registry import SessionRegistry
from bettercompute.gateway.server_time import ServerTime
from bettercompute.gateway.session import LiveSession
from bettercompute.session import opening
from bettercompute.session.effects import Close, PutBack
from bettercompute.session.handover import GatewayLoad
from bettercompute.session.hello_plan import GatewayFacts
from bettercompute.session.inputs import GatewayStopping, LeaseLost
from bettercompute.session.opening import GatewayCondition, GatewayState
from bettercompute.store.database import Database
from bettercompute.store.leases import Health, NewLease, Renewal
from bettercompute.store.limits import LEASE_LIMITS
from bettercompute.store.sessions import Lease
from bettercompute.world import World

log = structlog.get_logger("bettercompute.gateway")

WATCH_S = 0.25
# How long an orderly stop waits for facts and disconnect writes; the Liveness controller finds what is left.
STOP_WAIT_S = 10.0
# Forget when a node last said Hello once it no longer delays anything.
PACE_ENTRIES_MAX = 10_000


@dataclass(slots=True)
class _Turns:
    """The Hellos of one node: one at a time, the others in line."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    wanted: int = 0


class GatewayLife:
    """One gateway id, from its draw to its end."""

    def __init__(
        self,
        name: LeaseName,
        *,
        config: GatewayConfig,
        advertise_url: str,
        database: Database,
        world: World,
        metrics: GatewayMetrics,
        server_time: ServerTime,
        others: Callable[[], tuple[GatewayLoad, ...]],
        health: Callable[[], Health],
        drain_requested_by: str | None,
    ) -> None:
        self.name = name
        self.registry = SessionRegistry()
        self.fence = Fence(world.clock)
        self.streams = 0
        self.loop_lag_ms = 0
        self.ended = asyncio.Event()
        self.stopping = False
        self._config = config
        self._advertise_url = advertise_url
        self._database = database
        self._world = world
        self._metrics = metrics
        self._server_time = server_time
        self._health = health
        self._lease = lease = Lease(gateway_id=name.gateway_id, token=name.token)
        self._hints = Hints(database)
        self._ingest = Ingest(
            database, fence=self.fence, world=world, metrics=metrics, ended=self._hints.commands_ended
        )
        self._disconnects = DisconnectWriter(database, lease=lease, fence=self.fence, ingest=self._ingest, world=world)
        self.dispatcher = Dispatcher(
            database, lease=lease, fence=self.fence, registry=self.registry, world=world, metrics=metrics
        )
        self.liveness = LivenessLoop(
            database, lease=lease, fence=self.fence, registry=self.registry, world=world, metrics=metrics
        )
        self.hellos = HelloTransactions(
            database,
            lease=lease,
            ingest=self._ingest,
            server_time=server_time,
            world=world,
            metrics=metrics,
            pending_max=config.pending_hellos_max,
            uncertain=lambda key: self._disconnects.add(key, reason="hello-uncertain", opening=self.fence.opening),
        )
        self.handover = Handover(
            self.registry,
            others=others,
            admitting=lambda: not self.stopping and self.fence.admitting(),
            config=config,
            world=world,
            metrics=metrics,
        )
        self.drain_requested_by = drain_requested_by
        """Who wants it to drain, as the last renewal read it. Written by the lease's thread."""
        self.handover.drain(drain_requested_by is not None)
        self._turns: dict[str, _Turns] = {}
        self._last_hello_ms: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._enforced_opening = 0
        self._timeline: str | None = None
        """The database's, as the first renewal read it. Written by the lease's thread."""
        self._tasks: list[asyncio.Task[None]] = []
        self._loop = asyncio.get_running_loop()
        keeper = LeaseKeeper(
            fence=self.fence, world=world, connect=self._connect, streams=lambda: self.streams, changed=self._moved
        )
        self._holder = LeaseThread(keeper) if config.lease_in_thread else LeaseTask(keeper)

    @property
    def draining(self) -> bool:
        """Return whether everything is given away, and nothing taken."""
        return self.handover.draining

    # The lease

    async def _connect(self) -> LeaseConnection:
        connection = await self._database.dedicated(
            application_name=f"{self.name.gateway_id} lease", limits=LEASE_LIMITS
        )
        row = NewLease(
            name=self.name.gateway_id,
            token=self.name.token,
            advertise_url=self._advertise_url,
            internal_url=self._config.internal_url or self._advertise_url,
            version=self._config.version,
            stream_limit=self._config.streams_max,
            drain_requested_by=self.drain_requested_by,
        )
        return StoreLeaseConnection(
            connection,
            row,
            draining=lambda: self.draining,
            health=self._health,
            learned=self._learned,
            same_database=self._same_database,
        )

    def _same_database(self, timeline: str) -> bool:
        """Say, on the lease's thread, whether the database goes on as the one that this life began with.

        A standby that was promoted, or a backup that was restored, may lack what sessions here have told their nodes
        is stored; only their next Hello finds out what. So this life ends, and every session with it.
        """
        if self._timeline is None:
            self._timeline = timeline
        if timeline == self._timeline:
            return True
        log.error(
            "the database is on another timeline: it may lack the last commits, and every session says Hello anew",
            timeline=timeline,
            before=self._timeline,
        )
        return False

    def _learned(self, renewal: Renewal) -> None:
        """Note, on the lease's thread, what the row says; the watch follows it."""
        self.drain_requested_by = renewal.drain_requested_by

    def renew_now(self) -> None:
        """Read what the row says without waiting for the next renewal."""
        self._holder.poke()

    def _moved(self) -> None:
        """Note, on any thread, that the lease was renewed or lost."""
        with contextlib.suppress(RuntimeError):  # the main loop may be closed already
            self._loop.call_soon_threadsafe(self._changed.set)

    # Start and stop

    def start(self) -> None:
        """Take up the lease and start the loops."""
        self._holder.start()
        for name, work in (
            ("watch", self._watch()),
            ("ingest", self._ingest.run()),
            ("hints", self._hints.run()),
            ("dispatch", self.dispatcher.run()),
            ("disconnects", self._disconnects.run()),
            ("liveness", self.liveness.run()),
            ("handover", self.handover.run()),
        ):
            task = asyncio.create_task(work, name=f"gateway-{name}")
            task.add_done_callback(self._loop_ended)
            self._tasks.append(task)

    def _loop_ended(self, task: asyncio.Task[None]) -> None:
        """Give the id up when one of its loops has failed: sessions that nobody serves must go where they are served.

        Only a fault of ours ends a loop; the next life starts from what the database holds.
        """
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("loop failed: this gateway id is given up", loop=task.get_name(), exc_info=error)
            self.fence.retire()
            self.ended.set()

    async def _watch(self) -> None:
        while True:
            due_ms = self._world.clock.monotonic_ms() + round(WATCH_S * 1000)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._changed.wait()
                due_ms = self._world.clock.monotonic_ms()
            self._changed.clear()
            self.loop_lag_ms = max(0, self._world.clock.monotonic_ms() - due_ms)
            self.fence.tick()
            self._enforce_fence()
            self._follow_drain()
            view = self.fence.view()
            self._metrics.lease_left.set(view.trust_left_ms / 1000)
            self._metrics.loop_lag.set(self.loop_lag_ms / 1000)
            self._metrics.sessions.set(len(self.registry))

    def _enforce_fence(self) -> None:
        """Drop what the fence has closed on, then let the present opening admit.

        The sessions are looked at only when the fence has moved: those that open later are judged as they open.
        """
        if not self.fence.trusted() or self.fence.opening != self._enforced_opening:
            self._enforced_opening = self.fence.opening
            for session in self.registry:
                if not self.fence.holds(session.opening):
                    session.give(LeaseLost())
        if self.fence.retired:
            self.ended.set()
        elif self.fence.trusted():
            self.fence.reopen(self.fence.opening)

    def _follow_drain(self) -> None:
        wanted = self.drain_requested_by is not None
        if wanted != self.draining:
            self.handover.drain(wanted)
            # The row says so at once: the others count on nobody who drains.
            self._holder.poke()

    async def stop(self) -> None:
        """End every session in order, write what they leave, let the lease go."""
        self.stopping = True
        for session in self.registry:
            session.give(GatewayStopping())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_WAIT_S):
                await self._written()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._holder.stop()
        self.ended.set()

    async def _written(self) -> None:
        await self.hellos.idle()
        while self.fence.trusted() and not self._disconnects.idle:
            await self._disconnects.progress()
        await self._hints.tell()

    # Opening

    def condition(self, *, room_elsewhere: bool) -> GatewayCondition:
        """Return the gateway as it is for a stream that arrives."""
        return GatewayCondition(
            state=self._state(),
            loop_lag_ms=self.loop_lag_ms,
            streams=self.streams,
            streams_max=self._config.streams_max,
            room_elsewhere=room_elsewhere,
            hellos_pending=self.hellos.pending,
            hellos_max=self._config.pending_hellos_max,
        )

    def _state(self) -> GatewayState:
        if self.stopping or self.draining:
            return GatewayState.DRAINING
        if self.fence.admitting():
            return GatewayState.SERVING
        if self.fence.opening == 0:
            return GatewayState.STARTING
        return GatewayState.FENCED if self.fence.retired else GatewayState.NO_LEASE

    @contextlib.asynccontextmanager
    async def turn(self, node_id: str, *, left: Callable[[], bool]) -> AsyncIterator[bool]:
        """Take the node's Hellos one after another, at most one a second. Yields whether it is still there.

        One whose daemon has left delays nobody: a daemon that reconnects often would else stand in line behind all the
        streams that it has given up.
        """
        turns = self._turns.setdefault(node_id, _Turns())
        turns.wanted += 1
        try:
            async with turns.lock:
                now_ms = self._world.clock.monotonic_ms()
                delay_ms = opening.hello_delay_ms(last_hello_at_ms=self._last_hello_ms.get(node_id), now_ms=now_ms)
                if delay_ms and not left():
                    await asyncio.sleep(delay_ms / 1000)
                there = not left()
                if there:
                    self._note_hello(node_id)
                yield there
        finally:
            turns.wanted -= 1
            if not turns.wanted:
                del self._turns[node_id]

    def _note_hello(self, node_id: str) -> None:
        now_ms = self._world.clock.monotonic_ms()
        self._last_hello_ms.pop(node_id, None)
        self._last_hello_ms[node_id] = now_ms
        if len(self._last_hello_ms) > PACE_ENTRIES_MAX:
            # The oldest comes first: a dict keeps the order of insertion.
            oldest = next(iter(self._last_hello_ms))
            if now_ms - self._last_hello_ms[oldest] > opening.HELLO_EVERY_MS:
                del self._last_hello_ms[oldest]

    def gateway_facts(self, *, peer_address: str, trust_version: int) -> GatewayFacts:
        """Return what the gateway brings to a Hello."""
        return GatewayFacts(
            gateway_id=self.name.gateway_id,
            session_id=self._world.ids.uuid7(),
            protocol_min=self._config.protocol.min,
            protocol_max=self._config.protocol.max,
            capabilities=self._config.capabilities,
            lane_credits={int(lane): granted for lane, granted in DEFAULT_CREDITS.items()},
            heartbeat_interval_ms=self.liveness.interval_ms(),
            peer_address=peer_address,
            trust_version=trust_version,
            duplicate_hellos_max=self._config.duplicate_hellos_max,
            duplicate_window_ms=self._config.duplicate_window_ms,
            drawn=self._world.dice.uniform(0, 1),
        )

    # Surroundings of a session

    def record(self, session: LiveSession, facts: Sequence[Fact]) -> None:
        """Add facts to the group commit."""
        self._ingest.add(session, opening=session.opening, facts=facts)

    def put_back(self, session: LiveSession, effect: PutBack) -> None:
        """Put a command back to pending."""
        self.dispatcher.put_back(session, effect)

    def poke_dispatch(self, session: LiveSession) -> None:
        """Ask the session in the next dispatch transaction, unless it is known to have nothing to send."""
        self.dispatcher.credits_freed(session)

    def request_spec(self, session: LiveSession) -> None:
        """Read the node's spec for the session."""
        self.dispatcher.request_spec(session)

    def closed(self, session: LiveSession, effect: Close) -> None:
        """Forget a session; write its end when its row is still its own."""
        self.registry.remove(session)
        self._metrics.closes.labels(reason=str(effect.reason)).inc()
        log.info(
            "session closed",
            node_id=session.node_id,
            session_id=session.state.session_id,
            epoch=session.state.epoch,
            reason=str(effect.reason),
            message=effect.message,
        )
        if effect.disconnect_write:
            self._disconnects.add(session.key, reason=str(effect.reason), opening=session.opening)

    async def room(self, session: LiveSession) -> None:
        """Wait until the session may bring more facts."""
        await self._ingest.room(session)

    def server_time_ms(self) -> int:
        """Return the control plane's time."""
        return self._server_time.now_ms()
