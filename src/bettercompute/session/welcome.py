"""Welcome, both ends: what the gateway answers to Hello and what the daemon makes of it.

The order on the wire is fixed: Welcome, an Ack for the replayed results, the full desired state when one is due, the
replay in seq order, cancels. Welcome is a barrier: the daemon obeys nothing of a session before it has judged
Welcome, above all its `server_time`, which nobody signs. See docs/sessions.md, "Welcome"; decisions 0101.
"""

from __future__ import annotations

from dataclasses import replace

from bettercompute.delivery import desired_state
from bettercompute.delivery.commands import OutgoingCommand
from bettercompute.delivery.desired_state import Offer, StoredSpec
from bettercompute.delivery.lanes import open_daemon_lane
from bettercompute.protocol import capabilities, messages
from bettercompute.session import clock, epochs, liveness, refusals
from bettercompute.session.daemon_state import DaemonSession, Phase
from bettercompute.session.effects import (
    AckEvents,
    ApplyTrust,
    DaemonEffect,
    EndSession,
    SetCondition,
    StoreEpoch,
    StoreNonces,
    StoreTime,
    TakeNewJournalId,
    Warn,
)
from bettercompute.session.hello_plan import HelloPlan
from bettercompute.session.reconnect import Backoff
from bettercompute.session.refusals import Relayed

CLOCK_UNCONFIRMED = "ClockUnconfirmed"
HOST_CLOCK_OFF = "HostClockOff"
NEW_JOURNAL = "new-journal"

# The gateway's end


def opening_frames(
    plan: HelloPlan, *, offered: Offer | None, trust: messages.SignedTrustBundle | None, server_time_ms: int
) -> tuple[messages.ServerFrame, ...]:
    """Return what a committed Hello is answered with, in the order of the wire."""
    frames = [messages.ServerFrame(welcome=_welcome(plan, trust=trust, server_time_ms=server_time_ms))]
    if plan.results:
        acked = [fact.command_id for fact in plan.results]
        frames.append(messages.ServerFrame(ack=messages.Ack(command_ids=acked)))
    if offered is not None:
        frames.append(desired_frame(offered))
    frames += [command_frame(command) for command in plan.resent]
    frames += [cancel_frame(command_id) for command_id in plan.cancels]
    return tuple(frames)


def spec_to_offer(plan: HelloPlan, spec: StoredSpec | None) -> Offer | None:
    """Return the full desired state that follows Welcome, when one is due and this session may carry it."""
    if spec is None or not plan.send_spec:
        return None
    return desired_state.offer(
        spec,
        offered_generation=0,
        applied_generation=plan.applied_generation,
        requested=False,
        full_only=True,
        signed_only=plan.row.signed_only,
    )


def command_frame(command: OutgoingCommand) -> messages.ServerFrame:
    """Return the frame of a command: its stored bytes, never re-encoded."""
    frame = messages.Command(body=command.body, attempt=command.attempt)
    if command.seen is not None:
        frame.seen = messages.CommandState.ValueType(command.seen)
    if command.signature:
        frame.signature.MergeFromString(command.signature)
    if command.batch_approval:
        frame.batch_approval.MergeFromString(command.batch_approval)
    if command.batch_proof:
        frame.batch_proof.MergeFromString(command.batch_proof)
    return messages.ServerFrame(command=frame)


def cancel_frame(command_id: str, *, reason: str = "") -> messages.ServerFrame:
    """Return the frame that stops a command between actions."""
    return messages.ServerFrame(cancel=messages.Cancel(command_id=command_id, reason=reason))


def desired_frame(offered: Offer) -> messages.ServerFrame:
    """Return the frame of a desired state: its stored bytes, never re-encoded."""
    frame = messages.DesiredState(body=offered.body)
    if offered.signature:
        frame.signature.MergeFromString(offered.signature)
    return messages.ServerFrame(desired=frame)


def _welcome(plan: HelloPlan, *, trust: messages.SignedTrustBundle | None, server_time_ms: int) -> messages.Welcome:
    return messages.Welcome(
        session_id=plan.row.session_id,
        epoch=plan.row.session_epoch,
        protocol_version=plan.protocol_version,
        upgrade_required=plan.upgrade_required,
        heartbeat_interval_ms=plan.row.heartbeat_interval_ms,
        lane_credits=[
            messages.LaneCredits(lane=messages.Lane.ValueType(lane), credits=granted)
            for lane, granted in sorted(plan.lane_credits.items())
        ],
        acked_event_seq=plan.row.acked_event_seq,
        request_sections=plan.request_sections,
        server_time_ms=server_time_ms,
        trust=trust if plan.send_trust else None,
        gateway_id=plan.row.gateway_id,
        gateway_capabilities=plan.gateway_capabilities,
        new_journal=plan.new_journal,
    )


# The daemon's end


def apply_welcome(
    state: DaemonSession, welcome: messages.Welcome, *, wall_ms: int, now_ms: int
) -> tuple[DaemonSession, tuple[DaemonEffect, ...]]:
    """Return the state after a Welcome was judged: live, or ending because of its time or of a rolled-back journal.

    What the daemon owes (sections, results, events, status) is the caller's to send once the state is live.
    """
    before = state.clock
    judged = clock.welcomed(
        before,
        server_time_ms=welcome.server_time_ms,
        wall_ms=wall_ms,
        now_ms=now_ms,
        leaf_not_before_ms=state.serving_not_before_ms,
        leaf_not_after_ms=state.serving_not_after_ms,
    )
    if isinstance(judged, clock.TimeRefused):
        ended = replace(refusals.counted(state, Relayed.WELCOME, judged.reason), phase=Phase.ENDING)
        return ended, (Warn(judged.reason, judged.message), EndSession(judged.reason, judged.message))
    if not epochs.is_possible(welcome.epoch):
        state = refusals.counted(state, Relayed.WELCOME, "epoch-out-of-range")
    state = replace(
        state,
        clock=clock.stored(judged, now_ms=now_ms),
        last_epoch=epochs.remembered(state.last_epoch, told=welcome.epoch),
        hello_nonce=b"",
        previous_hello_nonce=state.hello_nonce,
        backoff=Backoff(),
    )
    # That the nonce is used up outlives the process: otherwise a machine that only ever restarts would say the same
    # pair for ever, and a disk restored from any time of it would seem to continue.
    writes: tuple[DaemonEffect, ...] = (
        StoreNonces(state.hello_nonce, state.previous_hello_nonce),
        StoreEpoch(state.last_epoch),
        StoreTime(judged.mark_ms, clock.confirmed_time(judged, now_ms=now_ms)),
    )
    if welcome.new_journal:
        message = (
            "the control plane knows more than this journal: a restored disk, or a copy of this machine. Taking a new "
            "journal id and saying Hello anew"
        )
        ended = replace(state, phase=Phase.ENDING)
        return ended, (*writes, TakeNewJournalId(), Warn(NEW_JOURNAL, message), EndSession(NEW_JOURNAL, message))
    return _go_live(state, welcome, writes, before=before, now_ms=now_ms)


def _go_live(
    state: DaemonSession,
    welcome: messages.Welcome,
    writes: tuple[DaemonEffect, ...],
    *,
    before: clock.Clock,
    now_ms: int,
) -> tuple[DaemonSession, tuple[DaemonEffect, ...]]:
    interval_ms = liveness.heartbeat_interval_obeyed(welcome.heartbeat_interval_ms)
    # An ack past the journal's own end would have been a rollback; never believe more than was written.
    acked = max(state.acked_event_seq, min(welcome.acked_event_seq, state.last_event_seq))
    if acked > state.acked_event_seq:
        writes = (*writes, AckEvents(acked))
    state = replace(
        state,
        phase=Phase.LIVE,
        session_id=welcome.session_id,
        epoch=welcome.epoch,
        upgrade_only=welcome.upgrade_required,
        update_batches=capabilities.UPDATE_BATCH in welcome.gateway_capabilities,
        acked_event_seq=acked,
        sent_event_seq=acked,
        sending_events=False,
        heartbeat_interval_ms=interval_ms,
        next_heartbeat_at_ms=now_ms + interval_ms,
        heartbeats_sent=0,
        hashes_due=False,
        drain_at_ms=None,
        last_heard_ms=now_ms,
        lanes={
            lane.lane: open_daemon_lane(
                granted=lane.credits,
                holders=(
                    entry.command_id
                    for entry in state.entries.values()
                    if entry.lane == lane.lane and not entry.done and entry.process_id == state.facts.process_id
                ),
            )
            for lane in welcome.lane_credits
        },
    )
    others: list[DaemonEffect] = [clock_condition(state.clock), *host_clock_change(before, state.clock)]
    if welcome.HasField("trust"):
        others.append(ApplyTrust(welcome.trust))
    return state, (*writes, *others)


def clock_condition(judged: clock.Clock) -> SetCondition:
    """Return whether this session's time is believed beyond it."""
    return SetCondition(
        CLOCK_UNCONFIRMED,
        holds=judged.unconfirmed,
        reason="server-time-ahead" if judged.unconfirmed else "",
        message=(
            "the server's time is more than 1 h ahead of any confirmed time and this host's clock does not agree: "
            "obeyed for this session only. Set the host's clock, or run `bcd clock reset`"
        )
        if judged.unconfirmed
        else "",
    )


def host_clock_change(before: clock.Clock, judged: clock.Clock) -> tuple[SetCondition, ...]:
    """Return that the host's clock needs setting though the server's time is believed, or needs it no more."""
    off = judged.host_off and not judged.unconfirmed
    if not off:
        return (SetCondition(HOST_CLOCK_OFF, holds=False),) if before.host_off else ()
    message = (
        "this host's clock is more than 1 h from the control plane's time: run a time service (chrony, "
        "systemd-timesyncd). Until then a gateway that lies as this clock does is believed; should one have done so, "
        "the way back is `bcd clock reset`, once the clock is right"
    )
    return (SetCondition(HOST_CLOCK_OFF, holds=True, reason="host-clock-off", message=message),)
