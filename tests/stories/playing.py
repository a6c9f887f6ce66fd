"""Where the stories are, and how one is played from its beginning."""

from __future__ import annotations

from pathlib import Path

from tests.stories import script
from tests.stories.directives import gateways, machines, people, registry
from tests.stories.stage import Stage

FOLDER = Path(__file__).parent
STORIES = tuple(sorted(FOLDER.glob("*.txt")))
DIRECTIVE_MODULES = (machines, gateways, people)
"""Importing them makes their directives known."""


def retold(path: Path) -> str:
    """Return a story's file as it would be with every passage told anew."""
    return told(path.read_text(encoding="utf-8"))


def told(text: str) -> str:
    """Return a story's text with every passage told anew, on a stage of its own."""
    stage = Stage()
    return script.played(script.parse(text), lambda passage: registry.play(stage, passage))
