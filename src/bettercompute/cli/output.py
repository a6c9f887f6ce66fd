"""What both commands print: tables for people, JSON lines for programs, one sentence and an exit code for a failure.

Standard output carries results only; progress and failures go to standard error, so that `--json | jq` always works.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from bettercompute.errors import BetterComputeError, Bug

# Exit codes: 1 the work failed, 2 the user must change something, 3 try again later, 70 a fault of ours (sysexits.h).
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 3
EXIT_SOFTWARE = 70

_STATUS_EXITS = {14: EXIT_UNAVAILABLE, 4: EXIT_UNAVAILABLE, 8: EXIT_UNAVAILABLE, 13: EXIT_SOFTWARE}

T = TypeVar("T")


def printable(text: str, *, keep: str = "\t") -> str:
    """Return a text in which nothing is left for a terminal to obey: what nodes and other people wrote is only shown.

    An escape sequence in it could hide, above all from an approver, what stands beside it.
    """
    return "".join(one if one.isprintable() or one in keep else "\ufffd" for one in text)


class _Terminal(Console):
    """Shows every text as it is, whoever wrote it; colours are ours alone."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, texts without control characters."""
        super().print(*(printable(one, keep="\t\n") if isinstance(one, str) else one for one in objects), **options)


console = _Terminal(soft_wrap=True, highlight=False)
error_console = _Terminal(stderr=True, soft_wrap=True, highlight=False)


def guard(program: Callable[[], object]) -> None:
    """Run a command line; where its results cannot go (a full disk, nobody who reads) is told, or at least an end."""
    if sys.stdout is None:  # closed by the caller, who wants none
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    try:
        try:
            program()
        finally:
            sys.stdout.flush()
    except OSError as error:
        # What is buffered would fail again at the very end, and Python would say so.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            sys.stderr.write(f"error: the results cannot be written: {error.strerror or error}\n")
        sys.exit(EXIT_FAILED)


def print_json(value: object) -> None:
    """Print `value` as one JSON line on standard output, at once: programs wait for it."""
    sys.stdout.write(json.dumps(value, separators=(",", ":"), ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """Print a table on standard output: aligned and coloured on a terminal, tab-separated where it is piped.

    `empty` is the sentence printed on standard error when there is nothing to list.
    """
    lines = [["" if cell is None else printable(str(cell), keep="") for cell in row] for row in rows]
    if not lines:
        error_console.print(empty, markup=False)
        return
    if not console.is_terminal:
        for line in (list(columns), *lines):
            sys.stdout.write("\t".join(line) + "\n")
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column.upper(), overflow="fold")
    for line in lines:
        table.add_row(*line)
    console.print(table, markup=False)


def print_facts(facts: Mapping[str, object]) -> None:
    """Print `name  value` lines of one thing, leaving out what is None or empty."""
    shown = {name: str(value) for name, value in facts.items() if value not in (None, "", [], {})}
    width = max((len(name) for name in shown), default=0)
    for name, value in shown.items():
        console.print(f"{name:<{width}}  {value}", markup=False)


def print_output(text: str) -> None:
    """Print what a program wrote: to a terminal as text only, elsewhere as it is."""
    if console.is_terminal:
        console.print(text, end="", markup=False)
        return
    sys.stdout.write(text)


def note(sentence: str) -> None:
    """Print a remark on standard error."""
    error_console.print(sentence, markup=False)


def fail(sentence: str, *, code: int = EXIT_FAILED) -> NoReturn:
    """Print one sentence on standard error and end with `code`."""
    error_console.print(f"error: {sentence}", style="red", markup=False)
    raise typer.Exit(code)


def run(action: Callable[[], T]) -> T:
    """Return what `action` returns; turn our own errors into a sentence and an exit code, never into a traceback."""
    try:
        return action()
    except Bug:
        raise
    except BetterComputeError as error:
        fail(error.message, code=_STATUS_EXITS.get(error.status, EXIT_USAGE))
    except OSError as error:
        # What the machine refuses is for the user to change: a path, a permission, a full disk.
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}{error.strerror or error}", code=EXIT_USAGE)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def cell(value: Any) -> str:
    """Return a table cell: lists joined by commas, None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return ",".join(str(item) for item in value) or "-"
    return str(value)
