"""The gateway's end: every input, every frame, and what a closed session ignores."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict, replace
from hashlib import sha256
from typing import get_args

import pytest

from bettercompute.delivery.commands import CommandState, OutgoingCommand
from bettercompute.delivery.desired_state import StoredSpec
from bettercompute.delivery.facts import (
    AppliedGenerationFact,
    CommandFact,
    EventsFact,
    InventoryFact,
    InventoryHashesFact,
    StatusFact,
)
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import KINDS
from bettercompute.protocol.statuses import Status
from bettercompute.session import gateway_side, hello, inputs
from bettercompute.session.changes import changed
from bettercompute.session.effects import (
    AskSecret,
    AskWorkloadToken,
    Close,
    GatewayEffect,
    PokeDispatch,
    PutBack,
    RecordFacts,
    RequestSpec,
    SendFrame,
)
from bettercompute.session.gateway_state import DispatchDemand, GatewaySession
from bettercompute.session.hello_plan import CommandInFlight, HeldCommand, HelloFacts, HelloPlan, NodeFacts
from tests.unit.session.world_in_memory import NODE_ID, START_MS, certificate_facts, empty_row, gateway_facts

SPEC = StoredSpec(generation=3, body=b"full")


def facts(**changes: object) -> HelloFacts:
    fields: dict[str, object] = {
        "now_ms": START_MS,
        "certificate": certificate_facts(not_after_ms=START_MS + 3_600_000),
        "gateway": gateway_facts(),
        "row": empty_row(),
        "node": NodeFacts(identity_generation=1, spec_generation=0),
    }
    return HelloFacts(**{**fields, **changes})  # type: ignore[arg-type]  # test data


def begin(given: HelloFacts | None = None, **said: object) -> tuple[GatewaySession, tuple[GatewayEffect, ...]]:
    fields: dict[str, object] = {
        "node_id": NODE_ID,
        "role": 1,
        "boot_id": "b",
        "journal_id": "j",
        "proto_min": 1,
        "proto_max": 1,
    }
    plan = hello.decide(given or facts(), messages.Hello(**{**fields, **said}))  # type: ignore[arg-type]  # test data
    assert isinstance(plan, HelloPlan)
    return gateway_side.open_session(
        plan,
        spec=SPEC if plan.send_spec else None,
        trust=messages.SignedTrustBundle(body=b"bundle") if plan.send_trust else None,
        server_time_ms=START_MS + 5,
        now_ms=0,
    )


def session(**changes: object) -> GatewaySession:
    return replace(begin()[0], **changes)  # type: ignore[arg-type]  # test data


def marked(number: int, *, lane: int = 1, kind: str = "inventory.refresh", signature: bytes = b"") -> OutgoingCommand:
    return OutgoingCommand(
        command_id=f"c-{number}",
        kind=kind,
        lane=lane,
        seq=number,
        attempt=1,
        seen=None,
        body=b"body",
        signature=signature,
    )


def frames(effects: tuple[GatewayEffect, ...]) -> list[messages.ServerFrame]:
    return [effect.frame for effect in effects if isinstance(effect, SendFrame)]


def step(
    state: GatewaySession, given: inputs.GatewayInput, now_ms: int = 1
) -> tuple[GatewaySession, tuple[GatewayEffect, ...]]:
    return gateway_side.step(state, given, now_ms)


def received(state: GatewaySession, **frame: object) -> tuple[GatewaySession, tuple[GatewayEffect, ...]]:
    return step(state, inputs.FrameReceived(messages.AgentFrame(**frame)))  # type: ignore[arg-type]  # test data


# Opening


def test_what_follows_hello_comes_in_the_order_of_the_page() -> None:
    commands = tuple(
        CommandInFlight(
            command_id=f"c-{number}",
            kind="inventory.refresh",
            lane=1,
            seq=number,
            state=CommandState.DISPATCHED,
            attempt=1,
            sent_boot_id="b",
            cancel_requested=number == 3,
            body=b"body",
        )
        for number in (3, 2, 1)
    )
    given = facts(
        commands=commands,
        node=NodeFacts(identity_generation=1, spec_generation=3),
        gateway=gateway_facts(trust_version=2),
    )
    done = messages.CommandUpdate(command_id="c-9", state=messages.COMMAND_STATE_SUCCEEDED)
    state, effects = begin(given, done_results=[done])
    sent = frames(effects)
    assert [frame.WhichOneof("frame") for frame in sent] == [
        "welcome",
        "ack",
        "desired",
        "command",
        "command",
        "cancel",
    ]
    welcome = sent[0].welcome
    assert (welcome.session_id, welcome.epoch, welcome.protocol_version) == ("s-1", 1, 1)
    assert welcome.server_time_ms == START_MS + 5
    assert {lane.lane: lane.credits for lane in welcome.lane_credits} == {1: 8, 2: 2}
    assert welcome.trust.body == b"bundle"
    assert list(sent[1].ack.command_ids) == ["c-9"]
    assert sent[2].desired.body == b"full"
    assert [frame.command.attempt for frame in sent[3:5]] == [2, 2]
    assert sent[5].cancel.command_id == "c-3"
    assert step(state, inputs.CancelRequested("c-3"))[1] == (), "a resume's cancel is told by then"
    assert isinstance(effects[-1], PokeDispatch)
    assert state.lanes[1].available == 6
    assert state.offered_generation == 3


def test_a_signed_only_session_withholds_an_unsigned_spec() -> None:
    given = facts(node=NodeFacts(identity_generation=1, spec_generation=3), gateway=gateway_facts(signed_only=True))
    state, effects = begin(given)
    assert [frame.WhichOneof("frame") for frame in frames(effects)] == ["welcome"]
    assert state.offered_generation == 0


# Endings

ENDINGS: dict[inputs.GatewayInput, tuple[Status, str, bool]] = {
    inputs.Superseded(): (Status.ABORTED, "superseded", False),
    inputs.ZombieFound(): (Status.ABORTED, "superseded", False),
    inputs.LeaseLost(): (Status.UNAVAILABLE, "fenced", False),
    inputs.Locked("by ops", 5): (Status.PERMISSION_DENIED, "locked", True),
    inputs.FactsFailed("away"): (Status.UNAVAILABLE, "database", True),
    inputs.FactsPoisoned("NUL"): (Status.INVALID_ARGUMENT, "invalid-frame", True),
    inputs.SlowConsumer(9): (Status.RESOURCE_EXHAUSTED, "slow-consumer", True),
    inputs.GatewayStopping(): (Status.UNAVAILABLE, "stopping", True),
    inputs.PeerEnded(): (Status.OK, "stream-ended", True),
    inputs.FrameRefused("too large"): (Status.INVALID_ARGUMENT, "invalid-frame", True),
}


@pytest.mark.parametrize("given", ENDINGS)
def test_every_ending(given: inputs.GatewayInput) -> None:
    state, effects = step(session(), given)
    status, reason, write = ENDINGS[given]
    (close,) = effects
    assert isinstance(close, Close)
    assert (close.status, close.reason, close.disconnect_write) == (status, reason, write)
    assert close.message
    assert state.closed


def test_no_ending_is_forgotten() -> None:
    tried = {type(given) for given in ENDINGS} | {inputs.Revoked}
    assert set(get_args(inputs.EndingInput)) <= tried


def test_a_revoked_session_is_told_and_closed() -> None:
    notice = messages.RevocationNotice(reason="duplicate-identity", message="two machines", cure="re-join one")
    state, effects = step(session(), inputs.Revoked(notice))
    assert frames(effects)[0].revoked == notice
    close = effects[-1]
    assert isinstance(close, Close)
    assert (close.status, close.message) == (Status.UNAUTHENTICATED, "two machines")
    assert state.closed


def test_a_closed_session_ignores_everything() -> None:
    state = session(closed=True)
    for given in (*ENDINGS, inputs.Tick(), inputs.CommandsMarked((marked(1),)), inputs.CancelRequested("c-1")):
        assert step(state, given) == (state, ())
    assert gateway_side.wants(state) is None


def test_silence_and_an_expired_certificate_close() -> None:
    assert step(session(), inputs.Tick(), 30_000)[1] == ()
    for now_ms, last_heard, reason in ((30_001, 0, "heartbeat-timeout"), (3_600_000, 3_600_000, "certificate-expired")):
        state, effects = step(session(last_heard_ms=last_heard), inputs.Tick(), now_ms)
        assert isinstance(effects[0], Close)
        assert effects[0].reason == reason
        assert state.closed


def test_any_frame_counts_as_heard() -> None:
    state, _ = step(session(), inputs.FrameReceived(messages.AgentFrame()), 29_000)
    assert state.last_heard_ms == 29_000


# Frames


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        ({"hello": messages.Hello()}, "second-hello"),
        (
            {"update": messages.CommandUpdate(command_id="a\0b", state=messages.COMMAND_STATE_SUCCEEDED)},
            "invalid-frame",
        ),
        ({"inventory": messages.InventorySection(name="cpu", body=b"x", sha256=b"1" * 32)}, "invalid-frame"),
        ({"events": messages.EventBatch(journal_id="j")}, "invalid-frame"),
        (
            {
                "events": messages.EventBatch(
                    journal_id="j",
                    events=[messages.Event(seq=2, event_id="00000000-0000-7000-8000-000000000001", type="t", at_ms=1)],
                )
            },
            "event-gap",
        ),
    ],
)
def test_a_broken_frame_ends_the_session_invalid_argument(frame: dict[str, object], reason: str) -> None:
    state, effects = received(session(), **frame)
    (close,) = effects
    assert isinstance(close, Close)
    assert (close.status, close.reason, close.disconnect_write) == (Status.INVALID_ARGUMENT, reason, True)
    assert state.closed


def test_an_unknown_frame_is_ignored() -> None:
    state = session()
    after, effects = received(state)
    assert effects == ()
    assert after == replace(state, last_heard_ms=1)


def test_a_plain_heartbeat_writes_nothing() -> None:
    beat = messages.Heartbeat(
        lanes=[
            messages.LaneState(lane=messages.LANE_CONTROL, free=8),
            messages.LaneState(lane=messages.LANE_BULK, free=2),
            messages.LaneState(),
        ],
        load=messages.NodeLoad(load1=0.5),
    )
    state, effects = received(session(), heartbeat=beat)
    assert effects == ()
    assert state.load is not None
    assert state.load.load1 == 0.5


def test_a_heartbeat_passes_on_what_changed() -> None:
    beat = messages.Heartbeat(applied_generation=4, inventory_hashes={"cpu": b"1" * 32})
    state, effects = received(session(), heartbeat=beat)
    assert effects == (RecordFacts((AppliedGenerationFact(4), InventoryHashesFact({"cpu": b"1" * 32}))),)
    again = messages.Heartbeat(applied_generation=4)
    assert received(state, heartbeat=again)[1] == ()


def test_a_heartbeat_that_frees_credits_pokes_dispatch() -> None:
    state, _ = step(session(), inputs.CommandsMarked(tuple(marked(number) for number in range(1, 9))))
    assert state.lanes[1].available == 0
    beat = messages.Heartbeat(lanes=[messages.LaneState(lane=messages.LANE_CONTROL, free=3, received=8)])
    state, effects = received(state, heartbeat=beat)
    assert effects == (PokeDispatch(),)
    assert state.lanes[1].available == 3


def test_updates_are_facts_and_an_end_frees_its_credit() -> None:
    state, _ = step(session(), inputs.CommandsMarked((marked(1), marked(2))))
    news = messages.CommandUpdateBatch(
        updates=[
            messages.CommandUpdate(command_id="c-1", state=messages.COMMAND_STATE_RUNNING, attempt=1),
            messages.CommandUpdate(command_id="c-1", state=messages.COMMAND_STATE_SUCCEEDED, attempt=1, result=b"r"),
            messages.CommandUpdate(command_id="c-2", state=messages.COMMAND_STATE_ACKED, attempt=1),
            messages.CommandUpdate(command_id="c-3", state=messages.COMMAND_STATE_PENDING),
        ]
    )
    state, effects = received(state, updates=news)
    assert isinstance(effects[0], RecordFacts)
    facts_seen = [(fact.command_id, fact.state) for fact in effects[0].facts if isinstance(fact, CommandFact)]
    assert facts_seen == [
        ("c-1", CommandState.RUNNING),
        ("c-1", CommandState.SUCCEEDED),
        ("c-2", CommandState.ACKED),
    ]
    assert effects[1:] == (PokeDispatch(),)
    assert state.lanes[1].available == 7
    assert state.sent == {"c-2": 1}


def test_busy_puts_back_what_this_session_sent_and_waits_longer() -> None:
    busy = messages.CommandUpdate(
        command_id="c-1",
        state=messages.COMMAND_STATE_REJECTED,
        reject_reason=messages.COMMAND_REJECT_REASON_BUSY,
        attempt=1,
    )
    state = session()
    assert received(state, update=busy)[1] == (), "not sent here"
    for back_off_ms in (1_000, 2_000, 4_000):
        state, _ = step(state, inputs.CommandsMarked((marked(1),)))
        state, effects = received(state, update=busy)
        assert effects == (PutBack("c-1", 1, back_off_ms),)
        assert state.lanes[1].available == 8
        state, effects = step(state, inputs.PutBackCommitted("c-1"))
        assert effects == (PokeDispatch(),)
    held = HeldCommand(command_id="c-1", kind="inventory.refresh", lane=1, seq=1, signed=False)
    again, effects = step(state, inputs.BackOffOver(held))
    assert (again.held, effects) == ((held,), (PokeDispatch(),)), (
        "it had been accepted once: held back, then sent again"
    )
    state, _ = step(state, inputs.CommandsMarked((marked(1),)))
    state, _ = received(state, update=messages.CommandUpdate(command_id="c-1", state=messages.COMMAND_STATE_RUNNING))
    assert not state.busy
    assert step(state, inputs.BackOffOver(held)) == (state, ()), "settled meanwhile"


def test_unsigned_updates_of_a_signed_only_session_are_not_authenticated() -> None:
    unsigned = messages.CommandUpdate(command_id="c-1", state=messages.COMMAND_STATE_SUCCEEDED)
    signed = messages.CommandUpdate(
        command_id="c-1", state=messages.COMMAND_STATE_SUCCEEDED, signature=messages.Signature(value=b"v" * 64)
    )
    for update, authenticated in ((unsigned, False), (signed, True)):
        _, effects = received(session(signed_only=True), update=update)
        assert isinstance(effects[0], RecordFacts)
        (fact,) = effects[0].facts
        assert isinstance(fact, CommandFact)
        assert fact.authenticated is authenticated


def test_events_status_and_inventory_are_facts() -> None:
    event = messages.Event(seq=1, event_id="00000000-0000-7000-8000-000000000001", type="t", at_ms=1)
    state, effects = received(session(), events=messages.EventBatch(journal_id="j", events=[event]))
    assert isinstance(effects[0], RecordFacts)
    assert isinstance(effects[0].facts[0], EventsFact)
    assert state.next_event_seq == 2
    report = messages.StatusReport(observed_generation=5, applied_generation=4, trust_version=2)
    state, effects = received(state, status=report)
    assert isinstance(effects[0], RecordFacts)
    assert isinstance(effects[0].facts[0], StatusFact)
    assert (state.observed_generation, state.applied_generation, state.trust_version) == (5, 4, 2)
    section = messages.InventorySection(name="cpu", body=b"x", sha256=sha256(b"x").digest())
    _, effects = received(state, inventory=section)
    assert isinstance(effects[0], RecordFacts)
    assert isinstance(effects[0].facts[0], InventoryFact)


def test_secrets_and_tokens_are_relayed_and_denied_to_tenants() -> None:
    secret = messages.SecretRequest(request_id="r", ref="env://X")
    token = messages.WorkloadTokenRequest(request_id="r", instance_id="i")
    assert received(session(), secret_request=secret)[1] == (AskSecret(secret),)
    assert received(session(), workload_token_request=token)[1] == (AskWorkloadToken(token),)
    tenant = session(tenant_controlled=True)
    (frame,) = frames(received(tenant, secret_request=secret)[1])
    assert (frame.secret.request_id, frame.secret.error) == ("r", "access-denied")
    (frame,) = frames(received(tenant, workload_token_request=token)[1])
    assert (frame.workload_token.request_id, frame.workload_token.error) == ("r", "access-denied")


def test_answers_and_tunnels_are_sent() -> None:
    secret = messages.SecretResponse(request_id="r", jwe="x")
    token = messages.WorkloadTokenResponse(request_id="r", jwe="x")
    assert frames(step(session(), inputs.SecretAnswered(secret))[1])[0].secret == secret
    assert frames(step(session(), inputs.WorkloadTokenAnswered(token))[1])[0].workload_token == token
    (frame,) = frames(step(session(), inputs.TunnelRequested("t", "ticket"))[1])
    assert (frame.open_tunnel.tunnel_id, frame.open_tunnel.ticket) == ("t", "ticket")


# Commit before ack


def test_an_ack_leaves_only_after_a_commit() -> None:
    (frame,) = frames(step(session(), inputs.FactsCommitted(("c-1",), "j", 7))[1])
    assert frame.ack == messages.Ack(journal_id="j", acked_event_seq=7, command_ids=["c-1"])
    assert step(session(), inputs.FactsCommitted())[1] == ()


# Desired state


def test_a_generation_is_offered_once_and_again_on_request() -> None:
    state, effects = step(session(), inputs.SpecPublished(SPEC))
    assert frames(effects)[0].desired.body == b"full"
    assert step(state, inputs.SpecPublished(SPEC))[1] == ()
    _, effects = received(state, spec_request=messages.SpecRequest())
    assert effects == (RequestSpec(),)
    assert frames(step(state, inputs.SpecPublished(SPEC, requested=True))[1])
    assert frames(step(state, inputs.SpecPublished(replace(SPEC, generation=4)))[1])


@pytest.mark.parametrize("restriction", ["upgrade_only", "awaits_new_journal"])
def test_a_restricted_session_gets_no_spec(restriction: str) -> None:
    state = session(**{restriction: True})
    assert step(state, inputs.SpecPublished(SPEC))[1] == ()
    assert received(state, spec_request=messages.SpecRequest())[1] == ()


# Cancel, drain, dispatch


def test_a_cancel_is_told_and_ends_holding_back() -> None:
    state, _ = step(session(), inputs.CommandsMarked(tuple(marked(number) for number in range(1, 11))))
    assert [held.command_id for held in state.held] == ["c-9", "c-10"]
    state, effects = step(state, inputs.CancelRequested("c-9", "why"))
    assert frames(effects)[0].cancel == messages.Cancel(command_id="c-9", reason="why")
    assert [held.command_id for held in state.held] == ["c-10"]


def test_a_cancel_is_told_once_on_a_stream_until_its_command_has_ended() -> None:
    state, _ = step(session(), inputs.CommandsMarked((marked(1),)))
    cancel = inputs.CancelRequested("c-1")
    state, effects = step(state, cancel)
    assert len(frames(effects)) == 1
    assert step(state, cancel) == (state, ()), "a poll names it again, the stream has carried it"
    running = messages.CommandUpdate(command_id="c-1", state=messages.COMMAND_STATE_RUNNING)
    state, _ = received(state, update=running)
    assert step(state, cancel)[1] == ()
    ended = messages.CommandUpdate(command_id="c-1", state=messages.COMMAND_STATE_CANCELLED)
    state, _ = received(state, update=ended)
    assert (step(state, cancel)[1], state.cancels_told) == ((), frozenset()), "its end waits for the database"
    assert len(frames(step(session(), cancel)[1])) == 1, "another stream tells it again"


def test_the_cancels_that_were_told_are_not_remembered_without_end() -> None:
    told = frozenset(f"abandoned-{number}" for number in range(gateway_side.CANCELS_TOLD_MAX))
    state, effects = step(session(cancels_told=told), inputs.CancelRequested("c-1"))
    assert (state.cancels_told, len(frames(effects))) == (frozenset({"c-1"}), 1)


def test_a_session_that_awaits_a_new_journal_is_told_no_cancel() -> None:
    state, effects = step(session(awaits_new_journal=True), inputs.CancelRequested("c-1"))
    assert (effects, "c-1" in state.cancels_told) == ((), False)


def test_a_drained_session_is_not_dispatched_to_and_ends_late() -> None:
    state, effects = step(session(), inputs.DrainRequested(5_000), 0)
    (frame,) = frames(effects)
    assert (frame.drain.reconnect_after_ms, frame.drain.reason) == (5_000, "draining")
    assert gateway_side.wants(state) is None
    assert step(state, inputs.Tick(), 14_999)[1] == ()
    _, effects = step(state, inputs.Tick(), 15_000)
    assert isinstance(effects[0], Close)
    assert (effects[0].reason, effects[0].disconnect_write) == ("draining", True)


def test_marked_commands_go_out_in_order_within_credits() -> None:
    state, effects = step(session(), inputs.CommandsMarked(tuple(marked(number) for number in range(10, 0, -1))))
    assert len(frames(effects)) == 8
    assert list(state.sent) == [f"c-{number}" for number in range(1, 9)]
    assert [held.command_id for held in state.held] == ["c-9", "c-10"]
    assert state.lanes[1].sent == 8


def demand(state: GatewaySession) -> DispatchDemand:
    wanted = gateway_side.wants(state)
    assert wanted is not None
    return wanted


def test_what_is_held_goes_before_what_is_pending() -> None:
    state, _ = step(session(), inputs.CommandsMarked(tuple(marked(number) for number in range(1, 11))))
    assert [lane.lane for lane in demand(state).lanes] == [2]
    ended = messages.CommandUpdateBatch(
        updates=[
            messages.CommandUpdate(command_id=f"c-{number}", state=messages.COMMAND_STATE_SUCCEEDED)
            for number in (1, 2, 3)
        ]
    )
    state, _ = received(state, updates=ended)
    control = demand(state).lanes[0]
    assert (control.free, control.held, control.pending) == (3, ("c-9", "c-10"), 1)
    state, effects = step(state, inputs.CommandsMarked((replace(marked(9), attempt=2), replace(marked(10), attempt=2))))
    assert len(frames(effects)) == 2
    assert not state.held


def test_a_mark_that_was_not_heard_is_held_and_asked_for_again() -> None:
    state, _ = step(session(), inputs.CommandsMarked(tuple(marked(number) for number in (1, 2))))
    found = tuple(
        HeldCommand(command_id=f"c-{number}", kind="inventory.refresh", lane=1, seq=number, signed=False)
        for number in (1, 2, 3)
    )
    state, effects = step(state, inputs.MarksFound(found))
    assert effects == (PokeDispatch(),)
    assert [held.command_id for held in state.held] == ["c-3"], "what was sent is known"
    assert demand(state).lanes[0].held == ("c-3",)
    assert step(state, inputs.MarksFound(found)) == (state, ())


EIGHT = range(1, 9)
MARKS_OF_EIGHT = inputs.MarksFound(
    tuple(
        HeldCommand(command_id=f"c-{number}", kind="inventory.refresh", lane=1, seq=number, signed=False)
        for number in EIGHT
    )
)


def eight_that_ended(*, beside: messages.CommandUpdate | None = None) -> GatewaySession:
    state, _ = step(session(), inputs.CommandsMarked(tuple(marked(number) for number in EIGHT)))
    updates = [
        messages.CommandUpdate(command_id=f"c-{number}", state=messages.COMMAND_STATE_SUCCEEDED) for number in EIGHT
    ]
    if beside is not None:
        updates.append(beside)
    return received(state, updates=messages.CommandUpdateBatch(updates=updates))[0]


@pytest.mark.parametrize(
    "beside",
    [
        None,
        messages.CommandUpdate(
            command_id="c-9",
            state=messages.COMMAND_STATE_REJECTED,
            reject_reason=messages.COMMAND_REJECT_REASON_BUSY,
        ),
    ],
)
def test_what_ended_and_waits_for_the_database_is_not_sent_again(beside: messages.CommandUpdate | None) -> None:
    state = eight_that_ended(beside=beside)
    assert step(state, MARKS_OF_EIGHT) == (state, ())
    state, _ = step(state, inputs.FactsCommitted(command_ids=tuple(f"c-{number}" for number in EIGHT)))
    assert not state.ending


def test_what_was_held_and_is_settled_takes_no_place_for_ever() -> None:
    # The marks were read before the ends of eight commands were committed, and come after: they are taken for unheard.
    state = eight_that_ended()
    state, _ = step(state, inputs.FactsCommitted(command_ids=tuple(f"c-{number}" for number in EIGHT)))
    state, _ = step(state, MARKS_OF_EIGHT)
    asked = demand(state)
    assert (len(asked.lanes[0].held), asked.lanes[0].pending) == (8, 0)
    state, effects = step(state, gateway_side.answered(asked, (replace(marked(8), attempt=2),)))
    assert not state.held
    assert PokeDispatch() in effects
    assert demand(state).lanes[0].pending == 7


def test_no_more_is_asked_for_than_credits_allow() -> None:
    state, _ = step(session(), inputs.CommandsMarked(tuple(marked(number) for number in range(1, 13))))
    state, _ = received(state, update=messages.CommandUpdate(command_id="c-1", state=messages.COMMAND_STATE_SUCCEEDED))
    control = demand(state).lanes[0]
    assert (control.free, control.held, control.pending) == (1, ("c-9",), 0)


def test_demands_carry_the_fence_and_the_restrictions() -> None:
    wanted = demand(session())
    assert (wanted.node_id, wanted.session_id, wanted.epoch, wanted.boot_id) == (NODE_ID, "s-1", 1, "b")
    assert wanted.kinds == frozenset(KINDS) - {"node.reboot"}, "its daemon does not advertise that it may reboot"
    assert demand(session(lacking=frozenset())).kinds is None
    upgrade = frozenset({"daemon.upgrade"})
    assert demand(session(upgrade_only=True)).kinds == upgrade
    assert demand(session(upgrade_only=True, allowed_kinds=frozenset({"diag.nvml"}))).kinds == frozenset()
    assert demand(session(signed_only=True)).signed_only
    assert gateway_side.wants(session(awaits_new_journal=True)) is None


def test_held_commands_that_the_session_may_not_carry_stay_held() -> None:
    full = tuple(marked(number) for number in range(1, 9))
    state, _ = step(session(signed_only=True), inputs.CommandsMarked((*full, marked(9), marked(10, signature=b"s"))))
    state, _ = received(state, update=messages.CommandUpdate(command_id="c-1", state=messages.COMMAND_STATE_SUCCEEDED))
    assert demand(state).lanes[0].held == ("c-10",)


def test_a_changed_copy_is_what_replacing_gives() -> None:
    before = session()
    fields = asdict(before)
    after = changed(before, next_event_seq=99, ending=frozenset({"c-1"}))
    assert after == replace(before, next_event_seq=99, ending=frozenset({"c-1"}))
    assert asdict(before) == fields
    with pytest.raises(TypeError, match="no next_seq"):
        changed(before, next_seq=1)
    with pytest.raises(FrozenInstanceError):
        after.closed = True  # type: ignore[misc] # that nobody can is what is tested
