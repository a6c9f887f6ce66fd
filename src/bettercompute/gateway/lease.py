"""The gateway's lease: one row, renewed from a thread of its own, so that no load delays it.

The id is drawn at process start, never reused and never taken over. The keeper claims the row, renews it every 5 s by
name and token on a connection that nothing else uses, and stops renewing while the main loop is silent: a gateway that
hangs must lose its lease. A renewal that matches no row means that somebody has retired the gateway: it fences for
good, and the process starts over under a new id. `LeaseThread` is the keeper in a thread with a loop of its own; the
simulator runs the same keeper as a task. See docs/gateway.md, "Its id, its lease, its fence"; decisions 0109.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from bettercompute.errors import BetterComputeError
from bettercompute.gateway.fence import LEASE_STATEMENT_TIMEOUT_MS, LOOP_SILENCE_MS, RENEW_EVERY_MS, Fence
from bettercompute.world import World

log = structlog.get_logger("bettercompute.gateway.lease")

# A dead connection shows as silence, not as an error: give up a little after the server would have.
ATTEMPT_TIMEOUT_S = (LEASE_STATEMENT_TIMEOUT_MS + 500) / 1000
FIRST_RETRY_S = 0.25
LAST_RETRY_S = 2.0


@dataclass(frozen=True, slots=True)
class LeaseName:
    """Who holds the lease: the id, and the token that proves that it is this process."""

    gateway_id: str
    token: str


class LeaseConnection(Protocol):
    """One connection of the lease's own."""

    async def claim(self) -> bool:
        """Insert the row, or extend it when an earlier claim's answer was lost; False when it is retired."""
        ...

    async def renew(self, *, streams: int) -> bool:
        """Extend the row by name and token; False when no row matched."""
        ...

    async def release(self) -> None:
        """Delete the row: an orderly stop."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


Connect = Callable[[], Awaitable[LeaseConnection]]


def draw_name(name: str, world: World) -> LeaseName:
    """Return a new gateway id `<name>-<8 random>` with a token: drawn at process start, never reused."""
    return LeaseName(gateway_id=f"{name}-{world.ids.random_bytes(4).hex()}", token=world.ids.random_bytes(16).hex())


class LeaseKeeper:
    """Claims the lease and renews it until told to stop, or until it is retired. One task, one connection."""

    def __init__(
        self, *, fence: Fence, world: World, connect: Connect, streams: Callable[[], int], changed: Callable[[], object]
    ) -> None:
        """Renew what `connect` opens; `streams` is told with each renewal, `changed` is called when the fence moved."""
        self._fence = fence
        self._world = world
        self._connect = connect
        self._streams = streams
        self._changed = changed
        self._connection: LeaseConnection | None = None
        self._claimed = False
        self._poked = asyncio.Event()
        self._stopping = False

    def poke(self) -> None:
        """Renew now: on the keeper's own loop only."""
        self._poked.set()

    def stop(self) -> None:
        """Let the row go and end: on the keeper's own loop only."""
        self._stopping = True
        self._poked.set()

    async def run(self) -> None:
        """Renew every 5 s (sooner after a failure, or when poked) until stopped, then let the row go."""
        retry_s = FIRST_RETRY_S
        try:
            while not self._stopping and not self._fence.retired:
                self._poked.clear()
                succeeded = await self.attempt()
                retry_s = FIRST_RETRY_S if succeeded else min(LAST_RETRY_S, retry_s * 2)
                pause_s = RENEW_EVERY_MS / 1000 if succeeded else self._world.dice.uniform(retry_s / 2, retry_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._poked.wait()
        finally:
            await self._end()

    async def attempt(self) -> bool:
        """Claim or renew once; return whether the lease was extended. A silent main loop is not renewed for."""
        if self._claimed and self._fence.loop_silent_ms() > LOOP_SILENCE_MS:
            log.error("lease not renewed: the main loop is silent", silent_ms=self._fence.loop_silent_ms())
            return False
        started_ms = self._world.clock.monotonic_ms()
        try:
            async with asyncio.timeout(ATTEMPT_TIMEOUT_S):
                matched = await self._claim_or_renew()
        except (BetterComputeError, OSError, TimeoutError) as error:
            log.warning("lease not renewed", error=str(error) or type(error).__name__)
            await self._disconnect()
            return False
        if not matched:
            log.error("lease gone: this gateway id never serves again")
            self._fence.retire()
        else:
            self._fence.renewed(started_ms=started_ms)
        self._changed()
        return matched

    async def _claim_or_renew(self) -> bool:
        if self._connection is None:
            self._connection = await self._connect()
        if not self._claimed:
            # A claim whose reply was lost is in the table: claiming is an upsert by name and token.
            self._claimed = await self._connection.claim()
            return self._claimed
        return await self._connection.renew(streams=self._streams())

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await _quietly(connection.close())

    async def _end(self) -> None:
        self._fence.retire()
        if self._connection is not None and self._claimed:
            await _quietly(self._connection.release())
        await self._disconnect()


async def _quietly(closing: Coroutine[Any, Any, None]) -> None:
    """Await a farewell that nothing depends on: the row expires by itself, and the connection with the process."""
    try:
        async with asyncio.timeout(1):
            await closing
    except (BetterComputeError, OSError, TimeoutError) as error:
        log.info("lease connection ended", error=str(error) or type(error).__name__)


class LeaseThread:
    """The keeper in a thread with an event loop of its own: what the main loop does cannot delay a renewal."""

    def __init__(self, keeper: LeaseKeeper) -> None:
        self._keeper = keeper
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._main, name="gateway-lease", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        # Plain asyncio, whatever loop the rest of the process runs on.
        self._loop = asyncio.SelectorEventLoop()
        self._thread.start()

    def _main(self) -> None:
        assert self._loop is not None
        try:
            self._loop.run_until_complete(self._keeper.run())
        finally:
            self._loop.close()

    def poke(self) -> None:
        """Renew now."""
        self._tell(self._keeper.poke)

    async def stop(self) -> None:
        """Let the row go and wait for the thread's end, without holding up the caller's loop."""
        if self._thread.is_alive():
            self._tell(self._keeper.stop)
            await asyncio.to_thread(self._thread.join)

    def _tell(self, told: Callable[[], None]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile: retired
                self._loop.call_soon_threadsafe(told)


class LeaseTask:
    """The keeper as a task of the caller's loop: for virtual time, where there are no threads."""

    def __init__(self, keeper: LeaseKeeper) -> None:
        self._keeper = keeper
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task."""
        self._task = asyncio.create_task(self._keeper.run(), name="gateway-lease")

    def poke(self) -> None:
        """Renew now."""
        self._keeper.poke()

    async def stop(self) -> None:
        """Let the row go and wait for the task's end."""
        self._keeper.stop()
        if self._task is not None:
            await self._task
