"""`diag.nvml`: the state of GPUs at one moment. What a model does not have is absent; what fails says why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bettercompute.daemon.handlers import Handler, HandlerContext
from bettercompute.daemon.handlers._nvml import LoadNvml, asked, handle_of, load_live, opened, processes_of
from bettercompute.daemon.inventory.gpus import MAX_GPUS, NVML, kernel_address, nvml_reason
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import KINDS, encode_result

_THROTTLE_PREFIX = "nvmlClocksThrottleReason"


class DiagNvml:
    """Asks the NVML that `load` gives, which a test replaces by a recorded one."""

    kind = "diag.nvml"

    def __init__(self, load: LoadNvml = load_live) -> None:
        self._load = load

    async def run(self, context: HandlerContext) -> bytes:
        """Ask; returns the serialized `DiagNvmlResult`."""
        payload = context.payload
        assert isinstance(payload, messages.DiagNvmlPayload), "the kind table names the payload"
        result = await asked(partial(self._read, list(payload.gpu_uuids), processes=payload.processes))
        return encode_result(KINDS[self.kind], result)

    def _read(self, uuids: Sequence[str], *, processes: bool) -> messages.DiagNvmlResult:
        with opened(self._load) as nvml:
            version = nvml.nvmlSystemGetCudaDriverVersion()
            result = messages.DiagNvmlResult(
                driver_version=nvml.nvmlSystemGetDriverVersion(),
                nvml_version=nvml.nvmlSystemGetNVMLVersion(),
                cuda_version=f"{version // 1000}.{version % 1000 // 10}",
            )
            wanted = {nvml.nvmlDeviceGetIndex(handle_of(nvml, uuid)) for uuid in uuids}
            for index in sorted(wanted) or range(min(nvml.nvmlDeviceGetCount(), MAX_GPUS)):
                result.gpus.append(_Asked(nvml, index).diagnosis(processes=processes))
            return result


HANDLER: Handler = DiagNvml()


class _Asked:
    """The questions to one GPU, each on its own."""

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml = nvml
        self._gpu = messages.GpuDiagnosis(index=index)

    def diagnosis(self, *, processes: bool) -> messages.GpuDiagnosis:
        nvml, gpu = self._nvml, self._gpu
        handle = self._ask("index", nvml.nvmlDeviceGetHandleByIndex, gpu.index)
        if handle is None:
            return gpu
        self._set("uuid", nvml.nvmlDeviceGetUUID, handle)
        self._set("name", nvml.nvmlDeviceGetName, handle)
        self._set("temperature_celsius", nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        self._set("power_milliwatts", nvml.nvmlDeviceGetPowerUsage, handle)
        self._set("power_limit_milliwatts", nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        for name, kind in (
            ("ecc_corrected", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ("ecc_uncorrected", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        ):
            self._set(name, nvml.nvmlDeviceGetTotalEccErrors, handle, kind, nvml.NVML_VOLATILE_ECC)
        pci = self._ask("pci_address", nvml.nvmlDeviceGetPciInfo, handle)
        if pci is not None:
            gpu.pci_address = kernel_address(pci.busId)
        utilization = self._ask("utilization_percent", nvml.nvmlDeviceGetUtilizationRates, handle)
        if utilization is not None:
            gpu.utilization_percent = utilization.gpu
        memory = self._ask("memory", nvml.nvmlDeviceGetMemoryInfo, handle)
        if memory is not None:
            gpu.memory_used_bytes, gpu.memory_total_bytes = memory.used, memory.total
        remapped = self._ask("remapped_rows", nvml.nvmlDeviceGetRemappedRows, handle)
        if remapped is not None:
            gpu.remapped_rows, gpu.remap_pending = remapped[0] + remapped[1], bool(remapped[2])
        self._throttled(handle)
        if processes:
            self._processes(handle)
        return gpu

    def _throttled(self, handle: Any) -> None:
        nvml = self._nvml
        held = self._ask("throttle_reasons", nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        names = {
            name.removeprefix(_THROTTLE_PREFIX): getattr(nvml, name)
            for name in dir(nvml)
            if name.startswith(_THROTTLE_PREFIX)
        }
        self._gpu.throttle_reasons.extend(
            sorted(
                name for name, bit in names.items() if held and name != "All" and isinstance(bit, int) and bit & held
            )
        )

    def _processes(self, handle: Any) -> None:
        found = self._ask("processes", lambda asked: processes_of(self._nvml, asked), handle) or {}
        for pid, memory_bytes in sorted(found.items()):
            self._gpu.processes.add(pid=pid, name=_program_name(pid), memory_bytes=memory_bytes)

    def _set(self, name: str, question: Callable[..., Any], *arguments: Any) -> None:
        answer = self._ask(name, question, *arguments)
        if answer is not None:
            setattr(self._gpu, name, answer)

    def _ask(self, name: str, question: Callable[..., Any], *arguments: Any) -> Any:
        nvml = self._nvml
        try:
            return question(*arguments)
        except nvml.NVMLError as error:
            if error.value not in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                reason = f"{nvml_reason(nvml, error)}: {error}"
                self._gpu.unreadable.add(what=f"{NVML} {name}", reason=reason)
            return None


def _program_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""
