"""The inventory that the daemon holds: what is hashed in Hello, sent when asked for, and collected anew.

Bodies stay here, hashes go into the session's rules. A first collection is begun at once and the first dial waits for
it a little; a machine whose collectors hang says Hello without, and what was found later goes with the next heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import structlog

from bettercompute.daemon.apart import apart
from bettercompute.daemon.inventory.canonical import CanonicalSection, changed_sections
from bettercompute.daemon.inventory.collection import collect_all
from bettercompute.daemon.inventory.facts import kept_facts
from bettercompute.daemon.inventory.host import HostRoot
from bettercompute.errors import Unavailable
from bettercompute.protocol import messages

log = structlog.get_logger("bcd.inventory")


class HeldInventory:
    """The sections as they were last collected. `on_change` is given the names of those that changed."""

    def __init__(self, *, state_dir: Path, root: Callable[[], HostRoot] = HostRoot.live) -> None:
        self.sections: dict[str, CanonicalSection] = {}
        self.on_change: Callable[[tuple[str, ...]], None] = lambda _: None
        self._state_dir = state_dir
        self._root = root

    @property
    def hashes(self) -> dict[str, bytes]:
        """SHA-256 by section."""
        return {name: section.sha256 for name, section in self.sections.items()}

    async def collect(self) -> None:
        """Collect everything but the operator's own facts, which a restart takes as they were kept."""
        try:
            found: dict[str, CanonicalSection] = await apart(partial(collect_all, self._root()))
        except Unavailable as error:
            log.warning("the inventory stays as it was", why=error.message)
            return
        facts = await asyncio.to_thread(kept_facts, self._state_dir)
        if facts is not None:
            found[facts.name] = facts
        await self.hold(changed_sections(self.sections, found))
        _give_memory_back()

    async def hold(self, changed: Mapping[str, CanonicalSection]) -> None:
        """Hold these sections from now on, and tell which they are."""
        if changed:
            self.sections.update(changed)
            log.debug("inventory changed", sections=sorted(changed))
            self.on_change(tuple(changed))

    def frames(self, names: Iterable[str], *, now_ms: int) -> list[messages.AgentFrame]:
        """Return the sections as frames, in this order; one that is not held is skipped."""
        return [
            messages.AgentFrame(
                inventory=messages.InventorySection(
                    name=name,
                    body=self.sections[name].body,
                    sha256=self.sections[name].sha256,
                    collected_at_ms=now_ms,
                )
            )
            for name in names
            if name in self.sections
        ]


def _give_memory_back() -> None:
    """Return to the kernel what a collection held: package databases alone are a quarter of an idle daemon's size."""
    with contextlib.suppress(AttributeError):  # a C library that is not GNU's does it by itself
        ctypes.CDLL(None).malloc_trim(0)
