"""What a daemon claims for itself, by its inventory."""

from __future__ import annotations

from pathlib import Path

import pytest

from bettercompute.daemon.inventory.canonical import CanonicalSection, canonical_section
from bettercompute.daemon.inventory.capabilities import RebootSettings, capabilities, drivers
from bettercompute.daemon.inventory.collection import collect_all
from bettercompute.protocol import messages
from tests.unit.daemon.inventory.recorded import recorded_host
from tests.unit.daemon.inventory.recorded_nvml import RecordedGpu, RecordedNvml

GPU_NODE = ["binding.kubernetes", "cdi", "devices.limits"]
OWN_COMMAND = RebootSettings(command=("nsenter", "reboot"), boot_id_file=Path("/host/boot_id"))


def sections(
    *, virtualization: str = "", boot_id: str = "b", gpus: int = 0, cuda: str = ""
) -> dict[str, CanonicalSection]:
    system = messages.SystemInventory(virtualization=virtualization, boot_id=boot_id)
    devices = [messages.Gpu(vendor="nvidia", index=index) for index in range(gpus)]
    found = messages.GpusInventory(gpus=devices, cuda_driver_version=cuda, nvidia_driver_version="550" if cuda else "")
    return {"system": canonical_section("system", system), "gpus": canonical_section("gpus", found)}


@pytest.mark.parametrize(
    ("gpus", "cuda", "names"),
    [
        (0, "", []),
        (0, "12.4", ["nvml"]),  # all of them are handed to guests or lost
        (1, "", GPU_NODE),  # handed to a guest: no driver on the host
        (8, "12.4", [*GPU_NODE, "nvml"]),
    ],
)
def test_gpus(gpus: int, cuda: str, names: list[str]) -> None:
    assert capabilities(sections(virtualization="docker", gpus=gpus, cuda=cuda), RebootSettings()) == names


@pytest.mark.parametrize(
    ("virtualization", "settings", "can_reboot"),
    [
        ("", RebootSettings(), True),
        ("kvm", RebootSettings(), True),
        ("vm", RebootSettings(), True),
        ("docker", RebootSettings(), False),
        ("lxc", RebootSettings(), False),
        ("docker", OWN_COMMAND, True),
        ("docker", RebootSettings(command=("reboot",)), False),  # nowhere to see that it happened
        ("", RebootSettings(allowed=False), False),
        ("docker", RebootSettings(command=("x",), boot_id_file=Path("/y"), allowed=False), False),
    ],
)
def test_reboot(virtualization: str, settings: RebootSettings, can_reboot: bool) -> None:
    assert ("reboot" in capabilities(sections(virtualization=virtualization), settings)) is can_reboot


def test_without_a_boot_id_a_reboot_could_not_be_proven() -> None:
    assert capabilities(sections(boot_id=""), RebootSettings()) == []


def test_without_sections_nothing_is_claimed() -> None:
    assert capabilities({}, RebootSettings()) == []
    assert drivers({}) == []


def test_the_driver_of_a_gpu_node() -> None:
    assert drivers(sections(gpus=1, cuda="12.4")) == [
        messages.DriverManifest(name="nvidia", version="550", kind="device")
    ]
    assert drivers(sections()) == []


def test_a_recorded_gpu_server(tmp_path: Path) -> None:
    found = collect_all(recorded_host(tmp_path, "gpu_server", nvml=RecordedNvml(RecordedGpu())))
    assert capabilities(found, RebootSettings()) == [*GPU_NODE, "nvml", "reboot"]
