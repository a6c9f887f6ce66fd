"""What the values of a spec may be: one rule for whoever sets it and for the daemon that converges it.

A daemon judges again, because a spec may come from a newer control plane. See docs/desired-state.md, "Sections".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from bettercompute.protocol import messages
from bettercompute.protocol.limits import KIB, MAX_NAME_CHARS, MIB

LOG_LEVELS: Final = ("debug", "info", "warning", "error")
# A report without news is a write to the database: a fleet of 100,000 that reports each 10 s is 10,000 writes a second,
# which only a handful of nodes under study may do.
STATUS_INTERVAL_MS_MIN: Final = 10_000
STATUS_INTERVAL_MS_MAX: Final = 86_400_000
# A collection takes a second of one core; more often than each minute it would show in the host's own load.
INVENTORY_INTERVAL_MS_MIN: Final = 60_000
INVENTORY_INTERVAL_MS_MAX: Final = 7 * 86_400_000
VERSION_CHARS_MAX: Final = 64
# Some dozens of keys, with their certificates.
JWKS_BYTES_MAX: Final = 64 * KIB
TUNNEL_OPS: Final = ("exec", "ssh", "tcp")
# What a daemon runs at once, whoever asks.
TUNNELS_MAX: Final = 16
ENVIRONMENT_NAMES_MAX: Final = 256
# Two page sizes on each of 64 NUMA nodes and some to spare.
HUGE_PAGE_ENTRIES_MAX: Final = 160
# The smallest (arm64 with 4 KiB pages) and the largest (arm64 with 64 KiB pages) that a Linux kernel has.
HUGE_PAGE_BYTES_MIN: Final = 64 * KIB
HUGE_PAGE_BYTES_MAX: Final = 16 * 1024 * MIB
# 64 TiB of the usual 2 MiB pages.
HUGE_PAGES_MAX: Final = 2**25
NUMA_NODE_MAX: Final = 1023

_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+-]*", re.ASCII)
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
_PRIVATE_PARTS = frozenset({"d", "p", "q", "dp", "dq", "qi", "oth", "k"})


@dataclass(frozen=True, slots=True)
class Fault:
    """A value that is not taken: where it stands, what it is, and what is taken there."""

    path: str
    """For example `host.huge_pages[1].size_bytes`."""
    value: object
    limit: str

    def sentence(self, shown: Callable[[object], str] = ascii) -> str:
        """Say it in words; `shown` makes a foreign value fit for a sentence."""
        return f"{self.path} is {shown(self.value)}: it {self.limit}"


def faults(spec: messages.NodeSpec, section: str) -> list[Fault]:
    """Return what is wrong with a section that is present; a section without rules of its own has nothing wrong."""
    check = _CHECKS.get(section)
    return [] if check is None else list(check(getattr(spec, section)))


def _interval(path: str, value: int, low: int, high: int) -> Iterator[Fault]:
    if value and not low <= value <= high:
        yield Fault(path, value, f"must be 0 (as configured on the host), or from {low} to {high} milliseconds")


def _daemon(section: messages.DaemonSection) -> Iterator[Fault]:
    if section.log_level and section.log_level not in LOG_LEVELS:
        yield Fault("daemon.log_level", section.log_level, f"must be one of {', '.join(LOG_LEVELS)}, or empty")
    yield from _interval(
        "daemon.status_interval_ms", section.status_interval_ms, STATUS_INTERVAL_MS_MIN, STATUS_INTERVAL_MS_MAX
    )
    yield from _interval(
        "daemon.inventory_interval_ms",
        section.inventory_interval_ms,
        INVENTORY_INTERVAL_MS_MIN,
        INVENTORY_INTERVAL_MS_MAX,
    )
    version = section.pinned_version
    if version and (len(version) > VERSION_CHARS_MAX or _VERSION.fullmatch(version) is None):
        yield Fault(
            "daemon.pinned_version",
            version,
            f"must be a version such as 1.4.2, of at most {VERSION_CHARS_MAX} characters",
        )


def _access(section: messages.AccessSection) -> Iterator[Fault]:
    if section.ticket_jwks:
        wrong = _jwks_fault(section.ticket_jwks)
        if wrong:
            yield Fault("access.ticket_jwks", f"{len(section.ticket_jwks)} characters", wrong)
    if len(section.ticket_issuer) > MAX_NAME_CHARS:
        yield Fault("access.ticket_issuer", section.ticket_issuer, f"must have at most {MAX_NAME_CHARS} characters")
    for index, op in enumerate(section.ops):
        if op not in TUNNEL_OPS:
            yield Fault(f"access.ops[{index}]", op, f"must be one of {', '.join(TUNNEL_OPS)}")
    if section.ops and not section.ticket_jwks:
        yield Fault("access.ticket_jwks", "", "must hold the keys that sign tickets where ops are allowed")
    if len(section.exec_environment) > ENVIRONMENT_NAMES_MAX:
        yield Fault(
            "access.exec_environment",
            f"{len(section.exec_environment)} names",
            f"must have at most {ENVIRONMENT_NAMES_MAX} entries",
        )
    for index, name in enumerate(section.exec_environment):
        if _ENVIRONMENT_NAME.fullmatch(name) is None:
            yield Fault(
                f"access.exec_environment[{index}]",
                name,
                "must be the name of an environment variable, without a value",
            )
    if section.tunnels_max > TUNNELS_MAX:
        yield Fault(
            "access.tunnels_max", section.tunnels_max, f"must be at most {TUNNELS_MAX}; 0: the daemon's own bound"
        )


def _jwks_fault(text: str) -> str:
    """Return what is wrong with a key set in words, or nothing. No key is judged: who checks a ticket does that."""
    if len(text.encode(errors="replace")) > JWKS_BYTES_MAX:
        return f"must be at most {JWKS_BYTES_MAX} bytes long"
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return 'must be a JSON Web Key Set: {"keys": [...]}'
    keys = value.get("keys") if isinstance(value, dict) else None
    if not isinstance(keys, list) or not keys or not all(isinstance(key, dict) for key in keys):
        return 'must be a JSON Web Key Set with at least one key: {"keys": [{...}]}'
    if any(_PRIVATE_PARTS & set(key) for key in keys):
        return "must hold public keys only: take the private parts out"
    return ""


def _host(section: messages.HostSection) -> Iterator[Fault]:
    if len(section.huge_pages) > HUGE_PAGE_ENTRIES_MAX:
        yield Fault(
            "host.huge_pages",
            f"{len(section.huge_pages)} entries",
            f"must have at most {HUGE_PAGE_ENTRIES_MAX} entries",
        )
    spread: set[int] = set()
    on_nodes: set[tuple[int, int]] = set()
    for index, entry in enumerate(section.huge_pages):
        path, size = f"host.huge_pages[{index}]", entry.size_bytes
        if not HUGE_PAGE_BYTES_MIN <= size <= HUGE_PAGE_BYTES_MAX or size & (size - 1):
            yield Fault(
                f"{path}.size_bytes",
                size,
                f"must be a power of two from {HUGE_PAGE_BYTES_MIN} to {HUGE_PAGE_BYTES_MAX}, for example 2097152",
            )
        if entry.count > HUGE_PAGES_MAX:
            yield Fault(f"{path}.count", entry.count, f"must be at most {HUGE_PAGES_MAX}")
        if not entry.HasField("numa_node"):
            twice = size in spread
            spread.add(size)
        else:
            if entry.numa_node > NUMA_NODE_MAX:
                yield Fault(f"{path}.numa_node", entry.numa_node, f"must be at most {NUMA_NODE_MAX}")
            twice = (size, entry.numa_node) in on_nodes
            on_nodes.add((size, entry.numa_node))
        if twice:
            yield Fault(f"{path}.size_bytes", size, "must be given once for each NUMA node: add the counts up")
    for size in sorted(spread & {size for size, _ in on_nodes}):
        yield Fault("host.huge_pages", f"{size} bytes", "must be given either for each NUMA node or for the whole host")


_CHECKS: Mapping[str, Callable[[Any], Iterator[Fault]]] = MappingProxyType(
    {"access": _access, "daemon": _daemon, "host": _host}
)
