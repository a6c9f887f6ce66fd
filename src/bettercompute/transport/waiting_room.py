"""Connections before TLS: accepted, silent until their ClientHello is whole, then in line for one of 64 handshakes.

A connection that says nothing costs a socket and an entry here, never a handshake's place. The kernel tells when the
whole ClientHello has come (SO_RCVLOWAT), so one that sends half of it waits here as well; the oldest silent one is
dropped first. See decisions 0102.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from bettercompute.transport.limits import TLS_RECORD_BYTES_MAX, TLS_RECORD_HEADER_BYTES, Limits

TLS_HANDSHAKE_RECORD = 0x16


@dataclass(slots=True)
class _Guest:
    sock: socket.socket
    address: tuple[str, int]
    deadline: asyncio.TimerHandle
    needed_bytes: int = TLS_RECORD_HEADER_BYTES
    # Whether the kernel was told to wake us for `needed_bytes` only.
    mark_set: bool = False


class WaitingRoom:
    """Holds sockets and hands each over when its ClientHello is there and a handshake is free."""

    def __init__(self, *, limits: Limits, start: Callable[[socket.socket, tuple[str, int]], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._start = start
        self._silent: dict[int, _Guest] = {}
        self._ready: deque[_Guest] = deque()
        self._in_handshake = 0
        self.dropped = 0

    @property
    def waiting(self) -> int:
        """Return how many connections wait, silent or in line."""
        return len(self._silent) + len(self._ready)

    @property
    def in_handshake(self) -> int:
        """Return how many handshakes are in progress."""
        return self._in_handshake

    def enter(self, sock: socket.socket, address: tuple[str, int]) -> None:
        """Take a connection in; when the room is full the oldest silent one goes, or this one if all have spoken."""
        if self.waiting >= self._limits.waiting_max:
            if not self._silent:
                self.dropped += 1
                sock.close()
                return
            self._drop(next(iter(self._silent.values())))
        descriptor = sock.fileno()
        deadline = self._loop.call_later(self._limits.handshake_ms / 1000, self._on_deadline, descriptor)
        self._silent[descriptor] = _Guest(sock, address, deadline)
        self._loop.add_reader(descriptor, self._on_readable, descriptor)

    def handshake_ended(self) -> None:
        """Give a place back: the next in line takes it."""
        self._in_handshake -= 1
        while self._ready and self._in_handshake < self._limits.handshakes_max:
            self._begin(self._ready.popleft())

    def close(self) -> None:
        """Drop everybody."""
        for guest in [*self._silent.values(), *self._ready]:
            self._drop(guest)
        self._ready.clear()

    def _on_deadline(self, descriptor: int) -> None:
        if (guest := self._silent.get(descriptor)) is not None:
            self._drop(guest)
            return
        for guest in self._ready:
            if guest.sock.fileno() == descriptor:
                self._ready.remove(guest)
                self._drop(guest)
                return

    def _drop(self, guest: _Guest) -> None:
        self.dropped += 1
        guest.deadline.cancel()
        if self._silent.pop(guest.sock.fileno(), None) is not None:
            self._loop.remove_reader(guest.sock.fileno())
        guest.sock.close()

    def _on_readable(self, descriptor: int) -> None:
        guest = self._silent[descriptor]
        woken_for = guest.needed_bytes
        try:
            seen = guest.sock.recv(TLS_RECORD_BYTES_MAX, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            self._drop(guest)
            return
        if not self._plausible(seen):
            self._drop(guest)
            return
        if len(seen) >= TLS_RECORD_HEADER_BYTES:
            guest.needed_bytes = TLS_RECORD_HEADER_BYTES + int.from_bytes(seen[3:5], "big")
        if len(seen) < guest.needed_bytes:
            self._wait_for_more(guest, had=len(seen), woken_for=woken_for)
            return
        self._silent.pop(descriptor)
        self._loop.remove_reader(descriptor)
        if self._in_handshake < self._limits.handshakes_max and not self._ready:
            self._begin(guest)
        else:
            self._ready.append(guest)

    @staticmethod
    def _plausible(seen: bytes) -> bool:
        if not seen or seen[0] != TLS_HANDSHAKE_RECORD:
            return False  # gone, or speaking something else than TLS
        return (
            len(seen) < TLS_RECORD_HEADER_BYTES
            or int.from_bytes(seen[3:5], "big") <= TLS_RECORD_BYTES_MAX - TLS_RECORD_HEADER_BYTES
        )

    def _wait_for_more(self, guest: _Guest, *, had: int, woken_for: int) -> None:
        if guest.mark_set and had < woken_for:
            # The mark was set for `woken_for` bytes and fewer are there: the peer has ended its side.
            self._drop(guest)
            return
        guest.mark_set = True
        guest.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, guest.needed_bytes)

    def _begin(self, guest: _Guest) -> None:
        guest.deadline.cancel()
        self._in_handshake += 1
        guest.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        self._start(guest.sock, guest.address)
