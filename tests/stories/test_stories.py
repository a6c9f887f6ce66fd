"""Stories are told again from their directives, and must be word for word what their files say."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from docs.generators import references
from docs.generators.markdown import headings

from tests.stories import script
from tests.stories.directives.registry import DIRECTIVES, duration_ms
from tests.stories.playing import DIRECTIVE_MODULES, FOLDER, STORIES, retold, told
from tests.stories.script import StoryError

ROOT = FOLDER.parents[1]
WIDTH = 120
OPENING_WORDS = 20


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_a_story_is_told_as_it_is_written(path: Path) -> None:
    assert retold(path) == path.read_text(encoding="utf-8"), "told differently now: `make golden`, and read the diff"


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_a_story_begins_with_what_it_shows_and_its_heading(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    opening = script.parse(text).opening
    assert len(opening.split()) >= OPENING_WORDS
    named = list(references.pages(opening))
    assert named, "name the page and its heading: docs/sessions.md, and the heading in quotes"
    for reference in named:
        assert reference.page in ("sessions.md", "delivery.md")
        assert reference.heading in headings((ROOT / "docs" / reference.page).read_text(encoding="utf-8"))
    assert all(len(line) <= WIDTH for line in text.splitlines())


def test_every_directive_is_described_and_used() -> None:
    used = {given.name for path in STORIES for passage in _passages(path) for given in passage.directives}
    assert used == set(DIRECTIVES)
    described = {
        (ast.get_docstring(node) or "").split()[0].rstrip(":")
        for module in DIRECTIVE_MODULES
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.FunctionDef) and node.decorator_list
    }
    assert described == used


def _passages(path: Path) -> tuple[script.Passage, ...]:
    return script.parse(path.read_text(encoding="utf-8")).passages


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("run 1s\n", "not followed by ----"),
        ("run 1s\n\n----\n", "not followed by ----"),
        ("walk 1s\n----\n", "no directive is named 'walk'"),
        ("run soon\n----\n", "no duration"),
        ("boot node-9\n----\n", "line 1: boot fails: KeyError"),
        ("show moon x\n----\n", "no 'moon' to show"),
        ('run "1s\n----\n', "line 1"),
    ],
)
def test_a_story_that_cannot_be_played_says_why(text: str, why: str) -> None:
    with pytest.raises(StoryError, match=why):
        told(text)


def test_what_was_told_before_does_not_matter() -> None:
    text = "# One.\n\ngateway gw-1\n----\nlies\n\nmore lies\n----\n# The end.\n"
    with pytest.raises(StoryError, match="no directive"):
        told(text)
    assert told("# One.\n\ngateway gw-1\n----\nlies\n\n# The end.\n") == (
        "# One.\n\ngateway gw-1\n----\n    0.000  gw-1 serves\n\n# The end.\n"
    )


@pytest.mark.parametrize(
    ("text", "milliseconds"), [("250ms", 250), ("-10m", -600_000), ("2h", 7_200_000), ("1d", 86_400_000)]
)
def test_durations(text: str, milliseconds: int) -> None:
    assert duration_ms(text) == milliseconds
