"""What bcd is given in a simulation in place of a real disk and of real effects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bettercompute.daemon.handlers import HandlerCancelled, HandlerContext
from bettercompute.daemon.journal import JournalDatabase
from bettercompute.daemon.journal_records import REFUSABLE, JournalFullError, JournalLimits, Write
from bettercompute.protocol.kinds import KINDS
from bettercompute.testing.sim.node import DURATIONS_S


class FullableDisk(JournalDatabase):
    """The production journal: `full` says whether there is room, `wrote` is told what has become durable."""

    def __init__(
        self,
        folder: Path,
        *,
        limits: JournalLimits,
        full: Callable[[], bool],
        wrote: Callable[[Sequence[Write]], None] | None,
    ) -> None:
        super().__init__(folder, limits=limits)
        self._full = full
        self._wrote = wrote

    def apply(self, writes: Sequence[Write]) -> None:
        """Refuse what may be refused while the disk is full; the ballast makes room for the rest."""
        if self._full() and (not writes or any(isinstance(write, REFUSABLE) for write in writes)):
            raise JournalFullError("the disk is full", disk=True)
        super().apply(writes)
        if self._wrote is not None:
            self._wrote(writes)


@dataclass(frozen=True, slots=True)
class PlayedHandler:
    """A command's effect: it begins, takes its time, and has happened."""

    kind: str
    began: Callable[[HandlerContext], None]

    async def run(self, context: HandlerContext) -> bytes:
        """Run to the end, or to the cancel."""
        self.began(context)
        try:
            async with asyncio.timeout(DURATIONS_S[self.kind]):
                await context.cancelled.wait()
        except TimeoutError:
            return KINDS[self.kind].result().SerializeToString()
        raise HandlerCancelled
