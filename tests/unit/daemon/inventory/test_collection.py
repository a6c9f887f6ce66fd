"""Collecting as a whole: stable on the real host, and nothing that a strange host does stops it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bettercompute.daemon.inventory import collection
from bettercompute.daemon.inventory.canonical import SECTION_CLASSES, SECTION_NAMES, CanonicalSection
from bettercompute.daemon.inventory.collection import COLLECTORS, Budget, collect_all
from bettercompute.daemon.inventory.host import HostRoot
from bettercompute.protocol import messages
from tests.unit.daemon.inventory.recorded import host_at, recorded_host
from tests.unit.daemon.inventory.recorded_nvml import RecordedGpu, RecordedNvml


def gaps(section: CanonicalSection) -> dict[str, str]:
    content = SECTION_CLASSES[section.name].FromString(section.body)
    return {gap.what: gap.reason for gap in content.unreadable}  # type: ignore[attr-defined]  # every section has them


def test_every_section_but_facts_has_a_collector() -> None:
    assert {*COLLECTORS, "facts"} == set(SECTION_NAMES)


def test_the_real_host_twice_gives_the_same_hashes() -> None:
    root = HostRoot.live()
    first, second = collect_all(root), collect_all(root)
    assert {name: section.sha256 for name, section in first.items()} == {
        name: section.sha256 for name, section in second.items()
    }
    assert list(first) == [name for name in SECTION_NAMES if name != "facts"]


def test_the_real_host_has_processors_memory_and_a_boot_id() -> None:
    sections = collect_all(HostRoot.live())
    assert messages.CpuInventory.FromString(sections["cpu"].body).online > 0
    assert messages.MemoryInventory.FromString(sections["memory"].body).total_bytes > 0
    assert messages.SystemInventory.FromString(sections["system"].body).boot_id
    assert not any("collector-failed" in reason for section in sections.values() for reason in gaps(section).values())


VOLATILE = {
    "proc/meminfo": "MemTotal: 2113459212 kB\nMemFree: 1 kB\nMemAvailable: 1 kB\nSwapTotal: 8388604 kB\n",
    "proc/loadavg": "9.99 9.99 9.99 1/1 1",
    "proc/stat": "cpu 9 9 9 9 9 9 9 9",
    "proc/swaps": "Filename Type Size Used Priority\n/dev/nvme0n1p3 partition 8388604 8388604 -2",
    "sys/class/net/ens1f0np0/statistics/rx_bytes": "999",
    "sys/block/nvme0n1/stat": "9 9 9",
    "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "1",
    "sys/bus/pci/devices/0000:1b:00.0/current_link_speed": "32.0 GT/s PCIe",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "800000",
}


def test_what_changes_by_itself_does_not_change_a_hash(tmp_path: Path) -> None:
    root = recorded_host(tmp_path, "gpu_server")
    before = collect_all(root)
    for path, content in VOLATILE.items():
        assert (tmp_path / path).is_file(), f"{path} is not in the recording"
        (tmp_path / path).write_text(content)
    assert collect_all(root) == before


def test_the_present_clock_rate_does_not_change_a_hash(tmp_path: Path) -> None:
    root = recorded_host(tmp_path, "gpu_server")
    before = collect_all(root)
    cpuinfo = tmp_path / "proc/cpuinfo"
    cpuinfo.write_text(cpuinfo.read_text().replace("cpu MHz\t\t: 2", "cpu MHz\t\t: 3"))
    assert collect_all(root) == before


@pytest.mark.parametrize(
    ("path", "content", "section"),
    [
        ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "2048", "memory"),
        ("sys/block/sda/size", "12345", "disks"),
        ("sys/class/net/bond0/mtu", "1500", "network"),
        ("sys/class/dmi/id/bios_version", "2.2", "system"),
        ("proc/sys/kernel/osrelease", "6.8.0", "software"),
        ("sys/bus/pci/devices/0000:1b:00.0/current_link_width", "16", "pci"),
        ("sys/devices/system/cpu/isolated", "", "cpu"),
    ],
)
def test_a_change_of_the_machine_changes_its_section_alone(
    tmp_path: Path, path: str, content: str, section: str
) -> None:
    root = recorded_host(tmp_path, "gpu_server")
    before = collect_all(root)
    (tmp_path / path).write_text(content)
    after = collect_all(root)
    assert {name for name in after if after[name] != before[name]} == {section}


JUNK = (
    b"",
    b"\n",
    b"junk",
    b"-1",
    b"1",
    b"99999999999999999999999",
    b"\xff\xfe\0\0",
    b"0x",
    b": = :\n\n: :\n",
    b"a b c d e f g h i j",
)


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("name", ["gpu_server", "firecracker_vm"])
def test_files_full_of_junk_make_gaps_not_failures(tmp_path: Path, name: str, junk: bytes) -> None:
    root = recorded_host(tmp_path, name, nvml=RecordedNvml(RecordedGpu()))
    for path in sorted(tmp_path.rglob("*")):
        if path.is_file() and not path.is_symlink():
            path.write_bytes(junk)
    assert not failures(collect_all(root))


@pytest.mark.parametrize("seed", range(12))
def test_some_files_full_of_junk_make_gaps_not_failures(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    root = recorded_host(tmp_path, "gpu_server", nvml=RecordedNvml(RecordedGpu()))
    files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file() and not path.is_symlink()]
    for path in dice.sample(files, len(files) // 4):
        content = path.read_bytes()
        cut = dice.randrange(len(content) + 1)
        path.write_bytes(dice.choice([dice.choice(JUNK), content[:cut], content[:cut] + dice.randbytes(8)]))
    assert not failures(collect_all(root))


def failures(sections: dict[str, CanonicalSection]) -> list[str]:
    reasons = [reason for section in sections.values() for reason in gaps(section).values()]
    return [reason for reason in reasons if reason.startswith("collector-failed")]


def test_a_collector_that_raises_leaves_its_reason_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(root: HostRoot) -> messages.CpuInventory:
        raise ZeroDivisionError("no cores")

    replace(monkeypatch, "cpu", broken)
    sections = collect_all(recorded_host(tmp_path, "gpu_server"))
    assert gaps(sections["cpu"]) == {"cpu": "collector-failed: ZeroDivisionError: no cores"}
    assert messages.MemoryInventory.FromString(sections["memory"].body).total_bytes > 0


def test_a_section_that_is_too_large_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(root: HostRoot) -> messages.PciInventory:
        return messages.PciInventory(functions=[messages.PciFunction(device_name="x" * (1 << 20))])

    replace(monkeypatch, "pci", endless)
    section = collect_all(host_at(tmp_path), sections=["pci"])["pci"]
    assert gaps(section)["pci"].startswith("too-large: section pci has ")


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A gpus collector that hangs until the event is set."""
    released = threading.Event()

    def hang(root: HostRoot) -> messages.GpusInventory:
        released.wait()
        return messages.GpusInventory(nvidia_driver_version="550")

    replace(monkeypatch, "gpus", hang)
    yield released
    released.set()


def test_a_collector_that_hangs_is_left_behind_until_it_ends(tmp_path: Path, hanging: threading.Event) -> None:
    root = host_at(tmp_path)
    threads = threading.active_count()
    for _ in range(3):
        section = collect_all(root, sections=["gpus"], budget=Budget(collector_ms=20))["gpus"]
        assert gaps(section) == {"gpus": "timed-out: its reading has not ended after 20 ms"}
    assert threading.active_count() == threads + 1, "one thread hangs, not one for each collection"

    left_behind = next(thread for thread in threading.enumerate() if thread.name == "inventory-gpus")
    hanging.set()
    left_behind.join()
    section = collect_all(root, sections=["gpus"])["gpus"]
    assert messages.GpusInventory.FromString(section.body).nvidia_driver_version == "550"


def test_only_the_named_sections_are_collected(tmp_path: Path) -> None:
    assert list(collect_all(host_at(tmp_path), sections=["pci", "cpu"])) == ["cpu", "pci"]


def replace(monkeypatch: pytest.MonkeyPatch, name: str, collector: Callable[[HostRoot], messages.ProtoMessage]) -> None:
    monkeypatch.setattr(collection, "COLLECTORS", {**COLLECTORS, name: collector})
