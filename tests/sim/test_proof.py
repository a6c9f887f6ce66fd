"""Rules whose breaking leaves nothing open and befalls nobody at once: shown by what is asked of a fleet in the end.

Each is broken on purpose in a small fleet that few faults befall, or none; see `testing/sim/proving.py` and `said.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from bettercompute.daemon.driver import Driver
from bettercompute.delivery.commands import CommandState
from bettercompute.gateway.session import LiveSession
from bettercompute.session import daemon_beats, daemon_commands, effects, gateway_side, liveness
from bettercompute.session.effects import JournalWrite
from bettercompute.session.inputs import DrainRequested, Locked, Revoked
from bettercompute.testing.sim.scenario import FaultPlan, Fleet, Phases, Scenario, Times, Work
from tests.sim import totals
from tests.sim.conftest import Run, until_noticed

SEEDS = 5
Patch = pytest.MonkeyPatch


def small(*faults: FaultPlan) -> Scenario:
    return Scenario(
        name="small " + ", ".join(plan.kind for plan in faults),
        fleet=Fleet(nodes=1, daemons=2, gateways=2, workers=1, signing=True),
        phases=Phases(calm_s=10, faults_s=20, settle_s=300),
        work=Work(command_every_s=2, event_every_s=1),
        faults=faults,
    )


QUIET = small()
# What is under way when a connection is lost: often, on long ways.
CUTS = replace(
    small(FaultPlan(kind="connection-loss", every_s=1.5)),
    times=Times(network_ms=(50, 400), database_ms=(50, 300)),
    work=Work(command_every_s=1, event_every_s=0.3),
)


def not_given(patch: Patch, *kinds: type) -> None:
    """Have live sessions not hear of something."""
    real = LiveSession.give
    patch.setattr(LiveSession, "give", lambda self, given: None if isinstance(given, kinds) else real(self, given))


def nothing_sent(patch: Patch) -> Scenario:
    patch.setattr(gateway_side, "wants", lambda _state: None)
    return QUIET


def cancels_not_sent(patch: Patch) -> Scenario:
    patch.setattr(gateway_side, "_cancel_requested", lambda state, _command_id, _reason: (state, ()))
    return QUIET


def everything_fails(patch: Patch) -> Scenario:
    real = daemon_commands.handler_finished

    def failed(state, given, *, now_ms):
        return real(state, replace(given, state=CommandState.FAILED), now_ms=now_ms)

    patch.setattr(daemon_commands, "handler_finished", failed)
    return QUIET


def revocations_end_no_session(patch: Patch) -> Scenario:
    not_given(patch, Revoked)
    return QUIET


def locks_end_no_session(patch: Patch) -> Scenario:
    not_given(patch, Locked)
    return QUIET


def drains_ignored(patch: Patch) -> Scenario:
    not_given(patch, DrainRequested)
    return QUIET


def silence_of_a_node_ignored(patch: Patch) -> Scenario:
    patch.setattr(liveness, "closing_cause", lambda **_named: None)
    return QUIET


def said_before_it_is_durable(patch: Patch) -> Scenario:
    real = Driver._obey_all

    async def obey(self, produced):
        for effect in produced:
            if not isinstance(effect, JournalWrite):
                await self._obey(effect)
        return await real(self, tuple(effect for effect in produced if isinstance(effect, JournalWrite)))

    patch.setattr(Driver, "_obey_all", obey)
    return QUIET


def events_forgotten_when_sent(patch: Patch) -> Scenario:
    real = daemon_beats.events_sent

    def sent(state, *, session_id, last_seq):
        state, due = real(state, session_id=session_id, last_seq=last_seq)
        seq = max(state.acked_event_seq, min(last_seq, state.last_event_seq))
        return replace(state, acked_event_seq=seq), (effects.AckEvents(seq), *due)

    patch.setattr(daemon_beats, "events_sent", sent)
    return CUTS


def results_forgotten_when_sent(patch: Patch) -> Scenario:
    real = daemon_commands._finished

    def finished(state, entry, update):
        state, said = real(state, entry, update)
        entries = {key: kept for key, kept in state.entries.items() if key != entry.command_id}
        return replace(state, entries=entries), said

    patch.setattr(daemon_commands, "_finished", finished)
    # Only of a kind that may not run twice is more than time lost, and few of those end in one run.
    return replace(CUTS, phases=replace(CUTS.phases, faults_s=90), work=Work(command_every_s=2, cancel_share=0))


BREAKINGS = [
    *(nothing_sent, cancels_not_sent, everything_fails),
    *(revocations_end_no_session, locks_end_no_session, drains_ignored, silence_of_a_node_ignored),
    *(said_before_it_is_durable, events_forgotten_when_sent, results_forgotten_when_sent),
]


@pytest.mark.long
@pytest.mark.parametrize("scenario", [QUIET, CUTS], ids=["quiet", "cuts"])
def test_a_small_fleet_is_sound(simulate: Run, scenario: Scenario) -> None:
    for seed in range(1, SEEDS + 1):
        assert not simulate(scenario, seed).violations


@pytest.mark.long
@pytest.mark.parametrize("breaking", BREAKINGS, ids=lambda value: str(value.__name__))
def test_what_leaves_nothing_open_is_noticed(
    simulate: Run,
    monkeypatch: Patch,
    record_property: Callable[[str, object], None],
    breaking: Callable[[Patch], Scenario],
) -> None:
    wanted = breaking(monkeypatch)
    record_property(totals.FOUND, until_noticed(simulate, wanted, breaking.__name__, seeds=SEEDS))
