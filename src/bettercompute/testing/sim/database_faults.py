"""Faults of the database: away, silent, late, a standby, unsure of what it committed, or of the time."""

from __future__ import annotations

import asyncio

from bettercompute.session.clock import BACKWARDS_ALLOWED_MS
from bettercompute.testing.sim import copies
from bettercompute.testing.sim.stage import Stage
from bettercompute.testing.sim.weather import Fate

# How far a standby lags, and how long a restore takes.
LAG_S = 3.0
RESTORE_S = (5.0, 60.0)


async def database_restart(stage: Stage, for_s: float) -> None:
    """Lose every connection to the database, and refuse new ones for a while."""
    if stage.server.weather.down:
        return
    stage.tell(f"the database is down, for {for_s:.1f} s")
    stage.server.weather.down = True
    stage.server.restart()
    stage.transactions.outages.begins(stage.world.clock.monotonic_ms())
    await asyncio.sleep(for_s)
    stage.server.weather.down = False
    stage.transactions.outages.ends(stage.world.clock.monotonic_ms())


async def database_silent(stage: Stage, for_s: float) -> None:
    """Let the database answer nobody for a while."""
    if stage.server.weather.silent:
        return
    stage.tell(f"the database is silent, for {for_s:.1f} s")
    stage.server.weather.silent = True
    await asyncio.sleep(for_s)
    stage.server.weather.silent = False


async def database_slow(stage: Stage, for_s: float) -> None:
    """Make every way to the database a hundred times longer."""
    weather = stage.server.weather
    before = weather.latency_s
    stage.tell(f"the database is slow, for {for_s:.1f} s")
    weather.latency_s = lambda: 100 * before()
    await asyncio.sleep(for_s)
    weather.latency_s = before


async def lost_commits(stage: Stage, for_s: float) -> None:
    """Lose a share of the connections at the COMMIT, before it or after it: nobody knows which."""
    weather = stage.server.weather
    before = weather.fate
    share = stage.rng.uniform(0.02, 0.3)
    rng = stage.rng

    def fate(client: str) -> str:
        if client == stage.operator_process.name or rng.random() >= share:
            return before(client)
        stage.faults["commit-of-unknown-outcome"] += 1
        return rng.choice([Fate.LOST_BEFORE, Fate.LOST_AFTER])

    stage.tell(f"{share:.0%} of the commits have an unknown outcome, for {for_s:.1f} s")
    weather.fate = fate
    await asyncio.sleep(for_s)
    weather.fate = before


async def database_clock_step(stage: Stage, for_s: float) -> None:
    """Step the database's clock, by as much as daemons believe it when it steps back again."""
    if stage.database_clock.wall_offset_ms:
        return
    step_ms = int(stage.rng.uniform(-BACKWARDS_ALLOWED_MS, BACKWARDS_ALLOWED_MS))
    stage.tell(f"the database's clock steps by {step_ms} ms, for {for_s:.1f} s")
    stage.transactions.outages.doubted(stage.world.clock.monotonic_ms())
    stage.database_clock.wall_offset_ms += step_ms
    await asyncio.sleep(for_s)
    stage.database_clock.wall_offset_ms -= step_ms
    stage.transactions.outages.doubted(stage.world.clock.monotonic_ms())


async def database_standby(stage: Stage, for_s: float) -> None:
    """Fail over to a standby that takes no writes yet: every connection is lost, and new ones find it read-only."""
    weather = stage.server.weather
    if weather.read_only or weather.down:
        return
    stage.tell(f"the database is a read-only standby, for {for_s:.1f} s")
    weather.read_only = True
    stage.server.restart()
    stage.transactions.outages.begins(stage.world.clock.monotonic_ms())
    await asyncio.sleep(for_s)
    weather.read_only = False
    stage.transactions.outages.ends(stage.world.clock.monotonic_ms())


async def database_failover(stage: Stage, for_s: float) -> None:
    """Promote a standby that lacks the commits of the last moments; sessions may outlive it."""
    lag_s = stage.rng.uniform(0, LAG_S)
    await _goes_back(stage, lag_s, away_s=for_s, what="a standby is promoted that lacks the commits of the last")


async def database_restored(stage: Stage, for_s: float) -> None:
    """Restore the database from a backup that was taken a while ago."""
    away_s = stage.rng.uniform(*RESTORE_S)
    await _goes_back(stage, for_s, away_s=away_s, what="the database is restored from a backup of")


async def _goes_back(stage: Stage, lag_s: float, *, away_s: float, what: str) -> None:
    if stage.copy_kept:
        return
    stage.copy_kept = True
    copy = copies.take(stage.server, name=str(stage.server.timeline))
    await asyncio.sleep(lag_s)
    while stage.server.weather.down or stage.server.weather.read_only:  # noqa: ASYNC110 - other faults' state
        await asyncio.sleep(1)
    stage.tell(f"{what} {lag_s:.1f} s, {away_s:.1f} s after its end")
    stage.server.weather.down = True
    stage.server.restart()
    stage.transactions.outages.begins(stage.world.clock.monotonic_ms())
    await asyncio.sleep(away_s)
    copies.put_back(stage.server, copy)
    copies.drop(stage.server, copy)
    stage.server.timeline += 1
    stage.went_back()
    stage.copy_kept = False
    stage.server.weather.down = False
    stage.transactions.outages.ends(stage.world.clock.monotonic_ms())
