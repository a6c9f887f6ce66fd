"""The `gpus` section: what NVML says of NVIDIA's GPUs, and what the PCI bus says of those that no driver serves.

Without a driver, NVML is absent with the reason `no-driver` and a GPU on the bus is listed by its address alone,
because a GPU that is handed to a guest has no driver on the host either. Temperatures, clocks and memory in use are
load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bettercompute.daemon.inventory.findings import Findings
from bettercompute.daemon.inventory.host import NO_DRIVER, PERMISSION_DENIED, READ_FAILED, HostRoot, Reason
from bettercompute.daemon.inventory.packages import installed_versions
from bettercompute.daemon.inventory.pci import names
from bettercompute.daemon.inventory.places import PCI
from bettercompute.protocol import messages

MAX_GPUS = 256
# More than any GPU has; the loop ends at the first link that does not exist.
MAX_NVLINKS = 64
NVML = "nvml"
NVIDIA = 0x10DE
_VENDORS = {NVIDIA: "nvidia", 0x1002: "amd", 0x8086: "intel"}
_CLASS_DISPLAY = 0x03
_CLASSES_WITHOUT_SCREEN = (0x0302, 0x0380, 0x1200)  # 3D controller, other display controller, processing accelerator
_INTEGRATED_BUS = "0000:00:"


def collect(root: HostRoot) -> messages.GpusInventory:
    """Return the GPUs."""
    findings = Findings(root)
    section = messages.GpusInventory()
    try:
        nvml = root.calls.nvml()
    except ImportError as error:
        findings.gap(NVML, NO_DRIVER, str(error))
    else:
        _from_nvml(findings, section, nvml)
    known = {gpu.pci_address for gpu in section.gpus}
    section.gpus.extend(gpu for gpu in _on_the_bus(findings) if gpu.pci_address not in known)
    for gpu in section.gpus:
        node = findings.number(f"{PCI}/{gpu.pci_address}/numa_node")
        if node is not None:
            gpu.numa_node = node
    section.unreadable.extend(findings.unreadable())
    return section


def _on_the_bus(findings: Findings) -> list[messages.Gpu]:
    """Return the GPUs that the PCI bus shows, screens of management controllers and of processors left out."""
    found = []
    for address in findings.entries(PCI, expected=False):
        vendor = findings.number(f"{PCI}/{address}/vendor", radix=16) or 0
        class_code = findings.number(f"{PCI}/{address}/class", radix=16) or 0
        without_screen = class_code >> 8 in _CLASSES_WITHOUT_SCREEN and not address.startswith(_INTEGRATED_BUS)
        any_display = vendor == NVIDIA and class_code >> 16 == _CLASS_DISPLAY
        if vendor in _VENDORS and (without_screen or any_display):
            device = findings.number(f"{PCI}/{address}/device", radix=16) or 0
            _, devices = names(findings, {(vendor, device)})
            gpu = messages.Gpu(pci_address=address, vendor=_VENDORS[vendor], name=devices.get((vendor, device), ""))
            driver = findings.root.link_name(f"{PCI}/{address}/driver")
            detail = f"bound to {driver}" if driver else ""
            gpu.unreadable.add(what=NVML, reason=f"{NO_DRIVER}: {detail}" if detail else NO_DRIVER)
            found.append(gpu)
    return found


def _from_nvml(findings: Findings, section: messages.GpusInventory, nvml: Any) -> None:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        findings.gap(NVML, nvml_reason(nvml, error), str(error))
        return
    try:
        section.nvidia_driver_version = nvml.nvmlSystemGetDriverVersion()
        section.nvml_version = nvml.nvmlSystemGetNVMLVersion()
        version = nvml.nvmlSystemGetCudaDriverVersion()
        section.cuda_driver_version = f"{version // 1000}.{version % 1000 // 10}"
        section.fabric_manager_version = _fabric_manager_version(findings)
        for index in range(min(nvml.nvmlDeviceGetCount(), MAX_GPUS)):
            section.gpus.append(_Reading(nvml, index).gpu())
    except nvml.NVMLError as error:
        findings.gap(NVML, nvml_reason(nvml, error), str(error))
    finally:
        nvml.nvmlShutdown()


def nvml_reason(nvml: Any, error: Any) -> Reason:
    """Return the reason that stands for an error of NVML."""
    if error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
        return NO_DRIVER
    return PERMISSION_DENIED if error.value == nvml.NVML_ERROR_NO_PERMISSION else READ_FAILED


def _fabric_manager_version(findings: Findings) -> str:
    versions = installed_versions(findings)
    found = (versions[name] for name in sorted(versions) if name.startswith("nvidia-fabricmanager"))
    return next(found, "")


class _Reading:
    """Asks NVML of one GPU. What a model does not have is no gap; what fails is, and the rest is still asked."""

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml = nvml
        self._index = index
        self._gaps: list[messages.Unreadable] = []

    def gpu(self) -> messages.Gpu:
        nvml = self._nvml
        gpu = messages.Gpu(vendor=_VENDORS[NVIDIA], index=self._index)
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(self._index)
            gpu.pci_address = kernel_address(nvml.nvmlDeviceGetPciInfo(handle).busId)
        except nvml.NVMLError as error:
            # A GPU that fell off the bus: the others are still served.
            gpu.unreadable.add(what=f"{NVML} index {self._index}", reason=f"{nvml_reason(nvml, error)}: {error}")
            return gpu
        gpu.uuid = self._ask(nvml.nvmlDeviceGetUUID, handle) or ""
        gpu.name = self._ask(nvml.nvmlDeviceGetName, handle) or ""
        gpu.serial = self._ask(nvml.nvmlDeviceGetSerial, handle) or ""
        gpu.part_number = self._ask(nvml.nvmlDeviceGetBoardPartNumber, handle) or ""
        gpu.firmware = self._ask(nvml.nvmlDeviceGetVbiosVersion, handle) or ""
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        gpu.memory_bytes = memory.total if memory is not None else 0
        capability = self._ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
        gpu.compute_capability = ".".join(map(str, capability)) if capability is not None else ""
        self._modes(gpu, handle)
        gpu.nvlinks = self._links_up(handle)
        gpu.unreadable.extend(self._gaps)
        return gpu

    def _modes(self, gpu: messages.Gpu, handle: Any) -> None:
        nvml = self._nvml
        # The present mode; the pending one holds from the next reset on.
        ecc = self._ask(nvml.nvmlDeviceGetEccMode, handle)
        if ecc is not None:
            gpu.ecc = ecc[0] == nvml.NVML_FEATURE_ENABLED
        mig = self._ask(nvml.nvmlDeviceGetMigMode, handle)
        if mig is not None:
            gpu.mig = mig[0] == nvml.NVML_DEVICE_MIG_ENABLE
        persistence = self._ask(nvml.nvmlDeviceGetPersistenceMode, handle)
        if persistence is not None:
            gpu.persistence = persistence == nvml.NVML_FEATURE_ENABLED
        power_limit_milliwatts = self._ask(nvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)
        if power_limit_milliwatts is not None:
            gpu.power_limit_milliwatts = power_limit_milliwatts

    def _links_up(self, handle: Any) -> int:
        nvml = self._nvml
        up = 0
        for link in range(MAX_NVLINKS):
            try:
                up += nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED
            except nvml.NVMLError:
                break
        return up

    def _ask(self, question: Callable[[Any], Any], handle: Any) -> Any:
        nvml = self._nvml
        try:
            return question(handle)
        except nvml.NVMLError as error:
            if error.value not in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                what = f"{NVML} {question.__name__}"
                self._gaps.append(messages.Unreadable(what=what, reason=f"{nvml_reason(nvml, error)}: {error}"))
            return None


def kernel_address(address: str) -> str:
    """Return NVML's PCI address as the kernel writes it: `00000000:1B:00.0` is `0000:1b:00.0`."""
    domain, _, rest = address.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"
