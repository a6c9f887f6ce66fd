"""NVML as recorded answers: the functions that the collector calls, over the real library's constants and errors."""

# ruff: noqa: N802 - the functions have NVML's names

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import pynvml

A = TypeVar("A")


@dataclass(slots=True)
class RecordedGpu:
    """One GPU's answers. A question in `failing` gets that error instead."""

    bus_id: str = "00000000:1B:00.0"
    uuid: str = "GPU-4c6a8f0e-3b1f-9d0a-7a52-0c5a4f1e0042"
    name: str = "NVIDIA H100 80GB HBM3"
    memory_bytes: int = 85520809984
    ecc: int = 1
    mig: int = 0
    links: int = 18
    failing: dict[str, int] = field(default_factory=dict)


class RecordedNvml:
    """Stands for the module `pynvml` on a machine with these GPUs."""

    def __init__(self, *gpus: RecordedGpu, init_error: int | None = None) -> None:
        self._gpus = gpus
        self._init_error = init_error
        self.opened = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvml"):
            raise AssertionError(f"{name} has no recorded answer")
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:
        if self._init_error is not None:
            raise pynvml.NVMLError(self._init_error)
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "550.54.15"

    def nvmlSystemGetNVMLVersion(self) -> str:
        return "12.550.54.15"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 12040

    def nvmlDeviceGetCount(self) -> int:
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> RecordedGpu:
        return self._answer(self._gpus[index], "nvmlDeviceGetHandleByIndex", self._gpus[index])

    def nvmlDeviceGetPciInfo(self, gpu: RecordedGpu) -> SimpleNamespace:
        return self._answer(gpu, "nvmlDeviceGetPciInfo", SimpleNamespace(busId=gpu.bus_id))

    def nvmlDeviceGetUUID(self, gpu: RecordedGpu) -> str:
        return self._answer(gpu, "nvmlDeviceGetUUID", gpu.uuid)

    def nvmlDeviceGetName(self, gpu: RecordedGpu) -> str:
        return self._answer(gpu, "nvmlDeviceGetName", gpu.name)

    def nvmlDeviceGetSerial(self, gpu: RecordedGpu) -> str:
        return self._answer(gpu, "nvmlDeviceGetSerial", "1652823000042")

    def nvmlDeviceGetBoardPartNumber(self, gpu: RecordedGpu) -> str:
        return self._answer(gpu, "nvmlDeviceGetBoardPartNumber", "692-2G520-0200-000")

    def nvmlDeviceGetVbiosVersion(self, gpu: RecordedGpu) -> str:
        return self._answer(gpu, "nvmlDeviceGetVbiosVersion", "96.00.89.00.01")

    def nvmlDeviceGetMemoryInfo(self, gpu: RecordedGpu) -> SimpleNamespace:
        memory = SimpleNamespace(total=gpu.memory_bytes, free=1, used=2)
        return self._answer(gpu, "nvmlDeviceGetMemoryInfo", memory)

    def nvmlDeviceGetCudaComputeCapability(self, gpu: RecordedGpu) -> tuple[int, int]:
        return self._answer(gpu, "nvmlDeviceGetCudaComputeCapability", (9, 0))

    def nvmlDeviceGetEccMode(self, gpu: RecordedGpu) -> list[int]:
        return self._answer(gpu, "nvmlDeviceGetEccMode", [gpu.ecc, 1 - gpu.ecc])

    def nvmlDeviceGetMigMode(self, gpu: RecordedGpu) -> list[int]:
        return self._answer(gpu, "nvmlDeviceGetMigMode", [gpu.mig, 1 - gpu.mig])

    def nvmlDeviceGetPersistenceMode(self, gpu: RecordedGpu) -> int:
        return self._answer(gpu, "nvmlDeviceGetPersistenceMode", 1)

    def nvmlDeviceGetPowerManagementDefaultLimit(self, gpu: RecordedGpu) -> int:
        return self._answer(gpu, "nvmlDeviceGetPowerManagementDefaultLimit", 700_000)

    def nvmlDeviceGetNvLinkState(self, gpu: RecordedGpu, link: int) -> int:
        if link >= gpu.links:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return 1

    def _answer(self, gpu: RecordedGpu, question: str, answer: A) -> A:
        if question in gpu.failing:
            raise pynvml.NVMLError(gpu.failing[question])
        return answer
