"""Waiting for commands to end: one LISTEN for all requests, and polling behind it, because NOTIFY is a hint."""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from bettercompute.errors import BetterComputeError
from bettercompute.store import channels
from bettercompute.store.database import DedicatedConnection

# How long a waiter sleeps when no hint comes: the price of a lost notification.
POLL_S = 1.0
RECONNECT_S = 1.0

_log = structlog.get_logger(__name__)


class FinishedFeed:
    """Wakes whoever waits when commands have ended."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._hint = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to listen; a lost connection is made anew."""
        self._task = asyncio.create_task(self._listen(), name="api-finished")

    async def stop(self) -> None:
        """Stop listening."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def wait(self, *, timeout_s: float) -> None:
        """Return at the next hint, or after `timeout_s` or a poll period, whichever comes first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(timeout_s, POLL_S))):
                await self._hint.wait()

    def _wake(self, _: str) -> None:
        self._hint.set()
        self._hint = asyncio.Event()

    async def _listen(self) -> None:
        while True:
            try:
                connection = await DedicatedConnection.open(self._dsn, application_name="better-compute api listen")
                try:
                    await connection.listen(channels.FINISHED, self._wake)
                    await connection.lost.wait()
                finally:
                    await connection.close()
            except (BetterComputeError, OSError) as error:
                _log.info("the feed of ended commands is not connected", error=str(error))
            await asyncio.sleep(RECONNECT_S)
