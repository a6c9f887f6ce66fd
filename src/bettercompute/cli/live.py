"""What running commands write, as it comes: a line for each line, with the node's name before it; and a bar.

What a node writes is shown, never obeyed: control characters are replaced, so that no output moves the cursor or
takes another node's name.
"""

from __future__ import annotations

import base64
import codecs
import sys
from collections.abc import Mapping
from itertools import islice
from typing import Any

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

from bettercompute.cli import output
from bettercompute.cli.client import ApiClient, path_of
from bettercompute.errors import Unavailable

# One request asks for so many; those that began first are shown, and others as these end.
FOLLOWED_MAX = 100
# A line that does not end is cut here: a node's output is bounded as a whole, a terminal's patience is not.
LINE_CHARACTERS_MAX = 4_096
COLOURS = ("cyan", "magenta", "yellow", "blue", "green")


class _Followed:
    """One command's output up to where it was shown."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.next_offset = 0
        self.stage = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._line = ""

    def lines(self, data: bytes, *, final: bool = False) -> list[str]:
        """Return the lines that are whole now."""
        *whole, self._line = (self._line + self._decoder.decode(data, final)).split("\n")
        if self._line and (final or len(self._line) > LINE_CHARACTERS_MAX):
            whole, self._line = [*whole, self._line], ""
        return [output.printable(line[:LINE_CHARACTERS_MAX].rstrip("\r")) for line in whole]


class LiveOutput:
    """Follows the output of the commands of a run."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._followed: dict[str, _Followed] = {}

    def show(self, batch_id: str, waiting: Mapping[str, str]) -> None:
        """Print what is new of the commands that have not been seen to end. An API that is away is asked later."""
        for command_id, node_id in islice(waiting.items(), FOLLOWED_MAX):
            self._followed.setdefault(command_id, _Followed(node_id))
        path = path_of("batches", batch_id, "output")
        while True:
            asked = [f"{command_id}:{self._followed[command_id].next_offset}" for command_id in self._asked(waiting)]
            try:
                answer = self._client.get(path, command=asked)
            except Unavailable:
                return
            for item in answer["items"]:
                self._show_one(self._followed[item["id"]], item)
            if not any(item["pieces"] for item in answer["items"]):
                return

    def end(self, command_id: str) -> None:
        """Print the rest of a command's output: what stands without a line's end."""
        followed = self._followed.pop(command_id, None)
        if followed is not None:
            self._print(followed, followed.lines(b"", final=True))

    def _asked(self, waiting: Mapping[str, str]) -> list[str]:
        return [command_id for command_id in self._followed if command_id in waiting][:FOLLOWED_MAX]

    def _show_one(self, followed: _Followed, item: dict[str, Any]) -> None:
        for piece in item["pieces"]:
            if piece["dropped_bytes"]:
                output.note(f"{followed.node_id}: [{piece['dropped_bytes']} bytes of output were dropped here]")
            self._print(followed, followed.lines(base64.b64decode(piece["data_base64"])))
        followed.next_offset = item["next_offset"]
        stage = describe_progress(item["progress"])
        if stage != followed.stage:
            followed.stage = stage
            if stage:
                output.note(f"{followed.node_id}: {stage}")

    def _print(self, followed: _Followed, lines: list[str]) -> None:
        style = COLOURS[sum(followed.node_id.encode()) % len(COLOURS)]
        for line in lines:
            output.console.print(Text.assemble((f"{followed.node_id}: ", style), line))


def describe_progress(progress: dict[str, Any] | None) -> str:
    """Return what a command is doing in a few words, in steps of a tenth."""
    if not progress:
        return ""
    done, total = int(progress.get("done", 0)), int(progress.get("total", 0))
    share = f"{min(100, 10 * (10 * done // total))} %" if total else ""
    return output.printable(" ".join(part for part in (progress.get("stage", ""), share) if part))


class Progress:
    """A bar on a terminal, a line per node elsewhere, nothing when the output is for programs."""

    def __init__(self, total: int, *, kind: str, quiet: bool) -> None:
        self._quiet = quiet
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            console=output.error_console,
            disable=quiet or not sys.stderr.isatty(),
            # What goes into a pipe stays out of the bar's way by itself.
            redirect_stdout=sys.stdout.isatty(),
            transient=True,
        )
        self._task = self._bar.add_task(kind, total=total)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, node_id: str, state: str) -> None:
        """Count one end."""
        self._bar.advance(self._task)
        if not self._quiet and self._bar.disable:
            output.note(f"{node_id}: {state}")
