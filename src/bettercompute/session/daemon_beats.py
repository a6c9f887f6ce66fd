"""What a daemon sends and ends by itself: heartbeats, events, status, silence, drain.

The shell ticks when `next_tick_ms` says so and at any other time; nothing depends on a tick being punctual. See
docs/sessions.md, "Liveness".
"""

from __future__ import annotations

from dataclasses import replace

from bettercompute.delivery import events, journal_rules
from bettercompute.protocol import messages
from bettercompute.session import clock, daemon_answers, liveness, refusals
from bettercompute.session.changes import changed
from bettercompute.session.daemon_state import DaemonSession, Phase
from bettercompute.session.effects import (
    DaemonEffect,
    EndSession,
    ForgetCommands,
    SendAgentFrame,
    SendEvents,
    StoreTime,
)
from bettercompute.session.inputs import DaemonTick
from bettercompute.session.welcome import clock_condition, host_clock_change

Outcome = tuple[DaemonSession, tuple[DaemonEffect, ...]]

WELCOME_WITHIN_MS = 60_000
"""A gateway answers Hello within its own bounds, or refuses it; a silent one is given up like any other."""
TICK_MAX_MS = 5_000


def ticked(state: DaemonSession, given: DaemonTick, *, now_ms: int) -> Outcome:
    """Return what the passing of time brings."""
    state = changed(state, last_heard_ms=max(state.last_heard_ms, given.last_heard_ms))
    ending = _ending(state, now_ms=now_ms)
    if ending is not None:
        return changed(state, phase=Phase.ENDING), (ending,)
    if state.phase is not Phase.LIVE:
        return state, ()
    return _beat(state, given, now_ms=now_ms) if _heartbeat_due(state, now_ms=now_ms) else (state, ())


def next_tick_ms(state: DaemonSession, *, now_ms: int) -> int:
    """Return in how many milliseconds the next `DaemonTick` is due: heartbeat, drain, silence; at most 5 s."""
    due = [now_ms + TICK_MAX_MS]
    if state.phase is Phase.LIVE:
        due += [at for at in (state.next_heartbeat_at_ms, state.drain_at_ms) if at is not None]
    if state.phase in (Phase.LIVE, Phase.AWAITING_WELCOME):
        due.append(state.last_heard_ms + liveness.SERVER_SILENCE_MS)
    return max(0, min(due) - now_ms)


def _ending(state: DaemonSession, *, now_ms: int) -> EndSession | None:
    if state.phase not in (Phase.LIVE, Phase.AWAITING_WELCOME):
        return None
    if liveness.server_silent(last_heard_ms=state.last_heard_ms, now_ms=now_ms):
        silence_ms = now_ms - state.last_heard_ms
        return EndSession("server-silent", f"no frame and no answered PING for {silence_ms} ms: dialing anew")
    if state.phase is Phase.AWAITING_WELCOME and now_ms - state.dialed_at_ms >= WELCOME_WITHIN_MS:
        return EndSession("no-welcome", f"no Welcome within {WELCOME_WITHIN_MS} ms of Hello: dialing anew")
    if state.drain_at_ms is not None and now_ms >= state.drain_at_ms:
        return EndSession("drained", "the gateway asked to reconnect elsewhere")
    return None


def _heartbeat_due(state: DaemonSession, *, now_ms: int) -> bool:
    return state.next_heartbeat_at_ms is not None and now_ms >= state.next_heartbeat_at_ms


def _beat(state: DaemonSession, given: DaemonTick, *, now_ms: int) -> Outcome:
    """Send a heartbeat; move the mark, write it once a minute, and forget what has been kept long enough."""
    carries = liveness.carries_hashes(heartbeats_sent=state.heartbeats_sent, inventory_changed=state.hashes_due)
    beat = messages.Heartbeat(
        lanes=[
            messages.LaneState(lane=messages.Lane.ValueType(key), free=lane.free, received=lane.received)
            for key, lane in sorted(state.lanes.items())
        ],
        load=given.load,
        applied_generation=state.advertised.applied_generation,
        inventory_hashes=state.advertised.inventory_hashes if carries else {},
    )
    before = state.clock
    judged = clock.ticked(before, wall_ms=given.wall_ms, now_ms=now_ms)
    state = replace(
        state,
        clock=judged,
        heartbeats_sent=state.heartbeats_sent + 1,
        hashes_due=False,
        next_heartbeat_at_ms=now_ms + state.heartbeat_interval_ms,
    )
    effects: list[DaemonEffect] = []
    if clock.store_due(judged, now_ms=now_ms):
        state, writes = _store_time(state, now_ms=now_ms)
        effects += writes
    effects.append(SendAgentFrame(messages.AgentFrame(heartbeat=beat)))
    if judged.unconfirmed != before.unconfirmed:
        effects.append(clock_condition(judged))
    if (judged.host_off, judged.unconfirmed) != (before.host_off, before.unconfirmed):
        effects += host_clock_change(before, judged)
    if not state.refused_reported:
        # Not at each refusal: a gateway must not make this node report as fast as it can forge.
        state, report = report_status(state)
        effects += report
    return state, tuple(effects)


def _store_time(state: DaemonSession, *, now_ms: int) -> Outcome:
    mark_ms = state.clock.mark_ms
    effects: list[DaemonEffect] = [StoreTime(mark_ms, clock.confirmed_time(state.clock, now_ms=now_ms))]
    gone = journal_rules.forgettable(
        (*state.entries.values(), *state.settled.values()),
        state.cancelled,
        process_id=state.facts.process_id,
        mark_ms=mark_ms,
    )
    if gone:
        effects.append(ForgetCommands(gone))
        state = daemon_answers.forgotten(state, gone)
    return changed(state, clock=clock.stored(state.clock, now_ms=now_ms)), tuple(effects)


# Events


def events_due(state: DaemonSession) -> Outcome:
    """Ask for the next batch of events, one at a time, while the window of unacked ones has room."""
    if state.phase is not Phase.LIVE or state.sending_events:
        return state, ()
    due = events.batch_to_send(
        acked_seq=state.acked_event_seq, sent_seq=state.sent_event_seq, last_seq=state.last_event_seq
    )
    if due is None:
        return state, ()
    after_seq, through_seq = due
    return changed(state, sending_events=True), (
        SendEvents(state.session_id, state.journal_id, after_seq, through_seq),
    )


def events_sent(state: DaemonSession, *, session_id: str, last_seq: int) -> Outcome:
    """Go on after a batch was queued; one of an earlier session says nothing about this one."""
    if session_id != state.session_id:
        return state, ()
    return events_due(changed(state, sent_event_seq=max(state.sent_event_seq, last_seq), sending_events=False))


# Status


def report_status(state: DaemonSession) -> Outcome:
    """Send the newest status; the first report after trust changed carries its version and the approver set."""
    if state.phase is not Phase.LIVE or state.status is None:
        return state, ()
    report = messages.StatusReport()
    report.CopyFrom(state.status)
    report.observed_generation = state.advertised.observed_generation
    report.applied_generation = state.advertised.applied_generation
    if not state.trust_reported:
        report.trust_version = state.advertised.trust_version
        report.approver_set_epoch = state.authority.approvers.epoch
        report.approver_set_sha256 = state.authority.approvers.sha256
    report.refusals.extend(refusals.reported(state.refused))
    told = changed(state, trust_reported=True, refused_reported=True)
    return told, (SendAgentFrame(messages.AgentFrame(status=report)),)
