"""Durations as people write them: `90s`, `5m`, `24h`, `7d`; a bare number counts seconds."""

from __future__ import annotations

import re

import typer

_UNITS_MS = {"ms": 1, "": 1_000, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_FORM = re.compile(r"(\d{1,12})\s*(ms|s|m|h|d|)", re.ASCII)


def parse_duration_ms(text: str) -> int:
    """Return milliseconds; raises `typer.BadParameter` with the forms that are allowed."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a duration; write 90s, 5m, 24h or 7d")
    return int(match[1]) * _UNITS_MS[match[2]]


def format_age(age_ms: int | None) -> str:
    """Return an age in its largest whole unit: `42s`, `3m`, `5h`, `2d`; a dash for None."""
    if age_ms is None:
        return "-"
    for unit in ("d", "h", "m"):
        if age_ms >= 2 * _UNITS_MS[unit]:
            return f"{age_ms // _UNITS_MS[unit]}{unit}"
    return f"{max(age_ms, 0) // 1_000}s"
