"""The `facts` section: what the operator's own files and programs say of the machine (docs/inventory.md, "Own facts").

Decides which files are believed. A fact program runs as the daemon, so a file that somebody else may write is
refused, and so is all of a folder that somebody else may write. Static files are read here; programs are started by
whoever owns the process groups. Everything is bounded: files, bytes, facts, time.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from bettercompute.daemon.inventory.canonical import FACTS, CanonicalSection, canonical_section
from bettercompute.daemon.inventory.host import (
    MALFORMED,
    PERMISSION_DENIED,
    TOO_LARGE,
    Unreadable,
    read_file,
    unreadable,
)
from bettercompute.protocol import messages
from bettercompute.protocol.limits import MAX_INVENTORY_SECTION_BYTES

MAX_FACT_FILES = 64
MAX_FACT_OUTPUT_BYTES = 64 * 1024
MAX_FACTS = 512
MAX_NAME_CHARACTERS = 64
MAX_VALUE_BYTES = 1024
MAX_REASON_CHARACTERS = 200
_FILE_NAME_BYTES = 255
assert MAX_FACTS * (MAX_NAME_CHARACTERS + MAX_VALUE_BYTES + _FILE_NAME_BYTES + 16) < MAX_INVENTORY_SECTION_BYTES, (
    "any facts that are taken fit in a section"
)
DEFAULT_PROGRAM_TIMEOUT_MS = 10_000
MAX_PROGRAM_TIMEOUT_MS = 600_000
KEPT_FILE = "facts.bin"

_NAME = re.compile(rf"[a-z0-9][a-z0-9._-]{{0,{MAX_NAME_CHARACTERS - 1}}}")


@dataclass(frozen=True, slots=True)
class FactSettings:
    """The `[inventory]` table of bcd's configuration. No folder: no `facts` section."""

    facts_dir: Path | None = None
    fact_timeout_ms: int = DEFAULT_PROGRAM_TIMEOUT_MS


class RunFact(Protocol):
    """Runs a fact program and returns what it printed; raises `Unreadable` when it failed, hung or printed too much."""

    async def __call__(self, program: Path) -> bytes:
        """Run one program to its end."""
        ...


@dataclass(frozen=True, slots=True)
class _FactFile:
    """A file that is believed: its content, or None for a program that must be run for it."""

    path: Path
    content: bytes | None


async def collect_facts(folder: Path, *, run: RunFact) -> CanonicalSection:
    """Return the section of a folder of facts. What is refused or fails is stated in it; only cancelling raises.

    Programs run one after the other, by name.
    """
    files, gaps = await asyncio.to_thread(_believed_files, folder)
    section = messages.FactsInventory()
    facts: dict[str, messages.Fact] = {}
    for file in files:
        try:
            content = await run(file.path) if file.content is None else file.content
            _take(facts, _parsed(content, file.path.name), file.path.name)
        except Unreadable as error:
            gaps[file.path.name] = error.stated
    section.facts.extend(facts.values())
    section.unreadable.extend(messages.Unreadable(what=name, reason=reason) for name, reason in gaps.items())
    return canonical_section(FACTS, section)


def keep_facts(state_dir: Path, section: CanonicalSection) -> None:
    """Keep the section for the daemon's next start, which must not run programs before it may say Hello."""
    with tempfile.NamedTemporaryFile(dir=state_dir, prefix=KEPT_FILE, delete=False) as file:
        try:
            file.write(section.body)
            file.close()
            Path(file.name).replace(state_dir / KEPT_FILE)
        except OSError:
            Path(file.name).unlink(missing_ok=True)
            raise


def kept_facts(state_dir: Path) -> CanonicalSection | None:
    """Return the section kept last; None when there is none, or none that can be believed."""
    try:
        body = read_file(state_dir / KEPT_FILE, shown=KEPT_FILE, limit_bytes=MAX_INVENTORY_SECTION_BYTES)
        return canonical_section(FACTS, messages.FactsInventory.FromString(body))
    except (Unreadable, DecodeError):
        return None


def _believed_files(folder: Path) -> tuple[list[_FactFile], dict[str, str]]:
    """Return the folder's files that only their owner can have written, and why the others are refused."""
    gaps: dict[str, str] = {}
    files: list[_FactFile] = []
    try:
        _refuse_foreign_writers(folder, shown=str(folder), wanted=stat.S_ISDIR)
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))  # noqa: PTH208 - names only
    except OSError as error:
        return files, {str(folder): unreadable(str(folder), error).stated}
    except Unreadable as error:
        return files, {str(folder): error.stated}
    if len(names) > MAX_FACT_FILES:
        gaps[str(folder)] = f"{TOO_LARGE}: {len(names)} files, of which the first {MAX_FACT_FILES} are read"
    for name in names[:MAX_FACT_FILES]:
        path = folder / name
        try:
            mode = _refuse_foreign_writers(path, shown=name, wanted=stat.S_ISREG)
            runs = mode & (stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
            content = None if runs else read_file(path, shown=name, limit_bytes=MAX_FACT_OUTPUT_BYTES)
        except Unreadable as error:
            gaps[name] = error.stated
        else:
            files.append(_FactFile(path=path, content=content))
    return files, gaps


def _refuse_foreign_writers(path: Path, *, shown: str, wanted: Callable[[int], bool]) -> int:
    """Return the mode of a file or folder of the wanted type that only root or the daemon's user may write."""
    try:
        found = path.lstat()
    except OSError as error:
        raise unreadable(shown, error) from None
    if not wanted(found.st_mode):
        raise Unreadable(shown, MALFORMED, "a link or a special file")
    if found.st_uid not in (0, os.geteuid()):
        raise Unreadable(shown, PERMISSION_DENIED, f"owned by user {found.st_uid}, not by root or the daemon's user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(found.st_mode)
        raise Unreadable(shown, PERMISSION_DENIED, f"others may write it (mode {mode:04o}): chmod go-w")
    return found.st_mode


def _parsed(content: bytes, name: str) -> Mapping[str, str]:
    """Return the facts of one file: a JSON object, or lines `name=value` among blank ones and comments."""
    try:
        text = content.decode().strip()
        if text.startswith("{"):
            return {key: _as_text(value) for key, value in json.loads(text).items()}
    except (ValueError, RecursionError) as error:
        raise Unreadable(name, MALFORMED, str(error)[:MAX_REASON_CHARACTERS]) from None
    lines = [line.strip() for line in text.splitlines()]
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    broken = next((key for key, middle, _ in pairs if not middle), None)
    if broken is not None:
        raise Unreadable(name, MALFORMED, f"line {broken[:40]!r} is not of the form name=value")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))


def _take(facts: dict[str, messages.Fact], stated: Mapping[str, str], source: str) -> None:
    """Add a file's facts, all or none; raises `Unreadable`."""
    if len(facts) + len(stated) > MAX_FACTS:
        raise Unreadable(source, TOO_LARGE, f"with its {len(stated)} facts there are more than {MAX_FACTS}")
    for name, value in stated.items():
        if not _NAME.fullmatch(name):
            raise Unreadable(source, MALFORMED, f"fact name {name[:80]!r} does not match {_NAME.pattern}")
        if name in facts:
            raise Unreadable(source, MALFORMED, f"fact {name} is already stated by {facts[name].source}")
        try:
            size_bytes = len(value.encode())
        except UnicodeEncodeError:
            raise Unreadable(source, MALFORMED, f"the value of {name} is no text") from None
        if size_bytes > MAX_VALUE_BYTES:
            raise Unreadable(source, TOO_LARGE, f"the value of {name} has {size_bytes} of {MAX_VALUE_BYTES} bytes")
        if "\0" in value:
            raise Unreadable(source, MALFORMED, f"the value of {name} holds a NUL")
    facts.update((name, messages.Fact(name=name, value=value, source=source)) for name, value in stated.items())
