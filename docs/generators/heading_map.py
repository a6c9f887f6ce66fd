"""The map: which module is which heading of the documentation, which tests are of it, and which stories tell it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from docs.generators import references
from docs.generators.markdown import anchor, generated, headings, table
from docs.generators.references import Reference

# The pages that modules are written after, in this order; others follow by name.
FIRST_PAGES = ("sessions.md", "protocol.md", "delivery.md")

INTRODUCTION = """\
# Map

From a heading of these pages to the modules that are it, and to their tests: those named after a module, else those
that import it, those whose docstring names the heading, and the stories whose first paragraph does. A module names its
heading in its docstring. Modules without a row serve several headings; [architecture.md](architecture.md) says what
their packages do."""


def page(root: Path) -> str:
    """Return docs/map.md."""
    modules = _by_docstring((root / "src").rglob("*.py"))
    tests, naming = _tests_by_module(root), _by_docstring((root / "tests").rglob("test_*.py"))
    stories = _stories_by_heading(root)
    named = sorted({reference.page for reference in modules} - set(FIRST_PAGES))
    lines = [generated("the docstrings of src/, the imports of tests/ and its stories"), "", INTRODUCTION]
    for name in (*FIRST_PAGES, *named):
        path = root / "docs" / name
        if path.exists():
            rows = [
                (
                    f"[{heading}]({name}#{anchor(heading)})",
                    " <br> ".join(_link(module, root) for module in modules[Reference(name, heading)]),
                    " <br> ".join(
                        _link(test, root)
                        for test in (
                            *sorted(
                                {
                                    *_tests_of(modules[Reference(name, heading)], root, tests),
                                    *naming[Reference(name, heading)],
                                }
                            ),
                            *stories[Reference(name, heading)],
                        )
                    ),
                )
                for heading in headings(path.read_text(encoding="utf-8"))[1:]
                if Reference(name, heading) in modules
            ]
            if rows:
                lines += ["", f"## {name}", "", table(("heading", "modules", "tests"), rows)]
    return "\n".join(lines)


def _by_docstring(paths: Iterable[Path]) -> dict[Reference, list[Path]]:
    """Return which of these modules name a heading in their docstring."""
    found: dict[Reference, list[Path]] = defaultdict(list)
    for path in sorted(paths):
        if "gen" in path.parts:
            continue
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for reference in dict.fromkeys(references.pages(docstring)):
            if reference.heading:
                found[reference].append(path)
    return found


def _stories_by_heading(root: Path) -> dict[Reference, list[Path]]:
    """Return which stories name a heading in their first paragraph."""
    found: dict[Reference, list[Path]] = defaultdict(list)
    for path in sorted((root / "tests" / "stories").glob("*.txt")):
        opening = path.read_text(encoding="utf-8").partition("\n\n")[0]
        for reference in dict.fromkeys(references.pages(opening)):
            found[reference].append(path)
    return found


def _tests_by_module(root: Path) -> dict[str, list[Path]]:
    """Return which test files import a module, by the module's dotted name."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in sorted((root / "tests").rglob("test_*.py")):
        for name in sorted(set(_imported(ast.parse(path.read_text(encoding="utf-8"))))):
            found[name].append(path)
    return found


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("bettercompute"):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _tests_of(modules: list[Path], root: Path, tests: dict[str, list[Path]]) -> list[Path]:
    """Return the tests named after the modules; for a module without any, those that import it."""
    found: set[Path] = set()
    for module in modules:
        importing = tests.get(".".join(module.relative_to(root / "src").with_suffix("").parts), [])
        found |= {test for test in importing if test.stem.startswith(f"test_{module.stem}")} or set(importing)
    return sorted(found)


def _link(path: Path, root: Path) -> str:
    relative = path.relative_to(root)
    shown = str(relative).removeprefix("src/bettercompute/").removeprefix("tests/")
    return f"[{shown}](../{relative})"
