"""What the simulations of a test run amounted to, over all of its processes: printed at its end.

Each run is noted on its test's report, which reaches the process that prints also from workers on other cores.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bettercompute.testing.sim.simulation import Outcome

SIMULATED = "simulated"
FOUND = "broken rule found"
MS_AN_HOUR = 3_600_000


def noted(outcome: Outcome) -> str:
    """Return a run as it is noted."""
    return json.dumps(
        {
            "scenario": outcome.scenario,
            "virtual_ms": int(outcome.virtual_s * 1000),
            "real_ms": int(outcome.real_s * 1000),
            "faults": dict(outcome.faults),
            "met": dict(outcome.met),
            "commands": outcome.commands,
            "events": outcome.events,
            "frames": outcome.frames,
            "statements": outcome.statements,
            "broken": len(outcome.violations),
        }
    )


def lines(properties: Iterable[tuple[str, object]]) -> list[str]:
    """Return what to print, from the properties of all reports."""
    totals: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    met: Counter[str] = Counter()
    scenarios: Counter[str] = Counter()
    found: list[str] = []
    for name, value in properties:
        if name == FOUND:
            found.append(f"broken on purpose, and noticed: {value}")
        elif name == SIMULATED:
            run = json.loads(str(value))
            scenarios[run.pop("scenario")] += 1
            faults.update(run.pop("faults"))
            met.update(run.pop("met"))
            totals.update(run)
    if not scenarios:
        return found
    runs = ", ".join(f"{count} of {scenario}" for scenario, count in sorted(scenarios.items()))
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(faults.items()))
    hours, computing = totals["virtual_ms"] / MS_AN_HOUR, totals["real_ms"] / MS_AN_HOUR
    counts = ", ".join(f"{totals[name]} {name}" for name in ("commands", "events", "frames", "statements"))
    return [
        *sorted(found),
        f"simulated {hours:.1f} hours in {computing:.2f} hours of computing; {faults.total()} faults; runs: {runs}",
        f"{counts}; {totals['broken']} promises broken",
        f"faults: {kinds}",
        f"met: {', '.join(f'{count} {name}' for name, count in sorted(met.items()))}",
    ]
