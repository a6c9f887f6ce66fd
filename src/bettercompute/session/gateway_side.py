"""The gateway's end of a session: `step` routes each input to the rule of its heading and threads the state through.

The session begins with `open_session`, after the Hello transaction has committed, and ends with the first `Close`
effect. Nothing is decided here: the rules live in `welcome`, `gateway_frames`, `dispatch`, `liveness`, `closing` and
in `delivery`.
"""

from __future__ import annotations

from dataclasses import replace

from bettercompute.delivery import desired_state
from bettercompute.delivery.desired_state import StoredSpec
from bettercompute.delivery.lanes import GatewayLane, open_gateway_lane
from bettercompute.errors import Refused
from bettercompute.protocol import messages
from bettercompute.protocol.limits import MAX_RUNNING_COMMANDS
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.protocol.validation import validate_for_store
from bettercompute.session import closing, inputs, liveness
from bettercompute.session.changes import changed
from bettercompute.session.closing import Cause
from bettercompute.session.dispatch import (
    answered,
    back_off_over,
    commands_marked,
    kinds_lacking,
    marks_found,
    wants,
)
from bettercompute.session.effects import Close, GatewayEffect, PokeDispatch, SendFrame
from bettercompute.session.gateway_frames import frame_received, without
from bettercompute.session.gateway_state import DispatchDemand, GatewaySession, LaneDemand
from bettercompute.session.hello_plan import HelloPlan
from bettercompute.session.welcome import cancel_frame, desired_frame, opening_frames, spec_to_offer

__all__ = ["DispatchDemand", "GatewaySession", "LaneDemand", "answered", "open_session", "step", "wants"]

DRAIN_GRACE_MS = 10_000
"""How long past its time a draining daemon may take to end the stream itself."""

CANCELS_TOLD_MAX = MAX_RUNNING_COMMANDS
"""More than a node ever has in flight."""

Outcome = tuple[GatewaySession, tuple[GatewayEffect, ...]]


def open_session(
    plan: HelloPlan,
    *,
    spec: StoredSpec | None,
    trust: messages.SignedTrustBundle | None,
    server_time_ms: int,
    now_ms: int,
    trust_version: int = 0,
) -> Outcome:
    """Return the session that a committed plan begins, and what is sent: Welcome, Ack, DesiredState, replay, cancels.

    `spec` when `plan.send_spec`, `trust`, of `trust_version`, when `plan.send_trust`; `server_time_ms` is compute_now()
    of now.
    """
    offered = spec_to_offer(plan, spec)
    frames = opening_frames(plan, offered=offered, trust=trust, server_time_ms=server_time_ms)
    sent = {**plan.running, **{command.command_id: command.lane for command in plan.resent}}
    state = GatewaySession(
        node_id=plan.node_id,
        session_id=plan.row.session_id,
        epoch=plan.row.session_epoch,
        gateway_id=plan.row.gateway_id,
        boot_id=plan.row.boot_id,
        journal_id=plan.row.journal_id,
        certificate_serial=plan.row.cert_serial,
        certificate_ends_at_ms=now_ms + plan.certificate_left_ms,
        heartbeat_interval_ms=plan.row.heartbeat_interval_ms,
        upgrade_only=plan.upgrade_required,
        signed_only=plan.row.signed_only,
        allowed_kinds=plan.allowed_kinds,
        lacking=kinds_lacking(plan.row.capabilities),
        tenant_controlled=plan.tenant_controlled,
        trust_version=plan.row.trust_version,
        last_heard_ms=now_ms,
        lanes={lane: _opened_lane(plan, lane, granted) for lane, granted in plan.lane_credits.items()},
        sent=sent,
        held=plan.held,
        next_event_seq=plan.next_event_seq,
        observed_generation=plan.observed_generation,
        applied_generation=plan.applied_generation,
        offered_generation=_already_offered(plan, spec=spec, offered=offered is not None),
        busy={},
        cancels_told=frozenset(plan.cancels),
        trust_offered=0 if trust is None else trust_version,
        awaits_new_journal=plan.new_journal,
    )
    return state, (*(SendFrame(frame) for frame in frames), PokeDispatch())


def _already_offered(plan: HelloPlan, *, spec: StoredSpec | None, offered: bool) -> int:
    """Return the generation that needs no offer any more: what went out with Welcome, or what the daemon has applied.

    0 where one was due and could not be read, or not be sent unsigned: the poll looks for it.
    """
    if plan.send_spec:
        return spec.generation if spec is not None and offered else 0
    return plan.applied_generation


def _opened_lane(plan: HelloPlan, lane: int, granted: int) -> GatewayLane:
    """Count a lane's credits anew: what runs holds one, then each re-sent command takes one and counts as sent."""
    opened = open_gateway_lane(granted=granted, running=(name for name, key in plan.running.items() if key == lane))
    resent = frozenset(command.command_id for command in plan.resent if command.lane == lane)
    return replace(opened, free=opened.free - len(resent), sent=len(resent), holders=opened.holders | resent)


def step(state: GatewaySession, given: inputs.GatewayInput, now_ms: int) -> Outcome:
    """Return the state and the effects that follow from one input. A closed session ignores everything."""
    if state.closed:
        return state, ()
    try:
        state, effects = _route(state, given, now_ms)
    except Refused as error:
        effects = (closing.close_refused(error),)
    if effects and isinstance(effects[-1], Close):
        state = changed(state, closed=True)
    return state, effects


def _route(state: GatewaySession, given: inputs.GatewayInput, now_ms: int) -> Outcome:
    match given:
        case inputs.FrameReceived(frame):
            validate_for_store(frame)
            return frame_received(changed(state, last_heard_ms=now_ms), frame)
        case inputs.CommandsMarked(commands, settled):
            return commands_marked(state, commands, settled)
        case inputs.FactsCommitted():
            return _facts_committed(state, given)
        case inputs.MarksFound(commands):
            return marks_found(state, commands)
        case inputs.PutBackCommitted():
            return state, (PokeDispatch(),)
        case inputs.BackOffOver(command):
            return back_off_over(state, command)
        case inputs.CancelRequested(command_id, reason):
            return _cancel_requested(state, command_id, reason)
        case inputs.SpecPublished(spec, requested):
            return _spec_published(state, spec, requested=requested)
        case inputs.DrainRequested(reconnect_after_ms, reason):
            drain = messages.Drain(reconnect_after_ms=reconnect_after_ms, reason=reason)
            draining = changed(state, drain_at_ms=now_ms + reconnect_after_ms)
            return draining, (SendFrame(messages.ServerFrame(drain=drain)),)
        case inputs.TunnelRequested(tunnel_id, ticket):
            request = messages.OpenTunnel(tunnel_id=tunnel_id, ticket=ticket)
            return state, (SendFrame(messages.ServerFrame(open_tunnel=request)),)
        case inputs.SecretAnswered(response):
            return state, (SendFrame(messages.ServerFrame(secret=response)),)
        case inputs.WorkloadTokenAnswered(response):
            return state, (SendFrame(messages.ServerFrame(workload_token=response)),)
        case inputs.Tick():
            return state, _ticked(state, now_ms=now_ms)
        case inputs.FrameRefused(message):
            raise refuse(Reason.INVALID_FRAME, message)
        case _:
            return state, _ended(given)


def _ended(given: inputs.EndingInput) -> tuple[GatewayEffect, ...]:
    """Return how each ending input ends the session."""
    match given:
        case inputs.Superseded():
            return (closing.close(Cause.SUPERSEDED_HERE, "superseded by a newer session"),)
        case inputs.ZombieFound():
            return (closing.close(Cause.SUPERSEDED_ELSEWHERE, "superseded by a newer session on another gateway"),)
        case inputs.LeaseLost():
            return (closing.close(Cause.FENCED, "the gateway lost its lease and is fenced; dial another one"),)
        case inputs.Revoked(notice):
            told = SendFrame(messages.ServerFrame(revoked=notice))
            return told, closing.close(Cause.REVOKED, notice.message or "the certificate is revoked")
        case inputs.Locked(message, pushback_ms):
            return (closing.close(Cause.LOCKED, message, pushback_ms=pushback_ms),)
        case inputs.FactsFailed(message):
            return (closing.close(Cause.FACTS_FAILED, message),)
        case inputs.FactsPoisoned(message):
            return (closing.close(Cause.FACTS_POISONED, message),)
        case inputs.SlowConsumer(queued_bytes):
            message = f"{queued_bytes} bytes wait to be read by this daemon; it reads too slowly"
            return (closing.close(Cause.SLOW_CONSUMER, message),)
        case inputs.GatewayStopping():
            return (closing.close(Cause.STOPPING, "the gateway stops; dial another one"),)
        case inputs.PeerEnded(message):
            return (closing.close(Cause.STREAM_ENDED, message or "the daemon ended the stream"),)


def _facts_committed(state: GatewaySession, given: inputs.FactsCommitted) -> Outcome:
    """Commit before ack: this is the only place from which an Ack leaves after Welcome's."""
    if not given.command_ids and not given.acked_event_seq:
        return state, ()
    if given.command_ids:
        state = changed(state, ending=state.ending.difference(given.command_ids))
    ack = messages.Ack(
        journal_id=given.journal_id, acked_event_seq=given.acked_event_seq, command_ids=given.command_ids
    )
    return state, (SendFrame(messages.ServerFrame(ack=ack)),)


def _cancel_requested(state: GatewaySession, command_id: str, reason: str) -> Outcome:
    """Tell the daemon, once on this stream, which loses nothing: the next session tells what has not ended by then.

    A command held back is not sent any more: the daemon's answer to the unknown id ends it.
    """
    if any(held.command_id == command_id for held in state.held):
        state = without(state, (command_id,))
    if state.awaits_new_journal or command_id in state.cancels_told or command_id in state.ending:
        return state, ()
    # Commands that others ended are never heard of here; should so many come together, all are told once more.
    told = state.cancels_told if len(state.cancels_told) < CANCELS_TOLD_MAX else frozenset[str]()
    return changed(state, cancels_told=told | {command_id}), (SendFrame(cancel_frame(command_id, reason=reason)),)


def _spec_published(state: GatewaySession, spec: StoredSpec, *, requested: bool) -> Outcome:
    if state.upgrade_only or state.awaits_new_journal:
        return state, ()
    offered = desired_state.offer(
        spec,
        offered_generation=state.offered_generation,
        applied_generation=state.applied_generation,
        requested=requested,
        full_only=False,
        signed_only=state.signed_only,
    )
    if offered is None:
        return state, ()
    return changed(state, offered_generation=max(spec.generation, state.offered_generation)), (
        SendFrame(desired_frame(offered)),
    )


def _ticked(state: GatewaySession, *, now_ms: int) -> tuple[GatewayEffect, ...]:
    cause = liveness.closing_cause(
        last_heard_ms=state.last_heard_ms,
        heartbeat_interval_ms=state.heartbeat_interval_ms,
        certificate_ends_at_ms=state.certificate_ends_at_ms,
        now_ms=now_ms,
    )
    if cause is Cause.CERTIFICATE_EXPIRED:
        return (closing.close(cause, f"certificate {state.certificate_serial} expired during the session; renew it"),)
    if cause is not None:
        silence_ms = now_ms - state.last_heard_ms
        return (closing.close(cause, f"no frame for {silence_ms} ms, three intervals of the heartbeat"),)
    if state.drain_at_ms is not None and now_ms >= state.drain_at_ms + DRAIN_GRACE_MS:
        return (closing.close(Cause.DRAINED, "asked to reconnect elsewhere; dial another gateway"),)
    return ()
