"""Cancel, both ends: what a cancel means in every state of a command.

A cancel is durable in the control plane before anybody is told. It is unsigned, like withholding: whoever can stop
frames can stop a command anyway. It stops a command between actions and never undoes one. See docs/delivery.md,
"Cancel"; decisions 0105.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from bettercompute.delivery.commands import CommandState
from bettercompute.delivery.journal_rules import JournalEntry


class ControlPlaneCancel(StrEnum):
    """What the control plane does with a cancel."""

    AT_ONCE = "at-once"
    """Cancelled in the same transaction: nobody has it."""
    SEND_FRAME = "send-frame"
    """Noted on the row; the node's session, or its next Hello, is told."""
    TOO_LATE = "too-late"


CONTROL_PLANE: Mapping[CommandState, ControlPlaneCancel] = {
    CommandState.PENDING: ControlPlaneCancel.AT_ONCE,
    CommandState.DISPATCHED: ControlPlaneCancel.SEND_FRAME,
    CommandState.ACKED: ControlPlaneCancel.SEND_FRAME,
    CommandState.RUNNING: ControlPlaneCancel.SEND_FRAME,
    CommandState.SUCCEEDED: ControlPlaneCancel.TOO_LATE,
    CommandState.FAILED: ControlPlaneCancel.TOO_LATE,
    CommandState.CANCELLED: ControlPlaneCancel.TOO_LATE,
    CommandState.EXPIRED: ControlPlaneCancel.TOO_LATE,
}


class DaemonCancel(StrEnum):
    """What the daemon does with a cancel frame."""

    REMEMBER = "remember"
    """Unknown id: answer cancelled and refuse its late delivery."""
    ANSWER_CANCELLED = "answer-cancelled"
    """An id already remembered so."""
    FINISH = "finish"
    """Left by an earlier process and not running: done as cancelled, nothing to stop."""
    STOP = "stop"
    """Running in this process: stop it between actions; its outcome follows, cancelled or real."""
    RESEND = "resend"
    """Done: the stored result is the answer, too late."""


def daemon_action(entry: JournalEntry | None, *, remembered: bool, process_id: str) -> DaemonCancel:
    """Return what a cancel frame does. `entry` None: the journal knows no such command."""
    if entry is None:
        return DaemonCancel.ANSWER_CANCELLED if remembered else DaemonCancel.REMEMBER
    if entry.done:
        return DaemonCancel.RESEND
    return DaemonCancel.STOP if entry.process_id == process_id else DaemonCancel.FINISH
