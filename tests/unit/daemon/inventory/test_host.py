"""Bounded reading, and which reason stands for which failure."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bettercompute.daemon.inventory import host as host_module
from bettercompute.daemon.inventory.findings import MAX_STATED_GAPS, Findings, key_values, listed_numbers
from bettercompute.daemon.inventory.host import Unreadable, unreadable
from tests.unit.daemon.inventory.recorded import host_at


def reason_of(call: object, *arguments: object, **keywords: object) -> str:
    with pytest.raises(Unreadable) as caught:
        call(*arguments, **keywords)  # type: ignore[operator]  # any method of a root
    return caught.value.reason


def test_text_is_trimmed_and_never_holds_a_nul(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"  QEMU\0HARD \xff\0\n")
    assert host_at(tmp_path).text("model") == "QEMU HARD \N{REPLACEMENT CHARACTER}"


def test_a_file_at_the_bound_is_read_and_one_over_it_is_not(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)
    root = host_at(tmp_path)
    assert len(root.data("file", limit_bytes=100)) == 100
    assert reason_of(root.data, "file", limit_bytes=99) == "too-large"


def test_a_pipe_in_a_files_place_does_not_hold_the_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert reason_of(host_at(tmp_path).data, "pipe") == "malformed"


def test_a_folder_with_too_many_entries_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "MAX_FOLDER_ENTRIES", 2)
    for name in ("b", "a"):
        (tmp_path / name).touch()
    assert host_at(tmp_path).entries("") == ["a", "b"]
    (tmp_path / "c").touch()
    assert reason_of(host_at(tmp_path).entries, "") == "too-large"


def test_missing_things(tmp_path: Path) -> None:
    root = host_at(tmp_path)
    assert reason_of(root.data, "nothing") == "not-found"
    assert reason_of(root.entries, "nothing") == "not-found"
    assert root.link_name("nothing") == ""
    assert not root.exists("nothing")


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOENT, "not-found"),
        (errno.ENODEV, "not-found"),
        (errno.EACCES, "permission-denied"),
        (errno.EPERM, "permission-denied"),
        (errno.EINVAL, "unsupported"),
        (errno.EIO, "read-failed"),
    ],
)
def test_reasons(number: int, reason: str) -> None:
    assert unreadable("sys/x", OSError(number, "")).reason == reason


def test_a_failed_reading_says_which_error_it_was() -> None:
    assert unreadable("sys/x", OSError(errno.EIO, "")).stated == "read-failed: EIO"


def test_links_lead_through_the_buses(tmp_path: Path) -> None:
    (tmp_path / "sys/devices/pci0000:00/0000:00:02.0/virtio1/block/vda").mkdir(parents=True)
    (tmp_path / "sys/block").mkdir()
    (tmp_path / "sys/block/vda").symlink_to("../devices/pci0000:00/0000:00:02.0/virtio1/block/vda")
    assert host_at(tmp_path).device_path("sys/block/vda") == "sys/devices/pci0000:00/0000:00:02.0/virtio1/block/vda"


def test_gaps_are_bounded_and_the_rest_is_counted(tmp_path: Path) -> None:
    findings = Findings(host_at(tmp_path))
    for number in range(MAX_STATED_GAPS + 3):
        findings.expected(f"missing/{number:04}")
    stated = findings.unreadable()
    assert len(stated) == MAX_STATED_GAPS + 1
    assert stated[0].what == "/missing/0000"
    assert stated[-1].reason == "too-large: 3 more entries are left out"


@pytest.mark.parametrize(
    ("content", "number", "gaps"),
    [("42\n", 42, 0), ("-1\n", None, 0), ("", None, 0), ("many", None, 1), ("4294967296", None, 1)],
)
def test_numbers(tmp_path: Path, content: str, number: int | None, gaps: int) -> None:
    (tmp_path / "file").write_text(content)
    findings = Findings(host_at(tmp_path))
    assert findings.number("file") == number
    assert len(findings.unreadable()) == gaps


@pytest.mark.parametrize("text", ["To Be Filled By O.E.M.", "Default string", "00000000-0000-0000-0000-000000000000"])
def test_what_a_vendor_did_not_fill_in_identifies_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "serial").write_text(text + "\n")
    findings = Findings(host_at(tmp_path))
    assert findings.firmware("serial") == ""
    assert findings.unreadable()[0].reason == f"placeholder: the vendor left {text!r}"


def test_kernel_lists() -> None:
    assert listed_numbers("0-3,8,10-11") == [0, 1, 2, 3, 8, 10, 11]
    assert listed_numbers("") == []


@pytest.mark.parametrize("text", ["3-1", "a", "0-99999999999", "1-", "-1"])
def test_broken_kernel_lists(text: str) -> None:
    with pytest.raises(ValueError):
        listed_numbers(text)


def test_key_values_keep_the_first_of_a_key() -> None:
    assert key_values("A: 1\nB\nA: 2\n C :x:y", separator=":") == {"A": "1", "C": "x:y"}
