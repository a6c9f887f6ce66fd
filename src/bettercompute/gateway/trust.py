"""The newest trust bundle, as published: relayed in Welcome to daemons that hold an older one."""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from bettercompute.errors import BetterComputeError
from bettercompute.gateway.services import GatewayServices
from bettercompute.protocol import messages
from bettercompute.protocol.frames import decode_message

log = structlog.get_logger("bettercompute.gateway.trust")

POLL_S = 60.0
# After one that could not be had: whoever says Hello meanwhile is told no bundle, and asked to come anew for it later.
RETRY_S = 5.0


class PublishedTrust:
    """Keeps the bundle at hand: asking for it at each Hello would cost every reconnect of the fleet."""

    def __init__(self, services: GatewayServices) -> None:
        self._services = services
        self._woken = asyncio.Event()
        self.renewed = asyncio.Event()
        """Set when a newer bundle was read; whoever waits for it clears it."""
        self.version = 0
        self.bundle: messages.SignedTrustBundle | None = None

    def poke(self) -> None:
        """Ask again now."""
        self._woken.set()

    async def run(self) -> None:
        """Ask until cancelled: once a minute, when poked, and soon after a failure."""
        while True:
            wait_s = POLL_S if await self.read() else RETRY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._woken.wait()
            self._woken.clear()

    async def read(self) -> bool:
        """Ask for the published bundle, and say whether there was an answer; without one the last stays in place."""
        try:
            published = await self._services.trust_bundle()
            if published is not None and published[0] > self.version:
                self.bundle = decode_message(messages.SignedTrustBundle, published[1])
                self.version = published[0]
                self.renewed.set()
        except BetterComputeError as error:
            log.warning("trust bundle not read", error=error.message)
            return False
        return True
