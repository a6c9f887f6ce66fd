"""Checks of the database and of the worker, which alone orders events and sees what nobody reports."""

from __future__ import annotations

from bettercompute.services.doctor.finding import Finding, Surroundings, failed, ok, warning
from bettercompute.store import controller_runs, doctor, migrations
from bettercompute.store.migrations import Phase

# Certificates are dated, proofs judged and locks ended by the database's clock; a proof of possession allows 60 s.
CLOCK_WARNS_MS = 2_000
CLOCK_FAILS_MS = 30_000
QUEUE_WARNS, QUEUE_FAILS = 0.25, 0.75
# The controllers look every 5 s, and the one that orders events every second.
RAN_WARNS_MS, RAN_FAILS_MS = 30_000, 120_000
UNNUMBERED_WARNS_MS, UNNUMBERED_FAILS_MS = 30_000, 300_000
WATCHED_CONTROLLER = "liveness"
START_WORKER = "start a worker (`better-compute serve --role worker`), or see its log"


async def check_migrations(around: Surroundings) -> Finding:
    """Whether the schema is the one that this release needs."""
    return judge_migrations(await migrations.status(around.dsn))


def judge_migrations(status: migrations.Status) -> Finding:
    """A changed file or a missing expansion has failed; what waits for its time, or a newer release did, warns."""
    missing = [one for one in status.pending if one.phase is Phase.EXPAND]
    if status.changed:
        return failed(
            f"migration {status.changed[0].version:04d} was changed after it was applied",
            cure="restore the file as released; a change of the schema is a new file",
        )
    if missing:
        return failed(f"{len(missing)} migrations are missing", cure="run `better-compute db migrate`")
    if status.newer:
        return warning(
            f"a newer release has moved the schema on to migration {status.newer[-1].version:04d}",
            cure="upgrade this process",
        )
    if status.pending:
        return warning(
            f"{len(status.pending)} contract migrations wait",
            cure="when every process runs this release: `better-compute db migrate --contract`",
        )
    return ok(f"all {len(status.applied)} migrations are applied")


async def check_clock(around: Surroundings) -> Finding:
    """Whether the database's clock and this process's agree."""
    before_ms = around.world.clock.now_ms()
    server = await doctor.server(around.database)
    # Halfway through the question; its way there and back is no difference of clocks.
    middle_ms = (before_ms + around.world.clock.now_ms()) // 2
    return judge_clock(server.now_ms - middle_ms)


def judge_clock(offset_ms: int) -> Finding:
    """Judge how far the database's clock is ahead of the API's."""
    sentence = f"the database's clock is {abs(offset_ms)} ms {'ahead of' if offset_ms > 0 else 'behind'} the API's"
    cure = "run a time service (chrony, systemd-timesyncd) on both hosts"
    if abs(offset_ms) > CLOCK_FAILS_MS:
        return failed(sentence, cure=cure)
    return warning(sentence, cure=cure) if abs(offset_ms) > CLOCK_WARNS_MS else ok(sentence)


async def check_notify_queue(around: Surroundings) -> Finding:
    """Whether somebody listens for notifications and does not read them."""
    return judge_notify_queue((await doctor.server(around.database)).notify_queue_share)


def judge_notify_queue(share: float) -> Finding:
    """A full queue makes every commit that notifies fail."""
    sentence = f"the queue of notifications is {share:.0%} full"
    cure = (
        "a session that listens holds a transaction open: find it in pg_stat_activity (state 'idle in transaction', "
        "the oldest xact_start) and end it"
    )
    if share > QUEUE_FAILS:
        return failed(sentence, cure=cure)
    return warning(sentence, cure=cure) if share > QUEUE_WARNS else ok(sentence)


async def check_outbox(around: Surroundings) -> Finding:
    """Whether published events get their place in the stream."""
    return judge_outbox(await doctor.oldest_unnumbered_ms(around.database))


def judge_outbox(waits_ms: int) -> Finding:
    """Judge how long the oldest event has waited."""
    if waits_ms <= UNNUMBERED_WARNS_MS:
        return ok("published events are numbered as they come")
    sentence = f"an event waits for its place in the stream since {waits_ms // 1000} s"
    return (failed if waits_ms > UNNUMBERED_FAILS_MS else warning)(sentence, cure=START_WORKER)


async def check_controllers(around: Surroundings) -> Finding:
    """Whether a worker runs."""
    run = await controller_runs.get(around.database, name=WATCHED_CONTROLLER)
    return judge_controllers(
        None if run is None else run.now_ms - run.ran_at_ms, holder="" if run is None else run.holder
    )


def judge_controllers(since_ms: int | None, *, holder: str) -> Finding:
    """Judge how long ago the controllers last looked; None: never."""
    if since_ms is None:
        return failed("no worker has ever run", cure=START_WORKER)
    sentence = f"{holder} last looked at the fleet {max(0, since_ms) // 1000} s ago"
    if since_ms > RAN_FAILS_MS:
        return failed(sentence, cure=START_WORKER)
    return warning(sentence, cure=START_WORKER) if since_ms > RAN_WARNS_MS else ok(sentence)
