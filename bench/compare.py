"""Two files of JSON lines beside each other: what each figure was, what it is, and by what it has changed.

`bench/compare.py BEFORE AFTER` prints one line a figure. Where the two come from different machines or loads it says so
first: then only ratios measured within one run mean anything. `--fail-over PERCENT` ends with status 1 when a figure
has become worse by more than that; without it the difference is for people to judge.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

Row = Mapping[str, object]

RATES = ("per_s",)
"""Figures by the end of their names of which more is better; of every other less is."""


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both files."""

    name: str
    before: float
    after: float

    @property
    def ratio(self) -> float:
        """Return after by before; 1 when both are nothing."""
        if self.before == 0:
            return 1.0 if self.after == 0 else float("inf")
        return self.after / self.before

    @property
    def worse_by(self) -> float:
        """Return by which share it has become worse, below 0 when better."""
        if self.name.endswith(RATES):
            return float("inf") if self.after == 0 else self.before / self.after - 1
        return self.ratio - 1


def read(path: Path) -> dict[str, Row]:
    """Return the rows of a file by their bench; of one that is there twice the last. Other lines are passed over."""
    rows: dict[str, Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("{"):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise SystemExit(f"{path}: a line is not JSON: {error}") from None
            if "bench" in row:
                rows[str(row["bench"])] = row
    if not rows:
        raise SystemExit(f"{path} has no row of a bench: give a file of JSON lines as `make bench` prints them")
    return rows


def changes(before: Mapping[str, Row], after: Mapping[str, Row]) -> list[Change]:
    """Return what was measured in both, in the order of the first; what was configured is no figure."""
    return [
        Change(f"{bench} {figure}", _number(row[figure]), _number(after[bench][figure]))
        for bench, row in before.items()
        if bench in after
        for figure in _figures(row)
        if figure in after[bench]
    ]


def differences(before: Mapping[str, Row], after: Mapping[str, Row]) -> list[str]:
    """Return what keeps figures from being compared, in words: machine, sizes, rows that only one file has."""
    found = [f"only one file has {bench}" for bench in sorted(before.keys() ^ after.keys())]
    for bench in before.keys() & after.keys():
        one, other = before[bench], after[bench]
        machines = [row.get("machine", {}) for row in (one, other)]
        for key in ("cpu", "cores", "kernel", "python"):
            found += _differing(f"machine {key}", *(_get(machine, key) for machine in machines))
        for key in one.keys() - {"machine", "commit", "spread", "refusals", *_figures(one)}:
            found += _differing(f"{bench} {key}", one[key], other.get(key))
        loads = [_number(_get(machine, "load1") or 0) for machine in machines]
        found += [f"{bench} ran at load {loads[0]:g} and {loads[1]:g}"] if abs(loads[0] - loads[1]) >= 1 else []
    return sorted(set(found))


def _differing(name: str, one: object, other: object) -> list[str]:
    return [] if one == other else [f"{name}: {one} and {other}"]


def _get(machine: object, key: str) -> object:
    return machine.get(key) if isinstance(machine, dict) else None


def _figures(row: Row) -> Iterable[str]:
    spread = row.get("spread")
    return list(spread) if isinstance(spread, dict) else []


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("before", type=Path, help="JSON lines of the benches")
    parser.add_argument("after", type=Path)
    parser.add_argument("--fail-over", type=float, metavar="PERCENT", help="fail when a figure is worse by more")
    wanted = parser.parse_args()
    try:
        before, after = read(wanted.before), read(wanted.after)
    except OSError as error:
        raise SystemExit(f"cannot read {error.filename}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SystemExit(f"one of the files is no text: {error.reason}") from None
    for difference in differences(before, after):
        print(f"not alike: {difference}")
    found = changes(before, after)
    width = max((len(change.name) for change in found), default=0)
    print(f"{'figure':{width}} {'before':>10} {'after':>10} {'ratio':>7}")
    for change in found:
        print(f"{change.name:{width}} {change.before:10.4g} {change.after:10.4g} {change.ratio:7.3f}")
    if wanted.fail_over is not None:
        worse = [change for change in found if change.worse_by * 100 > wanted.fail_over]
        for change in worse:
            print(f"worse by {change.worse_by:.0%}: {change.name}")
        sys.exit(1 if worse else 0)


if __name__ == "__main__":
    main()
