"""Habits that no linter knows: docstrings first, readable modules, no paths of a machine, no vague names."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for path in sorted((ROOT / "src").rglob("*.py")) if "gen" not in path.parts]
VAGUE = {"utils", "util", "common", "helpers", "helper", "base", "manager", "misc"}
LINES_MAX = 400
# Modules that are longer on purpose, with the reason.
LONGER: dict[str, str] = {}


def tracked() -> list[Path]:
    """The files that git tracks, or every file of the tree where there is no git."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_module_begins_with_its_purpose(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no module docstring"


def test_modules_are_of_a_readable_size() -> None:
    names = {str(path.relative_to(ROOT / "src" / "bettercompute")): path for path in SOURCES}
    long = {name for name, path in names.items() if len(path.read_text().splitlines()) > LINES_MAX}
    assert long == set(LONGER), (
        "split the module, or list it in LONGER with the reason (and take out what is short again)"
    )


def test_no_vague_module_names() -> None:
    vague = [str(path) for path in SOURCES if path.stem in VAGUE or VAGUE & set(path.relative_to(ROOT).parts)]
    assert not vague


def test_no_paths_of_a_machine_and_no_index_addresses() -> None:
    pattern = re.compile(r"/(?:home|work|Users)/\w+/|https?://\S+/simple\b|--(?:extra-)?index-url|\.\./shared")
    found = []
    for path in tracked():
        if path.suffix in {".binpb", ".png", ".bin"} or path == Path(__file__):
            continue
        found += [
            f"{path}:{n}"
            for n, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
            if pattern.search(line)
        ]
    assert not found
