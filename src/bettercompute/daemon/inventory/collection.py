"""Collects sections: one collector each, every one in a thread of its own with a deadline, none of which can fail us.

Decides what becomes of a collector that raises, hangs or finds too much: a section that holds nothing but the reason. A
reading that hangs in the kernel (a dying disk, a GPU that fell off the bus) cannot be ended; its thread is left behind,
and until it ends its section says so instead of leaving behind another one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from bettercompute.daemon.inventory import cpu, disks, gpus, memory, network, pci, software, system
from bettercompute.daemon.inventory.canonical import (
    FACTS,
    SECTION_CLASSES,
    SECTION_NAMES,
    CanonicalSection,
    SectionTooLarge,
    canonical_section,
)
from bettercompute.daemon.inventory.facts import FactSettings, kept_facts
from bettercompute.daemon.inventory.host import COLLECTOR_FAILED, TIMED_OUT, TOO_LARGE, HostRoot, Reason
from bettercompute.protocol import messages

Collector = Callable[[HostRoot], messages.ProtoMessage]
# `facts` is not here: its programs are started by the daemon's executor, which ends them after a crash.
COLLECTORS: Mapping[str, Collector] = MappingProxyType(
    {
        "system": system.collect,
        "cpu": cpu.collect,
        "memory": memory.collect,
        "disks": disks.collect,
        "network": network.collect,
        "pci": pci.collect,
        "gpus": gpus.collect,
        "software": software.collect,
    }
)
_FAILURE_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Budget:
    """How long one collector may take.

    NVML needs some seconds for eight GPUs without persistence mode; all collectors together must stay below the two
    minutes that `inventory.refresh` has.
    """

    collector_ms: int = 12_000


def collect_all(
    root: HostRoot, *, sections: Collection[str] | None = None, budget: Budget | None = None
) -> dict[str, CanonicalSection]:
    """Return the named sections (None: all but `facts`) in NodeInventory's order. Blocks: call it in a thread.

    Never raises for what the host does; a collector's failure is the content of its section.
    """
    wanted = COLLECTORS.keys() if sections is None else sections
    deadline = budget or Budget()
    return {name: _collect(root, name, deadline) for name in SECTION_NAMES if name in wanted and name in COLLECTORS}


def collect_without_programs(
    root: HostRoot, *, facts: FactSettings, state_dir: Path, budget: Budget | None = None
) -> dict[str, CanonicalSection]:
    """Return what the daemon may say of itself outside a command: all collected now, and the facts as kept last.

    Blocks: call it in a thread.
    """
    sections = collect_all(root, budget=budget)
    kept = kept_facts(state_dir) if facts.facts_dir is not None else None
    return sections if kept is None else {**sections, FACTS: kept}


class _Collection(threading.Thread):
    """One run of one collector."""

    def __init__(self, root: HostRoot, name: str) -> None:
        super().__init__(name=f"inventory-{name}", daemon=True)
        self._root = root
        self._section = name
        self.collected: CanonicalSection | None = None

    def run(self) -> None:
        try:
            self.collected = canonical_section(self._section, COLLECTORS[self._section](self._root))
        except SectionTooLarge as error:
            self.collected = _only_reason(self._section, TOO_LARGE, str(error))
        except Exception as error:  # noqa: BLE001 - whatever a strange host does to one collector, the others go on
            self.collected = _only_reason(self._section, COLLECTOR_FAILED, f"{type(error).__name__}: {error}")


_left_behind: dict[tuple[str, Path], _Collection] = {}


def _collect(root: HostRoot, name: str, budget: Budget) -> CanonicalSection:
    key = (name, root.folder)
    still = f"its reading has not ended after {budget.collector_ms} ms"
    earlier = _left_behind.get(key)
    if earlier is not None:
        if earlier.is_alive():
            return _only_reason(name, TIMED_OUT, still)
        del _left_behind[key]
    collection = _Collection(root, name)
    collection.start()
    collection.join(budget.collector_ms / 1000)
    if collection.collected is None:
        _left_behind[key] = collection
        return _only_reason(name, TIMED_OUT, still)
    return collection.collected


def _only_reason(name: str, reason: Reason, detail: str) -> CanonicalSection:
    gap = messages.Unreadable(what=name, reason=f"{reason}: {detail}"[:_FAILURE_CHARACTERS])
    return canonical_section(name, SECTION_CLASSES[name](unreadable=[gap]))
