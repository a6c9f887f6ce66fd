"""The `memory` section: total, NUMA nodes, huge pages, swap, modules. How much of it is free is load, not inventory."""

from __future__ import annotations

from collections import Counter

from bettercompute.daemon.inventory.findings import MAX_COUNT, Findings, is_placeholder, key_values, kilobytes
from bettercompute.daemon.inventory.host import MALFORMED, HostRoot, Unreadable
from bettercompute.daemon.inventory.smbios import BrokenTable, MemorySlot, memory_slots
from bettercompute.protocol import messages

NODES = "sys/devices/system/node"
HUGE_PAGES = "sys/kernel/mm/hugepages"
DMI_TABLE = "sys/firmware/dmi/tables/DMI"
BLOCK_SIZE = "sys/devices/system/memory/block_size_bytes"
EDAC = "sys/devices/system/edac/mc"
# Control groups of version 1 write the largest multiple of the page size for "no limit".
_NO_LIMIT_BYTES = 1 << 62


def collect(root: HostRoot) -> messages.MemoryInventory:
    """Return the memory; the modules are in a table that only root may read, and else a stated gap."""
    findings = Findings(root)
    meminfo = key_values(findings.expected("proc/meminfo"), separator=":")
    section = messages.MemoryInventory(
        total_bytes=kilobytes(meminfo.get("MemTotal", "")),
        swap_total_bytes=kilobytes(meminfo.get("SwapTotal", "")),
        page_size_bytes=root.calls.page_size_bytes,
        transparent_huge_pages=_chosen(findings.optional("sys/kernel/mm/transparent_hugepage/enabled")),
        cgroup_limit_bytes=_cgroup_limit_bytes(findings),
    )
    section.huge_pages.extend(_huge_pages(findings, HUGE_PAGES))
    block_bytes = findings.number(BLOCK_SIZE, radix=16, largest=MAX_COUNT)
    section.numa_nodes.extend(
        _numa_node(findings, int(name.removeprefix("node")), block_bytes)
        for name in findings.entries(NODES, expected=False)
        if name.startswith("node") and name.removeprefix("node").isdecimal()
    )
    section.ecc_controllers.extend(
        f"{name} {findings.optional(f'{EDAC}/{name}/mc_name')}".rstrip()
        for name in findings.entries(EDAC, expected=False)
        if name.startswith("mc")
    )
    section.modules.extend(_modules(findings))
    section.unreadable.extend(findings.unreadable())
    return section


def _chosen(text: str) -> str:
    """Return the bracketed word of `always [madvise] never`."""
    return text.partition("[")[2].partition("]")[0]


def _cgroup_limit_bytes(findings: Findings) -> int:
    """Return the limit at the root of the daemon's view: a container's own; the host's root group has none."""
    text = findings.optional("sys/fs/cgroup/memory.max") or findings.optional(
        "sys/fs/cgroup/memory/memory.limit_in_bytes"
    )
    return int(text) if text.isdecimal() and int(text) < _NO_LIMIT_BYTES else 0


def _huge_pages(findings: Findings, folder: str) -> list[messages.HugePages]:
    found = []
    for name in findings.entries(folder, expected=False):
        size = name.removeprefix("hugepages-").removesuffix("kB")
        if size.isdecimal():
            reserved = findings.number(f"{folder}/{name}/nr_hugepages", largest=MAX_COUNT) or 0
            found.append(messages.HugePages(size_bytes=int(size) * 1024, reserved=reserved))
    return found


def _numa_node(findings: Findings, number: int, block_bytes: int | None) -> messages.NumaNode:
    folder = f"{NODES}/node{number}"
    node = messages.NumaNode(number=number, cpus=findings.optional(f"{folder}/cpulist"))
    # A distance is a byte of ACPI's SLIT.
    distances = findings.optional(f"{folder}/distance").split()
    node.distances.extend(int(distance) for distance in distances if distance.isdecimal() and len(distance) <= 3)
    node.huge_pages.extend(_huge_pages(findings, f"{folder}/hugepages"))
    # Blocks first: a kernel that initializes memory late tells a MemTotal that still grows.
    blocks = sum(name.startswith("memory") for name in findings.entries(folder))
    if block_bytes and blocks > 0:
        node.memory_bytes = blocks * block_bytes
    else:
        meminfo = key_values(findings.optional(f"{folder}/meminfo"), separator=":")
        node.memory_bytes = kilobytes(meminfo.get(f"Node {number} MemTotal", ""))
    return node


def _modules(findings: Findings) -> list[messages.MemoryModule]:
    try:
        slots = memory_slots(findings.root.data(DMI_TABLE))
    except Unreadable as error:
        findings.state(error)
        return []
    except BrokenTable as error:
        findings.gap(f"/{DMI_TABLE}", MALFORMED, str(error))
        return []
    named = Counter(slot.locator for slot in slots)
    return [_module(slot, ambiguous=named[slot.locator] > 1) for slot in slots]


def _module(slot: MemorySlot, *, ambiguous: bool) -> messages.MemoryModule:
    """Return a slot, named with its bank where a vendor calls several slots `DIMM 0`."""
    module = messages.MemoryModule(locator=f"{slot.bank} {slot.locator}" if ambiguous else slot.locator)
    if slot.size_bytes > 0:
        module.size_bytes = slot.size_bytes
        module.type = slot.kind
        module.speed_mts = slot.speed_mts
        module.manufacturer = _stated(slot.manufacturer)
        module.part_number = _stated(slot.part_number)
        module.serial = _stated(slot.serial)
    return module


def _stated(text: str) -> str:
    return "" if is_placeholder(text) else text
