"""Copies of a state with some fields changed, at a quarter of the price of `dataclasses.replace`.

A session's state is copied for each frame, at both ends, and has so many fields that copying them one by one in Python
was a tenth of what a command cost. It takes frozen dataclasses without slots, and none that count on `__post_init__`.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def changed(state: T, **changes: Any) -> T:
    """Return a copy of a state with these fields changed; TypeError for one that it has not."""
    kind: Any = type(state)
    if not changes.keys() <= _names(kind):
        raise TypeError(f"a {kind.__name__} has no {', '.join(sorted(changes.keys() - _names(kind)))}")
    copied: T = object.__new__(kind)
    copied.__dict__.update(state.__dict__, **changes)
    return copied


@cache
def _names(kind: Any) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind))
