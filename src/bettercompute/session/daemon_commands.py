"""What a daemon makes of a command, its cancel and its end: judged, journaled, run, answered.

"Started" is durable before the effect, and a result before it is sent: each function puts its journal writes first. A
delivery is never trusted to be the first one (`resume.at_delivery`), and BUSY is the only answer that leaves no
trace. See docs/delivery.md, "At the daemon"; decisions 0051, 0104 and 0105.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bettercompute.delivery import cancel, journal_rules, lanes
from bettercompute.delivery.cancel import DaemonCancel
from bettercompute.delivery.commands import CommandState
from bettercompute.delivery.facts import rejection_reason
from bettercompute.delivery.journal_rules import JournalEntry
from bettercompute.errors import Refused
from bettercompute.pki.quorum import Approval
from bettercompute.protocol import messages
from bettercompute.protocol.frames import decode_message
from bettercompute.protocol.kinds import KINDS, CommandKind, unpack_payload
from bettercompute.protocol.limits import MAX_COMMAND_BODY_BYTES
from bettercompute.protocol.versions import UPGRADE_KIND
from bettercompute.session import authority, busy, clock, daemon_answers, refusals, resume
from bettercompute.session.authority import CommandRefusal
from bettercompute.session.changes import changed
from bettercompute.session.daemon_state import DaemonSession, Phase
from bettercompute.session.effects import (
    AcceptCommand,
    CountUnbatched,
    DaemonEffect,
    RememberCancelled,
    StartCommand,
    StartHandler,
    StopHandler,
    TakeUpCommand,
    Warn,
)
from bettercompute.session.inputs import HandlerFinished, HandlerProgressed
from bettercompute.session.refusals import Relayed
from bettercompute.session.resume import AtDelivery

Outcome = tuple[DaemonSession, tuple[DaemonEffect, ...]]

TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Delivery:
    """A command frame whose body decodes."""

    frame: messages.Command
    body: messages.CommandBody
    kind: CommandKind | None

    @property
    def command_id(self) -> str:
        return self.body.command_id


# Delivery


def delivered(state: DaemonSession, frame: messages.Command, *, now_ms: int) -> Outcome:
    """Return what a command frame does: count it, then answer from the journal, reject it, or accept and start it."""
    try:
        body = decode_message(messages.CommandBody, frame.body, limit=MAX_COMMAND_BODY_BYTES)
    except Refused as error:
        message = f"a command of the gateway does not decode and is ignored: {error.message}"
        return refusals.counted(state, Relayed.COMMAND, "unreadable"), (Warn("bad-command", message),)
    delivery = _Delivery(frame=frame, body=body, kind=KINDS.get(body.kind))
    if body.lane in state.lanes:
        state = daemon_answers.with_lane(state, body.lane, lanes.received(state.lanes[body.lane]))
    server_time_ms = clock.session_time(state.clock, now_ms=now_ms)
    refusal = authority.judge_signature(frame, body, state.authority, server_time_ms=server_time_ms)
    if refusal is not None:
        return _rejected(state, delivery, refusal.reason, refusal.message, now_ms=now_ms)
    command_id = delivery.command_id
    entry = state.entries.get(command_id) or state.settled.get(command_id)
    met = resume.at_delivery(
        entry,
        cancelled=command_id in state.cancelled,
        seen=frame.seen,
        process_id=state.facts.process_id,
        kind=delivery.kind,
    )
    if met in (AtDelivery.DONE, AtDelivery.RUNNING):
        # Honest after a lost answer, too; only a number that keeps rising says that somebody replays.
        state = refusals.counted(state, Relayed.COMMAND, "repeated")
    if met is AtDelivery.DONE and entry is not None:
        return state, daemon_answers.stored_result(state, entry)
    if met is AtDelivery.RUNNING and entry is not None:
        return state, daemon_answers.answer(
            state, daemon_answers.update_of(state, command_id, frame.attempt, entry.state, now_ms=now_ms)
        )
    if met is AtDelivery.REFUSED_CANCELLED:
        return state, daemon_answers.answer(
            state, daemon_answers.cancelled_update(state, command_id, frame.attempt, now_ms=now_ms)
        )
    if entry is not None and not _is_same(entry, delivery):
        message = f"this node holds another command under the id {command_id!r}: an id stands for one body"
        return _rejected(state, delivery, messages.COMMAND_REJECT_REASON_INVALID, message, now_ms=now_ms)
    unfit = _unfit(state, delivery, now_ms=now_ms)
    if unfit is not None:
        if entry is not None:
            return _finish_left(state, entry, frame.attempt, unfit, now_ms=now_ms)
        return _rejected(state, delivery, unfit.reason, unfit.message, now_ms=now_ms)
    if met is AtDelivery.FORGOTTEN_FAILS:
        return _lost(state, delivery, now_ms=now_ms)
    return _begin(state, delivery, entry, now_ms=now_ms)


def _lost(state: DaemonSession, delivery: _Delivery, *, now_ms: int) -> Outcome:
    """End a command that this journal forgot, and keep that: a database that becomes an earlier one forgets it too, and
    then delivers it as if it had never been seen.
    """
    body, attempt = delivery.body, delivery.frame.attempt
    update = daemon_answers.update_of(state, body.command_id, attempt, CommandState.FAILED, now_ms=now_ms)
    update.reason = resume.JOURNAL_LOST
    update.message = "this journal does not know the command, which was seen running before; it is not run twice"
    done_unacked, ids = _held_counts(state)
    if not journal_rules.has_room(done_unacked=done_unacked, ids=ids, journal_full=state.journal_full):
        return state, daemon_answers.answer(state, update)
    entry = JournalEntry(
        command_id=body.command_id,
        kind=body.kind,
        lane=body.lane,
        attempt=attempt,
        state=CommandState.ACKED,
        not_after_ms=body.not_after_ms,
        process_id=state.facts.process_id,
    )
    state, effects = _finished(state, entry, update)
    return state, (AcceptCommand(entry, delivery.frame.SerializeToString()), *effects)


def _held_counts(state: DaemonSession) -> tuple[int, int]:
    """Return how many results are owed, and how many ids the journal holds."""
    done_unacked = sum(1 for entry in state.entries.values() if entry.done)
    return done_unacked, len(state.entries) + len(state.settled) + len(state.cancelled)


def _is_same(entry: JournalEntry, delivery: _Delivery) -> bool:
    """Say whether the command that an earlier process left is the one delivered: what was approved, or counted, or
    judged safe to run again, was that body and no other, whoever signed this one.
    """
    if entry.kind != delivery.body.kind:
        return False
    if not entry.command:
        return True
    return decode_message(messages.Command, entry.command, limit=len(entry.command)).body == delivery.frame.body


def _begin(state: DaemonSession, delivery: _Delivery, entry: JournalEntry | None, *, now_ms: int) -> Outcome:
    """Accept a command, or take it up from an earlier process, and start it: one journal transaction, then the
    effect.
    """
    body, frame, facts = delivery.body, delivery.frame, state.facts
    time_ms = clock.session_time(state.clock, now_ms=now_ms)
    if busy.too_early(not_before_ms=body.not_before_ms, time_ms=time_ms):
        state = refusals.counted(state, Relayed.COMMAND, busy.WhyBusy.NOT_BEFORE.value)
        message = f"not_before is {body.not_before_ms} ms, it is {time_ms} ms by this session's time: try again later"
        return _rejected(state, delivery, messages.COMMAND_REJECT_REASON_BUSY, message, now_ms=now_ms)
    done_unacked, ids = _held_counts(state)
    why = busy.why_busy(
        state.lanes[body.lane],
        done_unacked=done_unacked,
        ids=ids,
        journal_full=state.journal_full,
        kept=entry is not None,
    )
    if why is not None:
        message = f"{why.value}: try again later"
        return _rejected(state, delivery, messages.COMMAND_REJECT_REASON_BUSY, message, now_ms=now_ms)
    grounds = _grounds(state, delivery, entry, now_ms=now_ms)
    if isinstance(grounds, CommandRefusal):
        if entry is not None:
            return _finish_left(state, entry, frame.attempt, grounds, now_ms=now_ms)
        return _rejected(state, delivery, grounds.reason, grounds.message, now_ms=now_ms)
    counted: tuple[DaemonEffect, ...] = ()
    if grounds is Approval.UNBATCHED:
        before = (body.command_id, state.unbatched)
        state = changed(state, unbatched=state.unbatched.ran(now_ms=now_ms), uncounted=before)
        counted = (CountUnbatched(state.unbatched),)
    started = JournalEntry(
        command_id=body.command_id,
        kind=body.kind,
        lane=body.lane,
        attempt=frame.attempt,
        state=CommandState.RUNNING,
        not_after_ms=body.not_after_ms,
        process_id=facts.process_id,
        started=True,
        start_boot_id=facts.boot_id,
        start_role=facts.role,
        start_version=facts.daemon_version,
    )
    serialized = frame.SerializeToString()
    keep: DaemonEffect
    if entry is None:
        accepted = replace(
            started, state=CommandState.ACKED, started=False, start_boot_id="", start_role=0, start_version=""
        )
        keep = AcceptCommand(accepted, serialized)
    else:
        keep = TakeUpCommand(body.command_id, frame.attempt, facts.process_id, serialized)
    state = changed(state, entries={**state.entries, body.command_id: started})
    state = daemon_answers.with_lane(state, body.lane, lanes.held(state.lanes[body.lane], body.command_id))
    update = daemon_answers.update_of(state, body.command_id, frame.attempt, CommandState.RUNNING, now_ms=now_ms)
    update.started_at_ms = update.at_ms
    return state, (
        keep,
        *counted,
        StartCommand(body.command_id, facts.boot_id, facts.role, facts.daemon_version),
        *daemon_answers.answer(state, update),
        StartHandler(body.command_id, frame.attempt, body),
    )


def _grounds(
    state: DaemonSession, delivery: _Delivery, entry: JournalEntry | None, *, now_ms: int
) -> CommandRefusal | Approval:
    """Return on what grounds a command may start; one that an earlier process started was counted then."""
    if entry is not None and entry.started:
        return Approval.NOT_NEEDED
    return authority.judge_approval(
        delivery.frame,
        delivery.body,
        KINDS[delivery.body.kind],
        state.authority,
        trust_domain=state.facts.trust_domain,
        unbatched=state.unbatched,
        server_time_ms=clock.session_time(state.clock, now_ms=now_ms),
        now_ms=now_ms,
    )


def journal_refused(state: DaemonSession, command_id: str, *, now_ms: int) -> Outcome:
    """Undo an acceptance for which the journal had no room, and answer BUSY: nothing of it has begun.

    What was to be kept as lost is told all the same.
    """
    entry = state.entries.get(command_id)
    if entry is None:
        return state, ()
    if state.uncounted is not None and state.uncounted[0] == command_id:
        state = changed(state, unbatched=state.uncounted[1], uncounted=None)
    entries = {other: kept for other, kept in state.entries.items() if other != command_id}
    state = daemon_answers.let_go(changed(state, entries=entries, journal_full=True), entry)
    if entry.done:
        return state, daemon_answers.stored_result(state, entry)
    update = daemon_answers.update_of(state, command_id, entry.attempt, CommandState.REJECTED, now_ms=now_ms)
    update.reject_reason = messages.COMMAND_REJECT_REASON_BUSY
    update.message = f"{busy.WhyBusy.JOURNAL_FULL.value}: try again later"
    return state, daemon_answers.answer(state, update)


def _unfit(state: DaemonSession, delivery: _Delivery, *, now_ms: int) -> CommandRefusal | None:
    """Return why a command must not run here, whoever sends it; None when it may."""
    body, kind = delivery.body, delivery.kind
    if not body.command_id:
        return CommandRefusal(messages.COMMAND_REJECT_REASON_INVALID, "the body names no command_id")
    if body.node_id != state.facts.node_id:
        message = f"the command is for node {body.node_id!r}, this is {state.facts.node_id!r}"
        return CommandRefusal(messages.COMMAND_REJECT_REASON_WRONG_NODE, message)
    if body.trust_domain and state.facts.trust_domain and body.trust_domain != state.facts.trust_domain:
        message = f"the command is of trust domain {body.trust_domain!r}, this is {state.facts.trust_domain!r}"
        return CommandRefusal(messages.COMMAND_REJECT_REASON_WRONG_NODE, message)
    if kind is None or (state.upgrade_only and body.kind != UPGRADE_KIND):
        message = f"this session takes only {UPGRADE_KIND}" if state.upgrade_only else f"unknown kind {body.kind!r}"
        return CommandRefusal(messages.COMMAND_REJECT_REASON_UNSUPPORTED, message)
    if state.facts.role not in kind.roles:
        message = f"{body.kind} is not for role {state.facts.role}"
        return CommandRefusal(messages.COMMAND_REJECT_REASON_KIND_NOT_ALLOWED, message)
    if body.lane != kind.lane or body.lane not in state.lanes:
        message = f"{body.kind} belongs to lane {int(kind.lane)}, the body says {int(body.lane)}"
        return CommandRefusal(messages.COMMAND_REJECT_REASON_INVALID, message)
    if body.timeout_ms == 0 or body.not_after_ms <= 0:
        message = "timeout_ms and not_after_ms must be set"
        return CommandRefusal(messages.COMMAND_REJECT_REASON_INVALID, message)
    if body.not_before_ms >= body.not_after_ms:
        message = f"not_before is {body.not_before_ms} ms and not_after {body.not_after_ms}: there is no time between"
        return CommandRefusal(messages.COMMAND_REJECT_REASON_INVALID, message)
    now = clock.session_time(state.clock, now_ms=now_ms)
    if now >= body.not_after_ms:
        message = f"not_after was {body.not_after_ms} ms, it is {now} ms by this session's time"
        return CommandRefusal(messages.COMMAND_REJECT_REASON_EXPIRED, message)
    try:
        unpack_payload(kind, body)
    except Refused as error:
        return CommandRefusal(messages.COMMAND_REJECT_REASON_INVALID, error.message)
    return None


def _rejected(
    state: DaemonSession,
    delivery: _Delivery,
    reason: messages.CommandRejectReason.ValueType,
    message: str,
    *,
    now_ms: int,
) -> Outcome:
    update = daemon_answers.update_of(
        state, delivery.command_id, delivery.frame.attempt, CommandState.REJECTED, now_ms=now_ms
    )
    update.reject_reason = reason
    update.message = message
    if reason != messages.COMMAND_REJECT_REASON_BUSY:
        state = refusals.counted(state, Relayed.COMMAND, rejection_reason(reason).removeprefix("rejected-"))
    return state, daemon_answers.answer(state, update)


# Cancel


def cancelled(state: DaemonSession, frame: messages.Cancel, *, now_ms: int) -> Outcome:
    """Return what a cancel frame does, by the table of `delivery.cancel`."""
    command_id = frame.command_id
    entry = state.entries.get(command_id) or state.settled.get(command_id)
    action = cancel.daemon_action(entry, remembered=command_id in state.cancelled, process_id=state.facts.process_id)
    if action is DaemonCancel.STOP:
        return state, (StopHandler(command_id, frame.reason),)
    if action is DaemonCancel.RESEND and entry is not None:
        return state, daemon_answers.stored_result(state, entry)
    if action is DaemonCancel.FINISH and entry is not None:
        attempt, started = entry.attempt, entry.started
        update = daemon_answers.cancelled_update(state, command_id, attempt, now_ms=now_ms, started=started)
        return _finished(state, entry, update)
    if action is DaemonCancel.REMEMBER and not journal_rules.may_remember(command_id, cancelled=len(state.cancelled)):
        return refusals.counted(state, Relayed.CANCEL, "not-remembered"), ()
    update = daemon_answers.cancelled_update(state, command_id, 0, now_ms=now_ms)
    if action is DaemonCancel.ANSWER_CANCELLED:
        return state, daemon_answers.answer(state, update)
    state = changed(state, cancelled={**state.cancelled, command_id: state.clock.mark_ms})
    return state, (RememberCancelled(command_id, state.clock.mark_ms), *daemon_answers.answer(state, update))


# Progress and end


def progressed(state: DaemonSession, given: HandlerProgressed, *, now_ms: int) -> Outcome:
    """Tell how far a running command has come; nothing is journaled, and nothing is owed once the stream is gone."""
    entry = state.entries.get(given.command_id)
    if entry is None or entry.done or state.phase is not Phase.LIVE:
        return state, ()
    update = daemon_answers.update_of(state, given.command_id, entry.attempt, CommandState.RUNNING, now_ms=now_ms)
    if given.progress is not None:
        update.progress.CopyFrom(given.progress)
    if given.output is not None:
        update.output.CopyFrom(given.output)
    return state, daemon_answers.answer(state, update)


def handler_finished(state: DaemonSession, given: HandlerFinished, *, now_ms: int) -> Outcome:
    """Journal a result, then send it; the credit is free with the sending, its processes have been reaped before."""
    entry = state.entries.get(given.command_id)
    if entry is None or entry.done:
        return state, ()
    update = daemon_answers.update_of(state, given.command_id, entry.attempt, given.state, now_ms=now_ms)
    update.result = given.result
    update.reason = given.reason
    update.message = given.message
    if given.signature is not None:
        update.signature.CopyFrom(given.signature)
    return _finished(state, entry, update)


def _finish_left(
    state: DaemonSession, entry: JournalEntry, attempt: int, unfit: CommandRefusal, *, now_ms: int
) -> Outcome:
    """End an entry of an earlier process that must not run any more: it is in the journal, so its end is too."""
    update = daemon_answers.update_of(state, entry.command_id, attempt, CommandState.FAILED, now_ms=now_ms)
    update.reason = rejection_reason(unfit.reason)
    update.message = unfit.message
    return _finished(state, entry, update)


def _finished(state: DaemonSession, entry: JournalEntry, update: messages.CommandUpdate) -> Outcome:
    state, write = daemon_answers.journal_end(state, entry, update)
    return state, (write, *daemon_answers.answer(state, update))
