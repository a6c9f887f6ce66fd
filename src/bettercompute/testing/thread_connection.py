"""A database connection for code without an event loop: fixtures that set up and tear down, threads of tests."""

from __future__ import annotations

import asyncio
from asyncio.events import _set_running_loop
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from bettercompute.store.database import DedicatedConnection, Row
from bettercompute.store.limits import NO_LIMITS, Limits

T = TypeVar("T")


class _DrivenLoop(asyncio.SelectorEventLoop):
    """A loop that can carry one awaitable to its end by itself."""

    def drive(self, work: Awaitable[T]) -> T:
        """Run `work`, which awaits futures of this loop only, to its end; also what came of it meanwhile."""
        _set_running_loop(self)
        steps = work.__await__()
        try:
            while True:
                waited = next(steps)
                while not waited.done():
                    self._turn()
        except StopIteration as ended:
            while self._ready:  # type: ignore[attr-defined]  # notifications that came with the answer
                self._turn()
            return cast("T", ended.value)
        finally:
            _set_running_loop(None)

    def _turn(self) -> None:
        self._run_once()  # type: ignore[attr-defined]  # `run_forever` makes five turns of each answer


class ThreadConnection:
    """A dedicated connection for a thread without an event loop: calls block. Used by one thread only."""

    def __init__(self, dsn: str, *, application_name: str, limits: Limits = NO_LIMITS) -> None:
        # Plain asyncio, whatever loop the rest of the process runs on.
        self._loop = _DrivenLoop()
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

    def drive(self, work: Callable[[DedicatedConnection], Awaitable[T]]) -> T:
        """Do the same at half the cost, for work that awaits the connection and nothing else: no task is made for it.

        A simulation does this a hundred thousand times.
        """
        return self._loop.drive(work(self._connection))

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
