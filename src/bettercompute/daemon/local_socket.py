"""Sockets in the state folder, by which an operator on the host reaches the living daemon: its owner's alone.

An address goes through /proc/self/fd, because a state folder may be longer than the 108 bytes that an address holds.
See docs/daemon.md, "What lies in the state folder"; decisions 0084.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def serve(state_dir: Path, name: str, handle: Serve, *, limit: int = 65_536) -> asyncio.Server:
    """Serve under `name`, reading lines of at most `limit` bytes.

    The folder's lock is held, so a socket that is there belongs to nobody.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with _address(state_dir, name) as address:
            (state_dir / name).unlink(missing_ok=True)
            listener.bind(address)
        (state_dir / name).chmod(0o600)
        return await asyncio.start_unix_server(handle, sock=listener, limit=limit)
    except BaseException:
        listener.close()
        raise


@contextlib.contextmanager
def connect(state_dir: Path, name: str, *, timeout_s: float) -> Iterator[socket.socket]:
    """Connect to whoever listens under `name`; raises what the operating system says when nobody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as asking:
        asking.settimeout(timeout_s)
        with _address(state_dir, name) as address:
            asking.connect(address)
        yield asking


def received(asking: socket.socket, *, limit: int) -> bytes:
    """Return all that comes until the other side hangs up; raise ValueError over `limit` bytes."""
    pieces: list[bytes] = []
    size_bytes = 0
    while piece := asking.recv(65_536):
        size_bytes += len(piece)
        if size_bytes > limit:
            raise ValueError(f"it is over {limit} bytes")
        pieces.append(piece)
    return b"".join(pieces)


@contextlib.contextmanager
def _address(state_dir: Path, name: str) -> Iterator[str]:
    folder = os.open(state_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{name}"
    finally:
        os.close(folder)
