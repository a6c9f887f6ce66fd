"""Notifications of what has been committed, in a transaction of their own that waits for no disk.

PostgreSQL lets one transaction with a NOTIFY commit at a time, and keeps the next one waiting until the first is on
the disk: commands that come singly stood in that line twice. See decisions 0161.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

from bettercompute.errors import Unavailable
from bettercompute.store import channels
from bettercompute.store.database import Database, Transaction


def tell_after(transaction: Transaction, names: Mapping[str, Iterable[str]]) -> None:
    """Tell these names on their channels once the transaction is committed."""
    told = _told(names)
    if told["channels"]:
        transaction.after_commit("hints.tell", **told)


async def tell(database: Database, names: Mapping[str, Iterable[str]]) -> None:
    """Tell now; what cannot be told is found by the poll behind each channel.

    It takes the database and no transaction: in one that matters it would take away its durability.
    """
    told = _told(names)
    if told["channels"]:
        with contextlib.suppress(Unavailable):
            await database.execute("hints.tell", **told)


def _told(names: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    told = [(channel, payload) for channel, some in names.items() for payload in channels.payloads(some)]
    return {"channels": [channel for channel, _ in told], "payloads": [payload for _, payload in told]}
