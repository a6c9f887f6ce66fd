"""What the gateway makes of each frame of a live session: facts, credits, put-backs.

Each function takes the state and one part of an `AgentFrame` and returns the state and effects. A frame that breaks
the protocol is refused by raising; `gateway_side` turns that into the session's end. What a daemon *reports* never
raises. See docs/sessions.md, "Frames of a live session".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from bettercompute.delivery import events, facts, lanes
from bettercompute.delivery.commands import TERMINAL
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.session import busy
from bettercompute.session.changes import changed
from bettercompute.session.effects import (
    AskSecret,
    AskWorkloadToken,
    GatewayEffect,
    PokeDispatch,
    PutBack,
    RecordFacts,
    RequestSpec,
    SendFrame,
)
from bettercompute.session.gateway_state import GatewaySession

Outcome = tuple[GatewaySession, tuple[GatewayEffect, ...]]

ACCESS_DENIED = "access-denied"


def frame_received(state: GatewaySession, frame: messages.AgentFrame) -> Outcome:
    """Route one frame. A case this gateway does not know is ignored: a newer daemon may send it."""
    match frame.WhichOneof("frame"):
        case "heartbeat":
            return heartbeat(state, frame.heartbeat)
        case "update":
            return updates(state, (frame.update,))
        case "updates":
            return updates(state, frame.updates.updates)
        case "events":
            return event_batch(state, frame.events)
        case "status":
            return status(state, frame.status)
        case "inventory":
            return state, (RecordFacts((facts.inventory_fact(frame.inventory),)),)
        case "spec_request":
            return spec_request(state)
        case "secret_request":
            return secret_request(state, frame.secret_request)
        case "workload_token_request":
            return workload_token_request(state, frame.workload_token_request)
        case "hello":
            raise refuse(Reason.SECOND_HELLO, "a second Hello on one session: open a new stream to say it again")
        case _:
            return state, ()


def heartbeat(state: GatewaySession, beat: messages.Heartbeat) -> Outcome:
    """Resynchronize credits, keep the load in memory, and pass on what changed: nothing is written for a plain
    heartbeat.
    """
    counted = dict(state.lanes)
    for told in beat.lanes:
        lane = counted.get(told.lane)
        if lane is not None:
            counted[told.lane] = lanes.resynchronized(lane, free=told.free, received=told.received)
    news: list[facts.Fact] = []
    if beat.applied_generation != state.applied_generation:
        news.append(facts.AppliedGenerationFact(beat.applied_generation))
    if beat.inventory_hashes:
        news.append(facts.InventoryHashesFact(dict(beat.inventory_hashes)))
    gained = any(lane.available > state.lanes[key].available for key, lane in counted.items())
    state = changed(
        state,
        lanes=counted,
        load=beat.load if beat.HasField("load") else state.load,
        applied_generation=beat.applied_generation,
    )
    effects: list[GatewayEffect] = []
    if news:
        effects.append(RecordFacts(tuple(news)))
    if gained:
        effects.append(PokeDispatch())
    return state, tuple(effects)


def updates(state: GatewaySession, reported: Iterable[messages.CommandUpdate]) -> Outcome:
    """Record updates as facts, free credits, put back what was refused BUSY."""
    effects: list[GatewayEffect] = []
    news: list[facts.Fact] = []
    ended: list[str] = []
    freed = False
    for update in reported:
        if facts.is_busy(update):
            state, ended = _ended(state, ended), []
            state, put_back = _busy(state, update)
            effects += put_back
            continue
        fact = facts.command_fact(update, authenticated=not state.signed_only or update.HasField("signature"))
        if fact is None:
            continue
        news.append(fact)
        if fact.command_id in state.busy:
            state = changed(state, busy=busy.settled(state.busy, fact.command_id))
        if fact.state in TERMINAL:
            freed = freed or fact.command_id in state.sent
            ended.append(fact.command_id)
    state = _ended(state, ended)
    if news:
        effects.insert(0, RecordFacts(tuple(news)))
    if freed:
        effects.append(PokeDispatch())
    return state, tuple(effects)


def _ended(state: GatewaySession, command_ids: Collection[str]) -> GatewaySession:
    """Return the state once the end of these was heard, which is not committed yet."""
    if not command_ids:
        return state
    state = changed(without(state, command_ids), ending=state.ending.union(command_ids))
    if state.cancels_told.isdisjoint(command_ids):
        return state
    return changed(state, cancels_told=state.cancels_told.difference(command_ids))


def _busy(state: GatewaySession, update: messages.CommandUpdate) -> Outcome:
    """BUSY is routing: only what this session sent is put back, and the store compares the attempt."""
    if update.command_id not in state.sent:
        return state, ()
    counts, back_off_ms = busy.refused(state.busy, update.command_id)
    state = changed(without(state, (update.command_id,)), busy=counts)
    return state, (PutBack(update.command_id, update.attempt, back_off_ms),)


def without(state: GatewaySession, command_ids: Collection[str]) -> GatewaySession:
    """Return the state without these commands: their credits are free, and they are not held any more."""
    credited: dict[int, list[str]] = {}
    for command_id in command_ids:
        if (lane_key := state.sent.get(command_id)) is not None:
            credited.setdefault(lane_key, []).append(command_id)
    if credited:
        counted = {key: lanes.freed(lane, *credited.get(key, ())) for key, lane in state.lanes.items()}
        remaining = {other: lane for other, lane in state.sent.items() if other not in command_ids}
        state = changed(state, lanes=counted, sent=remaining)
    if any(command.command_id in command_ids for command in state.held):
        state = changed(state, held=tuple(other for other in state.held if other.command_id not in command_ids))
    return state


def event_batch(state: GatewaySession, batch: messages.EventBatch) -> Outcome:
    """Record a batch of events; a gap or another journal ends the session INVALID_ARGUMENT."""
    fact = facts.events_fact(batch)
    next_seq = events.checked_batch(fact, journal_id=state.journal_id, next_seq=state.next_event_seq)
    return changed(state, next_event_seq=next_seq), (RecordFacts((fact,)),)


def status(state: GatewaySession, report: messages.StatusReport) -> Outcome:
    """Record a status report and remember what it says of generations and trust."""
    state = changed(
        state,
        observed_generation=max(state.observed_generation, report.observed_generation),
        applied_generation=report.applied_generation,
        trust_version=max(state.trust_version, report.trust_version),
    )
    return state, (RecordFacts((facts.status_fact(report),)),)


def spec_request(state: GatewaySession) -> Outcome:
    """Read the full spec for a daemon that asks for it; an upgrade-only session gets none."""
    if state.upgrade_only or state.awaits_new_journal:
        return state, ()
    return state, (RequestSpec(),)


def secret_request(state: GatewaySession, request: messages.SecretRequest) -> Outcome:
    """Relay a request for a secret; a tenant-controlled certificate always gets access-denied."""
    if not state.tenant_controlled:
        return state, (AskSecret(request),)
    denied = messages.SecretResponse(request_id=request.request_id, error=ACCESS_DENIED)
    return state, (SendFrame(messages.ServerFrame(secret=denied)),)


def workload_token_request(state: GatewaySession, request: messages.WorkloadTokenRequest) -> Outcome:
    """Relay a request for an instance's token; a tenant-controlled certificate always gets access-denied."""
    if not state.tenant_controlled:
        return state, (AskWorkloadToken(request),)
    denied = messages.WorkloadTokenResponse(request_id=request.request_id, error=ACCESS_DENIED)
    return state, (SendFrame(messages.ServerFrame(workload_token=denied)),)
