"""The `disks` section: whole disks with their partitions, and the file systems on them.

Left out is what comes and goes with guests and snapshots and is no disk: loop and RAM devices, device-mapper volumes,
drives without a medium. Free space is load, not inventory.
"""

from __future__ import annotations

import re

from bettercompute.daemon.inventory.findings import MAX_COUNT, Findings, key_values
from bettercompute.daemon.inventory.host import HostRoot, Unreadable, unreadable
from bettercompute.daemon.inventory.places import numa_node, pci_address
from bettercompute.protocol import messages

BLOCK = "sys/block"
MOUNTS = "proc/self/mountinfo"
# sysfs counts in these whatever the disk's block size is.
SECTOR_BYTES = 512
_NO_DISKS = re.compile(r"(?:loop|ram|zram|dm-|fd)\d+")
# Which part of the way through the buses tells how a disk is attached; the first that matches.
_TRANSPORTS = (
    ("/usb", "usb"),
    ("/session", "iscsi"),
    ("/rport-", "fc"),
    ("/end_device-", "sas"),
    ("/ata", "sata"),
    ("/virtio", "virtio"),
    ("/mmc_host/", "mmc"),
    ("/vmbus", "vmbus"),
    ("/vbd-", "xen"),
)
_MOUNTS_OF_GUESTS = ("/var/lib/kubelet/", "/var/lib/docker/", "/var/lib/containerd/", "/run/")


def collect(root: HostRoot) -> messages.DisksInventory:
    """Return the disks and the file systems that are mounted from them."""
    findings = Findings(root)
    by_id = _links(findings, "dev/disk/by-id")
    by_uuid = _links(findings, "dev/disk/by-partuuid")
    section = messages.DisksInventory()
    for name in findings.entries(BLOCK):
        if _NO_DISKS.fullmatch(name) or findings.number(f"{BLOCK}/{name}/hidden"):
            continue
        size_sectors = findings.number(f"{BLOCK}/{name}/size", largest=MAX_COUNT) or 0
        if size_sectors > 0:
            disk = _disk(findings, name, size_bytes=size_sectors * SECTOR_BYTES)
            disk.by_id = by_id.get(name, "")
            disk.partitions.extend(_partitions(findings, name, by_uuid))
            section.disks.append(disk)
    section.mounts.extend(_mounts(findings))
    section.unreadable.extend(findings.unreadable())
    return section


def _links(findings: Findings, folder: str) -> dict[str, str]:
    """Return the first link of udev's that leads to each kernel name."""
    found: dict[str, str] = {}
    for link in findings.entries(folder, expected=False):
        found.setdefault(findings.root.link_name(f"{folder}/{link}"), link)
    return found


def _disk(findings: Findings, name: str, *, size_bytes: int) -> messages.Disk:
    folder = f"{BLOCK}/{name}"
    device = f"{folder}/device"
    way = findings.root.device_path(folder)
    disk = messages.Disk(
        name=name,
        model=findings.optional(f"{device}/model"),
        vendor=_scsi_vendor(findings.optional(f"{device}/vendor")),
        serial=_serial(findings, name),
        wwn=findings.optional(f"{folder}/wwid") or findings.optional(f"{device}/wwid"),
        firmware=findings.optional(f"{device}/firmware_rev") or findings.optional(f"{device}/rev"),
        size_bytes=size_bytes,
        rotational=findings.number(f"{folder}/queue/rotational") == 1,
        removable=findings.number(f"{folder}/removable") == 1,
        read_only=findings.number(f"{folder}/ro") == 1,
        transport=_transport(findings, name, way),
        logical_block_bytes=findings.number(f"{folder}/queue/logical_block_size") or 0,
        physical_block_bytes=findings.number(f"{folder}/queue/physical_block_size") or 0,
        pci_address=pci_address(way),
        numa_node=numa_node(findings, way),
    )
    level = findings.optional(f"{folder}/md/level")
    if level:
        disk.model, disk.transport = f"software {level}", "md"
        disk.wwn = findings.optional(f"{folder}/md/uuid")
    return disk


def _scsi_vendor(text: str) -> str:
    """Return a SCSI vendor; virtio's is a number, and SATA disks say only that they are SATA disks."""
    return "" if text.startswith("0x") or text == "ATA" else text


def _serial(findings: Findings, name: str) -> str:
    """Return the serial number: NVMe and virtio write a file, SCSI a page of vital product data (80h)."""
    for path in (f"{BLOCK}/{name}/device/serial", f"{BLOCK}/{name}/serial"):
        if text := findings.optional(path):
            return text
    page = f"{BLOCK}/{name}/device/vpd_pg80"
    if not findings.root.exists(page):
        return ""
    try:
        # Four bytes of header, the last two of them the length.
        return findings.root.data(page)[4:].decode("latin-1").strip(" \0")
    except Unreadable as error:
        findings.state(error)
        return ""


def _transport(findings: Findings, name: str, way: str) -> str:
    if name.startswith("nvme"):
        fabric = findings.optional(f"{BLOCK}/{name}/device/transport")
        return "nvme" if fabric in ("", "pcie") else f"nvme-{fabric}"
    return next((transport for mark, transport in _TRANSPORTS if mark in f"/{way}"), "")


def _partitions(findings: Findings, disk: str, by_uuid: dict[str, str]) -> list[messages.Partition]:
    found = []
    for name in findings.entries(f"{BLOCK}/{disk}"):
        folder = f"{BLOCK}/{disk}/{name}"
        if not name.startswith(disk):
            continue
        number = findings.number(f"{folder}/partition")
        if number is None:
            continue
        event = key_values(findings.optional(f"{folder}/uevent"), separator="=")
        found.append(
            messages.Partition(
                name=name,
                number=number,
                start_bytes=(findings.number(f"{folder}/start", largest=MAX_COUNT) or 0) * SECTOR_BYTES,
                size_bytes=(findings.number(f"{folder}/size", largest=MAX_COUNT) or 0) * SECTOR_BYTES,
                uuid=event.get("PARTUUID") or by_uuid.get(name, ""),
                label=event.get("PARTNAME", ""),
            )
        )
    return found


def _mounts(findings: Findings) -> list[messages.Mount]:
    """Return one mount for each device: its first whole one by mount point, binds and guests' mounts left out."""
    by_source: dict[str, messages.Mount] = {}
    for line in findings.expected(MOUNTS).splitlines():
        before, _, after = line.partition(" - ")
        fields, source_fields = before.split(), after.split()
        if len(fields) < 6 or len(source_fields) < 2:
            continue
        top, mount_point = _unescaped(fields[3]), _unescaped(fields[4])
        kind, source = source_fields[0], _unescaped(source_fields[1])
        if top != "/" or not source.startswith("/dev/") or source.startswith("/dev/loop"):
            continue
        if mount_point.startswith(_MOUNTS_OF_GUESTS):
            continue
        mount = messages.Mount(
            mount_point=mount_point, source=source, type=kind, read_only="ro" in fields[5].split(",")
        )
        if source not in by_source or mount_point < by_source[source].mount_point:
            by_source[source] = mount
    for mount in by_source.values():
        try:
            mount.size_bytes = findings.root.calls.file_system_bytes(mount.mount_point)
        except OSError as error:
            findings.state(unreadable(mount.mount_point.lstrip("/"), error))
    return list(by_source.values())


def _unescaped(text: str) -> str:
    """Return a path of mountinfo, which writes blanks and backslashes in octal."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
