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
from bettercompute.session import liveness, resume
from bettercompute.store import database
from bettercompute.store.statements import statements
from bettercompute.testing.sim import ledger
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
        owner.give(ingest._committed(ingest.Offering(owner, opening, tuple(facts), 0), {}))

    patch.setattr(ingest.Ingest, "add", add)


def credits_not_reset(patch: Patch) -> None:
    def open_gateway_lane(*, granted, running):
        del running
        return lanes.GatewayLane(credits=granted, free=granted)

    patch.setattr(lanes, "open_gateway_lane", open_gateway_lane)


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


def lease_unchecked(patch: Patch) -> None:
    patch.setattr(fence.Fence, "trusted", lambda self: not self._retired and self._opening > 0)
    rewrite_sql(patch, r"(\w+\.)?expires_at >=? compute_now\(\)", "true")


def event_dedup_off(patch: Patch) -> None:
    real = ledger.install

    def install(server):
        server.script("ALTER TABLE node_events DROP CONSTRAINT node_events_node_id_event_id_key")
        real(server)

    patch.setattr(ledger, "install", install)


def grace_ignored(patch: Patch) -> None:
    patch.setattr(liveness, "in_grace", lambda *_args, **_named: False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("breaking", "scenario"),
    [
        (epoch_predicate_dropped, "short"),
        (ack_before_commit, "short"),
        (credits_not_reset, "short"),
        (journal_lost_rule_inverted, "short"),
        (double_replay, "short"),
        (lease_unchecked, "outages"),
        (event_dedup_off, "short"),
        (grace_ignored, "outages"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_broken_rule_is_noticed(
    simulate: Run,
    monkeypatch: Patch,
    record_property: Callable[[str, object], None],
    breaking: Callable[[Patch], None],
    scenario: str,
) -> None:
    breaking(monkeypatch)
    for seed in range(1, SEEDS + 1):
        outcome = simulate(scenario, seed)
        if outcome.violations:
            by = f"{breaking.__name__}, by seed {seed} of {scenario}: {outcome.violations[0].rule}"
            record_property(totals.FOUND, by)
            return
    pytest.fail(f"{breaking.__name__} went unnoticed through {SEEDS} seeds of {scenario}")
