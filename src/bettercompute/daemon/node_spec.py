"""This node's desired state with the sections that bring it about, and the loops whose intervals it may set.

See docs/desired-state.md, "Sections".
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from bettercompute.daemon.config import Config
from bettercompute.daemon.desired import DesiredState, SpecOwner
from bettercompute.daemon.identity import IdentityStore
from bettercompute.daemon.journal_records import Write
from bettercompute.daemon.regularly import Intervals
from bettercompute.daemon.sections.access import AccessSection
from bettercompute.daemon.sections.daemon import DaemonSection
from bettercompute.daemon.sections.host import HostSection
from bettercompute.world import Dice


class NodeSpec:
    """What is desired of this node. `on_change` is called when a section stands otherwise than before."""

    def __init__(
        self,
        owner: SpecOwner,
        *,
        kept: bytes,
        write: Callable[[Write], Awaitable[None]],
        identities: IdentityStore,
        config: Callable[[], Config],
        dice: Dice,
    ) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.access = AccessSection()
        self.daemon = DaemonSection(configured_log=lambda: config().log)
        self._config = config
        self._identities = identities
        self._intervals = Intervals(dice)
        self.desired = DesiredState(
            owner,
            kept=kept,
            write=write,
            raise_floor=self._raise_floor,
            sections={"access": self.access, "daemon": self.daemon, "host": HostSection(config().host_root)},
        )
        self.desired.on_change = self._changed

    async def collect_regularly(self, first: asyncio.Task[None], collect: Callable[[], Awaitable[object]]) -> None:
        """Collect the inventory at its interval once the first collection has ended."""
        await first
        await self._intervals.regularly(
            lambda: self.daemon.inventory_interval_s or self._config().inventory_refresh_s, collect
        )

    async def report_regularly(self, report: Callable[[], None]) -> None:
        """Report the status without news where the spec says so; otherwise nobody is told on a timer."""

        async def act() -> None:
            report()

        await self._intervals.regularly(lambda: self.daemon.status_interval_s, act)

    def _changed(self) -> None:
        self._intervals.changed()
        self.on_change()

    async def _raise_floor(self, generation: int) -> None:
        await asyncio.to_thread(self._identities.raise_marks, applied_generation=generation)
