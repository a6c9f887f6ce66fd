"""The operator's own facts: which files are believed, what they may say, and that one bad file costs only itself."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bettercompute.daemon.inventory import facts as facts_module
from bettercompute.daemon.inventory.canonical import CanonicalSection
from bettercompute.daemon.inventory.facts import collect_facts, keep_facts, kept_facts
from bettercompute.daemon.inventory.host import PROGRAM_FAILED, Unreadable
from bettercompute.protocol import messages


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "facts.d"
    place.mkdir(mode=0o755)
    return place


def write(path: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(mode)


async def run_nothing(program: Path) -> bytes:
    raise AssertionError(f"{program} must not run")


async def collect(folder: Path) -> messages.FactsInventory:
    return content(await collect_facts(folder, run=run_nothing))


def content(section: CanonicalSection) -> messages.FactsInventory:
    return messages.FactsInventory.FromString(section.body)


def values(section: messages.FactsInventory) -> dict[str, str]:
    return {fact.name: fact.value for fact in section.facts}


def gaps(section: messages.FactsInventory) -> dict[str, str]:
    return {gap.what: gap.reason for gap in section.unreadable}


async def test_lines_and_json(folder: Path) -> None:
    write(folder / "rack.txt", "# where it stands\n\nrack.row = 12\nrack.position=u07\nnote=a=b\n")
    write(
        folder / "tags.json",
        json.dumps({"owner": "team-ml", "slots": [2, 1], "spare": False, "limits": {"b": 1, "a": 2}}),
    )
    section = await collect(folder)
    assert values(section) == {
        "rack.row": "12",
        "rack.position": "u07",
        "note": "a=b",
        "owner": "team-ml",
        "slots": "[2,1]",
        "spare": "false",
        "limits": '{"a":2,"b":1}',
    }
    assert {fact.name: fact.source for fact in section.facts}["owner"] == "tags.json"
    assert not section.unreadable


async def test_programs_run_in_order_and_state_facts(folder: Path) -> None:
    for name in ("20-second", "10-first"):
        write(folder / name, "#!/bin/sh\n", mode=0o755)
    ran = []

    async def run(program: Path) -> bytes:
        ran.append(program.name)
        return f"ran.{program.name}=yes\n".encode()

    section = content(await collect_facts(folder, run=run))
    assert ran == ["10-first", "20-second"]
    assert values(section) == {"ran.10-first": "yes", "ran.20-second": "yes"}


async def test_a_program_that_fails_costs_only_its_own_facts(folder: Path) -> None:
    write(folder / "broken", "", mode=0o700)
    write(folder / "rack.txt", "row=1")

    async def run(program: Path) -> bytes:
        raise Unreadable(program.name, PROGRAM_FAILED, "exit code 3, no such rack")

    section = content(await collect_facts(folder, run=run))
    assert values(section) == {"row": "1"}
    assert gaps(section) == {"broken": "program-failed: exit code 3, no such rack"}


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o777, 0o775])
async def test_what_others_may_write_is_neither_read_nor_run(folder: Path, mode: int) -> None:
    write(folder / "fact", "row=1", mode=mode)
    section = await collect(folder)
    assert not section.facts
    assert gaps(section) == {"fact": f"permission-denied: others may write it (mode {mode:04o}): chmod go-w"}


async def test_a_folder_that_others_may_write_is_refused_whole(folder: Path) -> None:
    write(folder / "fact", "row=1")
    os.chmod(folder, 0o777)  # noqa: PTH101 - the asyncio lint takes Path.chmod for a slow call
    section = await collect(folder)
    assert not section.facts
    assert gaps(section)[str(folder)].startswith("permission-denied: others may write it (mode 0777)")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
async def test_another_users_file_is_refused(folder: Path) -> None:
    write(folder / "fact", "row=1")
    os.chown(folder / "fact", 65_534, 65_534)
    assert gaps(await collect(folder)) == {
        "fact": "permission-denied: owned by user 65534, not by root or the daemon's user"
    }


async def test_links_pipes_and_folders_are_refused_and_hidden_files_are_not_looked_at(folder: Path) -> None:
    (folder / "link").symlink_to("/etc/hostname")
    os.mkfifo(folder / "pipe", 0o644)
    (folder / "deeper").mkdir(mode=0o755)
    write(folder / ".rack.txt.swp", "row=1")
    section = await collect(folder)
    assert not section.facts
    assert gaps(section) == dict.fromkeys(("link", "pipe", "deeper"), "malformed: a link or a special file")


async def test_a_missing_folder_says_so(tmp_path: Path) -> None:
    section = await collect(tmp_path / "nowhere")
    assert gaps(section) == {str(tmp_path / "nowhere"): "not-found"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("row", "malformed: line 'row' is not of the form name=value"),
        ("Row=1", "malformed: fact name 'Row' does not match"),
        ("=1", "malformed: fact name '' does not match"),
        ("n" * 65 + "=1", "malformed: fact name 'nnn"),
        ("{", "malformed: Expecting property name"),
        ("{" + '"a":' + "[" * 60_000, "malformed: "),
        (b"row=\xff", "malformed: 'utf-8' codec can't decode"),
        ('{"a": "\\ud800"}', "malformed: the value of a is no text"),
        ('{"a": "x\\u0000y"}', "malformed: the value of a holds a NUL"),
        ("row=" + "x" * 1025, "too-large: the value of row has 1025 of 1024 bytes"),
        ("x" * (64 * 1024 + 1), "too-large: more than 65536 bytes"),
        ("\n".join(f"n{number}=1" for number in range(513)), "too-large: with its 513 facts there are more than 512"),
    ],
)
async def test_bad_files_are_refused_with_the_reason(folder: Path, text: str | bytes, reason: str) -> None:
    write(folder / "fact", text)
    section = await collect(folder)
    assert not section.facts, "all of a file or none"
    assert gaps(section)["fact"].startswith(reason)


async def test_two_files_that_state_one_fact(folder: Path) -> None:
    write(folder / "a", "row=1")
    write(folder / "b", "position=7\nrow=2")
    section = await collect(folder)
    assert values(section) == {"row": "1"}
    assert gaps(section) == {"b": "malformed: fact row is already stated by a"}


async def test_files_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module, "MAX_FACT_FILES", 2)
    for name in "abc":
        write(folder / name, f"{name}=1")
    section = await collect(folder)
    assert values(section) == {"a": "1", "b": "1"}
    assert gaps(section) == {str(folder): "too-large: 3 files, of which the first 2 are read"}


async def test_kept_facts_outlive_the_process(folder: Path, tmp_path: Path) -> None:
    assert kept_facts(tmp_path) is None
    write(folder / "fact", "row=1")
    section = await collect_facts(folder, run=run_nothing)
    keep_facts(tmp_path, section)
    keep_facts(tmp_path, section)
    assert kept_facts(tmp_path) == section
    assert {entry.name for entry in os.scandir(tmp_path)} == {"facts.bin", "facts.d"}


def test_kept_facts_that_are_damaged_count_as_none(tmp_path: Path) -> None:
    (tmp_path / "facts.bin").write_bytes(b"\xff\xff\xff")
    assert kept_facts(tmp_path) is None
