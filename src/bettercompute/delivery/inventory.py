"""Inventory by hashes, both ends.

Hello and some heartbeats carry one hash per section; bodies travel only when asked for or when they changed. The
gateway asks for what it never stored or stored differently, and the inventory counts as applied once every stored
section has the hash that the daemon reports. See docs/delivery.md, "Inventory and status".
"""

from __future__ import annotations

from collections.abc import Mapping

from bettercompute.protocol.limits import MAX_INVENTORY_SECTIONS

SECTIONS_MAX = MAX_INVENTORY_SECTIONS


def sections_to_request(*, stored: Mapping[str, bytes], reported: Mapping[str, bytes]) -> tuple[str, ...]:
    """Return the sections whose hash changed or was never seen, sorted."""
    return tuple(sorted(name for name, sha256 in reported.items() if stored.get(name) != sha256))


def changed_sections(*, before: Mapping[str, bytes], after: Mapping[str, bytes]) -> tuple[str, ...]:
    """Return the sections that the daemon sends after a collection: those that are new or changed, sorted."""
    return sections_to_request(stored=before, reported=after)


def agree(*, stored: Mapping[str, bytes], reported: Mapping[str, bytes]) -> bool:
    """Say whether the stored sections are what the daemon reports now: only then is an inventory applied."""
    return all(stored.get(name) == sha256 for name, sha256 in reported.items())
