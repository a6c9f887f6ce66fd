"""Decide how JSON columns cross the border: text on the wire (a codec costs round trips), mappings in the program."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def encode(value: Mapping[str, Any]) -> str:
    """Return the text of a JSON object."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, sort_keys=True)


def decode(text: str | None) -> dict[str, Any]:
    """Return the object of a column that holds one; SQL's and JSON's null are the empty object."""
    value = json.loads(text) if text is not None else None
    return dict(value) if value is not None else {}
