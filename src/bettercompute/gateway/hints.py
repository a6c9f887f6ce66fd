"""What a gateway tells others by notifications once it is committed: many hints in one transaction, a moment later.

See docs/gateway.md, "Facts"; decisions 0161.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from bettercompute.store import channels, hints
from bettercompute.store.database import Database

# Nobody who waits for a command's end notices, and each hint is a statement: without a window each end would have one.
WINDOW_S = 0.05


class Hints:
    """Collects hints and tells them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._names: dict[str, set[str]] = {}
        self._woken = asyncio.Event()

    def add(self, channel: str, names: Iterable[str]) -> None:
        """Tell these names on a channel, soon."""
        self._names.setdefault(channel, set()).update(names)
        self._woken.set()

    def commands_ended(self, command_ids: Iterable[str]) -> None:
        """Tell those who wait for these commands, and who gives events their positions."""
        self.add(channels.FINISHED, command_ids)
        self.add(channels.OUTBOX, ("",))

    async def run(self) -> None:
        """Tell until cancelled."""
        while True:
            await self._woken.wait()
            await asyncio.sleep(WINDOW_S)
            await self.tell()

    async def tell(self) -> None:
        """Tell what has been collected, without waiting for more."""
        self._woken.clear()
        names, self._names = self._names, {}
        await hints.tell(self._database, names)
