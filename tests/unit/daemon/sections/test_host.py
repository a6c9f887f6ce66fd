"""Huge pages: written to the kernel's files and read back, and every way in which that fails in words.

See docs/desired-state.md, "A section of your own".
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bettercompute.daemon.sections import SectionFailed
from bettercompute.daemon.sections.host import HostSection
from bettercompute.protocol import messages

KIB_2048, KIB_1G = 2**21, 2**30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host with two sizes and one NUMA node."""
    for folder in ("sys/kernel/mm/hugepages", "sys/devices/system/node/node0/hugepages"):
        for size in ("2048", "1048576"):
            (tmp_path / folder / f"hugepages-{size}kB").mkdir(parents=True)
            (tmp_path / folder / f"hugepages-{size}kB" / "nr_hugepages").write_text("0\n")
    return tmp_path


def pages(root: Path, size_kib: int = 2048, *, node: int | None = None) -> Path:
    folder = "sys/kernel/mm/hugepages" if node is None else f"sys/devices/system/node/node{node}/hugepages"
    return root / folder / f"hugepages-{size_kib}kB" / "nr_hugepages"


def wanted(*entries: tuple[int, int, int | None]) -> messages.NodeSpec:
    spec = messages.NodeSpec(host=messages.HostSection())
    for size, count, node in entries:
        spec.host.huge_pages.add(size_bytes=size, count=count, numa_node=node)
    return spec


def failure(root: Path, spec: messages.NodeSpec) -> SectionFailed:
    with pytest.raises(SectionFailed) as caught:
        HostSection(root).converge(spec)
    return caught.value


def test_pages_are_reserved_and_given_back(root: Path) -> None:
    section = HostSection(root)
    assert section.converge(wanted((KIB_2048, 64, None), (KIB_1G, 2, 0))) == ""
    assert (pages(root).read_text(), pages(root, 1_048_576, node=0).read_text()) == ("64\n", "2\n")
    pages(root).write_text("3\n")  # somebody changed it by hand
    section.converge(wanted((KIB_2048, 64, None)))
    assert pages(root).read_text() == "64\n"
    section.converge(wanted((KIB_2048, 0, None)))
    assert pages(root).read_text() == "0\n"
    section.converge(messages.NodeSpec())
    assert pages(root, 1_048_576, node=0).read_text() == "2\n", "what is not named is left alone"


def test_nothing_is_written_where_all_is_as_desired(root: Path) -> None:
    pages(root).write_text("64\n")
    pages(root).chmod(0o400)
    before = pages(root).stat().st_mtime_ns
    HostSection(root).converge(wanted((KIB_2048, 64, None)))
    assert pages(root).stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("held", "reason", "said"),
    [
        ("17\n", "not-enough-memory", "asked for 64, the host has 17; the kernel found no more memory in one piece"),
        ("90\n", "not-enough-memory", "asked for 64, the host has 90; the others are in use"),
        ("many\n", "read-failed", "holds no number"),
    ],
)
def test_what_the_kernel_did_is_read_back(
    root: Path, held: str, reason: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hold(file: Path, _: str, **__: str) -> None:
        file.write_bytes(held.encode())

    monkeypatch.setattr(Path, "write_text", hold)
    failed = failure(root, wanted((KIB_2048, 64, None)))
    assert failed.reason == reason
    assert said in failed.message


def test_an_ordinary_user_is_told_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "write_text", refuse)
    failed = failure(root, wanted((KIB_2048, 64, None)))
    assert failed.reason == "not-permitted"
    assert f"huge pages of 2 MiB: bcd may not write {pages(root)}; run bcd as root" in failed.message


@pytest.mark.parametrize(
    ("entry", "reason", "said"),
    [
        ((2**16, 1, None), "no-such-size", "huge pages of 64 KiB: this host has 2 MiB, 1 GiB"),
        ((KIB_2048, 1, 7), "no-numa-node", "huge pages of 2 MiB on NUMA node 7: this host has no such NUMA node"),
        ((3, 1, None), "bad-value", "host.huge_pages[0].size_bytes is 3: it must be a power of two"),
    ],
)
def test_what_this_host_has_not(root: Path, entry: tuple[int, int, int | None], reason: str, said: str) -> None:
    failed = failure(root, wanted(entry))
    assert (failed.reason, failed.message[: len(said)]) == (reason, said)


def test_one_that_fails_does_not_keep_the_others_back(root: Path) -> None:
    spec = wanted((2**16, 1, None), (KIB_2048, 8, None))
    spec.host.k8s_join.api_server = "10.0.0.1:6443"
    failed = failure(root, spec)
    assert failed.reason == "no-such-size"
    assert "no unit for host.k8s_join" in failed.message
    assert pages(root).read_text() == "8\n"
