"""The database of a simulation: the real PostgreSQL, met by simulated connections on virtual time.

The production `Database` runs unmodified on a pool of these. All of them share one real connection, and a transaction
is carried out in one go, so transactions run one at a time, in the order in which their latencies, drawn from the seed,
bring them to the server; no lock is ever waited for. Latency lies before BEGIN and after COMMIT, and a fault inside a
transaction is its connection lost before or after its COMMIT: then nobody at the client knows the outcome.
`compute_now()` is the virtual time. See docs/simulator.md, "The database".
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bettercompute.errors import Bug
from bettercompute.store.database import DedicatedConnection, Row
from bettercompute.testing.sim.machine import SimulatedClock
from bettercompute.testing.sim.process import SimulatedProcess
from bettercompute.testing.sim.weather import Weather
from bettercompute.testing.thread_connection import ThreadConnection

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


class ServerThread:
    """The one real connection, in a thread of its own: a call blocks its caller until PostgreSQL has answered."""

    def __init__(self, dsn: str, *, channels: Sequence[str]) -> None:
        self._dsn = dsn
        self._channels = channels
        self._asked: queue.SimpleQueue[Callable[[DedicatedConnection], Awaitable[Any]] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._heard: list[Notification] = []
        self._thread = threading.Thread(target=self._serve, name="simulated-postgres", daemon=True)
        self._thread.start()
        self._answer()

    def call(self, work: Callable[[DedicatedConnection], Awaitable[Any]]) -> Any:
        """Run something on the connection to its end."""
        self._asked.put(work)
        return self._answer()

    def heard(self) -> list[Notification]:
        """Return what was notified by transactions committed since the last call."""
        heard, self._heard = self._heard, []
        return heard

    def close(self) -> None:
        """Close the connection and end the thread."""
        self._asked.put(None)
        self._thread.join()

    def _answer(self) -> Any:
        result, error = self._answers.get()
        if error is not None:
            raise error
        return result

    def _serve(self) -> None:
        try:
            connection = ThreadConnection(self._dsn, application_name="simulator")
        except BaseException as error:  # noqa: BLE001 - told to whoever waits
            self._answers.put((None, error))
            return
        with connection:
            connection.run(self._listen)
            self._answers.put((None, None))
            while (work := self._asked.get()) is not None:
                try:
                    self._answers.put((connection.run(work), None))
                except BaseException as error:  # noqa: BLE001 - told to whoever waits
                    self._answers.put((None, error))

    async def _listen(self, connection: DedicatedConnection) -> None:
        await connection.script(_CHEAP)
        for channel in self._channels:
            await connection.listen(channel, self._hear(channel))

    def _hear(self, channel: str) -> Callable[[str], None]:
        # A session's own notifications come before the answer to its COMMIT, so none is ever late.
        return lambda payload: self._heard.append(Notification(channel, payload))


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
        self._thread = ServerThread(dsn, channels=channels)
        self._clock = clock
        self._open: Link | None = None
        self._set: tuple[int, str, int] | None = None
        self._read_only: bool | None = None
        self._links: dict[int, Link] = {}
        self._listeners: dict[str, dict[int, tuple[Link, Callable[[str], None]]]] = {}
        self._numbers = 0
        self._thread.call(lambda connection: connection.script(_CLOCK))

    def close(self) -> None:
        """Let go of the real connection."""
        self._thread.close()

    def now_ms(self) -> int:
        """Return compute_now()."""
        return self._clock.now_ms()

    def query(self, sql: str, *arguments: Any) -> list[Row]:
        """Look at the tables from outside the simulation, at no virtual time."""
        self._prepare(SIMULATOR)
        rows: list[Row] = self._thread.call(lambda connection: connection.query(sql, *arguments))
        self._thread.heard()
        return rows

    def write(self, sql: str, *arguments: Any) -> list[Row]:
        """Change rows from outside the simulation, at no virtual time, as if somebody had committed it."""
        self._prepare(SIMULATOR)
        rows: list[Row] = self._thread.call(lambda connection: connection.query(sql, *arguments))
        self._committed(SIMULATOR)
        return rows

    def script(self, sql: str) -> None:
        """Change the tables from outside the simulation, at no virtual time; nobody is told."""
        self._prepare(SIMULATOR)
        self._thread.call(lambda connection: connection.script(sql))
        self._thread.heard()

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
        self._prepare(link.client, begin=True)
        self._open = link

    def end(self, link: Link, *, commit: bool) -> None:
        """End it."""
        if self._open is not link:
            raise Bug(f"{link.client} ends a transaction that is not open")
        self._open = None
        if not commit:
            self._set = self._read_only = None  # SET is undone with the rest
        self._thread.call(lambda connection: connection.script("COMMIT" if commit else "ROLLBACK"))
        self._committed(link.client)

    def run(self, link: Link, sql: str, arguments: Sequence[Any]) -> list[Row]:
        """Run one statement, in the open transaction of this link or in one of its own."""
        if self._open is not link:
            if self._open is not None:
                raise Bug(f"{link.client} runs a statement inside a transaction of {self._open.client}")
            self._prepare(link.client)
        self.statements += 1
        rows: list[Row] = self._thread.call(lambda connection: connection.query(sql, *arguments))
        if self._open is None:
            self._committed(link.client)
        return rows

    def _prepare(self, client: str, *, begin: bool = False) -> None:
        wanted = (self.now_ms(), client, self.timeline)
        sql = self._standing(client) + ("BEGIN;" if begin else "")
        if self._set != wanted:
            sql += f"SET sim.now_ms = '{wanted[0]}'; SET sim.client = '{client}';"
            sql += f"SET sim.timeline = '{self.timeline}';"
        if sql:
            self._thread.call(lambda connection: connection.script(sql))
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
        heard = self._thread.heard()
        for notification in heard:
            for link, listener in list(self._listeners.get(notification.channel, {}).values()):
                link.hear(listener, notification.payload)
        self.on_commit(client, heard)
