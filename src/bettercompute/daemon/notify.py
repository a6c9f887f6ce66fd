"""Tells systemd how the daemon is (`Type=notify`): ready, its state in words, and that it is not stuck.

A datagram to the socket named in NOTIFY_SOCKET; without one, nothing. See sd_notify(3); docs/daemon.md, "Under
systemd".
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping

# The watchdog wants a sign at least this often within its interval; half leaves room for a busy host.
_WATCHDOG_SHARE = 0.5


class SystemdNotifier:
    """The socket of the service manager that started this process, if one did."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        watchdog = environment.get("WATCHDOG_USEC", "")
        self.watchdog_s = (
            int(watchdog) / 1_000_000 * _WATCHDOG_SHARE if watchdog.isdecimal() and int(watchdog) else None
        )
        """How often to call `alive`; None when nobody watches."""

    def ready(self) -> None:
        """The daemon has its journal and its identity and begins to dial."""
        self._send("READY=1")

    def reloading(self, monotonic_us: int) -> None:
        """The configuration is being read again; `ready` follows."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={monotonic_us}")

    def stopping(self) -> None:
        """The daemon ends in order."""
        self._send("STOPPING=1")

    def status(self, sentence: str) -> None:
        """Show a sentence in `systemctl status`."""
        self._send("STATUS=" + sentence.replace("\n", " "))

    def alive(self) -> None:
        """The loop turns."""
        self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        # A service manager that does not listen must not stop the service.
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out,
        ):
            out.sendto(message.encode(), self._address)
