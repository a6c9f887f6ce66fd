"""A command's payload as JSON, read as its kind's message, or refused with the field and what it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.json_format import ParseDict, ParseError

from bettercompute.api.invalid import shown
from bettercompute.errors import Refused
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import CommandKind
from bettercompute.protocol.statuses import Reason, refuse

_FAULTS = (ParseError, TypeError, ValueError, ArithmeticError)  # json_format lets some of Python's own errors through

_TAKES: Mapping[int, str] = MappingProxyType(
    {
        FieldDescriptor.CPPTYPE_STRING: "text",
        FieldDescriptor.CPPTYPE_BOOL: "true or false",
        FieldDescriptor.CPPTYPE_INT32: "a whole number below 2^31",
        FieldDescriptor.CPPTYPE_INT64: "a whole number below 2^63",
        FieldDescriptor.CPPTYPE_UINT32: "a whole number from 0 to below 2^32",
        FieldDescriptor.CPPTYPE_UINT64: "a whole number from 0 to below 2^64",
        FieldDescriptor.CPPTYPE_FLOAT: "a number",
        FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    }
)


def read(kind: CommandKind, value: Mapping[str, Any]) -> messages.ProtoMessage:
    """Return the payload. Raises `Refused` for an unknown field, a value it does not take, or a name not allowed."""
    described = _described(kind)
    for name in value:
        if name not in described.fields_by_name and name not in described.fields_by_camelcase_name:
            allowed = ", ".join(described.fields_by_name) or "none"
            raise _wrong(kind, f"there is no field {shown(name)}; its fields are: {allowed}")
    try:
        payload = ParseDict(dict(value), kind.payload())
    except _FAULTS:
        raise _wrong(kind, _fault(kind, value)) from None
    check = _CHECKS.get(kind.payload)
    if check is not None:
        check(kind, payload)
    return payload


def _described(kind: CommandKind) -> Descriptor:
    return cast("Descriptor", kind.payload.DESCRIPTOR)  # or its twin in C, which the stubs tell apart


def _wrong(kind: CommandKind, why: str) -> Refused:
    return refuse(Reason.BAD_REQUEST, f"payload of {kind.name}: {why}")


def _fault(kind: CommandKind, value: Mapping[str, Any]) -> str:
    """Say which field is at fault: the first that is refused also when it is alone."""
    described = _described(kind)
    for name, item in value.items():
        try:
            ParseDict({name: item}, kind.payload())
        except _FAULTS:
            field = next(each for each in described.fields_by_name.values() if name in {each.name, each.json_name})
            return f"{name} is {shown(item)}: it takes {takes(field)}"
    return "two of its fields exclude each other; give one of them"


def takes(field: FieldDescriptor) -> str:
    """Say in words which JSON a field takes."""
    if field.enum_type is not None:
        one = f"one of {', '.join(value.name for value in field.enum_type.values)}"
    elif field.message_type is not None:
        one = f"an object of {', '.join(field.message_type.fields_by_name)}"
    elif field.type == FieldDescriptor.TYPE_BYTES:
        one = "bytes in base64"
    else:
        one = _TAKES[field.cpp_type]
    return f"a list, each entry {one}" if field.is_repeated else one


def _check_sections(kind: CommandKind, payload: messages.ProtoMessage) -> None:
    assert isinstance(payload, messages.InventoryRefreshPayload)
    allowed = [field.name for field in messages.NodeInventory.DESCRIPTOR.fields]
    for name in payload.sections:
        if name not in allowed:
            raise _wrong(kind, f"there is no section {shown(name)}; the sections are: {', '.join(allowed)}")


# What a payload's types do not say. Names that the receiver would silently ignore are refused here.
_CHECKS: Mapping[type[messages.ProtoMessage], Callable[[CommandKind, messages.ProtoMessage], None]] = MappingProxyType(
    {messages.InventoryRefreshPayload: _check_sections}
)
