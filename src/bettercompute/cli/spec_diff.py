"""What differs between two specs, path by path, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.text import Text

from bettercompute.cli import output

_ABSENT: Final = object()


@dataclass(frozen=True, slots=True)
class Change:
    """One value that differs; a side that has none is `absent`."""

    path: str
    before: object
    after: object

    def as_json(self) -> dict[str, object]:
        """Return it for programs: `before` or `after` is left out on the side that has no value."""
        sides = {"before": self.before, "after": self.after}
        return {"path": self.path, **{side: value for side, value in sides.items() if value is not _ABSENT}}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Return what differs, in the order of the paths; entries of lists are compared by their place."""
    return list(_compare("", before, after))


def _compare(path: str, before: object, after: object) -> list[Change]:
    if before == after and type(before) is type(after):
        return []
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        names = sorted({*before, *after})
        return _each(
            [
                (f"{path}.{name}" if path else name, before.get(name, _ABSENT), after.get(name, _ABSENT))
                for name in names
            ]
        )
    if isinstance(before, list) and isinstance(after, list):
        places = range(max(len(before), len(after)))
        return _each([(f"{path}[{at}]", _entry(before, at), _entry(after, at)) for at in places])
    return [Change(path, before, after)]


def _each(pairs: Sequence[tuple[str, object, object]]) -> list[Change]:
    return [change for path, before, after in pairs for change in _compare(path, before, after)]


def _entry(items: list[Any], at: int) -> object:
    return items[at] if at < len(items) else _ABSENT


def print_differences(changes: Sequence[Change], *, title: str) -> None:
    """Print the changes: a line for each side that has a value, `-` before and `+` after, in colour on a terminal."""
    output.console.print(Text(title, style="bold"))
    if not changes:
        output.console.print("no difference", markup=False)
    for change in changes:
        for sign, value, style in (("-", change.before, "red"), ("+", change.after, "green")):
            if value is not _ABSENT:
                line = f"{sign} {change.path} = {json.dumps(value, ensure_ascii=False)}"
                output.console.print(Text(output.printable(line), style=style))
