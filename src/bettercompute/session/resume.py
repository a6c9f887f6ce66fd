"""Resume rules: what a reconnect proves about commands in flight, at both ends.

The gateway's half runs inside the Hello transaction, over every command of the node that is dispatched, acked or
running: the first rule that matches wins. A fact beats every guess, and whatever may have run and is not safe to run
twice fails with a reason instead. The daemon's half is two tables: what to make of entries that an earlier process
left unfinished, and what to answer to a delivery of a command that may not be the first. See docs/sessions.md,
"Resume rules"; decisions 0104.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from bettercompute.delivery.commands import CommandState, Move, moved
from bettercompute.delivery.journal_rules import JournalEntry
from bettercompute.errors import Refused
from bettercompute.protocol import messages
from bettercompute.protocol.frames import decode_message
from bettercompute.protocol.kinds import KINDS, CommandKind, Proof, unpack_payload
from bettercompute.session.hello_plan import CommandEnd, CommandInFlight

SELF_TERMINATING_SENDS_MAX = 3
"""A machine that never comes back differently is not rebooted for ever."""

KIND_NOT_ALLOWED = "kind-not-allowed"
JOURNAL_LOST = "journal-lost"
NOT_PROVEN = "not-proven"
ATTEMPTS_EXHAUSTED = "attempts-exhausted"
CANCELLED = "cancelled"
INTERRUPTED = "interrupted"
NO_EFFECT = "no-effect"


# The gateway's half


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconnect:
    """What a Hello proves, read against the row before it."""

    boot_id: str
    role: int
    previous_role: int
    daemon_version: str
    journal_changed: bool
    """Also when the journal was rolled back: then it is not the one whose end the control plane knows."""
    boot_changed: bool
    doubtful: bool
    """The Hello is a duplicate's or a fork's: it proves nothing about the machine that had the command."""
    proven: bool
    """False for a Hello that a proxy could have written: rules 5 and 6 are skipped."""
    running: frozenset[str]
    results: frozenset[str]
    """Ids in done_results or done_ids."""
    allowed_kinds: frozenset[str] | None


class Rule(StrEnum):
    """Which rule settled a command."""

    RESULT = "1 a result in this Hello"
    RUNNING = "2 named as running"
    KIND_NOT_ALLOWED = "3 kind not allowed"
    CANCEL_REQUESTED = "4 cancel requested"
    SELF_TERMINATING = "5 self-terminating"
    JOURNAL_LOST = "6 journal changed and not retry-safe"
    RESEND = "7 re-send"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What becomes of one command in flight. With neither `end` nor `resend` it stays in flight in the new epoch."""

    rule: Rule
    end: CommandEnd | None = None
    resend: bool = False
    keeps_credit: bool = False
    cancel_frame: bool = False

    @property
    def wakes_owner(self) -> bool:
        """Say whether the owning controller must decide again."""
        return self.end is not None and self.rule in (Rule.SELF_TERMINATING, Rule.JOURNAL_LOST)


def settle(command: CommandInFlight, reconnect: Reconnect, *, kinds: Mapping[str, CommandKind] = KINDS) -> Settled:
    """Return what a reconnect makes of one command in flight: the first rule that matches."""
    kind = kinds.get(command.kind)
    allowed = reconnect.allowed_kinds is None or command.kind in reconnect.allowed_kinds
    if command.command_id in reconnect.results:
        return Settled(rule=Rule.RESULT)
    if command.command_id in reconnect.running:
        return Settled(rule=Rule.RUNNING, keeps_credit=True, cancel_frame=not allowed or command.cancel_requested)
    if not allowed:
        message = f"the node's certificate does not allow {command.kind}"
        return Settled(
            rule=Rule.KIND_NOT_ALLOWED, end=_end(command, Move.CANCEL, reason=KIND_NOT_ALLOWED, message=message)
        )
    if command.cancel_requested:
        if not reconnect.journal_changed:
            return Settled(rule=Rule.CANCEL_REQUESTED, cancel_frame=True)
        message = "a cancel was asked for, and the node came back with a new journal: nothing there knows the command"
        return Settled(rule=Rule.CANCEL_REQUESTED, end=_end(command, Move.CANCEL, reason=CANCELLED, message=message))
    if reconnect.proven:
        by_evidence = _settle_by_evidence(command, kind, reconnect)
        if by_evidence is not None:
            return by_evidence
    if kind is not None and kind.self_terminating and command.attempt >= SELF_TERMINATING_SENDS_MAX:
        message = f"sent {command.attempt} times, at most {SELF_TERMINATING_SENDS_MAX} for a kind that ends the daemon"
        return Settled(rule=Rule.RESEND, end=_end(command, Move.FAIL, reason=ATTEMPTS_EXHAUSTED, message=message))
    return Settled(rule=Rule.RESEND, resend=True)


def _settle_by_evidence(command: CommandInFlight, kind: CommandKind | None, reconnect: Reconnect) -> Settled | None:
    """Rules 5 and 6: what boot, journal, role and version of the Hello say. None: neither matches."""
    if kind is not None and kind.self_terminating and command.state in (CommandState.ACKED, CommandState.RUNNING):
        boot_changed = reconnect.boot_id != command.sent_boot_id if command.sent_boot_id else reconnect.boot_changed
        if not reconnect.doubtful and _proof_holds(command, kind, reconnect, boot_changed=boot_changed):
            return Settled(rule=Rule.SELF_TERMINATING, end=_end(command, Move.SUCCEED, reason="", message=""))
        if boot_changed:
            message = f"the node booted anew, but this does not prove {command.kind} ({_expected(kind)})"
            return Settled(rule=Rule.SELF_TERMINATING, end=_end(command, Move.FAIL, reason=NOT_PROVEN, message=message))
        if reconnect.journal_changed:
            return Settled(rule=Rule.SELF_TERMINATING, end=_journal_lost(command))
        return None
    if reconnect.journal_changed and (kind is None or not kind.retry_safe):
        return Settled(rule=Rule.JOURNAL_LOST, end=_journal_lost(command))
    return None


def _proof_holds(command: CommandInFlight, kind: CommandKind, reconnect: Reconnect, *, boot_changed: bool) -> bool:
    match kind.proof:
        case Proof.BOOT_ID:
            return boot_changed
        case Proof.BOOT_ID_AND_ROLE:
            return boot_changed and reconnect.role != reconnect.previous_role
        case Proof.DAEMON_VERSION:
            return _reached(kind, command.body, daemon_version=reconnect.daemon_version)
        case None:
            return False


def _reached(kind: CommandKind, body: bytes, *, daemon_version: str) -> bool:
    """Say whether a daemon's version is the target that the command's payload names."""
    try:
        payload = unpack_payload(kind, decode_message(messages.CommandBody, body))
    except Refused:
        return False
    target = getattr(payload, "target_version", "")
    return bool(target) and target == daemon_version


def _expected(kind: CommandKind) -> str:
    return kind.proof.value if kind.proof is not None else "it has no proof"


def _end(command: CommandInFlight, move: Move, *, reason: str, message: str) -> CommandEnd:
    return CommandEnd(command_id=command.command_id, state=moved(command.state, move), reason=reason, message=message)


def _journal_lost(command: CommandInFlight) -> CommandEnd:
    return _end(
        command,
        Move.FAIL,
        reason=JOURNAL_LOST,
        message=f"the node came back with a new journal; {command.kind} may have run and is not run twice",
    )


# The daemon's half, at start


class AtStart(StrEnum):
    """What becomes of an entry that an earlier process left unfinished. Whatever it left running has been ended."""

    SUCCEEDED = "succeeded"
    """The kind's own proof holds."""
    NO_EFFECT = "no-effect"
    """Self-terminating, started, not proven: done, failed, never run again, or a container would reboot for ever."""
    INTERRUPTED = "interrupted"
    """Started and not retry-safe: done, failed."""
    MAY_RUN_AGAIN = "may-run-again"
    """Started and retry-safe: runs at redelivery."""
    NOT_STARTED = "not-started"
    """Runs at redelivery."""


def at_start(
    entry: JournalEntry, *, boot_id: str, role: int, daemon_version: str, kinds: Mapping[str, CommandKind] = KINDS
) -> AtStart:
    """Return what a new process makes of an unfinished entry of an earlier one."""
    if not entry.started:
        return AtStart.NOT_STARTED
    kind = kinds.get(entry.kind)
    if kind is None:
        return AtStart.INTERRUPTED
    if kind.self_terminating:
        proven = _proof_holds_here(entry, kind, boot_id=boot_id, role=role, daemon_version=daemon_version)
        return AtStart.SUCCEEDED if proven else AtStart.NO_EFFECT
    return AtStart.MAY_RUN_AGAIN if kind.retry_safe else AtStart.INTERRUPTED


def _proof_holds_here(entry: JournalEntry, kind: CommandKind, *, boot_id: str, role: int, daemon_version: str) -> bool:
    match kind.proof:
        case Proof.BOOT_ID:
            return boot_id != entry.start_boot_id
        case Proof.BOOT_ID_AND_ROLE:
            return boot_id != entry.start_boot_id and role != entry.start_role
        case Proof.DAEMON_VERSION:
            try:
                body = decode_message(messages.Command, entry.command).body
            except Refused:
                return False
            return _reached(kind, body, daemon_version=daemon_version)
        case None:
            return False


# The daemon's half, at a delivery


class AtDelivery(StrEnum):
    """What a delivered command meets in the journal, and so what is answered."""

    NEW = "new"
    """Unknown here and never seen by the control plane either: judge it, then run it."""
    FORGOTTEN_RUNS = "forgotten-runs"
    """Unknown here, but seen acked or running before: this journal forgot it. Retry-safe: run it."""
    FORGOTTEN_FAILS = "forgotten-fails"
    """The same, not retry-safe: failed `journal-lost`."""
    REFUSED_CANCELLED = "refused-cancelled"
    """Cancelled before it came."""
    RUNNING = "running"
    """This process has it: its state is the answer."""
    TAKE_UP = "take-up"
    """An earlier process left it, and it may run (again)."""
    DONE = "done"
    """The stored result is the answer."""


def at_delivery(
    entry: JournalEntry | None,
    *,
    cancelled: bool,
    seen: int,
    process_id: str,
    kind: CommandKind | None,
) -> AtDelivery:
    """Return what a delivery meets. `seen` is the highest state the control plane has stored (0, ACKED or RUNNING)."""
    if entry is not None:
        if entry.done:
            return AtDelivery.DONE
        return AtDelivery.RUNNING if entry.process_id == process_id else AtDelivery.TAKE_UP
    if cancelled:
        return AtDelivery.REFUSED_CANCELLED
    if seen < CommandState.ACKED:
        return AtDelivery.NEW
    return AtDelivery.FORGOTTEN_RUNS if kind is not None and kind.retry_safe else AtDelivery.FORGOTTEN_FAILS
