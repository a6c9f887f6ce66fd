"""Commands: their states and every move between them, as literal tables.

Two tables, because two parties move a command. Our own moves (dispatch, put-back, expiry, an operator's cancel, the
resume rules) must be in `MOVES`: anything else is a bug of ours and raises. What a daemon says is never a reason to
raise: `FACT_MERGE` maps every pair of a stored and a reported state to what becomes of it. See docs/delivery.md,
"Commands"; decisions 0105.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from bettercompute.errors import Bug


class CommandState(IntEnum):
    """Where a command is; the numbers of the wire and of signatures."""

    PENDING = 1
    DISPATCHED = 2
    ACKED = 3
    RUNNING = 4
    SUCCEEDED = 5
    FAILED = 6
    CANCELLED = 7
    EXPIRED = 8
    REJECTED = 9


IN_FLIGHT = frozenset({CommandState.DISPATCHED, CommandState.ACKED, CommandState.RUNNING})
TERMINAL = frozenset({CommandState.SUCCEEDED, CommandState.FAILED, CommandState.CANCELLED, CommandState.EXPIRED})
"""Stored terminal states. REJECTED is only ever said on the wire: it is stored failed, with the rejection as reason."""


class Move(StrEnum):
    """What the control plane itself does to a command."""

    DISPATCH = "dispatch"
    CANCEL_PENDING = "cancel-pending"
    EXPIRE = "expire"
    PUT_BACK = "put-back"
    PUT_BACK_CANCELLED = "put-back-cancelled"
    SUCCEED = "succeed"
    """By a resume rule: the kind's own proof holds."""
    FAIL = "fail"
    """By a resume rule, `nodes forget` or `commands abandon`."""
    CANCEL = "cancel"
    """By a resume rule: kind-not-allowed, or a cancel whose journal is lost."""


_IN_FLIGHT_MOVES: Mapping[Move, CommandState] = {
    Move.SUCCEED: CommandState.SUCCEEDED,
    Move.FAIL: CommandState.FAILED,
    Move.CANCEL: CommandState.CANCELLED,
}

MOVES: Mapping[tuple[CommandState, Move], CommandState] = {
    (CommandState.PENDING, Move.DISPATCH): CommandState.DISPATCHED,
    (CommandState.PENDING, Move.CANCEL_PENDING): CommandState.CANCELLED,
    (CommandState.PENDING, Move.EXPIRE): CommandState.EXPIRED,
    (CommandState.DISPATCHED, Move.PUT_BACK): CommandState.PENDING,
    # What the node has once accepted goes no step back: it stays in flight, held back, and is sent again later.
    (CommandState.ACKED, Move.PUT_BACK): CommandState.ACKED,
    (CommandState.RUNNING, Move.PUT_BACK): CommandState.RUNNING,
    **{(state, Move.PUT_BACK_CANCELLED): CommandState.CANCELLED for state in IN_FLIGHT},
    **{(state, move): to for state in IN_FLIGHT for move, to in _IN_FLIGHT_MOVES.items()},
}


def moved(state: CommandState, move: Move) -> CommandState:
    """Return the state after one of our own moves; a move that is not in the table is a bug of ours."""
    try:
        return MOVES[state, move]
    except KeyError:
        raise Bug(f"a command that is {state.name.lower()} cannot {move}; MOVES has no such line") from None


class Merge(StrEnum):
    """What becomes of a state that a daemon reports."""

    STORE = "store"
    REPEAT = "repeat"
    """The same state again: nothing to store but progress and output."""
    BACKWARDS = "backwards"
    """Older news than what is stored: ignored and counted."""
    LATE = "late"
    """A terminal state for a command that has ended: acked, counted and dropped."""


REPORTABLE = (
    CommandState.ACKED,
    CommandState.RUNNING,
    CommandState.SUCCEEDED,
    CommandState.FAILED,
    CommandState.CANCELLED,
    CommandState.EXPIRED,
)


def _merge(stored: CommandState, reported: CommandState) -> Merge:
    if stored in TERMINAL:
        return Merge.LATE if reported in TERMINAL else Merge.BACKWARDS
    if reported == stored:
        return Merge.REPEAT
    return Merge.STORE if reported > stored else Merge.BACKWARDS


FACT_MERGE: Mapping[tuple[CommandState, CommandState], Merge] = {
    (stored, reported): _merge(stored, reported)
    for stored in CommandState
    if stored is not CommandState.REJECTED
    for reported in REPORTABLE
}


def merge(stored: CommandState | None, reported: CommandState) -> Merge:
    """Return what becomes of a reported state. `stored` None: no such command of this node, so a late one.

    Never raises.
    """
    if stored is None:
        return Merge.LATE
    return FACT_MERGE.get((stored, reported), Merge.BACKWARDS)


def highest(states: Iterable[CommandState]) -> CommandState:
    """Return the state that wins within one batch: the first terminal one, else the highest."""
    best = CommandState.PENDING
    for state in states:
        if state in TERMINAL:
            return state
        best = max(best, state)
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingCommand:
    """A command as it is about to be sent: its row is already marked dispatched, or re-sent, in the session's epoch."""

    command_id: str
    kind: str
    lane: int
    seq: int
    attempt: int
    """Counts the sendings, this one included."""
    seen: CommandState | None
    """The highest state stored from the node: None, ACKED or RUNNING."""
    body: bytes
    signature: bytes = b""
    """The serialized `Signature`; empty when the command is not signed."""
    batch_approval: bytes = b""
    batch_proof: bytes = b""
