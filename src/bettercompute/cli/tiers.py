"""What people call the tiers of destructiveness."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

TIERS = MappingProxyType({"node": 1, "disk": 2, "fleet": 3})
WORDS = MappingProxyType(
    {
        1: "what interrupts a node",
        2: "what destroys data of a node",
        3: "what reaches more than its own node",
    }
)


def tier_names(numbers: Iterable[int]) -> str:
    """Return the tiers in words; one of a later release by its number."""
    return "; ".join(WORDS.get(number, f"tier {number}") for number in numbers)
