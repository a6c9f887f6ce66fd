"""A way to the database that takes its time: a socket between, which hands every byte on late and in order."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

SOCKET_NAME = ".s.PGSQL.5432"
CHUNK_BYTES = 65_536


@dataclass
class SlowDatabase:
    """Its address, and how long a round trip takes; the latter may be changed at any time."""

    dsn: str
    round_trip_s: float = 0.0


@contextlib.asynccontextmanager
async def slow_database(folder: Path, dsn: str) -> AsyncIterator[SlowDatabase]:
    """Listen beside a server that is reached through a socket in the file system."""
    [there] = re.findall(r"host=([^&]+)", dsn)
    slow = SlowDatabase(dsn.replace(f"host={there}", f"host={folder}"))
    pumps: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_unix_connection(f"{there}/{SOCKET_NAME}")
        for source, sink in ((reader, up_writer), (up_reader, writer)):
            pump = asyncio.create_task(_pump(slow, source, sink))
            pumps.add(pump)
            pump.add_done_callback(pumps.discard)

    server = await asyncio.start_unix_server(serve, folder / SOCKET_NAME)
    try:
        yield slow
    finally:
        server.close()
        for pump in list(pumps):
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(slow: SlowDatabase, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Hand on what comes, each piece half a round trip late."""
    loop = asyncio.get_running_loop()
    waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def hand_on() -> None:
        while True:
            due, data = await waiting.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not data:
                return
            sink.write(data)
            await sink.drain()

    writing = asyncio.create_task(hand_on())
    try:
        with contextlib.suppress(ConnectionError):
            while True:
                data = await source.read(CHUNK_BYTES)
                waiting.put_nowait((loop.time() + slow.round_trip_s / 2, data))
                if not data:
                    break
            await writing
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        sink.close()
