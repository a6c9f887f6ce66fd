"""The transition tables: every pair of state and move, and every pair of a stored and a reported state."""

from __future__ import annotations

import pytest

from bettercompute.delivery.commands import (
    FACT_MERGE,
    MOVES,
    REPORTABLE,
    TERMINAL,
    CommandState,
    Merge,
    Move,
    highest,
    merge,
    moved,
)
from bettercompute.errors import Bug
from bettercompute.protocol import messages

STORED = [state for state in CommandState if state is not CommandState.REJECTED]

# The table of decisions, written once more.
EXPECTED = {
    "pending": {"dispatch": "dispatched", "cancel-pending": "cancelled", "expire": "expired"},
    "dispatched": {
        "put-back": "pending",
        "put-back-cancelled": "cancelled",
        "succeed": "succeeded",
        "fail": "failed",
        "cancel": "cancelled",
    },
    "acked": {
        "put-back": "acked",
        "put-back-cancelled": "cancelled",
        "succeed": "succeeded",
        "fail": "failed",
        "cancel": "cancelled",
    },
    "running": {
        "put-back": "running",
        "put-back-cancelled": "cancelled",
        "succeed": "succeeded",
        "fail": "failed",
        "cancel": "cancelled",
    },
}


def test_states_are_those_of_the_wire() -> None:
    assert {state.name: int(state) for state in CommandState} == {
        name.removeprefix("COMMAND_STATE_"): number for name, number in messages.CommandState.items() if number
    }


@pytest.mark.parametrize("state", list(CommandState))
@pytest.mark.parametrize("move", list(Move))
def test_every_move_of_ours(state: CommandState, move: Move) -> None:
    to = EXPECTED.get(state.name.lower(), {}).get(move.value)
    if to is None:
        with pytest.raises(Bug, match=state.name.lower()):
            moved(state, move)
    else:
        assert moved(state, move) is CommandState[to.upper()]


def test_the_table_has_no_other_lines() -> None:
    assert len(MOVES) == sum(len(moves) for moves in EXPECTED.values())


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("reported", REPORTABLE)
def test_every_report_of_a_daemon(stored: CommandState, reported: CommandState) -> None:
    outcome = merge(stored, reported)
    if stored in TERMINAL:
        assert outcome is (Merge.LATE if reported in TERMINAL else Merge.BACKWARDS)
    elif reported in TERMINAL or reported > stored:
        assert outcome is Merge.STORE
    elif reported == stored:
        assert outcome is Merge.REPEAT
    else:
        assert outcome is Merge.BACKWARDS


def test_what_a_daemon_says_never_raises() -> None:
    for stored in (None, *CommandState):
        for reported in CommandState:
            assert merge(stored, reported) in Merge
    assert merge(None, CommandState.RUNNING) is Merge.LATE
    assert len(FACT_MERGE) == len(STORED) * len(REPORTABLE)


@pytest.mark.parametrize("state", [CommandState.ACKED, CommandState.RUNNING])
def test_a_put_back_that_crossed_loses_to_the_fact(state: CommandState) -> None:
    assert merge(CommandState.PENDING, state) is Merge.STORE
    assert merge(CommandState.PENDING, CommandState.SUCCEEDED) is Merge.STORE


@pytest.mark.parametrize(
    ("states", "winner"),
    [
        ((CommandState.ACKED, CommandState.RUNNING), CommandState.RUNNING),
        ((CommandState.RUNNING, CommandState.ACKED), CommandState.RUNNING),
        ((CommandState.ACKED, CommandState.FAILED, CommandState.SUCCEEDED), CommandState.FAILED),
        ((CommandState.ACKED,), CommandState.ACKED),
    ],
)
def test_the_highest_state_of_a_batch_wins_and_the_first_end_stays(
    states: tuple[CommandState, ...], winner: CommandState
) -> None:
    assert highest(states) is winner
