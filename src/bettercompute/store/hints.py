"""Notifications of what has been committed, in a transaction of their own that waits for no disk.

PostgreSQL lets one transaction with a NOTIFY commit at a time, and keeps the next one waiting until the first is on
the disk: where commands come singly, that queue was the larger part of their time. See decisions 0161.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

from bettercompute.errors import Unavailable
from bettercompute.store import channels
from bettercompute.store.database import Database


async def tell(database: Database, names: Mapping[str, Iterable[str]]) -> None:
    """Tell these names on their channels; what cannot be told now is found by the poll behind each channel.

    It takes the database and no transaction: in one that matters it would take away its durability.
    """
    told = [(channel, payload) for channel, some in names.items() for payload in channels.payloads(some)]
    if not told:
        return
    with contextlib.suppress(Unavailable):
        await database.execute(
            "hints.tell",
            channels=[channel for channel, _ in told],
            payloads=[payload for _, payload in told],
        )
