"""The transcript: who does what, at which second of the story, one sentence a line."""

from __future__ import annotations

import textwrap
from collections import Counter

WIDTH = 120
TIME_WIDTH = 9
INDENT = " " * (TIME_WIDTH + 2)


class Transcript:
    """Collects what is told. Heartbeats are only counted: they are many and alike."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._told_at_ms: int | None = None
        self._beats: Counter[str] = Counter()
        self.quiet = False
        """Nothing is told for a while."""

    def tell(self, sentence: str, *, now_ms: int) -> None:
        """Add a sentence. The time stands only where it moves on."""
        if self.quiet:
            return
        time = "" if now_ms == self._told_at_ms else f"{now_ms / 1000:.3f}"
        self._told_at_ms = now_ms
        self._lines += textwrap.wrap(
            sentence,
            WIDTH,
            initial_indent=f"{time:>{TIME_WIDTH}}  ",
            subsequent_indent=INDENT + "    ",
            break_long_words=False,
            break_on_hyphens=False,
        )

    def show(self, *lines: str) -> None:
        """Add lines as they are: rows and disks that the story asked to see."""
        self._lines += [INDENT + line for line in lines]

    def beat(self, machine: str) -> None:
        """Count a heartbeat that says nothing new."""
        self._beats[machine] += not self.quiet

    def take(self, *, now_ms: int) -> list[str]:
        """Return what one passage told, and begin anew."""
        for machine, count in sorted((+self._beats).items()):
            self.tell(f"({machine} has sent {count} heartbeat{'s' * (count > 1)} meanwhile)", now_ms=now_ms)
        lines, self._lines = self._lines, []
        self._beats.clear()
        self._told_at_ms = None
        return lines or [INDENT + "(nothing is told)"]
