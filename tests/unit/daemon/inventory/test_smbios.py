"""Memory slots of SMBIOS tables, well formed and broken."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bettercompute.daemon.inventory.smbios import MAX_SLOTS, BrokenTable, MemorySlot, memory_slots

END = bytes([127, 4, 0, 0, 0, 0])


def slot(*, size: int, extended: int = 0, speed: int = 3200, length: int = 0x28, locator: bytes = b"A1") -> bytes:
    body = struct.pack(
        "<BBHHHHHHBBBBBHHBBBBBIHHHH",
        *(17, length, 1, 0, 0, 72, 64, size, 9, 0, 1, 2, 0x1A, 0, speed, 3, 4, 0, 5, 2, extended, speed, 0, 0, 0),
    )
    return body[:length] + locator + b"\0BANK 0\0Micron\0SER42\0PART-7\0\0"


def test_a_populated_slot() -> None:
    assert memory_slots(slot(size=32_767 - 1) + END) == [
        MemorySlot(
            locator="A1",
            bank="BANK 0",
            size_bytes=32_766 << 20,
            kind="DDR4",
            speed_mts=3200,
            manufacturer="Micron",
            serial="SER42",
            part_number="PART-7",
        )
    ]


@pytest.mark.parametrize(
    ("size", "extended", "size_bytes"),
    [
        (0, 0, 0),
        (0xFFFF, 0, 0),  # unknown
        (0x8000 | 512, 0, 512 << 10),  # counted in kibibytes
        (0x7FFF, 131_072, 131_072 << 20),  # too large for the short field
    ],
)
def test_sizes(size: int, extended: int, size_bytes: int) -> None:
    assert memory_slots(slot(size=size, extended=extended) + END)[0].size_bytes == size_bytes


def test_an_old_short_structure() -> None:
    found = memory_slots(slot(size=4096, length=0x1B) + END)
    assert [(entry.size_bytes, entry.speed_mts) for entry in found] == [(4096 << 20, 3200)]


def test_unknown_speed_is_zero() -> None:
    assert memory_slots(slot(size=1, speed=0) + END)[0].speed_mts == 0


def test_what_follows_the_end_mark_is_not_read() -> None:
    assert memory_slots(END + slot(size=1)) == []


def test_slots_are_bounded() -> None:
    assert len(memory_slots(slot(size=1) * (MAX_SLOTS + 5) + END)) == MAX_SLOTS


@pytest.mark.parametrize("table", [b"\x11\x02\0\0\0\0", b"\x11\xff\0\0\0\0", b"\x00\x04\0\0no end"])
def test_broken_tables_are_refused(table: bytes) -> None:
    with pytest.raises(BrokenTable):
        memory_slots(table)


@given(st.binary(max_size=400), st.integers(min_value=0, max_value=200))
def test_no_bytes_do_worse_than_that(noise: bytes, cut: int) -> None:
    with contextlib.suppress(BrokenTable):
        memory_slots(slot(size=64)[:cut] + noise)
