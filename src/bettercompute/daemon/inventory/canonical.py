"""The canonical encoding of an inventory section: what its hash is of (docs/inventory.md, "Hashes").

Decides in which order every list of every section stands, so that two collections of one machine give the same bytes
whatever order the kernel listed things in; then protobuf's deterministic serialization, and SHA-256 of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor

from bettercompute.protocol import messages
from bettercompute.protocol.limits import MAX_INVENTORY_SECTION_BYTES, MAX_INVENTORY_SECTIONS

FACTS = "facts"
_FIELDS = messages.NodeInventory.DESCRIPTOR.fields
SECTION_NAMES: tuple[str, ...] = tuple(field.name for field in _FIELDS)
"""Every section, in the order of NodeInventory."""

SECTION_CLASSES: Mapping[str, type[messages.ProtoMessage]] = MappingProxyType(
    {
        field.name: message_factory.GetMessageClass(field.message_type)
        for field in _FIELDS
        if field.message_type is not None  # every field is a section
    }
)
assert len(SECTION_NAMES) <= MAX_INVENTORY_SECTIONS, "a Hello carries a hash for each"

# A list by `message.field`: the fields of its members that it is sorted by, SELF for a list of plain values, AS_GIVEN
# where the order has a meaning of its own.
SELF: tuple[str, ...] = ()
AS_GIVEN = None
LIST_ORDER: Mapping[str, tuple[str, ...] | None] = MappingProxyType(
    {
        "CpuInventory.sockets": ("number",),
        "CpuInventory.flags": SELF,
        "CpuInventory.vulnerabilities": ("name",),
        "CpuInventory.caches": ("level", "type", "shared_cpus"),
        "MemoryInventory.numa_nodes": ("number",),
        "MemoryInventory.huge_pages": ("size_bytes",),
        "MemoryInventory.modules": ("locator", "serial"),
        "MemoryInventory.ecc_controllers": SELF,
        "NumaNode.distances": AS_GIVEN,
        "NumaNode.huge_pages": ("size_bytes",),
        "DisksInventory.disks": ("name",),
        "DisksInventory.mounts": ("mount_point", "source"),
        "Disk.partitions": ("number", "name"),
        "NetworkInventory.interfaces": ("name",),
        "NetworkInventory.default_routes": ("metric", "family", "interface", "gateway"),
        "NetworkInventory.name_servers": AS_GIVEN,
        "NetworkInterface.addresses": SELF,
        "PciInventory.functions": ("address",),
        "GpusInventory.gpus": ("pci_address", "index"),
        "SoftwareInventory.programs": ("name", "path"),
        "SoftwareInventory.kernel_modules": SELF,
        "FactsInventory.facts": ("name",),
    }
)
# Every section has a list of gaps, and a GPU has one of its own.
_GAPS_FIELD = "unreadable"
_GAPS_ORDER = ("what", "reason")


@dataclass(frozen=True, slots=True)
class CanonicalSection:
    """A section as it is hashed, kept and sent: `body` is the canonical encoding, `sha256` its digest."""

    name: str
    body: bytes
    sha256: bytes


class SectionTooLarge(ValueError):
    """The canonical encoding is over the bound of one section."""


def canonical_section(name: str, section: messages.ProtoMessage) -> CanonicalSection:
    """Return the section's canonical form; sorts the lists of `section` in place. Raises `SectionTooLarge`."""
    _sort_lists(section)
    if section.ByteSize() > MAX_INVENTORY_SECTION_BYTES:
        raise SectionTooLarge(f"section {name} has {section.ByteSize()} bytes, more than {MAX_INVENTORY_SECTION_BYTES}")
    return section_of_body(name, section.SerializeToString(deterministic=True))


def section_of_body(name: str, body: bytes) -> CanonicalSection:
    """Return the section whose canonical encoding is `body`."""
    return CanonicalSection(name=name, body=body, sha256=hashlib.sha256(body).digest())


def changed_sections(
    before: Mapping[str, CanonicalSection], after: Mapping[str, CanonicalSection]
) -> dict[str, CanonicalSection]:
    """Return the sections of `after` that `before` does not hold in the same form."""
    return {name: section for name, section in after.items() if before.get(name) != section}


def list_order(field: FieldDescriptor) -> tuple[str, ...] | None:
    """Return by what a list is sorted. Raises KeyError for a list that has no entry in the table."""
    if field.name == _GAPS_FIELD:
        return _GAPS_ORDER
    container = field.containing_type
    return LIST_ORDER[f"{container.name if container is not None else ''}.{field.name}"]


def _sort_lists(message: messages.ProtoMessage) -> None:
    for field, value in message.ListFields():
        if not field.is_repeated:
            if field.message_type is not None:
                _sort_lists(value)
            continue
        if field.message_type is not None:
            for member in value:
                _sort_lists(member)
        order = list_order(field)
        if order is not AS_GIVEN:
            value.sort(key=lambda member, order=order: tuple(getattr(member, name) for name in order) or member)
