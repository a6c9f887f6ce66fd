"""References from code and pages into the documentation: how they are written, and how they are found.

Two forms, the same everywhere: a page with the headings meant, `docs/sessions.md, "Opening"`, and a decision record by
its number, `decisions 0102`; several follow each other, `"Hello", "Welcome"` and `decisions 0104 and 0105`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# The beginning of a comment's line in Python, protobuf and SQL: a reference may go over the end of a line.
COMMENT = re.compile(r"^\s*(?:#|//|--|\*)\s?", re.MULTILINE)
PAGE = re.compile(r'\bdocs/(?P<page>[a-z/-]+\.md)(?P<headings>(?:,? (?:and )?"[^"]{1,80}")*)')
QUOTED = re.compile(r'"([^"]+)"')
RECORDS = re.compile(r"\bdecisions? (?P<numbers>\d+(?:(?:,|,? and) \d+)*)", re.IGNORECASE)
RECORD_PATH = re.compile(r"\bdecisions/(\d{4})")
NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, order=True)
class Reference:
    """A page below docs/, and a heading of it; empty: the page as a whole."""

    page: str
    heading: str


def joined(text: str) -> str:
    """Return a text with its comment marks taken away and its lines joined."""
    return " ".join(COMMENT.sub("", text).split())


def pages(text: str) -> Iterator[Reference]:
    """Yield every reference to a page in a text."""
    for match in PAGE.finditer(joined(text)):
        headings = QUOTED.findall(match["headings"])
        yield from (Reference(match["page"], heading) for heading in headings or [""])


def records(text: str) -> Iterator[str]:
    """Yield the number of every decision record that a text refers to, as it is written."""
    flat = joined(text)
    for match in RECORDS.finditer(flat):
        yield from NUMBER.findall(match["numbers"])
    yield from RECORD_PATH.findall(flat)
