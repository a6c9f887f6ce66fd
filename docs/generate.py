"""Generates the pages of docs/ that the code knows better: `make docs`, or `python -m docs.generate`.

What is generated: the map from headings to modules and tests, a page per table of states, the references of commands,
API, protocol, reasons and metrics, and the index of decision records. A test renders all of it in memory and compares,
so a page that the code has outrun cannot be committed unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from docs.generators import (
    command_line,
    decisions,
    heading_map,
    openapi,
    protocol_reference,
    states,
    telemetry_reference,
)

DOCS = Path(__file__).parent
ROOT = DOCS.parent

# Folders that hold nothing else: what is no longer rendered is removed from them.
GENERATED_FOLDERS = ("states", "reference")

PAGES: Mapping[str, Callable[[], str]] = {
    "map.md": lambda: heading_map.page(ROOT),
    "decisions/README.md": lambda: decisions.page(DOCS / "decisions"),
    "states/commands.md": states.commands,
    "states/session-endings.md": states.session_endings,
    "states/connectivity.md": states.connectivity,
    "states/resume-rules.md": states.resume_rules,
    "states/grpc-call.md": states.grpc_call,
    "reference/cli.md": command_line.page,
    "reference/openapi.json": openapi.page,
    "reference/protocol.md": lambda: protocol_reference.page(ROOT / "proto"),
    "reference/reasons.md": telemetry_reference.reasons,
    "reference/metrics.md": telemetry_reference.metrics_and_events,
}


def render() -> dict[str, str]:
    """Return every generated page by its path below docs/."""
    return {name: f"{page().rstrip()}\n" for name, page in PAGES.items()}


def stale() -> list[str]:
    """Return the files in the generated folders that nothing renders any more."""
    found = [path for folder in GENERATED_FOLDERS for path in (DOCS / folder).glob("*") if path.is_file()]
    return sorted(name for path in found if (name := str(path.relative_to(DOCS))) not in PAGES)


def main() -> None:
    """Write the pages and remove what is stale."""
    for name, text in render().items():
        path = DOCS / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for name in stale():
        (DOCS / name).unlink()


if __name__ == "__main__":
    main()
