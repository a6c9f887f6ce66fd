"""Text that can be kept: what PostgreSQL's text and jsonb take, bounded, and no id that hides a control character.

Every text that comes into the API has one of these types, so that what the database cannot hold is refused where the
caller's name for the field is still known. `problems` keeps a backstop for what slips past.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints
from pydantic_core import PydanticCustomError

from bettercompute.protocol.limits import MAX_NAME_CHARS

# Objects and arrays within each other: no payload of a kind has half as many, and every parser's stack bears them.
JSON_DEPTH_MAX = 32

# The error type that `invalid` tells as it stands; `inside` says where in a nested value.
UNSTORABLE = "unstorable"

_NUL = "has a NUL character (U+0000), which cannot be stored: leave it out"
_SURROGATE = "has half of a surrogate pair, which is no character: send whole characters"

# A place in a nested value, innermost first: paths are only spelled out for an error.
_Place = tuple["_Place", str | int] | None


def _refuse(why: str, place: _Place = None) -> PydanticCustomError:
    parts: list[str] = []
    while place is not None:
        place, part = place
        parts.append(f"[{part}]" if isinstance(part, int) else f".{ascii(part[:40])[1:-1]}")
    return PydanticCustomError(UNSTORABLE, "{why}", {"why": why, "inside": "".join(reversed(parts))})


def _check(text: str, place: _Place = None) -> str:
    if "\x00" in text:
        raise _refuse(_NUL, place)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _refuse(_SURROGATE, place) from None
    return text


def _check_id(text: str) -> str:
    if not _check(text).isprintable():
        raise _refuse("has a control character or a line break: an id is printable text on one line")
    return text


def _check_json(value: dict[str, Any]) -> dict[str, Any]:
    pending: list[tuple[Any, _Place, int]] = [(value, None, 1)]
    while pending:
        item, place, depth = pending.pop()
        if isinstance(item, str):
            _check(item, place)
        elif isinstance(item, float) and not math.isfinite(item):
            raise _refuse("is no JSON number: send a finite one", place)
        elif isinstance(item, dict | list):
            if depth > JSON_DEPTH_MAX:
                raise _refuse(f"is nested deeper than {JSON_DEPTH_MAX} objects and lists: send a flatter value")
            members = item.items() if isinstance(item, dict) else enumerate(item)
            for key, child in members:
                if isinstance(key, str):
                    _check(key, place)
                pending.append((child, (place, key), depth + 1))
    return value


class Body(BaseModel):
    """A request's body. A field that it does not have is refused: a misspelled wish must not be taken for none."""

    model_config = ConfigDict(extra="forbid")


Storable = AfterValidator(_check)
"""Marks a text that is bounded by something else than the length of a name."""

Text = Annotated[str, StringConstraints(max_length=MAX_NAME_CHARS), Storable]
"""A name, a reason, a word of a query."""

Id = Annotated[str, StringConstraints(max_length=MAX_NAME_CHARS), AfterValidator(_check_id)]
"""What names a thing, in a path, a query, a header or a body."""

JsonObject = Annotated[dict[str, Any], AfterValidator(_check_json)]
"""An object of any shape, all of whose texts and numbers can be stored as jsonb."""
