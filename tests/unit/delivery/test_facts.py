"""Facts out of frames."""

from __future__ import annotations

from hashlib import sha256

import pytest

from bettercompute.delivery import facts
from bettercompute.delivery.commands import CommandState
from bettercompute.errors import Refused
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason, Status


def update(**fields: object) -> messages.CommandUpdate:
    return messages.CommandUpdate(command_id="c-1", attempt=1, **fields)  # type: ignore[arg-type]  # test data


@pytest.mark.parametrize("reason", [one for one in messages.CommandRejectReason.values() if one > 1])
def test_a_rejection_is_a_failure_with_its_reason(reason: int) -> None:
    said = update(state=messages.COMMAND_STATE_REJECTED, reject_reason=reason, message="why")
    fact = facts.command_fact(said)
    assert fact is not None
    assert fact.state is CommandState.FAILED
    name = messages.CommandRejectReason.Name(messages.CommandRejectReason.ValueType(reason))
    assert fact.reason == "rejected-" + name.removeprefix("COMMAND_REJECT_REASON_").lower().replace("_", "-")
    assert not facts.is_busy(said)


def test_busy_is_no_fact_of_a_command() -> None:
    assert facts.is_busy(
        update(state=messages.COMMAND_STATE_REJECTED, reject_reason=messages.COMMAND_REJECT_REASON_BUSY)
    )


def test_a_rejection_of_a_newer_daemon_is_a_failure_too() -> None:
    fact = facts.command_fact(update(state=messages.COMMAND_STATE_REJECTED, reject_reason=77))
    assert fact is not None
    assert fact.reason == "rejected-unknown"


@pytest.mark.parametrize("state", [0, 1, 2, 88])
def test_states_that_no_daemon_reports_say_nothing(state: int) -> None:
    assert facts.command_fact(update(state=state)) is None


def test_the_approver_set_counts_only_beside_a_trust_version() -> None:
    alone = facts.status_fact(messages.StatusReport(approver_set_epoch=3, approver_set_sha256=b"s" * 32))
    assert (alone.trust_version, alone.approver_set_epoch, alone.approver_set_sha256) == (0, None, None)
    beside = facts.status_fact(
        messages.StatusReport(trust_version=2, approver_set_epoch=3, approver_set_sha256=b"s" * 32)
    )
    assert (beside.trust_version, beside.approver_set_epoch, beside.approver_set_sha256) == (2, 3, b"s" * 32)
    none_held = facts.status_fact(messages.StatusReport(trust_version=2, approver_set_epoch=3))
    assert (none_held.approver_set_epoch, none_held.approver_set_sha256) == (None, None)


def test_a_section_must_be_what_its_hash_says() -> None:
    good = messages.InventorySection(name="cpu", body=b"x", sha256=sha256(b"x").digest())
    assert facts.inventory_fact(good).section == "cpu"
    for bad in (
        messages.InventorySection(name="cpu", body=b"y", sha256=sha256(b"x").digest()),
        messages.InventorySection(name="", body=b"x", sha256=sha256(b"x").digest()),
        messages.InventorySection(name="cpu", body=b"x"),
    ):
        with pytest.raises(Refused) as refused:
            facts.inventory_fact(bad)
        assert refused.value.status == Status.INVALID_ARGUMENT
        assert refused.value.reason == Reason.INVALID_FRAME
