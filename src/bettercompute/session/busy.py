"""BUSY, both ends: the daemon refuses a command for now, the gateway puts it back and waits.

BUSY is neither terminal nor journaled. The gateway's credits make it rare; where both counts disagree for a moment,
or the journal is full, nothing is dropped: the command is pending again, behind a back-off of its own per session.
See docs/sessions.md, "BUSY".
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from bettercompute.delivery import journal_rules
from bettercompute.delivery.lanes import DaemonLane

FIRST_BACK_OFF_MS = 1_000
BACK_OFF_MAX_MS = 30_000
EARLY_ALLOWED_MS = 5 * 60_000
"""How long before its `not_before` a command is taken: the moment is the control plane's, by the database's clock, and
a daemon's time of the same session may lie behind it by what a clock loses in a day. Beyond it somebody sends early."""


def back_off_ms(refusals: int) -> int:
    """Return how long a command waits after its n-th BUSY in a session: 1 s, doubling to 30 s."""
    assert refusals >= 1, "a back-off follows a refusal"
    return min(BACK_OFF_MAX_MS, FIRST_BACK_OFF_MS << min(refusals - 1, 16))


def refused(busy: Mapping[str, int], command_id: str) -> tuple[Mapping[str, int], int]:
    """Return the session's counts after a BUSY for a command, and how long that command waits."""
    refusals = busy.get(command_id, 0) + 1
    return {**busy, command_id: refusals}, back_off_ms(refusals)


def settled(busy: Mapping[str, int], command_id: str) -> Mapping[str, int]:
    """Return the session's counts once a command was accepted or has ended: its next BUSY starts over."""
    if command_id not in busy:
        return busy
    return {other: refusals for other, refusals in busy.items() if other != command_id}


class WhyBusy(StrEnum):
    """Why a daemon takes no command now."""

    NO_CREDIT = "no-credit"
    JOURNAL_FULL = "journal-full"
    NOT_BEFORE = "not-before"
    """It came long before it may be sent."""


def too_early(*, not_before_ms: int, time_ms: int) -> bool:
    """Say whether a command came so long before its `not_before` (0: none) that it is left for later."""
    return not_before_ms - time_ms > EARLY_ALLOWED_MS


def why_busy(
    lane: DaemonLane, *, done_unacked: int, ids: int, journal_full: bool, kept: bool = False
) -> WhyBusy | None:
    """Return why one more command of a lane must be answered BUSY; None when there is a credit and room.

    `kept`: an earlier process left it in the journal, where it has its place already.
    """
    if lane.free == 0:
        return WhyBusy.NO_CREDIT
    if not kept and not journal_rules.has_room(done_unacked=done_unacked, ids=ids, journal_full=journal_full):
        return WhyBusy.JOURNAL_FULL
    return None
