"""A cancel in every state, at both ends."""

from __future__ import annotations

import pytest

from bettercompute.delivery import cancel
from bettercompute.delivery.cancel import ControlPlaneCancel, DaemonCancel
from bettercompute.delivery.commands import IN_FLIGHT, TERMINAL, CommandState
from bettercompute.delivery.journal_rules import JournalEntry


def test_the_control_plane_knows_every_stored_state() -> None:
    assert set(cancel.CONTROL_PLANE) == set(CommandState) - {CommandState.REJECTED}
    assert cancel.CONTROL_PLANE[CommandState.PENDING] is ControlPlaneCancel.AT_ONCE
    assert all(cancel.CONTROL_PLANE[state] is ControlPlaneCancel.SEND_FRAME for state in IN_FLIGHT)
    assert all(cancel.CONTROL_PLANE[state] is ControlPlaneCancel.TOO_LATE for state in TERMINAL)


@pytest.mark.parametrize("remembered", [True, False])
@pytest.mark.parametrize("process_id", ["this", "earlier"])
@pytest.mark.parametrize("state", [None, *CommandState])
def test_every_case_of_the_daemon(state: CommandState | None, process_id: str, *, remembered: bool) -> None:
    entry = None
    if state is not None:
        entry = JournalEntry(
            command_id="c", kind="k", lane=1, attempt=1, state=state, not_after_ms=1, process_id=process_id
        )
    action = cancel.daemon_action(entry, remembered=remembered, process_id="this")
    if state is None:
        assert action is (DaemonCancel.ANSWER_CANCELLED if remembered else DaemonCancel.REMEMBER)
    elif state >= CommandState.SUCCEEDED:
        assert action is DaemonCancel.RESEND
    else:
        assert action is (DaemonCancel.STOP if process_id == "this" else DaemonCancel.FINISH)
