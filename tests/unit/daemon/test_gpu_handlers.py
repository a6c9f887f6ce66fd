"""`diag.nvml` and `gpu.reset` over a recorded NVML: no driver, what a model lacks, and resets one after the other."""

# ruff: noqa: N802, ARG002 - the functions have NVML's names and parameters

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from bettercompute.daemon import apart
from bettercompute.daemon.config import Config
from bettercompute.daemon.handlers import gpu_reset
from bettercompute.daemon.handlers.diag_nvml import DiagNvml
from bettercompute.daemon.handlers.gpu_reset import GpuReset
from bettercompute.delivery.commands import CommandState
from bettercompute.protocol import messages
from tests.unit.daemon.handler_bench import handler_bench
from tests.unit.daemon.inventory.recorded_nvml import RecordedGpu, RecordedNvml

FIRST = RecordedGpu(uuid="GPU-1")
OLD = RecordedGpu(
    uuid="GPU-2",
    bus_id="00000000:2A:00.0",
    failing={
        "nvmlDeviceGetTotalEccErrors": pynvml.NVML_ERROR_NOT_SUPPORTED,
        "nvmlDeviceGetRemappedRows": pynvml.NVML_ERROR_NOT_SUPPORTED,
        "nvmlDeviceGetTemperature": pynvml.NVML_ERROR_GPU_IS_LOST,
    },
)


class Diagnosed(RecordedNvml):
    """A recorded NVML that also answers the questions about state."""

    busy: tuple[int, ...] = ()

    def __dir__(self) -> list[str]:
        return dir(pynvml)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> RecordedGpu:
        for gpu in self._gpus:
            if gpu.uuid == uuid:
                return gpu
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetIndex(self, gpu: RecordedGpu) -> int:
        return self._gpus.index(gpu)

    def nvmlDeviceGetTemperature(self, gpu: RecordedGpu, sensor: int) -> int:
        return self._answer(gpu, "nvmlDeviceGetTemperature", 41)

    def nvmlDeviceGetPowerUsage(self, gpu: RecordedGpu) -> int:
        return 120_000

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: RecordedGpu) -> int:
        return 700_000

    def nvmlDeviceGetUtilizationRates(self, gpu: RecordedGpu) -> SimpleNamespace:
        return SimpleNamespace(gpu=7, memory=1)

    def nvmlDeviceGetTotalEccErrors(self, gpu: RecordedGpu, kind: int, counter: int) -> int:
        return self._answer(gpu, "nvmlDeviceGetTotalEccErrors", 5 + kind)

    def nvmlDeviceGetRemappedRows(self, gpu: RecordedGpu) -> tuple[int, int, int, int]:
        return self._answer(gpu, "nvmlDeviceGetRemappedRows", (1, 2, 1, 0))

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: RecordedGpu) -> int:
        return int(pynvml.nvmlClocksThrottleReasonSwPowerCap)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: RecordedGpu) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in self.busy]

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu: RecordedGpu) -> list[Any]:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name) if name.startswith("nvmlClocksThrottle") else super().__getattr__(name)


def no_library() -> Any:
    raise ImportError("libnvidia-ml.so.1 is not there")


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recorded nvidia-smi that notes what it was asked; GPU-2 does not let itself be reset."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n'
        'case "$2" in *GPU-2) echo "GPU 2 is in use by another client" >&2; exit 19;; esac\necho "was reset"\n'
    )
    program.chmod(0o700)
    monkeypatch.setattr(gpu_reset, "_ENVIRONMENT", {"PATH": f"{program.parent}:/usr/bin:/bin"})
    return tmp_path / "asked"


def asked(smi: Path) -> list[str]:
    return smi.read_text().splitlines() if smi.exists() else []


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(no_library, id="no-library"),
        pytest.param(lambda: RecordedNvml(init_error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED), id="not-loaded"),
    ],
)
async def test_without_a_driver_both_say_so(tmp_path: Path, load: Any) -> None:
    async with handler_bench(tmp_path, Config(), DiagNvml(load), GpuReset(load)) as bench:
        for kind, payload in (
            ("diag.nvml", messages.DiagNvmlPayload()),
            ("gpu.reset", messages.GpuResetPayload(gpu_uuids=["GPU-1"])),
        ):
            ending = await bench.run(kind, payload)
            assert (ending.state, ending.reason) == (CommandState.FAILED, "no-driver")
            assert "no NVIDIA driver on this host" in ending.message


async def test_a_diagnosis_tells_what_there_is_and_why_the_rest_is_missing(tmp_path: Path) -> None:
    nvml = Diagnosed(FIRST, OLD)
    nvml.busy = (1,)
    async with handler_bench(tmp_path, Config(), DiagNvml(lambda: nvml)) as bench:
        ending = await bench.run("diag.nvml", messages.DiagNvmlPayload(processes=True))
        result = messages.DiagNvmlResult.FromString(ending.result)
        only = await bench.run("diag.nvml", messages.DiagNvmlPayload(gpu_uuids=["GPU-2"]))
        unknown = await bench.run("diag.nvml", messages.DiagNvmlPayload(gpu_uuids=["GPU-9"]))
    first, old = result.gpus
    assert (result.driver_version, result.cuda_version) == ("550.54.15", "12.4")
    assert (first.uuid, first.pci_address, first.temperature_celsius) == ("GPU-1", "0000:1b:00.0", 41)
    assert (first.ecc_corrected, first.ecc_uncorrected) == (5, 6)
    assert (first.remapped_rows, first.remap_pending) == (3, True)
    assert list(first.throttle_reasons) == ["SwPowerCap"]
    assert [process.pid for process in first.processes] == [1]
    assert first.processes[0].name
    assert not first.unreadable
    assert not old.HasField("ecc_corrected")
    assert [gap.what for gap in old.unreadable] == ["nvml temperature_celsius"]
    assert [gpu.uuid for gpu in messages.DiagNvmlResult.FromString(only.result).gpus] == ["GPU-2"]
    assert unknown.reason == "unknown-gpu"
    assert nvml.opened == 0


async def test_gpus_are_reset_one_after_the_other(tmp_path: Path, smi: Path) -> None:
    nvml = Diagnosed(FIRST, OLD)
    async with handler_bench(tmp_path, Config(), GpuReset(lambda: nvml)) as bench:
        ending = await bench.run("gpu.reset", messages.GpuResetPayload(gpu_uuids=["GPU-1"]))
        assert ending.state is CommandState.SUCCEEDED, ending.message
        outcome = messages.GpuResetResult.FromString(ending.result).gpus[0]
        assert (outcome.uuid, outcome.reset, outcome.message) == ("GPU-1", True, "was reset")
        output = b"".join(told.output.data for told in bench.progressed if told.output is not None)
        assert output == b"was reset\n"
        ending = await bench.run("gpu.reset", messages.GpuResetPayload(gpu_uuids=["GPU-2", "GPU-1", "GPU-2"]))
    assert (ending.reason, ending.message) == (
        "reset-failed",
        "1 of 2 were not reset: GPU-2: GPU 2 is in use by another client",
    )
    assert asked(smi) == [f"--gpu-reset --id=GPU-{number}" for number in (1, 2, 1)]
    assert nvml.opened == 0


async def test_nothing_is_reset_that_is_unknown_or_in_use(tmp_path: Path, smi: Path) -> None:
    nvml = Diagnosed(FIRST)
    async with handler_bench(tmp_path, Config(), GpuReset(lambda: nvml)) as bench:
        assert (await bench.run("gpu.reset", messages.GpuResetPayload())).reason == "invalid-payload"
        unknown = messages.GpuResetPayload(gpu_uuids=["GPU-1", "GPU-9"])
        assert (await bench.run("gpu.reset", unknown)).reason == "unknown-gpu"
        nvml.busy = (4711,)
        in_use = await bench.run("gpu.reset", messages.GpuResetPayload(gpu_uuids=["GPU-1"]))
        assert in_use.reason == "gpu-in-use"
        assert "process 4711 uses GPU-1" in in_use.message
        assert asked(smi) == []
        forced = await bench.run("gpu.reset", messages.GpuResetPayload(gpu_uuids=["GPU-1"], force=True))
        assert forced.state is CommandState.SUCCEEDED


async def test_without_nvidia_smi_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_reset, "_ENVIRONMENT", {"PATH": str(tmp_path)})
    async with handler_bench(tmp_path, Config(), GpuReset(lambda: Diagnosed(FIRST))) as bench:
        ending = await bench.run("gpu.reset", messages.GpuResetPayload(gpu_uuids=["GPU-1"]))
    assert ending.reason == "no-nvidia-smi"


async def test_a_driver_that_hangs_holds_up_nothing_else_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def hung() -> Any:
        answers.wait(60)
        return Diagnosed(FIRST)

    monkeypatch.setattr(apart, "THREADS", apart.ApartThreads(places=3))
    payload = messages.DiagNvmlPayload()
    async with handler_bench(tmp_path, Config(), DiagNvml(hung)) as bench:
        for _ in range(3):
            assert (await bench.run("diag.nvml", payload, timeout_ms=20)).reason == "timeout"
        told = await bench.run("diag.nvml", payload)
        assert (told.state, told.reason) == (CommandState.FAILED, "host-hangs")
        assert "3 earlier questions to this host have no answer yet" in told.message
        answers.set()
        async with asyncio.timeout(30):
            while (await bench.run("diag.nvml", payload)).state is not CommandState.SUCCEEDED:
                pass
