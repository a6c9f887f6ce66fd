"""The `pci` section: every PCI function with its driver and group, and its names where the host has a list of names.

The present link speed is left out: power management lowers it on an idle device, and an inventory must not change with
the load. A narrower link than possible stays visible: width tells of a bad slot.
"""

from __future__ import annotations

import re

from bettercompute.daemon.inventory.findings import Findings
from bettercompute.daemon.inventory.host import HostRoot
from bettercompute.daemon.inventory.places import PCI
from bettercompute.protocol import messages

NAME_LISTS = ("usr/share/hwdata/pci.ids", "usr/share/misc/pci.ids")
MAX_NAME_LIST_BYTES = 8 * 1024 * 1024
# A link that is not there is told as the largest number of lanes.
_NO_LINK_LANES = 255
_VENDOR_LINE = re.compile(r"([0-9a-f]{4})\s+(.+)")
_DEVICE_LINE = re.compile(r"\t([0-9a-f]{4})\s+(.+)")


def collect(root: HostRoot) -> messages.PciInventory:
    """Return the functions."""
    findings = Findings(root)
    section = messages.PciInventory()
    section.functions.extend(_function(findings, address) for address in findings.entries(PCI, expected=False))
    vendors, devices = names(findings, {(function.vendor_id, function.device_id) for function in section.functions})
    for function in section.functions:
        function.vendor_name = vendors.get(function.vendor_id, "")
        function.device_name = devices.get((function.vendor_id, function.device_id), "")
    section.unreadable.extend(findings.unreadable())
    return section


def _function(findings: Findings, address: str) -> messages.PciFunction:
    folder = f"{PCI}/{address}"

    def number(name: str) -> int:
        return findings.number(f"{folder}/{name}", radix=16) or 0

    def lanes(name: str) -> int:
        width = findings.number(f"{folder}/{name}") or 0
        return 0 if width == _NO_LINK_LANES else width

    group = findings.root.link_name(f"{folder}/iommu_group")
    speed_max = findings.optional(f"{folder}/max_link_speed")
    return messages.PciFunction(
        address=address,
        class_code=number("class"),
        vendor_id=number("vendor"),
        device_id=number("device"),
        subsystem_vendor_id=number("subsystem_vendor"),
        subsystem_device_id=number("subsystem_device"),
        revision=number("revision"),
        driver=findings.root.link_name(f"{folder}/driver"),
        numa_node=findings.number(f"{folder}/numa_node"),
        iommu_group=int(group) if group.isdecimal() else None,
        link_speed_max="" if speed_max.startswith("Unknown") else speed_max,
        link_width=lanes("current_link_width"),
        link_width_max=lanes("max_link_width"),
    )


def names(findings: Findings, wanted: set[tuple[int, int]]) -> tuple[dict[int, str], dict[tuple[int, int], str]]:
    """Return the names of vendors and of devices (vendor id, device id), from the first list that the host has.

    The form of pci.ids: a vendor's line, then a line with a tab for each of its devices.
    """
    listing = ""
    for path in NAME_LISTS:
        listing = listing or findings.optional(path, limit_bytes=MAX_NAME_LIST_BYTES)
    wanted_vendors = {vendor for vendor, _ in wanted}
    vendors: dict[int, str] = {}
    devices: dict[tuple[int, int], str] = {}
    vendor = -1
    for line in listing.splitlines():
        if match := _VENDOR_LINE.fullmatch(line):
            vendor = int(match[1], 16)
            if vendor in wanted_vendors:
                vendors[vendor] = match[2]
        elif line.startswith("C "):
            break  # the classes: the same form with another meaning
        elif vendor in wanted_vendors and (match := _DEVICE_LINE.fullmatch(line)):
            key = (vendor, int(match[1], 16))
            if key in wanted:
                devices[key] = match[2]
    return vendors, devices
