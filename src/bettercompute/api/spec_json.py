"""A spec as JSON: read strictly, or refused with the path, the value and what is taken there.

Names are those of the .proto files. What a daemon would drop without a word, because it does not know it, never gets
into a spec: an unknown section, field or value is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message_factory import GetMessageClass

from bettercompute.api.invalid import SENTENCES_MAX, shown
from bettercompute.api.payloads import takes
from bettercompute.api.shapes import message_json
from bettercompute.delivery.spec_generations import SECTIONS
from bettercompute.delivery.spec_values import faults
from bettercompute.errors import Refused
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason, refuse

# json_format lets some of Python's own errors through.
_FAULTS = (ParseError, TypeError, ValueError, ArithmeticError, KeyError, AttributeError)
SITE_TYPE: Final = "type.googleapis.com/bettercompute.site.v1.SiteSpec"


def read_spec(value: Mapping[str, Any]) -> messages.NodeSpec:
    """Return a whole spec. Raises `Refused` for the first thing that is wrong in it, or for values out of bounds."""
    spec = messages.NodeSpec()
    for name, section in value.items():
        require_known(name)
        if section is not None:
            spec.MergeFrom(read_section(name, section))
    return spec


def require_known(name: str) -> None:
    """Refuse the name of a section that this release does not know."""
    if name not in SECTIONS:
        raise _wrong(f"there is no section {shown(name)}; the sections are: {', '.join(SECTIONS)}")


def read_section(name: str, value: object) -> messages.NodeSpec:
    """Return a spec with one section, also when that is empty. Raises `Refused`."""
    require_known(name)
    if not isinstance(value, Mapping):
        raise _wrong(f"{name} is {shown(value)}: it takes an object")
    described = messages.NodeSpec.DESCRIPTOR.fields_by_name[name].message_type
    assert described is not None
    _check(described, value, path=name)
    spec = messages.NodeSpec()
    getattr(spec, name).SetInParent()
    try:
        ParseDict(dict(value), getattr(spec, name))
    except _FAULTS as error:
        raise _wrong(f"{name} cannot be read: {ascii(str(error)[:200])[1:-1]}") from None
    wrong = faults(spec, name)
    if wrong:
        told = [fault.sentence(shown) for fault in wrong[:SENTENCES_MAX]]
        if len(wrong) > SENTENCES_MAX:
            told.append(f"and {len(wrong) - SENTENCES_MAX} more")
        raise _wrong("; ".join(told))
    return spec


def spec_json(spec: messages.NodeSpec) -> dict[str, Any]:
    """Return a spec as JSON, a section in each name; what this release does not know is left out."""
    return message_json(spec)


def _wrong(why: str) -> Refused:
    return refuse(Reason.BAD_REQUEST, f"spec: {why}")


def _check(described: Descriptor, value: Mapping[str, Any], *, path: str) -> None:
    """Raise for the first name that is not known, or value of a wrong shape, however deep it is."""
    if described.full_name == "google.protobuf.Any":
        if value.get("@type") != SITE_TYPE:
            raise _wrong(f'{path}["@type"] is {shown(value.get("@type"))}: it must be {SITE_TYPE}')
        rest = {name: item for name, item in value.items() if name != "@type"}
        _check(messages.site.SiteSpec.DESCRIPTOR, rest, path=path)
        return
    for name, item in value.items():
        field = described.fields_by_name.get(name)
        here = f"{path}.{ascii(name[:40])[1:-1]}"
        if field is None:
            raise _wrong(
                f"{here}: there is no such field; the fields of {path} are: {', '.join(described.fields_by_name)}"
            )
        if item is None:
            continue
        items = item if field.is_repeated and isinstance(item, list) else [item]
        if field.is_repeated and not isinstance(item, list):
            raise _wrong(f"{here} is {shown(item)}: it takes {takes(field)}")
        for index, each in enumerate(items):
            place = f"{here}[{index}]" if field.is_repeated else here
            _check_one(field, each, path=place)


def _check_one(field: FieldDescriptor, value: object, *, path: str) -> None:
    inner = field.message_type
    if inner is not None:
        if not isinstance(value, Mapping):
            raise _wrong(f"{path} is {shown(value)}: it takes an object of {', '.join(inner.fields_by_name)}")
        _check(inner, value, path=path)
        return
    holder = GetMessageClass(cast("Descriptor", field.containing_type))()
    try:
        ParseDict({field.name: [value] if field.is_repeated else value}, holder)
    except _FAULTS:
        wanted = takes(field).removeprefix("a list, each entry ")
        raise _wrong(f"{path} is {shown(value)}: it takes {wanted}") from None
