"""What changes by itself: the load of a heartbeat, the pressure of a status report."""

from __future__ import annotations

from pathlib import Path

import pytest

from bettercompute.daemon.inventory.host import HostRoot
from bettercompute.daemon.inventory.load import node_load
from bettercompute.daemon.inventory.pressure import PressureMeter
from bettercompute.protocol import messages
from tests.unit.daemon.inventory.recorded import host_at, recorded_host


def load(root: HostRoot) -> messages.NodeLoad:
    return node_load(root, running_commands=2, pending_events=7, journal_bytes=4096)


def test_load_of_a_server(tmp_path: Path) -> None:
    assert load(recorded_host(tmp_path, "gpu_server")) == messages.NodeLoad(
        load1=3.52,
        load5=2.10,
        load15=1.05,
        available_memory_bytes=2_001_220_412 << 10,
        running_commands=2,
        pending_events=7,
        journal_bytes=4096,
    )


def test_a_heartbeat_goes_out_without_a_load_too(tmp_path: Path) -> None:
    expected = messages.NodeLoad(running_commands=2, pending_events=7, journal_bytes=4096)
    assert load(host_at(tmp_path)) == expected
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/loadavg").write_text("a b c")
    (tmp_path / "proc/meminfo").write_text("MemAvailable: lots")
    assert load(host_at(tmp_path)) == expected


def test_load_of_the_real_host() -> None:
    assert load(HostRoot.live()).available_memory_bytes > 0


def test_pressure_is_the_kernels_average(tmp_path: Path) -> None:
    pressure = PressureMeter(recorded_host(tmp_path, "gpu_server")).read()
    assert (pressure.cpu_some_avg10, pressure.memory_some_avg10, pressure.io_some_avg10) == (12.34, 0.0, 1.5)
    assert pressure.HasField("memory_some_avg10"), "none at all is known, too"
    assert not pressure.HasField("cpu_steal"), "no time has passed"


@pytest.mark.parametrize(
    ("before", "after", "percent"),
    [
        ("0 0 0 800 0 0 0 0 0 0", "50 0 0 825 0 0 0 25 0 0", 25.0),
        ("0 0 0 800 0 0 0 100 0 0", "50 0 0 850 0 0 0 90 0 0", 0.0),  # corrected downwards after a migration
    ],
)
def test_steal_is_the_share_since_the_reading_before(tmp_path: Path, before: str, after: str, percent: float) -> None:
    stat = tmp_path / "proc/stat"
    stat.parent.mkdir()
    stat.write_text(f"cpu  {before}\ncpu0 1 2 3")
    meter = PressureMeter(host_at(tmp_path))
    stat.write_text(f"cpu  {after}\ncpu0 1 2 3")
    assert meter.read().cpu_steal == percent
    assert not meter.read().HasField("cpu_steal")


@pytest.mark.parametrize("content", ["", "cpu", "cpu 1 2", "cpu a b c d e f g h"])
def test_a_kernel_that_tells_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "proc/pressure").mkdir(parents=True)
    (tmp_path / "proc/pressure/cpu").write_text(content)
    (tmp_path / "proc/pressure/io").write_text("some avg60=1.0")
    (tmp_path / "proc/stat").write_text(content)
    assert PressureMeter(host_at(tmp_path)).read() == messages.HostPressure()
