"""Herds of 10,000 nodes on virtual time: how long, how often and against what until each has a session again.

One row a story: power-on, a lost gateway that comes back, a rolling restart, a database that is away for 60 s. The
production gateway and its statements run on a real PostgreSQL; time is the simulation's, so another machine, or a busy
one, prints the same figures. `n_over_rate_s` is the least that admission alone can take; what a story waits for besides
(leases that run out, 30 s between two gateways of a rolling restart) is in the time as well. `real_s` is the bench's.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the file also runs by its path

from bench.measure import Figures, options, report
from bettercompute.testing import postgres
from bettercompute.testing.sim import herd
from bettercompute.testing.sim.herd import Herd, HerdOutcome

STORIES = ("power-on", "gateway-loss", "rolling-restart", "database-outage")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The herd."""

    nodes: int
    gateways: int
    rate: int
    """Handshakes a second of each gateway."""
    streams_max: int


FULL = Sizes(nodes=10_000, gateways=2, rate=200, streams_max=7_500)
QUICK = Sizes(nodes=100, gateways=2, rate=50, streams_max=75)


def row_name(story: str) -> str:
    """Return the name of a story's row."""
    return f"herd_sim_{story.replace('-', '_')}"


def figures(outcome: HerdOutcome) -> Figures:
    """Return what one herd amounted to."""
    wanted = outcome.herd
    if outcome.all_connected_s is None or outcome.ratio is None:
        left = wanted.nodes - outcome.samples[-1].connected
        raise SystemExit(f"{wanted.story}: {left} of {wanted.nodes} nodes had no session after an hour")
    if outcome.bugs:
        raise SystemExit(f"{wanted.story}: a fault of ours was logged: {outcome.bugs[0]}")
    return {
        "nodes": wanted.nodes,
        "rate": wanted.gateways * wanted.handshakes_per_s,
        "n_over_rate_s": wanted.least_s,
        "all_connected_s": outcome.all_connected_s,
        "ratio_to_n_over_rate": outcome.ratio,
        "dropped": outcome.dropped,
        "attempts_mean": outcome.attempts_mean,
        "attempts_max": outcome.attempts_max,
        "refusals_max": outcome.refusals_max,
        "pending_hellos_max": outcome.pending_hellos_max,
        "statements_per_s": outcome.statements_per_s,
        "statements_per_s_max": outcome.statements_per_s_max,
        "real_s": outcome.real_s,
    }


def measure(sizes: Sizes, *, seeds: int, server: postgres.TestServer) -> None:
    """Measure every row; each repeat is another seed."""
    for story in STORIES:
        runs: list[Figures] = []
        reasons: dict[str, int] = {}
        for seed in range(1, seeds + 1):
            dsn = server.create_database()
            wanted = Herd(
                story=story,
                nodes=sizes.nodes,
                gateways=sizes.gateways,
                handshakes_per_s=sizes.rate,
                streams_max=sizes.streams_max,
                seed=seed,
            )
            outcome = herd.run(wanted, dsn=dsn)
            server.drop_database(dsn)
            runs.append(figures(outcome))
            for reason, times in outcome.reasons.items():
                reasons[reason or "dial"] = reasons.get(reason or "dial", 0) + times
        report(
            row_name(story),
            runs,
            clock="virtual",
            gateways=sizes.gateways,
            max_streams=sizes.streams_max,
            refusals=reasons,
        )


def main() -> None:
    """Print the rows."""
    wanted = options(__doc__).parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="bc-herd-") as fallback,
        postgres.scratch(Path(fallback)) as data_dir,
        postgres.serve(data_dir) as server,
    ):
        measure(QUICK if wanted.quick else FULL, seeds=wanted.repeats or 1, server=server)


if __name__ == "__main__":
    main()
