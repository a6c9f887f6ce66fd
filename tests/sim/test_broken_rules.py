"""Eight rules, each broken on purpose: the simulator must notice within 50 seeds, or it judges nothing.

Rules are broken by patching them here, in the test's own process; production code knows no such switch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from bettercompute.delivery import lanes
from bettercompute.gateway import fence, ingest
from bettercompute.session import gateway_side, liveness, resume
from bettercompute.store import database
from bettercompute.store.statements import statements
from bettercompute.testing.sim import ledger
from bettercompute.testing.sim import scenario as scenarios
from bettercompute.testing.sim.scenario import FaultPlan, Scenario, Work
from tests.sim import totals
from tests.sim.conftest import Run

SEEDS = 50
Patch = pytest.MonkeyPatch


def rewrite_sql(patch: Patch, pattern: str, by: str) -> None:
    """Replace a pattern in every named statement."""
    changed = {
        name: replace(statement, sql=re.sub(pattern, by, statement.sql)) for name, statement in statements().items()
    }
    assert any(changed[name].sql != statement.sql for name, statement in statements().items()), pattern
    patch.setattr(database, "statements", lambda: changed)


def epoch_predicate_dropped(patch: Patch) -> None:
    fenced = r"s\.session_epoch = said\.session_epoch AND s\.session_id = said\.session_id AND s\.gateway_id = (\$\d+)"
    # The parameter stays in the statement, or PostgreSQL would not take it.
    rewrite_sql(patch, fenced, r"\1::text IS NOT NULL")


def ack_before_commit(patch: Patch) -> None:
    real = ingest.Ingest.add

    def add(self, owner, *, opening, facts):
        real(self, owner, opening=opening, facts=facts)
        owner.give(ingest._committed(ingest.Offering(owner, opening, tuple(facts), rows=0, bytes=0), {}))

    patch.setattr(ingest.Ingest, "add", add)


def credits_not_reset(patch: Patch) -> None:
    def open_gateway_lane(*, granted, running):
        del running
        return lanes.GatewayLane(credits=granted, free=granted)

    patch.setattr(gateway_side, "open_gateway_lane", open_gateway_lane)


def journal_lost_rule_inverted(patch: Patch) -> None:
    real = resume._settle_by_evidence
    patch.setattr(
        resume,
        "_settle_by_evidence",
        lambda command, kind, seen: real(command, kind, replace(seen, journal_changed=not seen.journal_changed)),
    )


def double_replay(patch: Patch) -> None:
    real = resume.settle

    def settle(command, reconnect, **options):
        found = real(command, reconnect, **options)
        return replace(found, resend=True) if found.rule is resume.Rule.RUNNING else found

    patch.setattr(resume, "settle", settle)


def alter_schema(patch: Patch, sql: str) -> None:
    """Change the schema of each simulated database."""
    real = ledger.install

    def install(server):
        server.script(sql)
        real(server)

    patch.setattr(ledger, "install", install)


def lease_unchecked(patch: Patch) -> None:
    patch.setattr(fence.Fence, "trusted", lambda self: not self._retired and self._opening > 0)
    alter_schema(
        patch,
        "CREATE OR REPLACE FUNCTION holds_lease(gateway text, lease_token text) RETURNS boolean LANGUAGE sql STABLE"
        " PARALLEL SAFE AS $$ SELECT true $$",
    )


def event_dedup_off(patch: Patch) -> None:
    alter_schema(patch, "ALTER TABLE node_events DROP CONSTRAINT node_events_node_id_event_id_key")


def grace_ignored(patch: Patch) -> None:
    patch.setattr(liveness, "in_grace", lambda *_args, **_named: False)


def of_short(name: str, *kinds: str, work: Work) -> Scenario:
    """Return `short` with some of its faults only: what a rule is for comes more often, and costs less to wait for."""
    short = scenarios.load("short")
    return replace(short, name=name, faults=tuple(plan for plan in short.faults if plan.kind in kinds), work=work)


RECONNECTS = of_short(
    *("reconnects", "connection-loss", "partition", "gateway-pause"), work=Work(command_every_s=1, event_every_s=20)
)
SUPERSEDED = of_short(
    *("superseded", "gateway-pause", "gateway-partition", "partition", "clone"), work=Work(command_every_s=1)
)
LOST_JOURNALS = replace(
    of_short("lost-journals", "journal-lost", work=Work(command_every_s=0.7, event_every_s=20)),
    faults=(FaultPlan(kind="journal-lost", every_s=6), FaultPlan(kind="connection-loss", every_s=6)),
)
RESTORED_DISKS = replace(
    of_short("restored-disks", "connection-loss", work=Work(command_every_s=10, event_every_s=0.5)),
    faults=(
        FaultPlan(kind="journal-rollback", every_s=6, for_s=(2, 15)),
        FaultPlan(kind="connection-loss", every_s=6),
        FaultPlan(kind="node-crash", every_s=10),
    ),
)
# A judgement without the grace needs a gateway that nobody has replaced when the database is back, and long ages.
LONG_OUTAGES = replace(
    scenarios.load("outages"),
    name="long-outages",
    faults=(
        FaultPlan(kind="database-restart", every_s=100, for_s=(150, 400)),
        FaultPlan(kind="gateway-crash", every_s=100, for_s=(60, 400)),
    ),
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("breaking", "scenario"),
    [
        (epoch_predicate_dropped, SUPERSEDED),
        (ack_before_commit, scenarios.load("short")),
        (credits_not_reset, RECONNECTS),
        (journal_lost_rule_inverted, LOST_JOURNALS),
        (double_replay, RECONNECTS),
        (lease_unchecked, scenarios.load("outages")),
        (event_dedup_off, RESTORED_DISKS),
        (grace_ignored, LONG_OUTAGES),
    ],
    ids=lambda value: value.name if isinstance(value, Scenario) else value.__name__,
)
def test_a_broken_rule_is_noticed(
    simulate: Run,
    record_property: Callable[[str, object], None],
    breaking: Callable[[Patch], None],
    scenario: Scenario,
) -> None:
    """Only by a seed that is sound while the rule holds: what breaks anyway shows nothing of this rule."""
    unsound: list[int] = []
    for seed in range(1, SEEDS + 1):
        with pytest.MonkeyPatch.context() as patch:
            breaking(patch)
            outcome = simulate(scenario, seed)
        if not outcome.violations:
            continue
        if simulate(scenario, seed).violations:
            unsound.append(seed)
            continue
        by = f"{breaking.__name__}, by seed {seed} of {scenario.name}: {outcome.violations[0].rule}"
        record_property(totals.FOUND, by)
        return
    pytest.fail(
        f"{breaking.__name__} went unnoticed through {SEEDS} seeds of {scenario.name}; unsound without it: {unsound}"
    )
