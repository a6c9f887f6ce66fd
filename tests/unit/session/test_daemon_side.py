"""The daemon's end: the barrier, deliveries and answers, beats, reconnects; in every phase."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from bettercompute.delivery.commands import CommandState
from bettercompute.delivery.journal_rules import KEEP_MS, JournalEntry
from bettercompute.pki import certificates
from bettercompute.pki.quorum import NO_APPROVERS, Unbatched, make_approver_set
from bettercompute.pki.trust import CommandRoot
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import KINDS, pack_payload
from bettercompute.protocol.statuses import Reason, Status
from bettercompute.session import busy, clock, daemon_side, effects, inputs
from bettercompute.session.authority import ANYBODY, Authority
from bettercompute.session.daemon_state import DaemonSession, Phase
from bettercompute.session.effects import DaemonEffect
from bettercompute.session.refusals import Relayed
from tests.unit.session.world_in_memory import NODE_ID, START_MS

FRESH = b"f" * 16
LOAD = messages.NodeLoad(load1=0.5)


def booted(
    entries: dict[str, JournalEntry] | None = None, **journal: object
) -> tuple[DaemonSession, tuple[DaemonEffect, ...]]:
    fields: dict[str, object] = {
        "journal_id": "j-1",
        "entries": entries or {},
        "cancelled": {},
        "last_epoch": 3,
        "last_event_seq": 0,
        "acked_event_seq": 0,
        "hello_nonce": b"",
        "previous_hello_nonce": b"",
        "mark_ms": START_MS,
        "confirmed_ms": START_MS,
    }
    return daemon_side.start(
        daemon_side.DaemonFacts(
            node_id=NODE_ID,
            role=messages.AGENT_ROLE_NODE,
            boot_id="boot-1",
            process_id="p-1",
            daemon_version="1.0.0",
            proto_min=1,
            proto_max=1,
            trust_domain="bc.local",
        ),
        daemon_side.Advertised(inventory_hashes={"cpu": b"1" * 32}),
        daemon_side.JournalFacts(**{**fields, **journal}),  # type: ignore[arg-type]  # test data
        now_ms=0,
    )


def step(
    state: DaemonSession, given: inputs.DaemonInput, now_ms: int = 0
) -> tuple[DaemonSession, tuple[DaemonEffect, ...]]:
    return daemon_side.step(state, given, now_ms)


def welcome(**changes: object) -> messages.Welcome:
    fields: dict[str, object] = {
        "session_id": "s-1",
        "epoch": 4,
        "protocol_version": 1,
        "heartbeat_interval_ms": 10_000,
        "lane_credits": [
            messages.LaneCredits(lane=messages.LANE_CONTROL, credits=2),
            messages.LaneCredits(lane=messages.LANE_BULK, credits=1),
        ],
        "server_time_ms": START_MS,
        "gateway_capabilities": ["update-batch"],
    }
    return messages.Welcome(**{**fields, **changes})  # type: ignore[arg-type]  # test data


def told(state: DaemonSession, now_ms: int = 0, **frame: Any) -> tuple[DaemonSession, tuple[DaemonEffect, ...]]:
    server = messages.ServerFrame(**frame)
    return step(state, inputs.ServerFrameReceived(server, wall_ms=START_MS + now_ms), now_ms)


def dialed(state: DaemonSession | None = None) -> DaemonSession:
    return step(state or booted()[0], inputs.Dialed(fresh_nonce=FRESH))[0]


def live(state: DaemonSession | None = None, **changes: object) -> DaemonSession:
    return told(dialed(state), welcome=welcome(**changes))[0]


def command(
    command_id: str = "c-1",
    kind: str = "inventory.refresh",
    *,
    seen: CommandState | None = None,
    attempt: int = 1,
    **changes: object,
) -> messages.Command:
    known = KINDS.get(kind, KINDS["inventory.refresh"])
    fields: dict[str, object] = {
        "command_id": command_id,
        "node_id": NODE_ID,
        "kind": kind,
        "lane": known.lane,
        "payload": pack_payload(known.payload()),
        "not_after_ms": START_MS + 60_000,
        "timeout_ms": 1_000,
        "trust_domain": "bc.local",
    }
    body = messages.CommandBody(**{**fields, **changes})  # type: ignore[arg-type]  # test data
    frame = messages.Command(body=body.SerializeToString(), attempt=attempt)
    if seen is not None:
        frame.seen = messages.CommandState.ValueType(seen)
    return frame


def updates(done: tuple[DaemonEffect, ...]) -> list[messages.CommandUpdate]:
    found: list[messages.CommandUpdate] = []
    for effect in done:
        if isinstance(effect, effects.SendAgentFrame):
            if effect.frame.WhichOneof("frame") == "update":
                found.append(effect.frame.update)
            found += effect.frame.updates.updates
    return found


def sent(done: tuple[DaemonEffect, ...], case: str) -> list[messages.AgentFrame]:
    return [
        effect.frame
        for effect in done
        if isinstance(effect, effects.SendAgentFrame) and effect.frame.WhichOneof("frame") == case
    ]


def kinds(done: tuple[DaemonEffect, ...]) -> list[str]:
    return [type(effect).__name__ for effect in done]


def left(
    command_id: str = "c-1", *, kind: str = "inventory.refresh", process_id: str = "p-0", **changes: object
) -> JournalEntry:
    entry = JournalEntry(
        command_id=command_id,
        kind=kind,
        lane=1,
        attempt=1,
        state=CommandState.RUNNING,
        not_after_ms=START_MS + 60_000,
        process_id=process_id,
        started=True,
        start_boot_id="boot-1",
        start_role=1,
        start_version="1.0.0",
    )
    return replace(entry, **changes)  # type: ignore[arg-type]  # test data


def done_entry(command_id: str = "c-1", *, acked: bool = False) -> JournalEntry:
    update = messages.CommandUpdate(command_id=command_id, state=messages.COMMAND_STATE_SUCCEEDED, attempt=1)
    return left(
        command_id,
        state=CommandState.SUCCEEDED,
        update=b"" if acked else update.SerializeToString(),
        done_mark_ms=START_MS,
        acked=acked,
    )


# Start


def test_a_new_process_ends_what_must_not_run_again_and_dials() -> None:
    entries = {
        "safe": left("safe"),
        "unsafe": left("unsafe", kind="gpu.reset"),
        "reboot": left("reboot", kind="node.reboot"),
        "rebooted": left("rebooted", kind="node.reboot", start_boot_id="boot-0"),
        "waiting": left("waiting", kind="gpu.reset", started=False, state=CommandState.ACKED),
        "done": done_entry("done"),
        "acked": done_entry("acked", acked=True),
    }
    state, done = booted(entries)
    ended = {effect.command_id: effect for effect in done if isinstance(effect, effects.FinishCommand)}
    assert {name: effect.state for name, effect in ended.items()} == {
        "unsafe": CommandState.FAILED,
        "reboot": CommandState.FAILED,
        "rebooted": CommandState.SUCCEEDED,
    }
    reasons = {name: messages.CommandUpdate.FromString(effect.update).reason for name, effect in ended.items()}
    assert reasons == {"unsafe": "interrupted", "reboot": "no-effect", "rebooted": ""}
    assert done[-1] == effects.WaitThenDial(0, effects.Redial.NEW_CONNECTION, 0)
    assert set(state.settled) == {"acked"}
    assert state.phase is Phase.OFFLINE


# Hello and its nonces


def test_a_fresh_nonce_is_stored_before_hello_and_repeated_until_a_welcome() -> None:
    state, done = step(booted()[0], inputs.Dialed(fresh_nonce=FRESH))
    assert kinds(done) == ["StoreNonces", "SendAgentFrame"]
    assert done[0] == effects.StoreNonces(FRESH, b"")
    state, done = step(state, inputs.Dialed(fresh_nonce=b"g" * 16))
    assert kinds(done) == ["SendAgentFrame"]
    assert sent(done, "hello")[0].hello.hello_nonce == FRESH
    state, _ = told(state, welcome=welcome())
    state, done = step(state, inputs.Dialed(fresh_nonce=b"g" * 16))
    hello = sent(done, "hello")[0].hello
    assert (hello.hello_nonce, hello.previous_hello_nonce) == (b"g" * 16, FRESH)


# The barrier


@pytest.mark.parametrize(
    "frame",
    [
        {"command": command()},
        {"cancel": messages.Cancel(command_id="c-1")},
        {"desired": messages.DesiredState(body=b"x")},
        {"ack": messages.Ack(command_ids=["c-1"])},
        {"drain": messages.Drain()},
        {},
    ],
)
def test_nothing_is_obeyed_before_welcome(frame: dict[str, object]) -> None:
    state, done = told(dialed(), now_ms=0, **frame)
    assert kinds(done) == ["EndSession"]
    assert state.phase is Phase.ENDING
    assert told(state, welcome=welcome())[1] == (), "and nothing after the end was decided"


def test_a_welcome_is_applied() -> None:
    state, done = told(
        dialed(booted(last_event_seq=9)[0]), welcome=welcome(acked_event_seq=5, request_sections=["cpu"])
    )
    assert done[:4] == (
        effects.StoreNonces(b"", FRESH),
        effects.StoreEpoch(4),
        effects.StoreTime(START_MS, START_MS),
        effects.AckEvents(5),
    )
    assert effects.SendInventory(("cpu",)) in done
    assert effects.SendEvents("s-1", "j-1", 5, 9) in done
    assert (state.phase, state.epoch, state.last_epoch, state.session_id) == (Phase.LIVE, 4, 4, "s-1")
    assert (state.lanes[1].credits, state.lanes[2].credits) == (2, 1)
    assert state.backoff.attempt == 0


def test_a_welcome_from_the_past_ends_the_session() -> None:
    state, done = told(dialed(), welcome=welcome(server_time_ms=START_MS - 300_001))
    assert kinds(done) == ["Warn", "EndSession"]
    assert state.phase is Phase.ENDING
    assert state.last_epoch == 3


def test_a_rolled_back_journal_takes_a_new_id_and_says_hello_anew() -> None:
    state, done = told(dialed(booted(last_event_seq=9)[0]), welcome=welcome(new_journal=True))
    assert kinds(done) == ["StoreNonces", "StoreEpoch", "StoreTime", "TakeNewJournalId", "Warn", "EndSession"]
    state, _ = step(state, inputs.JournalRenewed("j-2", 4))
    state, _ = step(state, inputs.StreamEnded(drawn=0.0))
    _, done = step(state, inputs.Dialed(fresh_nonce=b"g" * 16))
    hello = sent(done, "hello")[0].hello
    assert (hello.journal_id, hello.last_event_seq, hello.first_unacked_event_seq) == ("j-2", 4, 1)


def test_a_welcome_that_asks_for_a_new_journal_resets_the_doubling_too() -> None:
    state = dialed()
    for _ in range(4):
        state = dialed(step(state, inputs.StreamEnded(drawn=0.0))[0])
    state, _ = told(state, welcome=welcome(new_journal=True))
    _, done = step(state, inputs.StreamEnded(drawn=0.5))
    assert done == (effects.WaitThenDial(500, effects.Redial.NEW_CONNECTION, 0),)


def test_results_that_did_not_ride_in_hello_follow_welcome_once() -> None:
    big = messages.CommandUpdate(command_id="x", state=messages.COMMAND_STATE_SUCCEEDED, result=bytes(600_000))
    entries = {
        name: replace(done_entry(name), update=big.SerializeToString(), done_mark_ms=number)
        for number, name in enumerate(("a", "b", "c"))
    }
    state = dialed(booted(entries)[0])
    _, done = told(state, welcome=welcome())
    assert len(sent(done, "update")) == 2


def test_a_trust_bundle_is_handed_on_and_reported_once() -> None:
    state = live(trust=messages.SignedTrustBundle(body=b"b"))
    state, _ = step(state, inputs.StatusChanged(messages.StatusReport()))
    approvers = replace(NO_APPROVERS, epoch=2, keys=(b"k" * 91,), threshold=1)
    state, done = step(state, inputs.TrustHeld(5, Authority(approvers=approvers)))
    report = sent(done, "status")[0].status
    assert (report.trust_version, report.approver_set_epoch) == (5, 2)
    assert report.approver_set_sha256 == approvers.sha256 != b""
    _, done = step(state, inputs.StatusChanged(messages.StatusReport()))
    assert sent(done, "status")[0].status.trust_version == 0


def test_trust_that_changed_between_hello_and_welcome_is_reported_after_it() -> None:
    state, _ = step(booted()[0], inputs.StatusChanged(messages.StatusReport()))
    state, _ = step(state, inputs.TrustHeld(4, ANYBODY))
    _, done = told(dialed(state), welcome=welcome())
    assert sent(done, "status")[0].status.trust_version == 0, "Hello told it"
    state, _ = step(dialed(state), inputs.TrustHeld(5, ANYBODY))
    _, done = told(state, welcome=welcome())
    assert sent(done, "status")[0].status.trust_version == 5


def test_an_ack_past_the_journals_end_is_not_believed() -> None:
    state, done = told(dialed(booted(last_event_seq=4)[0]), welcome=welcome(acked_event_seq=99))
    assert effects.AckEvents(4) in done
    assert state.acked_event_seq == 4
    state, done = step(state, inputs.EventsJournaled(5))
    assert done == (effects.SendEvents("s-1", "j-1", 4, 5),)


def test_a_clock_that_cannot_be_confirmed_is_a_condition() -> None:
    _, done = told(dialed(), welcome=welcome(server_time_ms=START_MS + 10 * 3_600_000))
    (condition,) = [effect for effect in done if isinstance(effect, effects.SetCondition)]
    assert (condition.type, condition.holds) == ("ClockUnconfirmed", True)
    assert effects.StoreTime(START_MS, START_MS) in done


def host_clock(done: tuple[DaemonEffect, ...]) -> list[bool]:
    """Return what was said of the host's clock, in order."""
    conditions = [effect for effect in done if isinstance(effect, effects.SetCondition)]
    return [one.holds for one in conditions if one.type == "HostClockOff"]


def test_a_host_clock_far_from_a_time_that_is_believed_is_a_condition() -> None:
    frame = messages.ServerFrame(welcome=welcome())
    ahead_ms = START_MS + 30 * 24 * 3_600_000
    state, done = step(dialed(), inputs.ServerFrameReceived(frame, wall_ms=ahead_ms))
    assert host_clock(done) == [True]
    state, done = step(state, inputs.DaemonTick(wall_ms=ahead_ms + 10_000, load=LOAD, last_heard_ms=0), now_ms=10_000)
    assert host_clock(done) == []
    state, done = step(state, inputs.DaemonTick(wall_ms=START_MS + 20_000, load=LOAD, last_heard_ms=0), now_ms=20_000)
    assert host_clock(done) == [False]
    # What the clock lay about has not moved the node's own time.
    assert state.clock.mark_ms <= START_MS + 20_000


# Deliveries


def test_a_command_is_kept_started_answered_and_run_in_that_order() -> None:
    state, done = told(live(), command=command())
    assert kinds(done) == ["AcceptCommand", "StartCommand", "SendAgentFrame", "StartHandler"]
    accept = done[0]
    assert isinstance(accept, effects.AcceptCommand)
    assert not accept.entry.started
    assert updates(done)[0].state == messages.COMMAND_STATE_RUNNING
    assert (state.lanes[1].free, state.lanes[1].received) == (1, 1)
    assert state.entries["c-1"].started


R = messages


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (command(node_id="other"), R.COMMAND_REJECT_REASON_WRONG_NODE),
        (command(trust_domain="other"), R.COMMAND_REJECT_REASON_WRONG_NODE),
        (command(kind="newer.kind"), R.COMMAND_REJECT_REASON_UNSUPPORTED),
        (command(lane=R.LANE_BULK), R.COMMAND_REJECT_REASON_INVALID),
        (command(not_after_ms=START_MS), R.COMMAND_REJECT_REASON_EXPIRED),
        (command(not_before_ms=START_MS + 9, not_after_ms=START_MS + 9), R.COMMAND_REJECT_REASON_INVALID),
        (command(not_after_ms=0), R.COMMAND_REJECT_REASON_INVALID),
        (command(timeout_ms=0), R.COMMAND_REJECT_REASON_INVALID),
        (command(payload=pack_payload(R.NodeRebootPayload())), R.COMMAND_REJECT_REASON_INVALID),
        (command(command_id=""), R.COMMAND_REJECT_REASON_INVALID),
    ],
)
def test_every_rejection_has_its_reason_and_leaves_no_trace(frame: messages.Command, reason: int) -> None:
    state, done = told(live(), command=frame)
    (update,) = updates(done)
    assert (update.state, update.reject_reason) == (messages.COMMAND_STATE_REJECTED, reason)
    assert update.message
    assert kinds(done) == ["SendAgentFrame"]
    assert not state.entries
    assert sum(lane.received for lane in state.lanes.values()) == 1
    assert all(not lane.holders for lane in state.lanes.values())


def test_a_command_that_comes_long_before_its_time_is_left_for_later_and_counted() -> None:
    allowed_ms = busy.EARLY_ALLOWED_MS
    assert "StartHandler" in kinds(
        told(live(), command=command(not_before_ms=START_MS + allowed_ms, not_after_ms=2 * START_MS))[1]
    )
    early = command(not_before_ms=START_MS + allowed_ms + 1, not_after_ms=2 * START_MS)
    state, done = told(live(), command=early)
    (update,) = updates(done)
    assert (update.state, update.reject_reason) == (R.COMMAND_STATE_REJECTED, R.COMMAND_REJECT_REASON_BUSY)
    assert "not_before is" in update.message
    assert state.refused == {("command", "not-before"): 1}
    assert (kinds(done), state.entries) == (["SendAgentFrame"], {})
    assert "StartHandler" in kinds(told(state, now_ms=1, command=early)[1])


def test_a_role_that_may_not_run_a_kind_rejects_it() -> None:
    state = live()
    site = replace(state, facts=replace(state.facts, role=messages.AGENT_ROLE_SITE))
    (update,) = updates(told(site, command=command(kind="gpu.reset"))[1])
    assert update.reject_reason == messages.COMMAND_REJECT_REASON_KIND_NOT_ALLOWED


def test_an_upgrade_only_session_takes_only_the_upgrade() -> None:
    state = live(upgrade_required=True)
    (update,) = updates(told(state, command=command())[1])
    assert update.reject_reason == messages.COMMAND_REJECT_REASON_UNSUPPORTED
    assert "StartHandler" in kinds(told(state, command=command(kind="daemon.upgrade"))[1])
    assert told(state, desired=messages.DesiredState(body=b"x"))[1] == ()
    assert told(state, open_tunnel=messages.OpenTunnel())[1] == ()


def test_a_command_that_does_not_verify_is_rejected_whatever_it_says() -> None:
    root = certificates.make_command_root(serial=bytes(16), now_ms=START_MS)
    signing, _ = step(
        live(), inputs.TrustHeld(2, Authority(command_roots=(CommandRoot(certificate=root.certificate),)))
    )
    state, done = told(signing, command=command())
    assert updates(done)[0].reject_reason == messages.COMMAND_REJECT_REASON_BAD_SIGNATURE
    assert "not signed" in updates(done)[0].message
    assert not state.entries


def one_unbatched_an_hour() -> DaemonSession:
    """Return a session whose approvers let one destructive command an hour pass without them."""
    key = certificates.generate_key().public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    approvers = make_approver_set(
        [key], epoch=1, threshold=1, tiers=[messages.DESTRUCTIVE_TIER_NODE], unbatched_per_hour=1
    )
    state, _ = step(live(), inputs.TrustHeld(2, Authority(approvers=approvers)))
    return state


def test_a_destructive_command_needs_an_approval_or_one_of_the_few_an_hour() -> None:
    state = one_unbatched_an_hour()
    state, done = told(state, command=command("c-1", kind="gpu.reset"))
    assert kinds(done)[:3] == ["AcceptCommand", "CountUnbatched", "StartCommand"], "counted before it starts"
    state, done = told(state, command=command("c-2", kind="gpu.reset"))
    assert updates(done)[0].reject_reason == messages.COMMAND_REJECT_REASON_APPROVAL_REQUIRED
    assert "c-2" not in state.entries
    _, done = told(state, command=command("c-3"))
    assert "StartHandler" in kinds(done), "what destroys nothing needs nobody"


def test_what_found_no_room_was_none_of_the_few_an_hour() -> None:
    state = one_unbatched_an_hour()
    state, _ = told(state, command=command("c-1", kind="gpu.reset"))
    state, done = step(state, inputs.JournalRefused("c-1"))
    assert updates(done)[0].reject_reason == messages.COMMAND_REJECT_REASON_BUSY
    state, _ = step(state, inputs.JournalRoom(full=False))
    state, done = told(state, command=command("c-1", kind="gpu.reset", attempt=2))
    assert "StartHandler" in kinds(done)
    _, done = told(state, command=command("c-2", kind="gpu.reset"))
    assert updates(done)[0].reject_reason == messages.COMMAND_REJECT_REASON_APPROVAL_REQUIRED


@pytest.mark.parametrize(("started", "said"), [(True, "before it began again"), (False, "cancelled before it began")])
def test_a_cancel_says_what_is_known_of_what_an_earlier_process_had(started: bool, said: str) -> None:
    _, done = told(live(booted({"c-1": left(started=started)})[0]), cancel=messages.Cancel(command_id="c-1"))
    [update] = updates(done)
    assert update.state == messages.COMMAND_STATE_CANCELLED
    assert said in update.message
    assert ("not undone" in update.message) == started


def test_the_hours_count_outlives_a_restart_and_a_reboot() -> None:
    kept = Unbatched("boot-1", (-5,))
    assert booted(unbatched=kept)[0].unbatched == kept
    assert booted(unbatched=Unbatched("boot-0", (1, 2)))[0].unbatched == Unbatched("boot-1", (0, 0))


def test_a_body_that_does_not_decode_is_said_in_the_log() -> None:
    _, done = told(live(), command=messages.Command(body=b"\xff"))
    assert kinds(done) == ["Warn"]


@pytest.mark.parametrize("full", [True, False])
def test_without_a_credit_or_room_it_is_busy(*, full: bool) -> None:
    state = live()
    if full:
        state, _ = step(state, inputs.JournalRoom(full=True))
    else:
        for number in (2, 3):
            state, _ = told(state, command=command(f"c-{number}"))
    state, done = told(state, command=command())
    (update,) = updates(done)
    assert update.reject_reason == messages.COMMAND_REJECT_REASON_BUSY
    assert update.message.startswith("journal-full" if full else "no-credit")
    assert "c-1" not in state.entries


def test_what_an_earlier_process_left_has_its_room_in_a_full_journal() -> None:
    left = replace(done_entry(), state=CommandState.RUNNING, started=True, process_id="p-0", update=b"", done_mark_ms=0)
    state = live(booted({"c-1": left}, full=True)[0])
    state, done = told(state, command=command(attempt=2, seen=CommandState.RUNNING))
    assert kinds(done) == ["TakeUpCommand", "StartCommand", "SendAgentFrame", "StartHandler"]
    _, done = told(state, command=command("c-2"))
    assert updates(done)[0].reject_reason == messages.COMMAND_REJECT_REASON_BUSY


def test_a_journal_that_refuses_an_acceptance_undoes_it() -> None:
    state, _ = told(live(), command=command())
    state, done = step(state, inputs.JournalRefused("c-1"))
    assert updates(done)[0].reject_reason == messages.COMMAND_REJECT_REASON_BUSY
    assert not state.entries
    assert state.lanes[1].free == 2
    assert state.journal_full
    assert step(state, inputs.JournalRefused("c-1"))[1] == ()


def test_a_duplicate_of_a_running_command_gets_its_state() -> None:
    state, _ = told(live(), command=command())
    after, done = told(state, command=command(attempt=2))
    assert kinds(done) == ["SendAgentFrame"]
    assert updates(done)[0].state == messages.COMMAND_STATE_RUNNING
    assert after.lanes[1].received == 2
    assert after.lanes[1].free == 1


@pytest.mark.parametrize("acked", [True, False])
def test_a_duplicate_of_a_done_command_gets_its_stored_result(*, acked: bool) -> None:
    state = live(booted({"c-1": done_entry(acked=acked)})[0])
    expired = command(not_after_ms=START_MS)
    _, done = told(state, command=expired)
    assert kinds(done) == (["ResendResult"] if acked else ["SendAgentFrame"])


def test_a_command_that_an_earlier_process_left_is_taken_up() -> None:
    state = live(booted({"c-1": left()})[0])
    state, done = told(state, command=command(attempt=2, seen=CommandState.RUNNING))
    assert kinds(done) == ["TakeUpCommand", "StartCommand", "SendAgentFrame", "StartHandler"]
    assert state.entries["c-1"].process_id == "p-1"


@pytest.mark.parametrize("other", [{"kind": "gpu.reset"}, {"kind": "node.reboot"}, {"timeout_ms": 2_000}])
def test_another_body_under_the_id_of_what_was_left_is_not_run(other: dict[str, Any]) -> None:
    # Approved or harmless was the body that this node began: a worker could otherwise spend its word on another.
    key = certificates.generate_key().public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    approvers = make_approver_set([key], epoch=1, threshold=1, tiers=[messages.DESTRUCTIVE_TIER_NODE])
    kept = left(command=command().SerializeToString())
    state, _ = step(live(booted({"c-1": kept})[0]), inputs.TrustHeld(2, Authority(approvers=approvers)))
    state, done = told(state, command=command(attempt=2, seen=CommandState.RUNNING, **other))
    assert kinds(done) == ["SendAgentFrame"]
    assert updates(done)[0].reject_reason == messages.COMMAND_REJECT_REASON_INVALID
    assert state.entries["c-1"] == kept
    _, done = told(state, command=command(attempt=3, seen=CommandState.RUNNING))
    assert "StartHandler" in kinds(done), "the one that was left may still be taken up"


def test_one_that_was_left_and_is_too_late_is_done_as_failed() -> None:
    state = live(booted({"c-1": left()})[0])
    state, done = told(state, command=command(attempt=2, not_after_ms=START_MS))
    assert kinds(done) == ["FinishCommand", "SendAgentFrame"]
    (update,) = updates(done)
    assert (update.state, update.reason) == (messages.COMMAND_STATE_FAILED, "rejected-expired")
    assert state.entries["c-1"].done


def test_a_retry_safe_command_that_this_journal_forgot_runs() -> None:
    _, done = told(live(), command=command(kind="inventory.refresh", seen=CommandState.ACKED))
    assert "StartHandler" in kinds(done)


def ends(done: tuple[DaemonEffect, ...]) -> list[tuple[int, str]]:
    return [(update.state, update.reason) for update in updates(done)]


LOST = [(messages.COMMAND_STATE_FAILED, "journal-lost")]


@pytest.mark.parametrize("running", [0, 2])
def test_one_that_it_forgot_and_that_is_not_safe_is_failed_and_kept_as_such(running: int) -> None:
    state = live()
    for number in range(running):  # it takes no credit, so that it needs none
        state, _ = told(state, command=command(f"other-{number}"))
    state, done = told(state, command=command(kind="gpu.reset", seen=CommandState.ACKED))
    assert kinds(done) == ["AcceptCommand", "FinishCommand", "SendAgentFrame"]
    assert ends(done) == LOST
    assert state.lanes[1].free == 2 - running
    # A database that became an earlier one has forgotten that it was ever seen.
    state, done = told(state, command=command(kind="gpu.reset"))
    assert kinds(done) == ["SendAgentFrame"]
    assert ends(done) == LOST
    state, _ = told(state, ack=messages.Ack(command_ids=["c-1"]))
    _, done = told(state, command=command(kind="gpu.reset"))
    assert kinds(done) == ["ResendResult"]


@pytest.mark.parametrize("known_as_full", [False, True])
def test_one_that_it_forgot_fails_also_where_a_full_journal_cannot_keep_that(*, known_as_full: bool) -> None:
    state = live(booted({}, full=known_as_full)[0])
    state, done = told(state, command=command(kind="gpu.reset", seen=CommandState.ACKED))
    if not known_as_full:
        state, done = step(state, inputs.JournalRefused("c-1"))
    assert kinds(done) == ["SendAgentFrame"]
    assert ends(done) == LOST
    assert not state.entries
    assert state.lanes[1].free == 2


# Cancel


def test_a_cancel_of_an_unknown_id_is_remembered_and_refuses_its_late_delivery() -> None:
    state, done = told(live(), cancel=messages.Cancel(command_id="c-1"))
    assert kinds(done) == ["RememberCancelled", "SendAgentFrame"]
    assert updates(done)[0].state == messages.COMMAND_STATE_CANCELLED
    _, again = told(state, cancel=messages.Cancel(command_id="c-1"))
    assert kinds(again) == ["SendAgentFrame"]
    state, done = told(state, command=command())
    assert updates(done)[0].state == messages.COMMAND_STATE_CANCELLED
    assert not state.entries


def test_a_cancel_stops_a_running_command_and_its_outcome_follows() -> None:
    state, _ = told(live(), command=command())
    state, done = told(state, cancel=messages.Cancel(command_id="c-1", reason="why"))
    assert done == (effects.StopHandler("c-1", "why"),)
    assert state.lanes[1].free == 1, "the credit is held until the outcome is sent"
    state, done = step(state, inputs.HandlerFinished(command_id="c-1", state=CommandState.SUCCEEDED))
    assert updates(done)[0].state == messages.COMMAND_STATE_SUCCEEDED


def test_a_cancel_of_what_was_left_ends_it() -> None:
    state = live(booted({"c-1": left()})[0])
    state, done = told(state, cancel=messages.Cancel(command_id="c-1"))
    assert kinds(done) == ["FinishCommand", "SendAgentFrame"]
    assert state.entries["c-1"].state is CommandState.CANCELLED


def test_a_cancel_too_late_gets_the_result() -> None:
    state = live(booted({"c-1": done_entry()})[0])
    assert updates(told(state, cancel=messages.Cancel(command_id="c-1"))[1])[0].state == 5


# Ends


def test_a_result_is_journaled_before_it_is_sent_and_frees_the_credit() -> None:
    state, _ = told(live(), command=command())
    signature = messages.Signature(value=b"v" * 64)
    finished = inputs.HandlerFinished(
        command_id="c-1", state=CommandState.FAILED, result=b"r", reason="timeout", message="m", signature=signature
    )
    state, done = step(state, finished, 50)
    assert kinds(done) == ["FinishCommand", "SendAgentFrame"]
    (update,) = updates(done)
    assert (update.result, update.reason, update.message, update.signature) == (b"r", "timeout", "m", signature)
    assert update.at_ms == START_MS + 50
    assert state.lanes[1].free == 2
    assert step(state, finished)[1] == (), "ended once"


def test_a_result_made_offline_is_journaled_and_not_sent() -> None:
    state, _ = told(live(), command=command())
    state, _ = step(state, inputs.StreamEnded(drawn=0.0))
    _, done = step(state, inputs.HandlerFinished(command_id="c-1", state=CommandState.SUCCEEDED))
    assert kinds(done) == ["FinishCommand"]


def test_progress_and_output_are_told_while_live_only() -> None:
    state, _ = told(live(), command=command())
    news = inputs.HandlerProgressed(
        "c-1", messages.CommandProgress(stage="s", done=1), messages.CommandOutput(data=b"o")
    )
    (update,) = updates(step(state, news)[1])
    assert (update.state, update.progress.stage, update.output.data) == (4, "s", b"o")
    assert step(state, inputs.HandlerProgressed("unknown"))[1] == ()
    offline, _ = step(state, inputs.StreamEnded(drawn=0.0))
    assert step(offline, news)[1] == ()


def test_an_ack_settles_results_and_forgets_events() -> None:
    state = live(booted({"c-1": done_entry()}, last_event_seq=5)[0])
    ack = messages.Ack(journal_id="j-1", acked_event_seq=3, command_ids=["c-1", "unknown"])
    state, done = told(state, ack=ack)
    assert done[:2] == (effects.AckCommands(("c-1",)), effects.AckEvents(3))
    assert state.settled["c-1"].acked
    assert not state.entries
    assert told(state, ack=messages.Ack(journal_id="other", acked_event_seq=5))[1] == ()
    assert told(state, ack=messages.Ack(journal_id="j-1", acked_event_seq=3))[1] == ()


# Events, inventory, status, spec


def test_events_go_one_batch_at_a_time_and_only_on_their_session() -> None:
    state = live()
    state, done = step(state, inputs.EventsJournaled(700))
    assert done == (effects.SendEvents("s-1", "j-1", 0, 500),)
    state, done = step(state, inputs.EventsJournaled(701))
    assert done == ()
    state, done = step(state, inputs.EventsSent("s-0", 500))
    assert done == ()
    state, done = step(state, inputs.EventsSent("s-1", 420))
    assert done == (effects.SendEvents("s-1", "j-1", 420, 701),)


def test_changed_inventory_is_sent_and_hashed_early() -> None:
    state, done = step(live(), inputs.InventoryCollected({"cpu": b"2" * 32, "pci": b"3" * 32}))
    assert done == (effects.SendInventory(("cpu", "pci")),)
    state, done = tick(state, 10_000)
    assert set(sent(done, "heartbeat")[0].heartbeat.inventory_hashes) == {"cpu", "pci"}
    state, done = tick(state, 20_000)
    assert not sent(done, "heartbeat")[0].heartbeat.inventory_hashes
    assert step(state, inputs.InventoryCollected({"cpu": b"2" * 32, "pci": b"3" * 32}))[1] == ()
    offline, _ = step(state, inputs.StreamEnded(drawn=0.0))
    assert step(offline, inputs.InventoryCollected({"cpu": b"9" * 32}))[1] == ()


def test_what_is_held_of_the_spec_is_reported() -> None:
    state, done = step(live(), inputs.SpecHeld(5, 4, b"s" * 32))
    assert done == ()
    state, done = step(state, inputs.StatusChanged(messages.StatusReport()))
    assert (sent(done, "status")[0].status.observed_generation, sent(done, "status")[0].status.applied_generation) == (
        5,
        4,
    )
    _, done = tick(state, 10_000)
    assert sent(done, "heartbeat")[0].heartbeat.applied_generation == 4


# Beats


def tick(
    state: DaemonSession, now_ms: int, *, heard_ms: int | None = None
) -> tuple[DaemonSession, tuple[DaemonEffect, ...]]:
    given = inputs.DaemonTick(
        wall_ms=START_MS + now_ms, load=LOAD, last_heard_ms=now_ms if heard_ms is None else heard_ms
    )
    return step(state, given, now_ms)


def test_heartbeats_come_at_their_interval_with_free_and_received() -> None:
    state, _ = told(live(), command=command())
    assert daemon_side.next_tick_ms(state, now_ms=0) == 5_000
    assert tick(state, 9_999)[1] == ()
    assert daemon_side.next_tick_ms(state, now_ms=9_000) == 1_000
    state, done = tick(state, 10_000)
    beat = sent(done, "heartbeat")[0].heartbeat
    assert {lane.lane: (lane.free, lane.received) for lane in beat.lanes} == {1: (1, 1), 2: (1, 0)}
    assert beat.load == LOAD
    carried = []
    for number in range(2, 21):
        state, done = tick(state, number * 10_000)
        if sent(done, "heartbeat")[0].heartbeat.inventory_hashes:
            carried.append(number)
    assert carried == [10, 20]


def test_the_mark_is_written_once_a_minute_and_old_ids_are_forgotten() -> None:
    entries = {"old": done_entry("old", acked=True), "owed": done_entry("owed")}
    state = live(booted(entries)[0])
    state, done = tick(state, 59_999)
    assert kinds(done) == ["SendAgentFrame"]
    state, done = tick(state, 70_000)
    assert kinds(done) == ["StoreTime", "SendAgentFrame"]
    forgotten = []
    for now_ms in range(130_000, KEEP_MS + 190_000, 60_000):
        state, done = tick(state, now_ms)
        forgotten += [effect for effect in done if isinstance(effect, effects.ForgetCommands)]
    assert forgotten == [effects.ForgetCommands(("old",))]
    assert not state.settled
    assert "owed" in state.entries


def test_after_a_time_that_nobody_saw_the_session_ends_and_its_frames_are_not_obeyed() -> None:
    state, _ = told(live(), command=command())
    frame = messages.ServerFrame(command=command("c-2"))
    given = inputs.ServerFrameReceived(frame, wall_ms=START_MS)
    ended, done = step(state, given, clock.UNSEEN_MAX_MS + 1)
    assert ended.phase is Phase.ENDING
    assert [(type(effect), effect.reason) for effect in done if isinstance(effect, effects.EndSession)] == [
        (effects.EndSession, "time-unseen")
    ]
    assert "c-2" not in ended.entries
    obeyed, _ = step(state, given, clock.UNSEEN_MAX_MS - 1_000)
    assert "c-2" in obeyed.entries


def test_what_a_handler_has_done_in_a_time_that_nobody_saw_is_kept() -> None:
    state, _ = told(live(), command=command())
    finished = inputs.HandlerFinished(command_id="c-1", state=CommandState.SUCCEEDED)
    ended, done = step(state, finished, 3_600_000)
    assert ended.entries["c-1"].done
    assert kinds(done)[0] == "EndSession"
    assert "FinishCommand" in kinds(done)


def test_a_silent_gateway_is_given_up() -> None:
    state, done = tick(live(), 60_000, heard_ms=0)
    assert kinds(done) == ["EndSession"]
    assert state.phase is Phase.ENDING
    assert tick(state, 61_000, heard_ms=0)[1] == ()
    assert tick(live(), 60_000, heard_ms=1)[1] != done


def test_a_gateway_that_never_welcomes_is_given_up() -> None:
    assert tick(dialed(), 59_999)[1] == ()
    _, done = tick(dialed(), 60_000)
    assert isinstance(done[0], effects.EndSession)
    assert done[0].reason == "no-welcome"


def test_a_drain_ends_the_session_when_its_time_has_come() -> None:
    state, done = told(live(), drain=messages.Drain(reconnect_after_ms=3_000))
    assert done == ()
    assert daemon_side.next_tick_ms(state, now_ms=0) == 3_000
    assert "StartHandler" in kinds(told(state, command=command())[1]), "nothing is dropped meanwhile"
    _, done = tick(state, 3_000)
    assert isinstance(done[0], effects.EndSession)
    assert done[0].reason == "drained"


def test_an_offline_tick_does_nothing() -> None:
    state, _ = booted()
    assert tick(state, 10**9)[1] == ()
    assert daemon_side.next_tick_ms(state, now_ms=0) == 5_000


# Reconnecting


def test_a_refusal_is_waited_out_and_told_in_the_log() -> None:
    refused = inputs.StreamEnded(
        drawn=0.5, status=Status.RESOURCE_EXHAUSTED, reason=Reason.HANDSHAKES, pushback_ms=1_234, message="come back"
    )
    state, done = step(dialed(), refused)
    assert done == (
        effects.Warn("handshakes", "come back"),
        effects.WaitThenDial(1_234, effects.Redial.SAME_CONNECTION, 1),
    )
    state, done = step(dialed(state), refused)
    assert isinstance(done[-1], effects.WaitThenDial)
    assert done[-1].attempt == 2
    assert live(state).backoff.bucket_refusals == 0


def test_a_lost_connection_backs_off() -> None:
    state = booted()[0]
    delays = []
    for _ in range(4):
        state, done = step(dialed(state), inputs.StreamEnded(drawn=0.5))
        (wait,) = done
        assert isinstance(wait, effects.WaitThenDial)
        delays.append(wait.delay_ms)
    assert delays == [500, 1_000, 2_000, 4_000]


def test_a_revocation_is_told_to_the_people_of_this_host() -> None:
    notice = messages.RevocationNotice(
        reason="duplicate-identity",
        message="two machines",
        cure="re-join one",
        claimants=[messages.IdentityClaimant(boot_id="b-1", address="192.0.2.1")],
    )
    for state in (live(), dialed()):
        _, done = told(state, revoked=notice)
        warn = done[-1]
        assert isinstance(warn, effects.Warn)
        for part in ("two machines", "b-1", "192.0.2.1", "re-join one"):
            assert part in warn.message
        assert kinds(done) == ["SetCondition", "Warn"]


def test_answers_are_handed_on() -> None:
    secret, token = messages.SecretResponse(request_id="r"), messages.WorkloadTokenResponse(request_id="r")
    tunnel, desired = messages.OpenTunnel(tunnel_id="t"), messages.DesiredState(body=b"x")
    assert told(live(), secret=secret)[1] == (effects.DeliverSecret(secret),)
    assert told(live(), workload_token=token)[1] == (effects.DeliverWorkloadToken(token),)
    assert told(live(), open_tunnel=tunnel)[1] == (effects.OpenTunnel(tunnel),)
    assert told(live(), desired=desired)[1] == (effects.ApplyDesired(desired),)
    assert told(live())[1] == (), "an unknown frame is ignored"
    assert told(live(), welcome=welcome())[1] == (), "a second Welcome is none"


# Every input in every phase

EVERY_INPUT: tuple[inputs.DaemonInput, ...] = (
    inputs.Dialed(fresh_nonce=FRESH),
    inputs.ServerFrameReceived(messages.ServerFrame(command=command()), wall_ms=START_MS),
    inputs.JournalRefused("c-1"),
    inputs.HandlerProgressed("c-1"),
    inputs.HandlerFinished(command_id="c-1", state=CommandState.SUCCEEDED),
    inputs.InventoryCollected({"cpu": b"2" * 32}),
    inputs.EventsJournaled(3),
    inputs.EventsSent("s-1", 3),
    inputs.StatusChanged(messages.StatusReport()),
    inputs.SpecHeld(1, 1, b"s" * 32),
    inputs.TrustHeld(1, ANYBODY),
    inputs.RelayRefused(Relayed.TRUST_BUNDLE, "bad-proof"),
    inputs.JournalRoom(full=False),
    inputs.JournalRenewed("j-2", 0),
    inputs.DaemonTick(wall_ms=START_MS, load=LOAD, last_heard_ms=0),
    inputs.StreamEnded(drawn=0.5),
)


def test_no_input_is_forgotten() -> None:
    assert {type(given) for given in EVERY_INPUT} == set(get_args(inputs.DaemonInput))


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("given", EVERY_INPUT, ids=lambda given: type(given).__name__)
def test_no_phase_sends_without_a_session_and_writes_come_first(phase: Phase, given: inputs.DaemonInput) -> None:
    state, _ = told(live(), command=command("c-1"))
    if phase is Phase.OFFLINE:
        state, _ = step(state, inputs.StreamEnded(drawn=0.0))
    elif phase is Phase.AWAITING_WELCOME:
        state = dialed(state)
    elif phase is Phase.ENDING:
        state = replace(state, phase=Phase.ENDING)
    _, done = step(state, given, 10_000)
    if phase is not Phase.LIVE and not isinstance(given, inputs.Dialed):
        assert not [effect for effect in done if isinstance(effect, effects.SendAgentFrame | effects.SendEvents)]
    writes = [isinstance(effect, get_args(effects.JournalWrite)) for effect in done]
    assert writes == sorted(writes, reverse=True)
