"""Which machine this is: what tells it from a copy of its disk, and which boot of it.

See docs/security.md, "On a node's disk"; decisions 0111.
"""

from __future__ import annotations

from pathlib import Path

from bettercompute.daemon.identity import Identity, Machine, MachineChange
from bettercompute.daemon.inventory.host import HostRoot, Unreadable
from bettercompute.errors import Refused
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason, refuse

_DMI = "sys/class/dmi/id"
_BOOT_ID = "proc/sys/kernel/random/boot_id"


def read_machine(root: HostRoot) -> Machine:
    """Return what the host says; what it does not let this user read is None."""
    return Machine(
        machine_id=_line(root, "etc/machine-id"),
        dmi_uuid=(_line(root, f"{_DMI}/product_uuid") or "").lower() or None,
    )


def read_boot_id(root: HostRoot, boot_id_file: Path | None) -> str:
    """Return the name of this boot, from the configured file or the kernel."""
    where = str(boot_id_file or f"/{_BOOT_ID}")
    boot_id = _line(root, where.lstrip("/"))
    if boot_id is None:
        raise refuse(
            Reason.INVALID_CONFIG,
            f"{where} tells no boot id: set reboot.boot_id_file to a file that is new at each boot",
        )
    return boot_id


def hardware_claims(root: HostRoot, *, boot_id: str) -> messages.HardwareClaims:
    """Return what the machine says of itself when it joins; what this user may not read is empty."""
    return messages.HardwareClaims(
        machine_id=_line(root, "etc/machine-id") or "",
        dmi_uuid=(_line(root, f"{_DMI}/product_uuid") or "").lower(),
        serial=_line(root, f"{_DMI}/product_serial") or "",
        board_serial=_line(root, f"{_DMI}/board_serial") or "",
        mac_addresses=sorted(_mac_addresses(root)),
        hostname=_line(root, "proc/sys/kernel/hostname") or "",
        architecture=root.calls.architecture,
        boot_id=boot_id,
        vendor=_line(root, f"{_DMI}/sys_vendor") or "",
        product=_line(root, f"{_DMI}/product_name") or "",
    )


def check_machine(identity: Identity, machine: Machine, *, adopt: bool) -> str:
    """Return a warning, or nothing; refuse an identity that another machine was given, unless told to adopt it."""
    change = identity.machine_change(machine)
    if change is MachineChange.NONE:
        return ""
    held = identity.record
    differs = (
        f"machine id {held.machine_id} became {machine.machine_id}, DMI uuid {held.dmi_uuid} became {machine.dmi_uuid}"
    )
    if change is MachineChange.BOTH and not adopt:
        raise another_machine(identity.record.node_id, differs)
    return f"this machine differs from the one that {held.node_id} joined on: {differs}"


def another_machine(node_id: str, differs: str) -> Refused:
    """Return the refusal to run under a copied identity."""
    return refuse(
        Reason.INVALID_CONFIG,
        f"this is not the machine that {node_id} joined on: {differs}. If its disk was copied, join this machine anew "
        "with a token of its own (`bcd join`); if it was moved here for good, start once with `bcd node --adopt`",
    )


def _mac_addresses(root: HostRoot) -> list[str]:
    """Return the addresses of interfaces that are hardware: those that a device stands behind."""
    try:
        names = root.entries("sys/class/net")
    except Unreadable:
        return []
    found = [
        _line(root, f"sys/class/net/{name}/address") for name in names if root.exists(f"sys/class/net/{name}/device")
    ]
    return [address for address in found if address is not None]


def _line(root: HostRoot, path: str) -> str | None:
    try:
        return root.text(path).strip() or None
    except Unreadable:
        return None
