"""A database connection for code without an event loop: fixtures that set up and tear down, threads of tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from bettercompute.store.database import NO_LIMITS, DedicatedConnection, Limits, Row

T = TypeVar("T")


class ThreadConnection:
    """A dedicated connection for a thread without an event loop: calls block. Used by one thread only."""

    def __init__(self, dsn: str, *, application_name: str, limits: Limits = NO_LIMITS) -> None:
        # Plain asyncio, whatever loop the rest of the process runs on.
        self._loop = asyncio.SelectorEventLoop()
        try:
            self._connection = self._loop.run_until_complete(
                DedicatedConnection.open(dsn, application_name=application_name, limits=limits)
            )
        except BaseException:
            self._loop.close()
            raise

    def fetch_one(self, name: str, /, **arguments: Any) -> Row | None:
        """Run the named statement, which has one row at most."""
        return self._loop.run_until_complete(self._connection.fetch_one(name, **arguments))

    def script(self, sql: str) -> None:
        """Run statements without arguments."""
        self._loop.run_until_complete(self._connection.script(sql))

    def query(self, sql: str, *arguments: Any) -> list[Row]:
        """Run SQL that has no name."""
        return self._loop.run_until_complete(self._connection.query(sql, *arguments))

    def run(self, work: Callable[[DedicatedConnection], Awaitable[T]]) -> T:
        """Run a coroutine on this connection's loop to its end."""

        async def bound() -> T:
            return await work(self._connection)

        return self._loop.run_until_complete(bound())

    def close(self) -> None:
        """Close the connection and its loop."""
        self._loop.run_until_complete(self._connection.close())
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
