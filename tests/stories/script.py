"""Story files: plain words, directives, and the transcript that the directives make.

The form is that of etcd-io/raft's datadriven tests. Lines that begin with `#` tell the reader what happens. A passage
is one directive or several, one a line, then `----`, then what was told while they were played, up to an empty line.
What is told is the only part that `make golden` writes; everything else is a person's.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

RULE = "----"
COMMENT = "#"
QUIETLY = "quietly"


class StoryError(Exception):
    """A story file that cannot be read or played: the message says which line and why."""


@dataclass(frozen=True, slots=True)
class Directive:
    """One thing that the story lets happen: `[quietly] name argument ... option=value ...`."""

    line: int
    name: str
    arguments: tuple[str, ...]
    options: Mapping[str, str]
    quiet: bool = False
    """What it makes happen is not told: other stories tell it."""


@dataclass(frozen=True, slots=True)
class Passage:
    """Directives and their transcript, with the words before them."""

    before: tuple[str, ...]
    """Comments and empty lines, as they stand."""
    lines: tuple[str, ...]
    directives: tuple[Directive, ...]
    told: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Script:
    """A whole story file."""

    opening: str
    """The first paragraph of comments: what the story shows, and of which heading it is."""
    passages: tuple[Passage, ...]
    after: tuple[str, ...]


def parse(text: str) -> Script:
    """Return the story in a file's text."""
    lines = text.splitlines()
    passages: list[Passage] = []
    before: list[str] = []
    at = 0
    while at < len(lines):
        if not lines[at].strip() or lines[at].startswith(COMMENT):
            before.append(lines[at])
            at += 1
            continue
        end = _rule_after(lines, at)
        told_end = next((n for n in range(end + 1, len(lines)) if not lines[n].strip()), len(lines))
        passages.append(
            Passage(
                before=tuple(before),
                lines=tuple(lines[at:end]),
                directives=tuple(_directive(line, number) for number, line in enumerate(lines[at:end], at + 1)),
                told=tuple(lines[end + 1 : told_end]),
            )
        )
        before = []
        at = told_end
    return Script(opening=_opening(lines), passages=tuple(passages), after=tuple(before))


def played(script: Script, play: Callable[[Sequence[Directive]], Sequence[str]]) -> str:
    """Return the file's text with every passage told anew."""
    lines: list[str] = []
    for passage in script.passages:
        lines += [*passage.before, *passage.lines, RULE, *play(passage.directives)]
    return "\n".join([*lines, *script.after]).rstrip("\n") + "\n"


def _rule_after(lines: Sequence[str], at: int) -> int:
    for number in range(at, len(lines)):
        if lines[number] == RULE:
            return number
        if not lines[number].strip() or lines[number].startswith(COMMENT):
            break
    raise StoryError(f"line {at + 1}: the directive {lines[at]!r} is not followed by {RULE}")


def _directive(line: str, number: int) -> Directive:
    try:
        name, *words = shlex.split(line)
    except ValueError as error:
        raise StoryError(f"line {number}: {error}") from None
    quiet = name == QUIETLY
    if quiet:
        name, *words = words
    options = dict(word.split("=", 1) for word in words if "=" in word)
    return Directive(number, name, tuple(word for word in words if "=" not in word), options, quiet)


def _opening(lines: Sequence[str]) -> str:
    paragraph: list[str] = []
    for line in lines:
        if not line.startswith(COMMENT) or line.strip() == COMMENT:
            break
        paragraph.append(line.removeprefix(COMMENT).strip())
    return " ".join(paragraph)
