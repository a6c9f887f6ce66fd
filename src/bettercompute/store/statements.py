"""Decide what a named SQL statement is: its name, its mark, its arguments. The product's SQL is all in `queries/*.sql`.

A statement begins with `-- name: group.statement`, where the group is the file's name, and `-- fenced`, `-- fact` or
`-- other: reason`. Arguments are written `:name` and become `$n` in the order of their first use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bettercompute.errors import Bug

QUERIES = Path(__file__).parent / "queries"
MARKS = ("fenced", "fact", "other")

_HEADER = re.compile(r"^-- name: (?P<name>[a-z_]+\.[a-z0-9_]+)\n-- (?P<mark>\w+)(?:: (?P<reason>.+))?\n", re.MULTILINE)
# Strings, comments and casts are stepped over; what is left of `:word` is an argument.
_TOKEN = re.compile(r"'(?:[^']|'')*'|--[^\n]*|::|:(?P<argument>[a-z_][a-z0-9_]*)")


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement as PostgreSQL takes it, and the names of its arguments in their order."""

    name: str
    mark: str
    reason: str
    sql: str
    arguments: tuple[str, ...]

    def bind(self, values: Mapping[str, Any]) -> list[Any]:
        """Return the values in the order of the statement's arguments. Raises Bug unless the names match exactly."""
        if values.keys() != frozenset(self.arguments):
            missing = sorted(set(self.arguments) - values.keys())
            unknown = sorted(values.keys() - set(self.arguments))
            raise Bug(f"statement {self.name}: missing arguments {missing}, unknown arguments {unknown}")
        return [values[argument] for argument in self.arguments]


def parse(text: str, *, group: str) -> list[Statement]:
    """Return the statements of one file. Raises Bug for a wrong group, an unknown mark or `other` without a reason."""
    headers = list(_HEADER.finditer(text))
    if len(headers) != text.count("-- name:"):
        raise Bug(f"queries/{group}.sql: each `-- name: {group}.x` needs a mark in the next line: one of {MARKS}")
    found = []
    for header, end in zip(headers, [*(later.start() for later in headers[1:]), len(text)], strict=True):
        name, mark, reason = header["name"], header["mark"], header["reason"] or ""
        if name.partition(".")[0] != group or mark not in MARKS or (mark == "other") != bool(reason):
            raise Bug(f"queries/{group}.sql: {name} has a foreign group, an unknown mark, or `other` without a reason")
        found.append(_statement(name, mark, reason, text[header.end() : end].strip().removesuffix(";")))
    return found


def _statement(name: str, mark: str, reason: str, body: str) -> Statement:
    arguments: dict[str, int] = {}

    def number(token: re.Match[str]) -> str:
        argument = token["argument"]
        return token[0] if argument is None else f"${arguments.setdefault(argument, len(arguments) + 1)}"

    sql = _TOKEN.sub(number, body)
    # The name travels in the text, so that pg_stat_activity and the server's log name the statement.
    return Statement(name, mark, reason, f"/* {name} */ {sql}", tuple(arguments))


@cache
def statements() -> Mapping[str, Statement]:
    """Return every statement by its name."""
    found: dict[str, Statement] = {}
    for path in sorted(QUERIES.glob("*.sql")):
        for statement in parse(path.read_text(encoding="utf-8"), group=path.stem):
            if found.setdefault(statement.name, statement) is not statement:
                raise Bug(f"queries/{path.name}: {statement.name} is defined twice")
    return found
