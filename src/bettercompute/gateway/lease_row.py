"""The lease's row in the database, as its keeper sees it. All of it runs on the lease's thread.

Each renewal also says how the gateway is: its clock, how old its picture of the revocations is, how long its serving
certificate is good. See docs/gateway.md, "Its id, its lease, its fence"; decisions 0127.
"""

from __future__ import annotations

from collections.abc import Callable

from bettercompute.store import leases
from bettercompute.store.database import DedicatedConnection
from bettercompute.store.leases import Health, NewLease, Renewal


class StoreLeaseConnection:
    """The lease's row, over a connection of its own."""

    def __init__(
        self,
        connection: DedicatedConnection,
        row: NewLease,
        *,
        draining: Callable[[], bool],
        health: Callable[[], Health],
        learned: Callable[[Renewal], object],
        same_database: Callable[[str], bool],
    ) -> None:
        """Follow the row; `same_database` is told the database's timeline and says whether the lease still is one."""
        self._connection = connection
        self._row = row
        self._draining = draining
        self._health = health
        self._learned = learned
        self._same_database = same_database

    async def claim(self) -> bool:
        """Insert or extend the row."""
        claimed = await leases.claim(self._connection, self._row)
        return claimed and self._same_database(await leases.timeline(self._connection))

    async def renew(self, *, streams: int) -> bool:
        """Extend the row."""
        renewal = await leases.renew(
            self._connection,
            name=self._row.name,
            token=self._row.token,
            stream_count=streams,
            draining=self._draining(),
            health=self._health(),
        )
        if renewal is None or not self._same_database(renewal.timeline):
            return False
        self._learned(renewal)
        return True

    async def release(self) -> None:
        """Retire the row."""
        await leases.release(self._connection, name=self._row.name, token=self._row.token)

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()
