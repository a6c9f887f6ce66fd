"""What systemd is told."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from bettercompute.daemon.notify import SystemdNotifier


@pytest.mark.parametrize("abstract", [False, True])
def test_each_state_is_one_datagram(tmp_path: Path, abstract: bool) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        if abstract:
            manager.bind(b"")  # the kernel picks an abstract name
            address = "@" + manager.getsockname()[1:].decode()
        else:
            manager.bind(str(tmp_path / "notify"))
            address = str(tmp_path / "notify")
        notifier = SystemdNotifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "60000000"})
        notifier.ready()
        notifier.status("two\nlines")
        notifier.alive()
        notifier.reloading(5)
        notifier.stopping()
        manager.settimeout(5)
        told = [manager.recv(200).decode() for _ in range(5)]
    assert told == [
        "READY=1",
        "STATUS=two lines",
        "WATCHDOG=1",
        "RELOADING=1\nMONOTONIC_USEC=5",
        "STOPPING=1",
    ]
    assert notifier.watchdog_s == 30


def test_without_a_manager_nothing_happens(tmp_path: Path) -> None:
    SystemdNotifier({}).ready()
    SystemdNotifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready()
    assert SystemdNotifier({"WATCHDOG_USEC": "x"}).watchdog_s is None
