"""Validation errors as sentences: the field as the caller knows it, the value, the limit or what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bettercompute.api.storable import UNSTORABLE

# Of a text that is repeated to whoever sent it.
SHOWN_CHARACTERS_MAX = 60
# The first few say what is wrong; the rest is mostly the same again.
SENTENCES_MAX = 5

NOT_JSON = "send a JSON object in UTF-8 with `content-type: application/json`"

_WANTED: Mapping[str, str] = MappingProxyType(
    {
        "string_type": "must be text",
        "string_unicode": "has half of a surrogate pair, which is no character: send whole characters",
        "string_sub_type": "must be text",
        "int_type": "must be a whole number",
        "int_parsing": "must be a whole number",
        "int_parsing_size": "must be a whole number of fewer digits",
        "int_from_float": "must be a whole number",
        "finite_number": "must be a finite number",
        "bool_type": "must be true or false",
        "bool_parsing": "must be true or false",
        "list_type": "must be a list",
        "dict_type": "must be an object",
    }
)

_BOUNDED: Mapping[str, Callable[[Mapping[str, Any]], str]] = MappingProxyType(
    {
        "greater_than_equal": lambda limits: f"must be at least {limits['ge']}",
        "less_than_equal": lambda limits: f"must be at most {limits['le']}",
        "string_too_long": lambda limits: f"must be at most {limits['max_length']} characters long",
        "too_long": lambda limits: f"must have at most {limits['max_length']} entries",
        "literal_error": lambda limits: f"must be {limits['expected']}",
        "enum": lambda limits: f"must be {limits['expected']}",
    }
)


def shown(value: object) -> str:
    """Return a foreign value for a sentence: shortened, printable ASCII."""
    if isinstance(value, str):
        text = ascii(value[:SHOWN_CHARACTERS_MAX])
        return text if len(value) <= SHOWN_CHARACTERS_MAX else f"{text}... ({len(value)} characters)"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = ascii(value)
    return text if len(text) <= SHOWN_CHARACTERS_MAX else f"{text[:SHOWN_CHARACTERS_MAX]}..."


def in_body(errors: Sequence[Mapping[str, Any]]) -> bool:
    """Say whether it is the body that is wrong, and only that."""
    return all(error["loc"][:1] == ("body",) for error in errors)


def sentences(errors: Sequence[Mapping[str, Any]]) -> str:
    """Return pydantic's errors in our words."""
    told = [_sentence(error) for error in errors[:SENTENCES_MAX]]
    if len(errors) > SENTENCES_MAX:
        told.append(f"and {len(errors) - SENTENCES_MAX} more")
    return "; ".join(told)


def _field(location: Sequence[str | int]) -> str:
    source, *parts = location
    if not parts:
        return f"the {source}"
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{ascii(part[:40])[1:-1]}" for part in parts)
    return f"header {name[1:]}" if source == "header" else name.removeprefix(".")


def _sentence(error: Mapping[str, Any]) -> str:
    kind, value, limits = error["type"], error.get("input"), error.get("ctx", {})
    if kind == "json_invalid":
        return f"the body is not JSON ({limits['error']} at character {error['loc'][-1]}): {NOT_JSON}"
    field = _field(error["loc"])
    if kind == "missing":
        return f"{field} is missing" + (f": {NOT_JSON}" if field == "the body" else "")
    if kind == "extra_forbidden":
        return f"{field} is no field of this request: leave it out; /openapi.json lists the fields there are"
    if kind in {"model_attributes_type", "model_type"}:
        if isinstance(value, bytes):
            return f"{field} is not JSON: {NOT_JSON}"
        return f"{field} is {shown(value)}: {NOT_JSON}"
    if kind == UNSTORABLE:
        return f"{field}{limits['inside']} {limits['why']}"
    if kind == "value_error":
        return f"{field} is {shown(value)}: {limits['error']}"
    wanted = _BOUNDED[kind](limits) if kind in _BOUNDED else _WANTED.get(kind, str(error["msg"])[:200])
    return f"{field} is {shown(value)}: it {wanted}" if not wanted.startswith("has ") else f"{field} {wanted}"
