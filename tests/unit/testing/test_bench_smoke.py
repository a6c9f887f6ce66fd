"""Every bench runs and prints its row, at sizes that mean nothing: a real gateway process, TLS and PostgreSQL.

Those of delivery in each run of the tests, the others in the long one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import uvloop

from bench import bcd_idle, commands, events, gateway_streams, herd, herd_sim, journal
from bench.echo_reference import reference
from bench.stack import BenchStack, stack
from bettercompute.testing import postgres

ROWS = {
    "session_open": {"gateway_cpu_ms", "ratio_to_bare_h2"},
    "gateway_streams": {"streams", "cpu_percent", "ratio_to_bare_h2", "rss_kb_per_stream"},
    "commands": {"per_s", "cpu_us", "paced_cpu_us", "p50_ms", "p99_ms"},
    "events": {"per_s", "cpu_us"},
    "journal": {"accept_p50_ms", "per_s"},
    "bcd_idle": {"rss_mb", "cpu_percent"},
    "herd": {"nodes", "rate", "all_connected_s", "ratio_to_n_over_rate", "attempts_max"},
    **{
        herd_sim.row_name(story): {
            *("nodes", "rate", "n_over_rate_s", "all_connected_s", "ratio_to_n_over_rate"),
            *("attempts_max", "refusals_max", "pending_hellos_max", "statements_per_s", "statements_per_s_max"),
        }
        for story in herd_sim.STORIES
    },
}

Printed = Callable[[], dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def running() -> Iterator[BenchStack]:
    with stack(roles=("gateway", "api")) as started:
        yield started


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """Return the rows that were printed, each checked for its fields and for what makes it comparable."""

    def read() -> dict[str, dict[str, Any]]:
        rows = {row["bench"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
        for name, row in rows.items():
            assert row.keys() >= ROWS[name] | {"machine", "commit", "repeats", "spread"}
            assert all(math.isfinite(row[field]) for field in ROWS[name])
        return rows

    return read


@pytest.mark.long
def test_gateway_streams(running: BenchStack, printed: Printed) -> None:
    sizes = replace(gateway_streams.QUICK, window_s=0.2)
    with reference(running) as (echo_id, echo_url):
        uvloop.run(gateway_streams.measure(running, sizes, echo_id=echo_id, echo_url=echo_url))
    rows = printed()
    assert rows.keys() == {"session_open", "gateway_streams"}
    assert rows["gateway_streams"]["streams"] == gateway_streams.QUICK.streams


def test_commands(running: BenchStack, printed: Printed) -> None:
    uvloop.run(commands.measure(running, commands.QUICK))
    assert printed()["commands"]["streams_lost"] >= 0  # a full machine loses some: what counts is that it is told


def test_events(running: BenchStack, printed: Printed) -> None:
    uvloop.run(events.measure(running, events.QUICK))
    assert printed()["events"]["streams_lost"] >= 0


def test_journal(printed: Printed) -> None:
    uvloop.run(journal.measure(journal.QUICK))
    assert printed()["journal"]["per_s"] > 0


@pytest.mark.long
def test_bcd_idle(running: BenchStack, printed: Printed) -> None:
    uvloop.run(bcd_idle.measure(running, bcd_idle.QUICK))
    assert printed()["bcd_idle"]["rss_mb"] > 0


@pytest.mark.long
def test_herd(printed: Printed) -> None:
    with stack(handshakes_per_s=herd.QUICK.rate) as started:
        uvloop.run(herd.measure(started, herd.QUICK))
    assert printed()["herd"]["attempts_max"] <= 2


@pytest.mark.long
def test_herd_sim(printed: Printed, postgres_server: postgres.TestServer) -> None:
    herd_sim.measure(herd_sim.QUICK, seeds=1, server=postgres_server)
    rows = printed()
    assert rows.keys() == {herd_sim.row_name(story) for story in herd_sim.STORIES}
    assert rows["herd_sim_power_on"]["ratio_to_n_over_rate"] <= 1.5
