"""Canonical encoding: one order for every list, one hash for one machine."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from bettercompute.daemon.inventory.canonical import (
    LIST_ORDER,
    SECTION_CLASSES,
    SECTION_NAMES,
    CanonicalSection,
    SectionTooLarge,
    canonical_section,
    changed_sections,
    list_order,
)
from bettercompute.protocol import messages
from bettercompute.protocol.limits import MAX_INVENTORY_SECTION_BYTES


def lists_of(message: Descriptor) -> Iterator[tuple[str, FieldDescriptor]]:
    for field in message.fields:
        if field.is_repeated:
            yield f"{message.name}.{field.name}", field
        if field.message_type is not None:
            yield from lists_of(field.message_type)


def test_every_list_has_an_order_and_every_order_a_list() -> None:
    lists = dict(lists_of(messages.NodeInventory.DESCRIPTOR))
    for name, field in lists.items():
        for member in list_order(field) or ():
            assert field.message_type is not None, f"{name} is a list of plain values"
            assert member in field.message_type.fields_by_name, f"{name} has no member {member}"
    assert LIST_ORDER.keys() <= lists.keys()


def test_every_section_has_a_list_of_gaps() -> None:
    assert tuple(SECTION_CLASSES) == SECTION_NAMES
    gaps = {section.DESCRIPTOR.fields_by_name["unreadable"].message_type for section in SECTION_CLASSES.values()}
    assert gaps == {messages.Unreadable.DESCRIPTOR}


def sample() -> messages.MemoryInventory:
    section = messages.MemoryInventory(total_bytes=64 << 30, ecc_controllers=["mc1", "mc0", "mc2"])
    for number in range(4):
        node = section.numa_nodes.add(number=number, distances=[21, 10, 31, 10 + number])
        for size in (1 << 30, 2 << 20, 64 << 10):
            node.huge_pages.add(size_bytes=size, reserved=number)
        section.modules.add(locator="DIMM 0", serial=f"S{number}")
        section.unreadable.add(what=f"/sys/{number}", reason="permission-denied")
    return section


@pytest.mark.parametrize("seed", range(20))
def test_the_hash_does_not_depend_on_the_order_of_finding(seed: int) -> None:
    dice = random.Random(seed)
    section = sample()
    for node in section.numa_nodes:
        dice_sort(dice, node.huge_pages)
    for members in (section.numa_nodes, section.modules, section.unreadable, section.ecc_controllers):
        dice_sort(dice, members)
    assert canonical_section("memory", section) == canonical_section("memory", sample())


def dice_sort(dice: random.Random, members: object) -> None:
    members.sort(key=lambda _: dice.random())  # type: ignore[attr-defined]  # any repeated field


def test_lists_whose_order_means_something_keep_it() -> None:
    section = canonical_section("network", messages.NetworkInventory(name_servers=["::2", "::1"]))
    assert list(messages.NetworkInventory.FromString(section.body).name_servers) == ["::2", "::1"]


def test_the_hash_is_of_the_body() -> None:
    section = canonical_section("memory", sample())
    assert section.sha256 == hashlib.sha256(section.body).digest()
    assert messages.MemoryInventory.FromString(section.body).numa_nodes[3].distances[3] == 13


def test_a_section_at_the_bound_is_kept_and_one_over_it_is_not() -> None:
    def facts(size: int) -> messages.FactsInventory:
        return messages.FactsInventory(facts=[messages.Fact(name="x", value="v" * size)])

    overhead = facts(MAX_INVENTORY_SECTION_BYTES).ByteSize() - MAX_INVENTORY_SECTION_BYTES
    at_bound = canonical_section("facts", facts(MAX_INVENTORY_SECTION_BYTES - overhead))
    assert len(at_bound.body) == MAX_INVENTORY_SECTION_BYTES
    with pytest.raises(SectionTooLarge, match="section facts has 1048577 bytes, more than 1048576"):
        canonical_section("facts", facts(MAX_INVENTORY_SECTION_BYTES - overhead + 1))


def test_changed_sections() -> None:
    old, new = (CanonicalSection(name="cpu", body=body, sha256=body) for body in (b"1", b"2"))
    other = CanonicalSection(name="pci", body=b"1", sha256=b"1")
    assert changed_sections({"cpu": old}, {"cpu": new, "pci": other}) == {"cpu": new, "pci": other}
    assert changed_sections({"cpu": old, "pci": other}, {"cpu": old}) == {}
