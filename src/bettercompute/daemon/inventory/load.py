"""How busy the host is, coarsely: `NodeLoad` of a heartbeat. It changes by itself, so none of it is inventory."""

from __future__ import annotations

import contextlib

from bettercompute.daemon.inventory.findings import key_values, kilobytes
from bettercompute.daemon.inventory.host import HostRoot, Unreadable
from bettercompute.protocol import messages


def node_load(root: HostRoot, *, running_commands: int, pending_events: int, journal_bytes: int) -> messages.NodeLoad:
    """Return the load; what the kernel does not tell stays 0."""
    load = messages.NodeLoad(
        running_commands=running_commands, pending_events=pending_events, journal_bytes=journal_bytes
    )
    # A heartbeat is a sign of life first, with or without a load.
    with contextlib.suppress(Unreadable, ValueError):
        load.load1, load.load5, load.load15 = map(float, root.text("proc/loadavg").split()[:3])
    load.available_memory_bytes = _available_memory_bytes(root)
    return load


def _available_memory_bytes(root: HostRoot) -> int:
    try:
        meminfo = key_values(root.text("proc/meminfo"), separator=":")
    except Unreadable:
        return 0
    return kilobytes(meminfo.get("MemAvailable", ""))
