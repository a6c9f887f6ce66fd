"""Which nodes a selector means, and what a label may be called: `gpu=h100,site!=x`.

A selector is a list of requirements that must all hold: `key=value` (also `==`), `key!=value`, `key in (a,b)`,
`key notin (a,b)`, `key` (there is such a label) and `!key` (there is none). `!=` and `notin` hold for a node without
the label too. The keys `site`, `role` and `state` are the node's own; `bc.dev/` names what the control plane says of a
node, which no operator's label can stand in for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from bettercompute.errors import Refused
from bettercompute.protocol.statuses import Reason, refuse

SYSTEM_PREFIX: Final = "bc.dev/"
NODE_FIELDS: Final = frozenset({"site", "role", "state"})
# A request's query has 8 KiB in all.
SELECTOR_CHARACTERS_MAX: Final = 4_096
REQUIREMENTS_MAX: Final = 32
# A DNS name, a slash, a name: as wide as the column.
KEY_CHARACTERS_MAX: Final = 317
VALUE_CHARACTERS_MAX: Final = 256

_KEY = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]*[A-Za-z0-9])?", re.ASCII)
# What separates requirements, quotes in a shell or ends a value is left out.
_VALUE = re.compile(r"[A-Za-z0-9._:/@+~-]*", re.ASCII)
_SPACE = re.compile(r"\s*")
_LIST = re.compile(r"(in|notin)\s*\(", re.ASCII)


class Source(StrEnum):
    """Where a key's value is kept."""

    FIELD = "field"
    SYSTEM = "system"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """One term: the node has `key` with one of `values` (None: any), or, `negated`, it has not."""

    key: str
    values: tuple[str, ...] | None
    negated: bool = False

    @property
    def source(self) -> Source:
        """Return whose word on this key counts."""
        if self.key in NODE_FIELDS:
            return Source.FIELD
        return Source.SYSTEM if self.key.startswith(SYSTEM_PREFIX) else Source.OPERATOR


def parse(text: str) -> tuple[Requirement, ...]:
    """Return the requirements of a selector. Raises `Refused` with the place of what it does not understand."""
    if len(text) > SELECTOR_CHARACTERS_MAX:
        raise refuse(
            Reason.BAD_REQUEST, f"a selector of {len(text)} characters: at most {SELECTOR_CHARACTERS_MAX} are read"
        )
    return _Parser(text).selector()


def check_label(key: str, value: str) -> None:
    """Refuse a label that an operator may not set, saying why."""
    check_label_key(key)
    if len(value) > VALUE_CHARACTERS_MAX or _VALUE.fullmatch(value) is None:
        raise refuse(
            Reason.BAD_REQUEST,
            f"label {key}: {value[:60]!a} is no value: at most {VALUE_CHARACTERS_MAX} letters, digits and any of "
            ". _ : / @ + ~ -",
        )


def check_label_key(key: str) -> None:
    """Refuse a key that an operator may not set or remove, saying why."""
    if len(key) > KEY_CHARACTERS_MAX or _KEY.fullmatch(key) is None:
        raise refuse(
            Reason.BAD_REQUEST,
            f"{key[:60]!a} is no label key: at most {KEY_CHARACTERS_MAX} letters, digits and any of . _ / - that "
            "begin and end with a letter or digit",
        )
    if key.startswith(SYSTEM_PREFIX):
        raise refuse(
            Reason.BAD_REQUEST, f"label {key}: {SYSTEM_PREFIX} is the control plane's own: choose another prefix"
        )
    if key in NODE_FIELDS:
        raise refuse(Reason.BAD_REQUEST, f"label {key}: that is the node's own {key}, which selectors know already")


class _Parser:
    """Reads from the left; `at` is the place of the next character."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def selector(self) -> tuple[Requirement, ...]:
        found = [self._requirement()]
        while self._take(","):
            if len(found) == REQUIREMENTS_MAX:
                raise self._refuse(f"more than {REQUIREMENTS_MAX} requirements")
            found.append(self._requirement())
        if self._at < len(self._text):
            raise self._refuse("a comma or the end is expected")
        return tuple(found)

    def _requirement(self) -> Requirement:
        if self._take("!"):
            return Requirement(key=self._key(), values=None, negated=True)
        key = self._key()
        if self._take("!="):
            return Requirement(key=key, values=(self._value(),), negated=True)
        if self._take("==") or self._take("="):
            return Requirement(key=key, values=(self._value(),))
        listed = _LIST.match(self._text, self._at)
        if listed is None:
            return Requirement(key=key, values=None)
        self._at = listed.end()
        values = {self._value()}
        while self._take(","):
            values.add(self._value())
        if not self._take(")"):
            raise self._refuse("a comma or ) is expected")
        return Requirement(key=key, values=tuple(sorted(values)), negated=listed[1] == "notin")

    def _key(self) -> str:
        self._skip()
        found = _KEY.match(self._text, self._at)
        if found is None or len(found[0]) > KEY_CHARACTERS_MAX:
            raise self._refuse("a label's key is expected, as in gpu=h100 or site!=x")
        self._at = found.end()
        self._skip()
        return found[0]

    def _value(self) -> str:
        self._skip()
        found = _VALUE.match(self._text, self._at)
        assert found is not None, "it matches nothing, too"
        if len(found[0]) > VALUE_CHARACTERS_MAX:
            raise self._refuse(f"a value has at most {VALUE_CHARACTERS_MAX} characters")
        self._at = found.end()
        self._skip()
        return found[0]

    def _take(self, token: str) -> bool:
        if not self._text.startswith(token, self._at):
            return False
        self._at += len(token)
        self._skip()
        return True

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self._at)
        assert found is not None, "it matches nothing, too"
        self._at = found.end()

    def _refuse(self, expected: str) -> Refused:
        rest = self._text[self._at : self._at + 20]
        found = f"{rest!a} stands" if rest else "it ends"
        return refuse(Reason.BAD_REQUEST, f"selector, character {self._at + 1}: {expected}, and {found} there")
