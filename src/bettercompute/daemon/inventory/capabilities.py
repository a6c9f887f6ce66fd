"""What this daemon claims in Hello, judged by its inventory (docs/inventory.md, "Capabilities")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bettercompute.daemon.inventory.canonical import CanonicalSection
from bettercompute.daemon.inventory.system import is_container
from bettercompute.protocol import capabilities as names
from bettercompute.protocol import messages

NVIDIA_DRIVER = "nvidia"
DEVICE_KIND = "device"


@dataclass(frozen=True, slots=True)
class RebootSettings:
    """How this node is rebooted where the daemon cannot tell by itself: the `[reboot]` table.

    `command` and `boot_id_file` go together: who reboots by a command of its own must also say where the new boot
    shows.
    """

    command: tuple[str, ...] = ()
    boot_id_file: Path | None = None
    allowed: bool = True


def capabilities(sections: Mapping[str, CanonicalSection], reboot: RebootSettings) -> list[str]:
    """Return the names for `Hello.capabilities`, sorted. Instance runtimes add their own."""
    found = []
    gpus = _gpus(sections)
    if gpus.gpus:
        found += [names.CDI, names.DEVICES_LIMITS, names.BINDING_KUBERNETES]
    if gpus.cuda_driver_version:
        found.append(names.NVML)
    if can_reboot(sections, reboot):
        found.append(names.REBOOT)
    return sorted(found)


def drivers(sections: Mapping[str, CanonicalSection]) -> list[messages.DriverManifest]:
    """Return the built-in device drivers for `Hello.drivers`: `nvidia` on a node with such GPUs."""
    gpus = _gpus(sections)
    if not any(gpu.vendor == NVIDIA_DRIVER for gpu in gpus.gpus):
        return []
    return [messages.DriverManifest(name=NVIDIA_DRIVER, version=gpus.nvidia_driver_version, kind=DEVICE_KIND)]


def _gpus(sections: Mapping[str, CanonicalSection]) -> messages.GpusInventory:
    section = sections.get("gpus")
    return messages.GpusInventory.FromString(section.body) if section is not None else messages.GpusInventory()


def can_reboot(sections: Mapping[str, CanonicalSection], reboot: RebootSettings) -> bool:
    """Return whether a reboot would show in the boot id: a container sees its host's, which it cannot change."""
    if not reboot.allowed:
        return False
    if reboot.command and reboot.boot_id_file is not None:
        return True
    section = sections.get("system")
    if section is None:
        return False
    system = messages.SystemInventory.FromString(section.body)
    return bool(system.boot_id) and not is_container(system.virtualization)
