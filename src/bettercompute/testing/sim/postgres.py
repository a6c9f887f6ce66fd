"""The database of a simulation: the real PostgreSQL, met by simulated connections on virtual time.

The production `Database` runs unmodified on a pool of these. All of them share one real connection, and a transaction
is carried out in one go, so transactions run one at a time, in the order in which their latencies, drawn from the seed,
bring them to the server; no lock is ever waited for. Latency lies before BEGIN and after COMMIT, and a fault inside a
transaction is its connection lost before or after its COMMIT: then nobody at the client knows the outcome.
`compute_now()` is the virtual time. See docs/simulator.md, "The database".
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.events import _get_running_loop, _set_running_loop
from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from bettercompute.errors import Bug
from bettercompute.store.database import DedicatedConnection, Row
from bettercompute.testing.sim import unchanged
from bettercompute.testing.sim.machine import SimulatedClock
from bettercompute.testing.sim.process import SimulatedProcess
from bettercompute.testing.sim.unchanged import Unchanged
from bettercompute.testing.sim.weather import Weather
from bettercompute.testing.thread_connection import ThreadConnection

T = TypeVar("T")

_CLOCK = """
CREATE OR REPLACE FUNCTION compute_now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
  AS $$ SELECT timestamptz 'epoch' + current_setting('sim.now_ms')::bigint * interval '1 millisecond' $$;
CREATE OR REPLACE FUNCTION database_timeline() RETURNS text LANGUAGE sql STABLE
  AS $$ SELECT current_setting('sim.timeline') $$;
"""

# Planning costs more than running where tables are this small.
_CHEAP = "SET plan_cache_mode = force_generic_plan; SET jit = off; SET synchronous_commit = off;"

# Who looks and writes from outside the simulation.
SIMULATOR = "simulator"


@dataclass(frozen=True, slots=True)
class Notification:
    """One NOTIFY, as it was committed."""

    channel: str
    payload: str


class ServerConnection:
    """The one real connection, on a loop of its own: a call blocks its caller until PostgreSQL has answered.

    The loop turns inside a step of the simulation's, which therefore stands still meanwhile. A thread for it would cost
    two more changes of threads for each statement, which is most of what a statement costs on a busy machine.
    """

    def __init__(self, dsn: str, *, channels: Sequence[str], on_written: Callable[[str], None]) -> None:
        self._channels = channels
        self._on_written = on_written
        self._heard: list[Notification] = []
        with _outside_the_simulation():
            self._connection = ThreadConnection(dsn, application_name="simulator")
        self.call(self._listen)

    def call(self, work: Callable[[DedicatedConnection], Awaitable[T]]) -> T:
        """Run something on the connection to its end."""
        with _outside_the_simulation():
            return self._connection.drive(work)

    def heard(self) -> list[Notification]:
        """Return what was notified by transactions committed since the last call."""
        heard, self._heard = self._heard, []
        return heard

    def close(self) -> None:
        """Close the connection."""
        with _outside_the_simulation():
            self._connection.close()

    async def _listen(self, connection: DedicatedConnection) -> None:
        await connection.script(_CHEAP)
        for channel in self._channels:
            await connection.listen(channel, self._hear(channel))
        await connection.listen(unchanged.CHANNEL, self._on_written)

    def _hear(self, channel: str) -> Callable[[str], None]:
        # A session's own notifications come before the answer to its COMMIT, so none is ever late.
        return lambda payload: self._heard.append(Notification(channel, payload))


@contextlib.contextmanager
def _outside_the_simulation() -> Iterator[None]:
    """Let another loop run in this thread, as if the simulation's were not running."""
    loop = _get_running_loop()
    task = None if loop is None else asyncio.current_task(loop)
    if loop is not None and task is not None:
        _leave_task(loop, task)
    _set_running_loop(None)
    try:
        yield
    finally:
        _set_running_loop(loop)
        if loop is not None and task is not None:
            _enter_task(loop, task)


class Link(Protocol):
    """One connection of a process, as the server sees it."""

    client: str
    process: SimulatedProcess | None

    def terminate(self) -> None:
        """Close it without a word."""
        ...

    def lose(self) -> None:
        """Close it, and tell whoever listens for that."""
        ...

    def hear(self, listener: Callable[[str], None], payload: str) -> None:
        """Bring a notification."""
        ...


class SimulatedServer:
    """The server, as every process meets it."""

    def __init__(self, dsn: str, *, clock: SimulatedClock, channels: Sequence[str]) -> None:
        self.weather = Weather()
        self.timeline = 1
        """Another one after each promotion and each restore."""
        self.statements = 0
        self.transactions = 0
        self.on_commit: Callable[[str, list[Notification]], None] = lambda _client, _heard: None
        """Called after every transaction, with who ran it and what it notified."""
        self._clock = clock
        self._open: Link | None = None
        self._begun = False
        """Whether PostgreSQL knows of the open transaction: not before its first statement that must be run."""
        self._changes_before = 0
        self._asked: list[tuple[str, Sequence[Any], list[Row]]] = []
        """What the open transaction, or the statement, has been told."""
        self._set: tuple[int, int] | None = None
        self._read_only: bool | None = None
        self._links: dict[int, Link] = {}
        self._listeners: dict[str, dict[int, tuple[Link, Callable[[str], None]]]] = {}
        self._numbers = 0
        self._unchanged = Unchanged(frozenset(), frozenset())
        self._connection = ServerConnection(dsn, channels=channels, on_written=self._written)
        self._watch_tables()

    def _watch_tables(self) -> None:
        call = self._connection.call
        call(lambda connection: connection.script(_CLOCK))
        tables = [row["relname"] for row in call(lambda connection: connection.query(unchanged.TABLES))]
        fickle = [row["name"] for row in call(lambda connection: connection.query(unchanged.FICKLE))]
        call(lambda connection: connection.script(unchanged.triggers(tables)))
        self._unchanged = Unchanged(frozenset(tables), frozenset(fickle))

    def _written(self, table: str) -> None:
        self._unchanged.written(table)

    def close(self) -> None:
        """Let go of the real connection."""
        self._connection.close()

    def now_ms(self) -> int:
        """Return compute_now()."""
        return self._clock.now_ms()

    def query(self, sql: str, *arguments: Any) -> list[Row]:
        """Look at the tables from outside the simulation, at no virtual time."""
        self._prepare(SIMULATOR)
        rows: list[Row] = self._connection.call(lambda connection: connection.query(sql, *arguments))
        self._connection.heard()
        return rows

    def write(self, sql: str, *arguments: Any) -> list[Row]:
        """Change rows from outside the simulation, at no virtual time, as if somebody had committed it."""
        self._prepare(SIMULATOR)
        rows: list[Row] = self._connection.call(lambda connection: connection.query(sql, *arguments))
        self._committed(SIMULATOR)
        return rows

    def script(self, sql: str) -> None:
        """Change the tables from outside the simulation, at no virtual time; nobody is told."""
        self._prepare(SIMULATOR)
        self._connection.call(lambda connection: connection.script(sql))
        self._connection.heard()
        self._unchanged.forget()

    def restart(self) -> None:
        """Lose every connection."""
        for link in list(self._links.values()):
            link.lose()

    def drop(self, process: SimulatedProcess) -> None:
        """Lose the connections of a process that was killed."""
        for link in list(self._links.values()):
            if link.process is process:
                link.terminate()

    # What links do

    def enter(self, link: Link) -> int:
        """Note an open connection; return its number."""
        self._numbers += 1
        self._links[self._numbers] = link
        return self._numbers

    def leave(self, number: int) -> None:
        """Forget a connection."""
        self._links.pop(number, None)
        for listeners in self._listeners.values():
            listeners.pop(number, None)

    def listen(self, number: int, channel: str, link: Link, listener: Callable[[str], None]) -> None:
        """Tell `listener` of notifications."""
        self._listeners.setdefault(channel, {})[number] = (link, listener)

    def inside(self, link: Link) -> bool:
        """Return whether the open transaction is this link's."""
        return self._open is link

    def begin(self, link: Link) -> None:
        """Begin the one open transaction."""
        if self._open is not None:
            raise Bug(
                f"{link.client} begins a transaction inside one of {self._open.client}: somebody has awaited something "
                "that is not the connection between BEGIN and COMMIT"
            )
        self._open, self._begun = link, False
        self._listen_for_changes()

    def end(self, link: Link, *, commit: bool) -> None:
        """End it."""
        if self._open is not link:
            raise Bug(f"{link.client} ends a transaction that is not open")
        self._open = None
        if self._begun:
            if not commit:
                self._set = self._read_only = None  # SET is undone with the rest
            self._connection.call(lambda connection: connection.script("COMMIT" if commit else "ROLLBACK"))
        if commit:
            self._keep_answers()
        self._committed(link.client)

    def run(self, link: Link, sql: str, arguments: Sequence[Any]) -> list[Row]:
        """Run one statement, in the open transaction of this link or in one of its own."""
        inside = self._open is link
        if self._open is not None and not inside:
            raise Bug(f"{link.client} runs a statement inside a transaction of {self._open.client}")
        self.statements += 1
        # Until its first statement that must be run, a transaction sees what anybody would see.
        known = None if (inside and self._begun) or self.weather.read_only else self._unchanged.answer(sql, arguments)
        if known is not None:
            rows = known
        elif inside:
            if not self._begun:
                self._prepare(link.client, begin=True)
                self._begun = True
            rows = self._connection.call(lambda connection: connection.query(sql, *arguments))
            self._asked.append((sql, arguments, rows))
        else:
            self._listen_for_changes()
            self._prepare(link.client)
            rows = self._connection.call(lambda connection: connection.query(sql, *arguments))
            self._asked.append((sql, arguments, rows))
            self._keep_answers()
        if not inside:
            self._committed(link.client)
        return rows

    def _listen_for_changes(self) -> None:
        self._changes_before = self._unchanged.changes
        self._asked.clear()

    def _keep_answers(self) -> None:
        """Keep what was answered within a transaction that has changed nothing."""
        if self._unchanged.changes == self._changes_before:
            for asked in self._asked:
                self._unchanged.keep(*asked)

    def _prepare(self, client: str, *, begin: bool = False) -> None:
        wanted = (self.now_ms(), self.timeline)
        sql = self._standing(client) + ("BEGIN;" if begin else "")
        if self._set != wanted:
            sql += f"SET sim.now_ms = '{wanted[0]}'; SET sim.timeline = '{wanted[1]}';"
        if sql:
            self._connection.call(lambda connection: connection.script(sql))
            self._set = wanted

    def _standing(self, client: str) -> str:
        """Return what makes the server a standby, or a primary again. Who looks from outside is never refused."""
        wanted = self.weather.read_only and client != SIMULATOR
        if wanted == self._read_only:
            return ""
        self._read_only = wanted
        return f"SET default_transaction_read_only = {'on' if wanted else 'off'};"

    def _committed(self, client: str) -> None:
        self.transactions += 1
        heard = self._connection.heard()
        for notification in heard:
            for link, listener in list(self._listeners.get(notification.channel, {}).values()):
                link.hear(listener, notification.payload)
        self.on_commit(client, heard)
