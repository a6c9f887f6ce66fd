"""Inventory by hashes."""

from __future__ import annotations

from bettercompute.delivery import inventory


def test_sections_that_changed_or_were_never_seen_are_asked_for() -> None:
    stored = {"cpu": b"1", "memory": b"2", "gone": b"3"}
    reported = {"memory": b"9", "disks": b"4", "cpu": b"1"}
    assert inventory.sections_to_request(stored=stored, reported=reported) == ("disks", "memory")
    assert inventory.changed_sections(before=stored, after=reported) == ("disks", "memory")


def test_an_inventory_is_applied_only_when_both_agree() -> None:
    assert inventory.agree(stored={"cpu": b"1", "old": b"2"}, reported={"cpu": b"1"})
    assert not inventory.agree(stored={"cpu": b"1"}, reported={"cpu": b"2"})
    assert not inventory.agree(stored={}, reported={"cpu": b"1"})
