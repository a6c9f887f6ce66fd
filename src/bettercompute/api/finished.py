"""Waiting for commands to end, or for events: one LISTEN for all requests, and polling behind it: NOTIFY is a hint."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

import structlog

from bettercompute.errors import BetterComputeError
from bettercompute.store import channels
from bettercompute.store.database import DedicatedConnection

# How long a waiter sleeps when no hint comes: the price of a lost notification.
POLL_S = 1.0
RECONNECT_S = 1.0

_log = structlog.get_logger(__name__)


class FinishedFeed:
    """Wakes whoever waits when commands have ended, or events have got their positions."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._hints = {channel: asyncio.Event() for channel in (channels.FINISHED, channels.STREAM)}
        self._hearers: list[Callable[[frozenset[str] | None], None]] = []
        self.subscribers = 0
        """Who follows the events; counted by them."""
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

    async def wait(self, *, timeout_s: float, channel: str = channels.FINISHED) -> None:
        """Return at the channel's next hint, or after `timeout_s` or a poll period, whichever comes first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(timeout_s, POLL_S))):
                await self._hints[channel].wait()

    def on_finished(self, hear: Callable[[frozenset[str] | None], None]) -> None:
        """Call `hear` with the ids of commands that have ended, before those who wait are woken; None: any may have."""
        self._hearers.append(hear)

    def _wake(self, channel: str, payload: str) -> None:
        if channel == channels.FINISHED:
            for hear in self._hearers:
                hear(channels.names(payload))
        self._hints[channel].set()
        self._hints[channel] = asyncio.Event()

    async def _listen(self) -> None:
        while True:
            try:
                connection = await DedicatedConnection.open(self._dsn, application_name="better-compute api listen")
                try:
                    for channel in self._hints:
                        await connection.listen(channel, partial(self._wake, channel))
                    # What was said while nobody listened.
                    self._wake(channels.FINISHED, channels.ANY)
                    await connection.lost.wait()
                finally:
                    await connection.close()
            except (BetterComputeError, OSError) as error:
                _log.info("the feed of ended commands is not connected", error=str(error))
            await asyncio.sleep(RECONNECT_S)
