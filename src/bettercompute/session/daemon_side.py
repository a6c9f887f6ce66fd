"""The daemon's end of its sessions: `step` routes each input to the rule of its heading and threads the state
through.

One `DaemonSession` lives as long as the daemon's process: between streams it waits and keeps what it owes, on a
stream it says Hello, judges Welcome (the barrier) and works. Nothing is decided here: the rules live in `hello`,
`welcome`, `clock`, `daemon_commands`, `daemon_answers`, `daemon_beats`, `resume`, `reconnect` and in `delivery`.
"""

from __future__ import annotations

from dataclasses import replace

from bettercompute.delivery import inventory
from bettercompute.delivery.commands import CommandState
from bettercompute.pki.quorum import Unbatched
from bettercompute.protocol import messages
from bettercompute.protocol.limits import MAX_SENTENCE_CHARS
from bettercompute.protocol.statuses import Status
from bettercompute.session import clock, daemon_answers, daemon_beats, daemon_commands, inputs, refusals, resume
from bettercompute.session.announcements import notice_text
from bettercompute.session.authority import ANYBODY, Authority
from bettercompute.session.changes import changed
from bettercompute.session.daemon_state import Advertised, DaemonFacts, DaemonSession, JournalFacts, Phase
from bettercompute.session.effects import (
    AckCommands,
    AckEvents,
    ApplyDesired,
    DaemonEffect,
    DeliverSecret,
    DeliverWorkloadToken,
    EndSession,
    OpenTunnel,
    Redial,
    SendAgentFrame,
    SendInventory,
    SetCondition,
    StoreNonces,
    WaitThenDial,
    Warn,
)
from bettercompute.session.hello import new_hello
from bettercompute.session.reconnect import Backoff, Ending, next_wait
from bettercompute.session.refusals import Relayed
from bettercompute.session.resume import AtStart
from bettercompute.session.welcome import apply_welcome

__all__ = ["Advertised", "DaemonFacts", "DaemonSession", "JournalFacts", "Phase", "next_tick_ms", "start", "step"]

IDENTITY_REVOKED = "IdentityRevoked"

Outcome = tuple[DaemonSession, tuple[DaemonEffect, ...]]

next_tick_ms = daemon_beats.next_tick_ms


def start(
    facts: DaemonFacts,
    advertised: Advertised,
    journal: JournalFacts,
    *,
    authority: Authority = ANYBODY,
    now_ms: int,
) -> Outcome:
    """Return the state at process start, after what the previous process left running has been ended, and what to
    write.

    The daemon's half of the resume rules is applied to every unfinished entry of an earlier process; then it dials.
    """
    state = DaemonSession(
        facts=facts,
        advertised=advertised,
        clock=clock.restored(mark_ms=journal.mark_ms, confirmed_ms=journal.confirmed_ms, now_ms=now_ms),
        authority=authority,
        unbatched=(journal.unbatched or Unbatched(facts.boot_id)).after_boot(facts.boot_id),
        journal_id=journal.journal_id,
        journal_full=journal.full,
        entries={name: entry for name, entry in journal.entries.items() if not (entry.done and entry.acked)},
        settled={name: entry for name, entry in journal.entries.items() if entry.done and entry.acked},
        cancelled=journal.cancelled,
        last_epoch=journal.last_epoch,
        last_event_seq=journal.last_event_seq,
        acked_event_seq=journal.acked_event_seq,
        hello_nonce=journal.hello_nonce,
        previous_hello_nonce=journal.previous_hello_nonce,
        phase=Phase.OFFLINE,
        backoff=Backoff(),
    )
    effects: list[DaemonEffect] = []
    for entry in tuple(state.entries.values()):
        if entry.done or entry.process_id == facts.process_id:
            continue
        verdict = resume.at_start(entry, boot_id=facts.boot_id, role=facts.role, daemon_version=facts.daemon_version)
        if verdict not in _ENDS_AT_START:
            continue
        reached, reason, message = _ENDS_AT_START[verdict]
        update = daemon_answers.end_update(state, entry, reached, reason=reason, message=message, now_ms=now_ms)
        state, write = daemon_answers.journal_end(state, entry, update)
        effects.append(write)
    effects.append(WaitThenDial(0, Redial.NEW_CONNECTION, 0))
    return state, tuple(effects)


_ENDS_AT_START = {
    AtStart.SUCCEEDED: (CommandState.SUCCEEDED, "", ""),
    AtStart.NO_EFFECT: (
        CommandState.FAILED,
        resume.NO_EFFECT,
        "it was started and this process shows no sign of its effect; it is not run again",
    ),
    AtStart.INTERRUPTED: (
        CommandState.FAILED,
        resume.INTERRUPTED,
        "the daemon ended while it ran, and it is not safe to run twice",
    ),
}


def step(state: DaemonSession, given: inputs.DaemonInput, now_ms: int) -> Outcome:
    """Return the state and the effects that follow from one input, and from the time that has passed before it."""
    state, ending = _looked(state, now_ms=now_ms)
    state, done = _taken(state, given, now_ms=now_ms)
    return state, (*ending, *done) if ending else done


def _taken(state: DaemonSession, given: inputs.DaemonInput, *, now_ms: int) -> Outcome:
    match given:
        case inputs.ServerFrameReceived():
            return _frame_received(state, given, now_ms=now_ms)
        case inputs.Dialed():
            return _dialed(state, given, now_ms=now_ms)
        case inputs.StreamEnded():
            return _stream_ended(state, given)
        case inputs.DaemonTick():
            return daemon_beats.ticked(state, given, now_ms=now_ms)
        case inputs.HandlerProgressed():
            return daemon_commands.progressed(state, given, now_ms=now_ms)
        case inputs.HandlerFinished():
            return daemon_commands.handler_finished(state, given, now_ms=now_ms)
        case inputs.JournalRefused(command_id):
            return daemon_commands.journal_refused(state, command_id, now_ms=now_ms)
        case inputs.JournalRoom(full):
            return changed(state, journal_full=full), ()
        case inputs.JournalRenewed(journal_id, last_event_seq):
            renewed = changed(state, journal_id=journal_id, last_event_seq=last_event_seq, acked_event_seq=0)
            return renewed, ()
        case inputs.InventoryCollected(hashes):
            return _inventory_collected(state, hashes)
        case inputs.EventsJournaled(last_event_seq):
            return daemon_beats.events_due(changed(state, last_event_seq=max(state.last_event_seq, last_event_seq)))
        case inputs.EventsSent(session_id, last_seq):
            return daemon_beats.events_sent(state, session_id=session_id, last_seq=last_seq)
        case _:
            return _held(state, given)


def _looked(state: DaemonSession, *, now_ms: int) -> Outcome:
    """Look at the clock before anything is judged by it: a session of before a time that nobody saw is over.

    Its frames may have waited as long, and its time is not known any more; the next Welcome tells it.
    """
    seen, unseen_ms = clock.looked(state.clock, now_ms=now_ms)
    if seen is not state.clock:
        state = changed(state, clock=seen)
    if not unseen_ms or state.phase not in (Phase.AWAITING_WELCOME, Phase.LIVE):
        return state, ()
    message = (
        f"{unseen_ms} ms have passed without a look at the clock: this process stood still, the host slept, or its "
        "clock leapt. Dialing anew to be told the time"
    )
    return changed(state, phase=Phase.ENDING), (EndSession("time-unseen", message),)


def _held(
    state: DaemonSession, given: inputs.StatusChanged | inputs.SpecHeld | inputs.TrustHeld | inputs.RelayRefused
) -> Outcome:
    """What the daemon holds and reports: its status, its spec, its trust, what it refused."""
    match given:
        case inputs.RelayRefused(what, reason):
            return refusals.counted(state, what, reason), ()
        case inputs.StatusChanged(report):
            return daemon_beats.report_status(changed(state, status=report))
        case inputs.SpecHeld(observed_generation, applied_generation, spec_sha256):
            advertised = replace(
                state.advertised,
                observed_generation=observed_generation,
                applied_generation=applied_generation,
                spec_sha256=spec_sha256,
            )
            return changed(state, advertised=advertised), ()
        case inputs.TrustHeld(trust_version, authority):
            advertised = replace(state.advertised, trust_version=trust_version)
            held = changed(state, advertised=advertised, authority=authority, trust_reported=False)
            return daemon_beats.report_status(held)


# The stream


def _dialed(state: DaemonSession, given: inputs.Dialed, *, now_ms: int) -> Outcome:
    """Say Hello: with a fresh nonce when a Welcome was applied since the last one, else with the same pair again."""
    effects: tuple[DaemonEffect, ...] = ()
    if not state.hello_nonce:
        state = changed(state, hello_nonce=given.fresh_nonce)
        effects = (StoreNonces(state.hello_nonce, state.previous_hello_nonce),)
    hello, riding = new_hello(state)
    state = replace(
        state,
        phase=Phase.AWAITING_WELCOME,
        serving_not_before_ms=given.serving_not_before_ms,
        serving_not_after_ms=given.serving_not_after_ms,
        dialed_at_ms=now_ms,
        last_heard_ms=now_ms,
        hello_results=riding,
        trust_reported=True,
        lanes={},
        session_id="",
        drain_at_ms=None,
        next_heartbeat_at_ms=None,
    )
    return state, (*effects, SendAgentFrame(messages.AgentFrame(hello=hello)))


def _stream_ended(state: DaemonSession, given: inputs.StreamEnded) -> Outcome:
    """Wait as `reconnect` says, then dial again, whatever the reason was: a daemon never gives up."""
    backoff, wait = next_wait(
        state.backoff,
        Ending(status=given.status, reason=given.reason, pushback_ms=given.pushback_ms),
        drawn=given.drawn,
    )
    state = replace(
        state, phase=Phase.OFFLINE, backoff=backoff, lanes={}, next_heartbeat_at_ms=None, sending_events=False
    )
    effects: list[DaemonEffect] = []
    if given.status not in (None, Status.OK):
        effects.append(Warn(given.reason or given.status.name.lower(), given.message))
    effects.append(WaitThenDial(wait.delay_ms, wait.redial, backoff.bucket_refusals))
    return state, tuple(effects)


def _frame_received(state: DaemonSession, given: inputs.ServerFrameReceived, *, now_ms: int) -> Outcome:
    """Welcome is a barrier: before it nothing is obeyed, and a second one is none."""
    frame = given.frame
    case = frame.WhichOneof("frame")
    state = changed(state, last_heard_ms=now_ms)
    if state.phase is Phase.AWAITING_WELCOME:
        if case == "welcome":
            return _welcomed(state, frame.welcome, wall_ms=given.wall_ms, now_ms=now_ms)
        if case == "revoked":
            return _revoked(state, frame.revoked)
        message = f"the gateway's first frame is {case or 'unknown'}, it must be welcome; nothing of it was obeyed"
        state = refusals.counted(state, Relayed.WELCOME, "not-welcome")
        return changed(state, phase=Phase.ENDING), (EndSession("not-welcome", message),)
    if state.phase is not Phase.LIVE:
        return state, ()
    match case:
        case "command":
            return daemon_commands.delivered(state, frame.command, now_ms=now_ms)
        case "cancel":
            return daemon_commands.cancelled(state, frame.cancel, now_ms=now_ms)
        case "ack":
            return _acked(state, frame.ack)
        case "desired":
            return state, () if state.upgrade_only else (ApplyDesired(frame.desired),)
        case "drain":
            return changed(state, drain_at_ms=now_ms + frame.drain.reconnect_after_ms), ()
        case "revoked":
            return _revoked(state, frame.revoked)
        case "open_tunnel":
            return state, () if state.upgrade_only else (OpenTunnel(frame.open_tunnel),)
        case "secret":
            return state, (DeliverSecret(frame.secret),)
        case "workload_token":
            return state, (DeliverWorkloadToken(frame.workload_token),)
        case "welcome":
            return refusals.counted(state, Relayed.WELCOME, "second-welcome"), ()
        case _:
            return state, ()


def _welcomed(state: DaemonSession, welcome: messages.Welcome, *, wall_ms: int, now_ms: int) -> Outcome:
    """Judge Welcome; on a live session then send what is owed: sections, results, events, status."""
    state, effects = apply_welcome(state, welcome, wall_ms=wall_ms, now_ms=now_ms)
    if state.phase is not Phase.LIVE:
        return state, effects
    # Each once: a section is up to a MiB, and a list of its name costs the gateway nothing.
    sections = tuple(dict.fromkeys(welcome.request_sections))
    requested: tuple[DaemonEffect, ...] = (SendInventory(sections),) if sections else ()
    results = daemon_answers.owed_results(state)
    state, batch = daemon_beats.events_due(state)
    state, status = daemon_beats.report_status(state)
    return state, (*effects, *requested, *results, *batch, *status)


def _acked(state: DaemonSession, ack: messages.Ack) -> Outcome:
    """Forget only what the gateway has committed; an ack of another journal's events says nothing here."""
    effects: list[DaemonEffect] = []
    state, known = daemon_answers.acked(state, ack.command_ids)
    if known:
        effects.append(AckCommands(known))
    seq = min(ack.acked_event_seq, state.last_event_seq)
    if ack.journal_id == state.journal_id and seq > state.acked_event_seq:
        state = changed(state, acked_event_seq=seq, sent_event_seq=max(seq, state.sent_event_seq))
        effects.append(AckEvents(seq))
    state, batch = daemon_beats.events_due(state)
    return state, (*effects, *batch)


def _revoked(state: DaemonSession, notice: messages.RevocationNotice) -> Outcome:
    """Tell people on this host who claimed the identity and what the cure is; the gateway ends the session."""
    message = notice_text(notice)[:MAX_SENTENCE_CHARS]
    return state, (
        SetCondition(IDENTITY_REVOKED, holds=True, reason=notice.reason, message=message),
        Warn(notice.reason or "revoked", message),
    )


def _inventory_collected(state: DaemonSession, hashes: inputs.Hashes) -> Outcome:
    """Send what changed, and the hashes early: an inventory is applied only when both agree."""
    sections = inventory.changed_sections(before=state.advertised.inventory_hashes, after=hashes)
    state = changed(state, advertised=replace(state.advertised, inventory_hashes=dict(hashes)))
    if not sections or state.phase is not Phase.LIVE:
        return state, ()
    return changed(state, hashes_due=True), (SendInventory(sections),)
