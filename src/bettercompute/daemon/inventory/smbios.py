"""The memory modules that firmware lists: structures of type 17 in the SMBIOS table (DSP0134, 7.18).

Decides how a table of bytes, which firmware wrote and nobody checked, becomes modules: bounded, and a broken structure
ends the reading instead of being guessed at.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

MEMORY_DEVICE = 17
END_OF_TABLE = 127
MAX_SLOTS = 512

_SIZE_IN_KIBIBYTES = 0x8000
_SIZE_UNKNOWN = 0xFFFF
_SIZE_IS_EXTENDED = 0x7FFF
_SPEED_IS_EXTENDED = 0xFFFF
# Table 76 and 78 of DSP0134, those that servers and laptops of this age have.
_TYPES = {
    0x18: "DDR3",
    0x1A: "DDR4",
    0x1E: "LPDDR4",
    0x1F: "logical non-volatile",
    0x20: "HBM",
    0x21: "HBM2",
    0x22: "DDR5",
    0x23: "LPDDR5",
    0x24: "HBM3",
}


@dataclass(frozen=True, slots=True)
class MemorySlot:
    """One slot; `size_bytes` is 0 for an empty one. Otherwise empty text and zero mean that firmware does not say."""

    locator: str
    bank: str
    size_bytes: int
    kind: str
    speed_mts: int
    manufacturer: str
    serial: str
    part_number: str


class BrokenTable(ValueError):
    """The table ends inside a structure, or a structure is shorter than its own header."""


def memory_slots(table: bytes) -> list[MemorySlot]:
    """Return the memory slots in the table's order; raises `BrokenTable`."""
    slots: list[MemorySlot] = []
    for kind, formatted, strings in _structures(table):
        if kind == MEMORY_DEVICE and (slot := _memory_slot(formatted, strings)) is not None:
            slots.append(slot)
        if len(slots) == MAX_SLOTS:
            break
    return slots


def _structures(table: bytes) -> Iterator[tuple[int, bytes, list[str]]]:
    """Yield type, formatted area and strings of each structure until the end mark."""
    at = 0
    while at + 4 <= len(table):
        kind, length = table[at], table[at + 1]
        if length < 4 or at + length > len(table):
            raise BrokenTable(f"structure of type {kind} at byte {at} claims {length} of {len(table) - at} bytes")
        end = table.find(b"\0\0", at + length)
        if end < 0:
            raise BrokenTable(f"the strings of the structure of type {kind} at byte {at} have no end")
        text = table[at + length : end]
        strings = [piece.decode("latin-1").strip() for piece in text.split(b"\0")] if text else []
        yield kind, table[at : at + length], strings
        if kind == END_OF_TABLE:
            return
        at = end + 2


def _memory_slot(formatted: bytes, strings: list[str]) -> MemorySlot | None:
    """Return the slot of one type 17 structure, None for one that is shorter than any SMBIOS version allows."""
    if len(formatted) < 0x15:
        return None

    def text(offset: int) -> str:
        number = formatted[offset] if offset < len(formatted) else 0
        return strings[number - 1] if 0 < number <= len(strings) else ""

    return MemorySlot(
        locator=text(0x10),
        bank=text(0x11),
        size_bytes=_size_bytes(formatted),
        kind=_TYPES.get(formatted[0x12], "other"),
        speed_mts=_speed_mts(formatted),
        manufacturer=text(0x17),
        serial=text(0x18),
        part_number=text(0x1A),
    )


def _size_bytes(formatted: bytes) -> int:
    (size,) = struct.unpack_from("<H", formatted, 0x0C)
    if size == _SIZE_UNKNOWN:
        return 0
    if size == _SIZE_IS_EXTENDED and len(formatted) >= 0x20:
        (mebibytes,) = struct.unpack_from("<I", formatted, 0x1C)
        return (int(mebibytes) & 0x7FFF_FFFF) * 1024 * 1024
    if size & _SIZE_IN_KIBIBYTES:
        return (int(size) & 0x7FFF) * 1024
    return int(size) * 1024 * 1024


def _speed_mts(formatted: bytes) -> int:
    """Return the configured speed in megatransfers per second, the rated one when there is none."""
    for short, extended in ((0x20, 0x58), (0x15, 0x54)):
        if len(formatted) < short + 2:
            continue
        (speed,) = struct.unpack_from("<H", formatted, short)
        if speed == _SPEED_IS_EXTENDED and len(formatted) >= extended + 4:
            (speed,) = struct.unpack_from("<I", formatted, extended)
        if speed not in (0, _SPEED_IS_EXTENDED):
            return int(speed)
    return 0
