"""Tell every story anew and write it into its file: `make golden`. Read the difference before you commit it."""

from __future__ import annotations

import sys

from tests.stories.playing import STORIES, retold
from tests.stories.script import StoryError


def main() -> None:
    """Rewrite the stories that have changed."""
    for path in STORIES:
        try:
            text = retold(path)
        except StoryError as error:
            sys.exit(f"{path.name}, {error}")
        if text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
            print(f"told anew: {path.name}")  # noqa: T201 - this is a program


if __name__ == "__main__":
    main()
