"""Where a device sits, read from the way through the buses that sysfs makes its path of: PCI address and NUMA node."""

from __future__ import annotations

import re

from bettercompute.daemon.inventory.findings import Findings

PCI = "sys/bus/pci/devices"
_PCI_ADDRESS = re.compile(r"(?<=/)[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7](?=/|$)")


def pci_address(way: str) -> str:
    """Return the address of the last PCI function on the way: the device's own controller. Empty if there is none."""
    found: list[str] = _PCI_ADDRESS.findall(f"/{way}")
    return found[-1] if found else ""


def numa_node(findings: Findings, way: str) -> int | None:
    """Return the NUMA node of the device's PCI function; None where the machine has one node or does not tell."""
    address = pci_address(way)
    return findings.number(f"{PCI}/{address}/numa_node") if address else None
