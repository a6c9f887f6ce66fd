"""What one collector reads and what it could not: every gap ends as an entry of the section's `unreadable` list.

Decides which gaps are worth stating. What any machine has (`expected`) is stated when its file is missing; what only
some have (`optional`) is stated only when it exists and could not be read.
"""

from __future__ import annotations

from bettercompute.daemon.inventory.host import (
    MALFORMED,
    MAX_FILE_BYTES,
    NOT_FOUND,
    PLACEHOLDER,
    TOO_LARGE,
    UNSUPPORTED,
    HostRoot,
    Reason,
    Unreadable,
)
from bettercompute.protocol import messages

# A machine where more than this fails has one cause; the first ones by name show it.
MAX_STATED_GAPS = 128
# What a uint32 holds, and what a count of sectors may be so that its bytes fit a uint64.
MAX_SMALL_NUMBER = 0xFFFF_FFFF
MAX_COUNT = 1 << 54
_MAX_DIGITS = 15
# Processors and nodes in one kernel list: far above any machine, far below what a broken file could ask for.
MAX_LISTED_NUMBERS = 65_536

# What firmware says when a vendor filled nothing in. Compared in lower case.
_PLACEHOLDERS = frozenset(
    {
        "0",
        "none",
        "n/a",
        "null",
        "unknown",
        "default string",
        "not specified",
        "not available",
        "not applicable",
        "no asset tag",
        "no dimm",
        "to be filled by o.e.m.",
        "to be filled by oem",
        "system serial number",
        "system manufacturer",
        "system product name",
        "o.e.m.",
        "0123456789",
        "123456789",
        "00000000",
        "00000000-0000-0000-0000-000000000000",
        "ffffffff-ffff-ffff-ffff-ffffffffffff",
        "03000200-0400-0500-0006-000700080009",  # one vendor's uuid on thousands of boards
    }
)


def is_placeholder(text: str) -> bool:
    """Return whether firmware text means that nobody filled it in, so that it must not identify a machine."""
    return text.lower() in _PLACEHOLDERS


class Findings:
    """Reads for one section, and keeps the reason of each gap by what is missing: a path or the name of a source."""

    def __init__(self, root: HostRoot) -> None:
        self.root = root
        self._gaps: dict[str, str] = {}

    def gap(self, what: str, reason: Reason, detail: str = "") -> None:
        """State that something is absent; the first reason given for it stays."""
        self._gaps.setdefault(what, f"{reason}: {detail}" if detail else reason)

    def state(self, error: Unreadable) -> None:
        """State a failed reading."""
        self._gaps.setdefault(f"/{error.path}", error.stated)

    def unreadable(self) -> list[messages.Unreadable]:
        """Return the gaps by what is missing, bounded; the last entry tells how many are left out."""
        stated = [messages.Unreadable(what=what, reason=reason) for what, reason in sorted(self._gaps.items())]
        left_out = len(stated) - MAX_STATED_GAPS
        if left_out > 0:
            rest = messages.Unreadable(what="the rest", reason=f"{TOO_LARGE}: {left_out} more entries are left out")
            stated = [*stated[:MAX_STATED_GAPS], rest]
        return stated

    def expected(self, path: str) -> str:
        """Return a file's text, or an empty one with the gap stated."""
        return self._text(path, state_missing=True)

    def optional(self, path: str, *, limit_bytes: int = MAX_FILE_BYTES) -> str:
        """Return a file's text, or an empty one; a missing file, or one that this device does not fill, is no gap."""
        return self._text(path, state_missing=False, limit_bytes=limit_bytes)

    def firmware(self, path: str) -> str:
        """Return text that firmware wrote, or an empty one with the gap stated when the vendor left it unfilled."""
        text = self.optional(path)
        if is_placeholder(text):
            self.gap(f"/{path}", PLACEHOLDER, f"the vendor left {text!r}")
            return ""
        return text

    def number(self, path: str, *, radix: int = 10, largest: int = MAX_SMALL_NUMBER) -> int | None:
        """Return an optional file's whole number, 0 to `largest`; -1, which the kernel writes for none, is None."""
        text = self.optional(path)
        if not text:
            return None
        try:
            number = int(text, radix)
        except ValueError:
            self.gap(f"/{path}", MALFORMED, f"{text[:40]!r} is not a number")
            return None
        if number > largest:
            self.gap(f"/{path}", MALFORMED, f"{number} is more than {largest}")
            return None
        return number if number >= 0 else None

    def entries(self, path: str, *, expected: bool = True) -> list[str]:
        """Return the sorted names in a folder, or none with the gap stated."""
        try:
            return self.root.entries(path)
        except Unreadable as error:
            if expected or error.reason != NOT_FOUND:
                self.state(error)
            return []

    def _text(self, path: str, *, state_missing: bool, limit_bytes: int = MAX_FILE_BYTES) -> str:
        try:
            return self.root.text(path, limit_bytes=limit_bytes)
        except Unreadable as error:
            if state_missing or error.reason not in (NOT_FOUND, UNSUPPORTED):
                self.state(error)
            return ""


def listed_numbers(text: str) -> list[int]:
    """Return the numbers of a kernel list such as `0-3,8`; raises ValueError for anything else."""
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, dash, last = part.partition("-")
        low, high = int(first), int(last if dash else first)
        if high < low or high - low + len(numbers) >= MAX_LISTED_NUMBERS:
            raise ValueError(f"{part!r} is no range of processors or nodes")
        numbers.extend(range(low, high + 1))
    return numbers


def key_values(text: str, *, separator: str) -> dict[str, str]:
    """Return the first value of each key, of lines such as `MemTotal: 42 kB` or `DEVTYPE=disk`."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, middle, value = line.partition(separator)
        if middle:
            found.setdefault(key.strip(), value.strip())
    return found


def kilobytes(text: str) -> int:
    """Return the bytes that `42 kB` of meminfo stands for; 0 for anything else."""
    number = text.removesuffix("kB").strip()
    return int(number) * 1024 if number.isdecimal() and len(number) <= _MAX_DIGITS else 0
