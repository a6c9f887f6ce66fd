"""What the Hello transaction decides, step by step of the page, and what a daemon says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bettercompute import telemetry
from bettercompute.delivery.commands import CommandState
from bettercompute.delivery.journal_rules import JournalEntry
from bettercompute.protocol import messages
from bettercompute.protocol.limits import MAX_DONE_RESULTS, MAX_HELLO_BYTES
from bettercompute.protocol.statuses import Reason, Status
from bettercompute.protocol.validation import validate_for_store
from bettercompute.session import daemon_side, hello
from bettercompute.session.hello_plan import (
    BootSeen,
    CommandInFlight,
    HelloFacts,
    HelloPlan,
    HelloRefusal,
    NodeFacts,
    SessionRow,
)
from tests.unit.session.world_in_memory import NODE_ID, START_MS, certificate_facts, empty_row, gateway_facts

ROW = replace(
    empty_row(),
    session_epoch=7,
    boot_id="boot-1",
    journal_id="j-1",
    role=1,
    acked_event_seq=10,
    recent_boots=(BootSeen(boot_id="boot-1", seen_at_ms=START_MS - 1_000),),
)
LIVE = replace(ROW, gateway_id="gw-1", session_id="s-0", last_seen_ms=START_MS - 1_000, peer_address="192.0.2.9")


def said(**changes: object) -> messages.Hello:
    fields: dict[str, object] = {
        "node_id": NODE_ID,
        "role": messages.AGENT_ROLE_NODE,
        "boot_id": "boot-1",
        "journal_id": "j-1",
        "last_epoch": 7,
        "proto_min": 1,
        "proto_max": 1,
        "last_event_seq": 10,
    }
    return messages.Hello(**{**fields, **changes})  # type: ignore[arg-type]  # test data


def facts(**changes: object) -> HelloFacts:
    fields: dict[str, object] = {
        "now_ms": START_MS,
        "certificate": certificate_facts(),
        "gateway": gateway_facts(),
        "row": ROW,
        "node": NodeFacts(identity_generation=1, spec_generation=0),
    }
    return HelloFacts(**{**fields, **changes})  # type: ignore[arg-type]  # test data


def plan(given: HelloFacts | None = None, **changes: object) -> HelloPlan:
    decided = hello.decide(given or facts(), said(**changes))
    assert isinstance(decided, HelloPlan), decided
    return decided


def refusal(given: HelloFacts, **changes: object) -> HelloRefusal:
    decided = hello.decide(given, said(**changes))
    assert isinstance(decided, HelloRefusal), decided
    return decided


def in_flight(command_id: str, **changes: object) -> CommandInFlight:
    fields: dict[str, object] = {
        "command_id": command_id,
        "kind": "inventory.refresh",
        "lane": 1,
        "seq": int(command_id.split("-")[1]),
        "state": CommandState.DISPATCHED,
        "attempt": 1,
        "sent_boot_id": "boot-1",
        "cancel_requested": False,
        "body": b"body",
    }
    return CommandInFlight(**{**fields, **changes})  # type: ignore[arg-type]  # test data


# 1 Certificate


@pytest.mark.parametrize(
    ("certificate", "reason"),
    [
        ({"revocation_reason": "operator"}, Reason.REVOKED),
        ({"revocation_reason": "duplicate-identity"}, Reason.QUARANTINED),
        ({"generation": 0}, Reason.OLD_GENERATION),
        ({"superseded": True}, Reason.SUPERSEDED_CERTIFICATE),
    ],
)
def test_a_recorded_certificate_may_be_void(certificate: dict[str, object], reason: Reason) -> None:
    refused = refusal(facts(certificate=certificate_facts(**certificate)))
    assert refused.reason is reason
    assert refused.refused.status == Status.UNAUTHENTICATED
    if reason is Reason.SUPERSEDED_CERTIFICATE:
        assert refused.writes is not None
        assert [event.name for event in refused.writes.events] == [telemetry.EVENT_SUPERSEDED_CERTIFICATE]
    else:
        assert refused.writes is None


@pytest.mark.parametrize("recorded", [True, False])
def test_one_that_has_expired_by_the_databases_clock_opens_no_session(*, recorded: bool) -> None:
    """TLS judges it by the clock of the gateway's host, which may be behind."""
    expired = certificate_facts(recorded=recorded, not_after_ms=START_MS)
    assert refusal(facts(certificate=expired)).reason is Reason.CERTIFICATE_EXPIRED
    plan(facts(certificate=certificate_facts(recorded=recorded, not_after_ms=START_MS + 1)))
    revoked = certificate_facts(revocation_reason="operator", not_after_ms=START_MS)
    assert refusal(facts(certificate=revoked)).reason is Reason.REVOKED


def test_an_unrecorded_certificate_is_let_through() -> None:
    unrecorded = certificate_facts(recorded=False, revocation_reason="x", generation=0, superseded=True)
    assert not plan(facts(certificate=unrecorded)).first_use


@pytest.mark.parametrize("used", [True, False])
def test_the_first_use_supersedes_the_older_serials(*, used: bool) -> None:
    assert plan(facts(certificate=certificate_facts(used=used))).first_use is not used


# 2 Previous session


def test_a_node_without_a_row_has_not_joined() -> None:
    refused = refusal(facts(row=None))
    assert (refused.refused.status, refused.reason) == (Status.PERMISSION_DENIED, Reason.NOT_JOINED)


# 3 Epoch and routing


def test_the_row_after_hello() -> None:
    row = plan(
        daemon_version="1.2.3",
        proto_max=2**32 - 1,
        trust_version=4,
        capabilities=["nvml", "Bad Name", "cdi", "nvml"],
        approver_set_epoch=3,
        approver_set_sha256=b"s" * 32,
        hello_nonce=b"n" * 16,
    ).row
    assert row.session_epoch == 8
    assert (row.gateway_id, row.session_id, row.cert_serial) == ("gw-1", "s-1", "0a")
    assert row.capabilities == ("cdi", "nvml")
    assert row.proto_max == 2**31 - 1
    assert (row.approver_set_epoch, row.approver_set_sha256) == (3, b"s" * 32)
    assert (row.trust_version, row.hello_nonce, row.acked_event_seq) == (4, b"n" * 16, 10)


def test_an_empty_approver_set_is_stored_as_null() -> None:
    row = plan(approver_set_epoch=3).row
    assert (row.approver_set_epoch, row.approver_set_sha256) == (None, None)


def test_an_epoch_behind_is_published() -> None:
    ahead = plan(last_epoch=90)
    assert ahead.row.session_epoch == 91
    assert ahead.events[0].attributes["epochBehind"] is True


@pytest.mark.parametrize(("last_epoch", "forked"), [(0, True), (8, True), (9, False), (2_000_000, True)])
def test_a_restored_database_is_no_fork(last_epoch: int, *, forked: bool) -> None:
    row = replace(ROW, session_epoch=8, hello_nonce=b"9" * 16)
    pair = {"hello_nonce": b"1" * 16, "previous_hello_nonce": b"2" * 16}
    assert plan(facts(row=row), last_epoch=last_epoch, **pair).new_journal is forked


def test_a_new_journal_restarts_the_event_ack() -> None:
    changed = plan(journal_id="j-2", last_event_seq=3, first_unacked_event_seq=1)
    assert changed.row.acked_event_seq == 0
    assert changed.next_event_seq == 1
    assert not changed.new_journal
    assert changed.events[0].attributes["journalChanged"] is True


def test_a_gap_at_hello_is_accepted_and_shown() -> None:
    gap = plan(last_event_seq=20, first_unacked_event_seq=15)
    assert gap.event_gap is not None
    assert (gap.event_gap.first_seq, gap.event_gap.last_seq) == (11, 14)
    assert gap.row.acked_event_seq == 14
    assert gap.events[0].attributes["eventGap"] == [11, 14]


# Rollback


@pytest.mark.parametrize(
    ("row", "changes"),
    [
        (replace(ROW, hello_nonce=b"9" * 16), {"hello_nonce": b"1" * 16, "previous_hello_nonce": b"2" * 16}),
        (ROW, {"last_event_seq": 9}),
        (replace(ROW, journal_id="rolled-back:j-1", acked_event_seq=0), {}),
    ],
)
def test_a_rolled_back_journal_is_told_so_and_gets_nothing(row: SessionRow, changes: dict[str, object]) -> None:
    commands = (
        in_flight("c-1"),
        in_flight("c-2", cancel_requested=True),
        in_flight("c-3", kind="gpu.reset"),
        in_flight("c-4", cancel_requested=True),
    )
    node = NodeFacts(identity_generation=1, spec_generation=3)
    rolled = plan(facts(row=row, commands=commands, node=node), running_command_ids=["c-4"], **changes)
    assert rolled.new_journal
    assert rolled.row.journal_id == "rolled-back:j-1"
    assert rolled.row.acked_event_seq == 0
    assert not rolled.resent
    assert not rolled.cancels, "not even of what runs: the next Hello is told"
    assert not rolled.send_spec
    assert [(end.command_id, end.reason) for end in rolled.ends] == [("c-2", "cancelled"), ("c-3", "journal-lost")]
    again = plan(facts(row=replace(ROW, journal_id="rolled-back:j-1")), journal_id="j-2", last_event_seq=0)
    assert not again.new_journal
    assert again.row.journal_id == "j-2"


# 5 Replay


def test_commands_go_out_in_order_within_credits_and_the_rest_is_held() -> None:
    commands = tuple(in_flight(f"c-{number}") for number in range(11, 0, -1))
    replayed = plan(facts(commands=commands), running_command_ids=["c-2", "unknown"])
    assert [command.command_id for command in replayed.resent] == ["c-1", *(f"c-{n}" for n in range(3, 9))]
    assert all(command.attempt == 2 for command in replayed.resent)
    assert [command.command_id for command in replayed.held] == ["c-9", "c-10", "c-11"]
    assert replayed.running == {"c-2": 1}
    assert set(replayed.in_flight) == {command.command_id for command in commands}


@pytest.mark.parametrize(
    ("state", "seen"),
    [
        (CommandState.DISPATCHED, None),
        (CommandState.ACKED, CommandState.ACKED),
        (CommandState.RUNNING, CommandState.RUNNING),
    ],
)
def test_a_command_says_what_was_seen_of_it(state: CommandState, seen: CommandState | None) -> None:
    assert plan(facts(commands=(in_flight("c-1", state=state),))).resent[0].seen is seen


def test_results_are_facts_and_named_ones_wait() -> None:
    commands = (in_flight("c-1"), in_flight("c-2"))
    done = messages.CommandUpdate(command_id="c-1", state=messages.COMMAND_STATE_SUCCEEDED)
    elsewhere = messages.CommandUpdate(command_id="c-99", state=messages.COMMAND_STATE_FAILED)
    nothing = messages.CommandUpdate(command_id="c-2", state=messages.COMMAND_STATE_ACKED)
    decided = plan(facts(commands=commands), done_results=[done, elsewhere, nothing], done_ids=["c-1", "c-2", "c-99"])
    assert [fact.command_id for fact in decided.results] == ["c-1", "c-99"]
    assert decided.in_flight == ("c-2",)
    assert not decided.resent
    assert not decided.held


def test_an_upgrade_only_session_replays_only_the_upgrade() -> None:
    commands = (in_flight("c-1"), in_flight("c-2", kind="daemon.upgrade", lane=2))
    decided = plan(
        facts(commands=commands, node=NodeFacts(identity_generation=1, spec_generation=3)), proto_min=0, proto_max=0
    )
    assert decided.upgrade_required
    assert decided.row.upgrade_only
    assert decided.protocol_version == 1
    assert not decided.send_spec
    assert [command.command_id for command in decided.resent] == ["c-2"]
    assert [command.command_id for command in decided.held] == ["c-1"]


def test_a_signed_only_session_withholds_what_is_not_signed() -> None:
    commands = (in_flight("c-1"), in_flight("c-2", signature=b"signature"))
    decided = plan(facts(commands=commands, gateway=gateway_facts(signed_only=True)))
    assert [command.command_id for command in decided.resent] == ["c-2"]
    assert [command.command_id for command in decided.held] == ["c-1"]


def test_an_unsigned_result_of_a_signed_only_session_is_stored_as_unauthenticated() -> None:
    results = [messages.CommandUpdate(command_id=name, state=messages.COMMAND_STATE_SUCCEEDED) for name in ("a", "b")]
    results[1].signature.value = b"signature"
    for signed_only, authenticated in ((True, [False, True]), (False, [True, True])):
        decided = plan(facts(gateway=gateway_facts(signed_only=signed_only)), done_results=results)
        assert [fact.authenticated for fact in decided.results] == authenticated


def test_kinds_that_the_certificate_does_not_allow_are_cancelled() -> None:
    certificate = certificate_facts(allowed_kinds=frozenset({"diag.nvml"}))
    decided = plan(facts(certificate=certificate, commands=(in_flight("c-1"),)))
    assert [(end.state, end.reason) for end in decided.ends] == [(CommandState.CANCELLED, "kind-not-allowed")]
    assert not decided.wake_commands
    assert decided.allowed_kinds == frozenset({"diag.nvml"})


def test_rules_five_and_six_wake_the_owners() -> None:
    commands = (in_flight("c-1", kind="gpu.reset"), in_flight("c-2", kind="node.reboot", state=CommandState.ACKED))
    decided = plan(facts(commands=commands), journal_id="j-2", boot_id="boot-2", last_event_seq=0)
    assert {end.command_id: end.state for end in decided.ends} == {
        "c-1": CommandState.FAILED,
        "c-2": CommandState.SUCCEEDED,
    }
    assert set(decided.wake_commands) == {"c-1", "c-2"}


# 6 Connectivity, duplicates


def test_the_connected_event_has_its_flags() -> None:
    event = plan(boot_id="boot-2").events[0]
    assert event.name == telemetry.EVENT_NODE_CONNECTED
    assert event.attributes["epoch"] == 8
    assert event.attributes["bootId"] == "boot-2"
    assert event.attributes["bootChanged"] is True
    assert event.attributes["journalChanged"] is False
    assert event.attributes["duplicateIdentity"] is False


def test_a_live_session_of_another_boot_is_a_duplicate() -> None:
    decided = plan(facts(row=LIVE), boot_id="boot-2")
    assert decided.close_previous
    assert [event.name for event in decided.events] == [
        telemetry.EVENT_NODE_CONNECTED,
        telemetry.EVENT_DUPLICATE_SESSION,
    ]
    assert decided.events[1].attributes == {
        "nodeId": NODE_ID,
        "gatewayId": "gw-1",
        "previousBootId": "boot-1",
        "bootId": "boot-2",
        "alternations": 1,
        "windowSeconds": 600,
        "quarantined": False,
    }
    assert decided.row.duplicate_hellos == 1
    assert [change.type for change in decided.conditions if change.holds] == ["DuplicateIdentity"]


def test_the_quarantine_commits_its_writes_without_an_epoch() -> None:
    boots = ("boot-2", "boot-1", "boot-2", "boot-1")
    row = replace(
        LIVE,
        duplicate_hellos=3,
        duplicate_since_ms=START_MS - 60_000,
        recent_boots=tuple(BootSeen(boot_id=boot, seen_at_ms=START_MS - 1_000) for boot in boots),
    )
    refused = refusal(facts(row=row), boot_id="boot-2")
    assert (refused.refused.status, refused.reason) == (Status.UNAUTHENTICATED, Reason.QUARANTINED)
    for told in ("boot-1", "boot-2", "192.0.2.1", "192.0.2.9", "bcd rejoin", "duplicate identity"):
        assert told in refused.refused.message
    writes = refused.writes
    assert writes is not None
    assert writes.revoke is not None
    assert (writes.revoke.generation, writes.revoke.reason) == (1, "duplicate-identity")
    assert writes.reset_duplicates
    assert [event.name for event in writes.events] == [
        telemetry.EVENT_DUPLICATE_SESSION,
        telemetry.EVENT_NODE_QUARANTINED,
    ]
    assert writes.events[0].attributes["quarantined"] is True
    assert writes.notice is not None
    assert {one.boot_id for one in writes.notice.claimants} == {"boot-1", "boot-2"}


def test_conditions_clear_after_a_quiet_window() -> None:
    node = NodeFacts(
        identity_generation=1, spec_generation=0, conditions=frozenset({"DuplicateIdentity", "RebootLoop"})
    )
    assert {(change.type, change.holds) for change in plan(facts(node=node)).conditions} == {
        ("DuplicateIdentity", False),
        ("RebootLoop", False),
    }
    counting = replace(ROW, duplicate_hellos=1, duplicate_since_ms=START_MS - 1_000)
    assert not plan(facts(node=node, row=counting)).conditions


def test_a_crash_loop_is_a_condition() -> None:
    row = replace(LIVE, duplicate_hellos=3, duplicate_since_ms=START_MS - 60_000)
    decided = plan(facts(row=row), boot_id="boot-9")
    assert {change.type for change in decided.conditions} == {"DuplicateIdentity", "RebootLoop"}


# 7 Inventory, labels, spec, trust


def test_sections_whose_hash_changed_or_was_never_seen_are_asked_for() -> None:
    given = facts(inventory_hashes={"cpu": b"1" * 32, "disks": b"2" * 32})
    decided = plan(given, inventory_hashes={"cpu": b"1" * 32, "disks": b"3" * 32, "pci": b"4" * 32})
    assert decided.request_sections == ("disks", "pci")
    assert set(decided.inventory_hashes) == {"cpu", "disks", "pci"}


def test_capabilities_are_system_labels() -> None:
    assert plan(capabilities=["nvml", "NOT"]).capability_labels == {"bc.dev/cap.nvml": "1"}


@pytest.mark.parametrize(
    ("generation", "applied", "sha256", "due"), [(0, 0, b"", False), (3, 2, b"x" * 32, True), (3, 3, b"", True)]
)
def test_the_spec_is_due(generation: int, applied: int, sha256: bytes, *, due: bool) -> None:
    node = NodeFacts(identity_generation=1, spec_generation=generation)
    assert plan(facts(node=node), applied_generation=applied, spec_sha256=sha256).send_spec is due


def test_a_hello_above_the_nodes_own_generation_wakes_its_controllers() -> None:
    node = NodeFacts(identity_generation=1, spec_generation=3)
    assert plan(facts(node=node), applied_generation=4).wake_nodes
    assert not plan(facts(node=node), applied_generation=3).wake_nodes


def test_another_spec_under_the_nodes_own_generation_counts_as_the_next() -> None:
    given = facts(node=NodeFacts(identity_generation=1, spec_generation=3, spec_sha256=b"x" * 32))
    other = plan(given, observed_generation=3, applied_generation=3, spec_sha256=b"y" * 32)
    assert (other.observed_generation, other.applied_generation, other.wake_nodes) == (4, 3, True)
    for observed, sha256 in ((3, b"x" * 32), (3, b""), (2, b"y" * 32)):
        same = plan(given, observed_generation=observed, spec_sha256=sha256)
        assert (same.observed_generation, same.wake_nodes) == (observed, False)


@pytest.mark.parametrize(("held", "sent"), [(4, True), (5, False), (6, False)])
def test_only_a_newer_trust_bundle_is_sent(held: int, *, sent: bool) -> None:
    assert plan(facts(gateway=gateway_facts(trust_version=5)), trust_version=held).send_trust is sent


def test_the_same_facts_give_the_same_plan() -> None:
    assert plan(facts(commands=(in_flight("c-1"),))) == plan(facts(commands=(in_flight("c-1"),)))


# What a daemon says


def daemon(entries: dict[str, JournalEntry]) -> daemon_side.DaemonSession:
    state, _ = daemon_side.start(
        daemon_side.DaemonFacts(
            node_id=NODE_ID,
            role=1,
            boot_id="boot-1",
            process_id="p-1",
            daemon_version="1.0.0",
            proto_min=1,
            proto_max=1,
        ),
        daemon_side.Advertised(capabilities=("nvml",), trust_version=3),
        daemon_side.JournalFacts(
            journal_id="j-1",
            entries=entries,
            cancelled={},
            last_epoch=7,
            last_event_seq=12,
            acked_event_seq=10,
            hello_nonce=b"n" * 16,
            previous_hello_nonce=b"m" * 16,
            mark_ms=START_MS,
            confirmed_ms=START_MS,
        ),
        now_ms=0,
    )
    return state


def done(number: int, *, result: bytes = b"", acked: bool = False) -> JournalEntry:
    update = messages.CommandUpdate(
        command_id=f"c-{number}", state=messages.COMMAND_STATE_SUCCEEDED, attempt=1, result=result
    )
    return JournalEntry(
        command_id=f"c-{number}",
        kind="inventory.refresh",
        lane=1,
        attempt=1,
        state=CommandState.SUCCEEDED,
        not_after_ms=START_MS,
        process_id="p-0",
        started=True,
        update=update.SerializeToString(),
        done_mark_ms=number,
        acked=acked,
    )


def test_a_hello_is_built_from_the_journal() -> None:
    running = replace(done(3), state=CommandState.RUNNING, process_id="p-1", update=b"")
    left = replace(running, command_id="c-4", process_id="p-0")
    built, riding = hello.new_hello(
        daemon({"c-2": done(2), "c-1": done(1), "c-3": running, "c-4": left, "c-5": done(5, acked=True)})
    )
    assert [result.command_id for result in built.done_results] == ["c-1", "c-2"]
    assert list(built.done_ids) == ["c-1", "c-2"]
    assert riding == {"c-1", "c-2"}
    assert list(built.running_command_ids) == ["c-3"]
    assert (built.first_unacked_event_seq, built.last_event_seq, built.last_epoch) == (11, 12, 7)
    assert (built.hello_nonce, built.previous_hello_nonce) == (b"n" * 16, b"m" * 16)
    assert list(built.capabilities) == ["nvml"]
    assert built.trust_version == 3


def test_a_hello_never_passes_its_bound() -> None:
    entries = {f"c-{number}": done(number, result=bytes(100_000)) for number in range(30)}
    built, riding = hello.new_hello(daemon(entries))
    assert built.ByteSize() <= MAX_HELLO_BYTES
    assert len(built.done_results) == 10
    assert riding == {f"c-{number}" for number in range(10)}, "the oldest that fit"
    assert len(built.done_ids) == 30
    validate_for_store(messages.AgentFrame(hello=built))


def test_ten_thousand_results_fit_by_their_ids() -> None:
    entries = {f"c-{number}": done(number, result=bytes(60)) for number in range(MAX_DONE_RESULTS + 5)}
    built, _ = hello.new_hello(daemon(entries))
    assert built.ByteSize() <= MAX_HELLO_BYTES
    assert len(built.done_ids) == MAX_DONE_RESULTS
