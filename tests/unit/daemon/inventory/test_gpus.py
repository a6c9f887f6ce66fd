"""GPUs by NVML and by the PCI bus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pynvml
import pytest

from bettercompute.daemon.inventory import gpus
from bettercompute.daemon.inventory.host import SystemCalls
from bettercompute.protocol import messages
from tests.unit.daemon.inventory.recorded import host_at, recorded_host
from tests.unit.daemon.inventory.recorded_nvml import RecordedGpu, RecordedNvml


def collect(folder: Path, nvml: Any) -> messages.GpusInventory:
    return gpus.collect(recorded_host(folder, "gpu_server", nvml=nvml))


def test_what_nvml_says(tmp_path: Path) -> None:
    nvml = RecordedNvml(RecordedGpu())
    section = collect(tmp_path, nvml)

    assert section.nvidia_driver_version == "550.54.15"
    assert section.nvml_version == "12.550.54.15"
    assert section.cuda_driver_version == "12.4"
    assert section.fabric_manager_version == "550.54.15-1"
    assert not section.unreadable
    gpu = section.gpus[0]
    assert gpu == messages.Gpu(
        pci_address="0000:1b:00.0",
        uuid="GPU-4c6a8f0e-3b1f-9d0a-7a52-0c5a4f1e0042",
        name="NVIDIA H100 80GB HBM3",
        vendor="nvidia",
        serial="1652823000042",
        part_number="692-2G520-0200-000",
        firmware="96.00.89.00.01",
        memory_bytes=85520809984,
        compute_capability="9.0",
        numa_node=0,
        ecc=True,
        mig=False,
        persistence=True,
        power_limit_milliwatts=700_000,
        nvlinks=18,
        index=0,
    )
    assert nvml.opened == 0, "NVML is shut down again"


def test_a_gpu_that_is_handed_to_a_guest_is_listed_by_its_address(tmp_path: Path) -> None:
    section = collect(tmp_path, RecordedNvml(RecordedGpu()))
    assert [gpu.pci_address for gpu in section.gpus] == ["0000:1b:00.0", "0000:9b:00.0"]
    guests = section.gpus[1]
    assert guests.name == "GH100 [H100 SXM5 80GB]"
    assert guests.numa_node == 1
    assert not guests.HasField("index")
    assert guests.unreadable[0] == messages.Unreadable(what="nvml", reason="no-driver: bound to vfio-pci")


def test_without_a_driver_the_section_is_empty_and_says_so(tmp_path: Path) -> None:
    section = gpus.collect(host_at(tmp_path))
    assert not section.gpus
    assert section.cuda_driver_version == ""
    assert [gap.what for gap in section.unreadable] == ["nvml"]
    assert section.unreadable[0].reason.startswith("no-driver")


def test_without_the_library_there_is_no_driver(tmp_path: Path) -> None:
    def missing() -> Any:
        raise ModuleNotFoundError("No module named 'pynvml'")

    root = host_at(tmp_path)
    calls = SystemCalls(
        nvml=missing,
        ipv4_addresses=root.calls.ipv4_addresses,
        file_system_bytes=root.calls.file_system_bytes,
        architecture="",
        page_size_bytes=4096,
        libc_version="",
    )
    section = gpus.collect(type(root)(folder=tmp_path, calls=calls))
    assert section.unreadable[0].reason == "no-driver: No module named 'pynvml'"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no-driver"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "no-driver"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "permission-denied"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "read-failed"),
    ],
)
def test_why_nvml_does_not_begin(tmp_path: Path, error: int, reason: str) -> None:
    section = gpus.collect(host_at(tmp_path, nvml=RecordedNvml(init_error=error)))
    assert [gap.reason.partition(":")[0] for gap in section.unreadable] == [reason]


def test_a_lost_gpu_does_not_hide_the_others(tmp_path: Path) -> None:
    lost = RecordedGpu(failing={"nvmlDeviceGetHandleByIndex": pynvml.NVML_ERROR_GPU_IS_LOST})
    section = gpus.collect(host_at(tmp_path, nvml=RecordedNvml(lost, RecordedGpu())))
    assert section.gpus[0].unreadable[0].what == "nvml index 0"
    assert section.gpus[0].unreadable[0].reason.startswith("read-failed")
    assert section.gpus[1].uuid.startswith("GPU-")


def test_what_a_model_does_not_have_is_absent_and_what_fails_is_stated(tmp_path: Path) -> None:
    workstation = RecordedGpu(
        links=0,
        failing={
            "nvmlDeviceGetMigMode": pynvml.NVML_ERROR_NOT_SUPPORTED,
            "nvmlDeviceGetEccMode": pynvml.NVML_ERROR_NOT_SUPPORTED,
            "nvmlDeviceGetBoardPartNumber": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            "nvmlDeviceGetSerial": pynvml.NVML_ERROR_NO_PERMISSION,
        },
    )
    gpu = gpus.collect(host_at(tmp_path, nvml=RecordedNvml(workstation))).gpus[0]
    assert not gpu.HasField("mig")
    assert not gpu.HasField("ecc")
    assert gpu.nvlinks == 0
    assert [(gap.what, gap.reason.partition(":")[0]) for gap in gpu.unreadable] == [
        ("nvml nvmlDeviceGetSerial", "permission-denied")
    ]


def test_screens_of_management_controllers_are_no_gpus(tmp_path: Path) -> None:
    for address, vendor, class_code in (
        ("0000:03:00.0", "0x1a03", "0x030000"),  # ASPEED, on nearly every server board
        ("0000:00:02.0", "0x8086", "0x038000"),  # Intel's integrated one
        ("0000:43:00.0", "0x1002", "0x038000"),  # AMD's accelerator
    ):
        folder = tmp_path / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor)
        (folder / "class").write_text(class_code)
    section = gpus.collect(host_at(tmp_path))
    assert [(gpu.pci_address, gpu.vendor) for gpu in section.gpus] == [("0000:43:00.0", "amd")]
