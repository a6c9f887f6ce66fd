"""Why a command waits: one row per reason, and what comes first of several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bettercompute.delivery.commands import TERMINAL, CommandState
from bettercompute.delivery.waiting import Approvals, Holder, Wait, WaitingFacts, decide

READY = WaitingFacts(
    command_id="c1",
    kind="inventory.refresh",
    lane=1,
    state=CommandState.PENDING,
    signed=False,
    held_back=False,
    busy_count=0,
    cancel_requested=False,
    not_before_ms=None,
    not_after_ms=10_000,
    now_ms=1_000,
    node_id="n1",
    node_state="connected",
    node_state_reason="",
    quarantine_reason=None,
    revoked_by=None,
    locked_by=None,
    locked_left_ms=None,
    gateway_id="gw-1",
    gateway_live=True,
    gateway_draining=False,
    upgrade_only=False,
    signed_only=False,
    capabilities=frozenset(),
    allowed_kinds=None,
    holders=(),
    ahead=0,
)
HOLDERS = tuple(
    Holder(command_id=f"h{number}", kind="inventory.refresh", state=CommandState.RUNNING) for number in range(8)
)
AWAY: dict[str, Any] = {
    "gateway_id": None,
    "gateway_live": False,
    "node_state": "disconnected",
    "node_state_reason": "stale",
}


@pytest.mark.parametrize(
    ("changes", "wait", "says"),
    [
        ({}, Wait.DISPATCH, "nothing stands in its way"),
        ({"ahead": 3}, Wait.TURN, "3 commands"),
        ({"now_ms": 10_000}, Wait.EXPIRY, "deadline"),
        ({"not_before_ms": 3_000}, Wait.NOT_BEFORE, "2000 ms"),
        (
            {"not_before_ms": 10_000, "approval": Approvals(batch_id="b1", approved_by=("alice",), required=2)},
            Wait.APPROVALS,
            "waiting for approvals (1 of 2, by alice): better-compute approve b1",
        ),
        (
            {"not_before_ms": 29_000_000, "asked_not_before_ms": 29_000_000, "not_after_ms": 1 << 40},
            Wait.NOT_BEFORE,
            "8 h 3 min",
        ),
        ({"not_before_ms": 61_000}, Wait.NOT_BEFORE, "60 s"),
        (
            {"not_before_ms": 10_000, "asked_not_before_ms": 2_000, "led_by": "ops"},
            Wait.NOT_BEFORE,
            "the rolling run that ops leads; and it is not to be sent before 1000 ms from now",
        ),
        ({"not_before_ms": 3_000, "busy_count": 2}, Wait.BUSY, "BUSY 2 times"),
        (AWAY, Wait.NO_SESSION, "disconnected (stale)"),
        ({"gateway_live": False}, Wait.NO_SESSION, "gw-1"),
        ({**AWAY, "node_state": "joined"}, Wait.NO_SESSION, "never connected"),
        ({**AWAY, "quarantine_reason": "duplicate"}, Wait.NO_SESSION, "quarantined"),
        ({**AWAY, "revoked_by": "ops"}, Wait.NODE_REVOKED, "until it joins anew"),
        ({**AWAY, "locked_by": "ops"}, Wait.NODE_LOCKED, "by ops until it is unlocked"),
        ({**AWAY, "locked_by": "ops", "locked_left_ms": 1_500}, Wait.NODE_LOCKED, "for another 2 s"),
        ({"gateway_draining": True}, Wait.DRAINING, "gw-1"),
        ({"upgrade_only": True}, Wait.UPGRADE_ONLY, "daemon.upgrade only"),
        ({"allowed_kinds": frozenset({"logs.collect"})}, Wait.KIND_NOT_ALLOWED, "it allows: logs.collect"),
        ({"kind": "node.reboot"}, Wait.CAPABILITY_MISSING, "capability reboot"),
        ({"signed_only": True}, Wait.UNSIGNED, "not signed"),
        ({"holders": HOLDERS}, Wait.NO_CREDIT, "h7 (inventory.refresh, running)"),
        ({"state": CommandState.DISPATCHED}, Wait.NODE, "not confirmed"),
        ({"state": CommandState.RUNNING, "holders": HOLDERS}, Wait.NODE, "runs"),
        ({"state": CommandState.RUNNING, "cancel_requested": True}, Wait.CANCEL, "cancel"),
        ({"state": CommandState.RUNNING, **AWAY}, Wait.NO_SESSION, "disconnected"),
        ({"state": CommandState.ACKED, "held_back": True, "holders": HOLDERS}, Wait.HELD_BACK, "earlier session"),
        ({"state": CommandState.ACKED, "held_back": True, "busy_count": 3}, Wait.HELD_BACK, "n1 has refused it BUSY 3"),
    ],
)
def test_each_reason(changes, wait, says) -> None:
    first, *_ = decide(replace(READY, **changes))
    assert first.wait is wait
    assert says in first.sentence


def test_what_waits_for_approvers_and_for_its_time_says_both() -> None:
    approval = Approvals(batch_id="b1", approved_by=(), required=2)
    facts = replace(READY, not_before_ms=10_000, approval=approval)
    assert [reason.wait for reason in decide(facts)] == [Wait.APPROVALS]
    facts = replace(facts, asked_not_before_ms=2_000)
    assert [reason.wait for reason in decide(facts)] == [Wait.APPROVALS, Wait.NOT_BEFORE]


def test_everything_that_stands_in_the_way_is_named() -> None:
    facts = replace(READY, kind="node.reboot", gateway_draining=True, holders=HOLDERS, not_before_ms=5_000)
    assert [reason.wait for reason in decide(facts)] == [
        Wait.NOT_BEFORE,
        Wait.DRAINING,
        Wait.CAPABILITY_MISSING,
        Wait.NO_CREDIT,
    ]


def test_the_last_session_says_nothing_of_the_next() -> None:
    assert [reason.wait for reason in decide(replace(READY, **AWAY, upgrade_only=True))] == [Wait.NO_SESSION]


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_what_has_ended_waits_for_nothing(state) -> None:
    assert [reason.wait for reason in decide(replace(READY, state=state, **AWAY))] == [Wait.NOTHING]
