"""What a daemon refused of what its gateway relayed, counted by what it was and why.

A relay that alters, invents or repeats gets nowhere, and somebody should hear of it: the counts of this process ride in
status reports and stand in `bcd status`. They tell a gateway that lies from one that is merely slow; nothing is decided
by them. See docs/security.md, "What a gateway can do"; decisions 0140.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from bettercompute.protocol import messages
from bettercompute.protocol.limits import MAX_RELAY_REFUSALS
from bettercompute.session.changes import changed
from bettercompute.session.daemon_state import DaemonSession

OTHER = "other"
"""Where the table has no room for one more reason; the reasons are ours and fewer."""


class Relayed(StrEnum):
    """What a gateway relays or says."""

    WELCOME = "welcome"
    COMMAND = "command"
    CANCEL = "cancel"
    DESIRED_STATE = "desired-state"
    TRUST_BUNDLE = "trust-bundle"
    APPROVER_SET = "approver-set"
    IDENTITY = "identity"
    """The answer to a renewal."""
    FRAME = "frame"


def counted(state: DaemonSession, what: Relayed, reason: str) -> DaemonSession:
    """Return the state after one more refusal; the next heartbeat reports it."""
    key = (what.value, reason)
    if key not in state.refused and len(state.refused) >= MAX_RELAY_REFUSALS - 1:
        key = (OTHER, OTHER)
    refused = {**state.refused, key: state.refused.get(key, 0) + 1}
    return changed(state, refused=refused, refused_reported=False)


def reported(refused: Mapping[tuple[str, str], int]) -> list[messages.RelayRefusal]:
    """Return the counts as a status report carries them."""
    return [
        messages.RelayRefusal(what=what, reason=reason, count=count)
        for (what, reason), count in sorted(refused.items())
    ]
