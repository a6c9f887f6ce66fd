"""A gateway with a valid serving certificate against the node's rules: what it may do with commands, tried one by one.

After each attack an honest gateway takes over, by its own production rules: the real command runs once, and nothing
that no worker signed ever began. What was refused is counted under its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from bettercompute.delivery.commands import CommandState
from bettercompute.pki.intent import IntentSigner
from bettercompute.protocol import messages
from bettercompute.session.inputs import ServerFrameReceived
from tests.security.hostile import (
    FOREIGN_SIGNER,
    HOUR_MS,
    NARROW_SIGNER,
    ROOT,
    SIGNER,
    TRUST_DOMAIN,
    Alteration,
    Site,
    altered,
    body_of,
    signed,
    worker,
)
from tests.unit.session.world_in_memory import START_MS

ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
SUCCEEDED = CommandState.SUCCEEDED

ORIGINAL = body_of("c-9")
ORIGINAL_SIGNED = signed(ORIGINAL)


def attacked(frame: messages.Command, *, reason: str) -> None:
    """Relay a command that must not run; see it refused and counted, and the node as good as before."""
    site = Site()
    real = site.enqueue("gpu.reset")
    site.hostile_stream()
    answers = site.relay(command=frame)
    assert site.started == []
    assert site.refused("command") == {reason: 1}
    assert not any(answer.update.state == messages.COMMAND_STATE_RUNNING for answer in answers)
    runs_once(site, real)


def runs_once(site: Site, command_id: str) -> None:
    """Let an honest gateway deliver the command; see it run once, as it was stored, and its end in the table."""
    site.honest_again()
    if command_id in site.handlers:
        site.finish(command_id)
    site.settle()
    assert site.rows[command_id].state is SUCCEEDED
    assert site.started.count(site.rows[command_id].body) == 1
    assert set(site.started) <= site.signed_bodies


# Altered

BODY_ALTERATIONS = [
    *altered(ORIGINAL),
    Alteration("an unknown field appended", ORIGINAL.SerializeToString() + b"\xfa\x07\x01x"),
    Alteration("the body twice", ORIGINAL.SerializeToString() * 2),
    Alteration("fields in another order", b"".join(reversed([b"\x12\x06node-1", ORIGINAL.SerializeToString()]))),
    Alteration("empty", b""),
]


def test_the_alterations_reach_every_field():
    touched = {alteration.name.split()[0].split(".")[0] for alteration in BODY_ALTERATIONS}
    assert {field.name for field in messages.CommandBody.DESCRIPTOR.fields} <= touched


@pytest.mark.parametrize("alteration", BODY_ALTERATIONS, ids=lambda alteration: alteration.name)
def test_an_altered_body_is_refused(alteration: Alteration) -> None:
    frame = messages.Command(body=alteration.data, signature=ORIGINAL_SIGNED.signature, attempt=1)
    attacked(frame, reason="bad-signature")


@pytest.mark.parametrize("cut", [1, 2, len(ORIGINAL.SerializeToString()) // 2, len(ORIGINAL.SerializeToString()) - 1])
def test_a_truncated_body_is_refused(cut: int) -> None:
    frame = messages.Command(body=ORIGINAL_SIGNED.body[:cut], signature=ORIGINAL_SIGNED.signature, attempt=1)
    site = Site()
    site.hostile_stream()
    site.relay(command=frame)
    assert site.started == []
    assert sum(site.refused("command").values()) == 1
    assert set(site.refused("command")) <= {"bad-signature", "unreadable"}


def with_signature(**changes: object) -> messages.Command:
    frame = messages.Command()
    frame.CopyFrom(ORIGINAL_SIGNED)
    for name, value in changes.items():
        if name == "certificate_chain":
            del frame.signature.certificate_chain[:]
            frame.signature.certificate_chain.extend(value)  # type: ignore[arg-type]
        else:
            setattr(frame.signature, name, value)
    return frame


ROOT_DER = ROOT.certificate.public_bytes(Encoding.DER)
VALUE = ORIGINAL_SIGNED.signature.value
CHAIN = list(ORIGINAL_SIGNED.signature.certificate_chain)
FOREIGN_CHAIN = list(FOREIGN_SIGNER.chain_der)
SHORT_LIVED = worker(ROOT, serial=7, lifetime_ms=HOUR_MS, at_ms=START_MS - 2 * HOUR_MS)


def stripped() -> messages.Command:
    frame = messages.Command()
    frame.CopyFrom(ORIGINAL_SIGNED)
    frame.ClearField("signature")
    return frame


def signed_as(purpose: Callable[[IntentSigner, bytes], bytes]) -> messages.Command:
    frame = stripped()
    frame.signature.MergeFromString(purpose(SIGNER, frame.body))
    return frame


ENVELOPES = {
    "no signature": stripped(),
    "an empty signature": messages.Command(body=ORIGINAL_SIGNED.body, signature=messages.Signature(), attempt=1),
    "no value": with_signature(value=b""),
    "63 bytes": with_signature(value=VALUE[:63]),
    "65 bytes": with_signature(value=VALUE + b"\0"),
    "zeros": with_signature(value=bytes(64)),
    "halves changed about": with_signature(value=VALUE[32:] + VALUE[:32]),
    "a bit": with_signature(value=bytes([VALUE[0] ^ 1]) + VALUE[1:]),
    "no chain": with_signature(certificate_chain=[]),
    "another worker's chain": with_signature(certificate_chain=FOREIGN_CHAIN),
    "the root as the chain": with_signature(certificate_chain=[ROOT_DER]),
    "a chain that is no certificate": with_signature(certificate_chain=[b"\x30\x03\x02\x01\x01"]),
    "a thousand certificates": with_signature(certificate_chain=CHAIN * 1000),
    "of another command": messages.Command(
        body=ORIGINAL_SIGNED.body, signature=signed(body_of("c-8")).signature, attempt=1
    ),
    "of another purpose": signed_as(IntentSigner.sign_desired_state),
    "of a worker of another root": signed(ORIGINAL, FOREIGN_SIGNER),
    "of a worker whose time is over": signed(ORIGINAL, SHORT_LIVED),
}


@pytest.mark.parametrize("name", ENVELOPES)
def test_a_spoilt_envelope_is_refused(name: str) -> None:
    attacked(ENVELOPES[name], reason="bad-signature")


TWIN = VALUE[:32] + (ORDER - int.from_bytes(VALUE[32:], "big")).to_bytes(32, "big")
HARMLESS = {
    "the signature's twin": with_signature(value=TWIN),
    "another kid": with_signature(kid="0" * 64),
    "the chain with its root": with_signature(certificate_chain=[*CHAIN, ROOT_DER]),
    "another attempt": messages.Command(
        body=ORIGINAL_SIGNED.body, signature=ORIGINAL_SIGNED.signature, attempt=2**32 - 1
    ),
    "an approval that nobody asked for": messages.Command(
        body=ORIGINAL_SIGNED.body,
        signature=ORIGINAL_SIGNED.signature,
        batch_approval=messages.BatchApproval(batch_id="b", scope_root=bytes(32), scope_size=1),
        batch_proof=messages.BatchProof(leaf_index=2**32 - 1, path=[b"x"]),
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_no_signature_covers_changes_nothing_of_what_runs(name: str) -> None:
    """The unsigned fields of the envelope: the very body that was signed runs, or nothing does, and never twice."""
    site = Site()
    site.hostile_stream()
    for frame in (HARMLESS[name], ORIGINAL_SIGNED, HARMLESS[name]):
        site.relay(command=frame)
    assert site.started in ([ORIGINAL_SIGNED.body], [])
    if site.started:
        assert site.refused("command").get("repeated", 0) + site.refused("command").get("bad-signature", 0) == 2
    validate_honest(site)


def validate_honest(site: Site) -> None:
    site.honest_again()
    assert site.live


# Invented, swapped, late

INVENTED = {
    "another node's": (signed(body_of("c-7", node_id="node-2")), "wrong-node"),
    "another installation's": (signed(body_of("c-7", trust_domain="other.local")), "wrong-node"),
    "past its deadline": (signed(body_of("c-7", not_after_ms=START_MS - 1)), "expired"),
    "at its deadline": (signed(body_of("c-7", not_after_ms=START_MS)), "expired"),
    "without a deadline": (signed(body_of("c-7", not_after_ms=0)), "invalid"),
    "without a timeout": (signed(body_of("c-7", timeout_ms=0)), "invalid"),
    "without an id": (signed(body_of("")), "invalid"),
    "on another lane": (signed(body_of("c-7", lane=messages.LANE_BULK)), "invalid"),
    "of a kind that nobody knows": (signed(body_of("c-7", kind="node.melt")), "unsupported"),
    "of a kind for another role": (signed(body_of("c-7", kind="node.melt", lane=0)), "unsupported"),
    "of a kind that the root may not sign": (signed(body_of("c-7"), NARROW_SIGNER), "kind-not-allowed"),
    "made up": (signed(body_of("c-7", kind="node.reboot"), None), "bad-signature"),
    "made up and signed by the relay": (signed(body_of("c-7"), FOREIGN_SIGNER), "bad-signature"),
    "with the payload of another kind": (
        signed(body_of("c-7", payload=body_of("x", kind="node.reboot").payload)),
        "invalid",
    ),
}


@pytest.mark.parametrize("name", INVENTED)
def test_what_is_not_for_this_node_now_is_refused(name: str) -> None:
    frame, reason = INVENTED[name]
    attacked(frame, reason=reason)


# Repeated, in another order, over restarts


@pytest.mark.parametrize("kind", ["gpu.reset", "node.reboot", "inventory.refresh", "logs.collect"])
@pytest.mark.parametrize("when", ["running", "done", "acked", "restarted", "days-later"])
def test_a_command_that_ran_is_not_repeated(kind: str, when: str) -> None:
    site = Site()
    real = site.enqueue(kind)
    frame = site.command_of(real)
    site.honest_again()
    assert site.started == [frame.body]
    if when != "running":
        site.finish(real)
        if when != "done":
            site.settle()
    if when == "restarted":
        site.restart_daemon()
    site.hostile_stream()
    if when == "days-later":
        site.wait(48 * HOUR_MS)
    for attempt in (1, 2, 7):
        for seen in (0, CommandState.ACKED, CommandState.RUNNING):
            frame.attempt, frame.seen = attempt, messages.CommandState.ValueType(seen)
            site.relay(command=frame)
    assert site.started == [frame.body]
    answered = site.refused("command")
    assert answered in ({"repeated": 9}, {"expired": 9}), answered


@pytest.mark.parametrize("kind", ["gpu.reset", "node.reboot"])
def test_a_restart_in_the_middle_is_no_second_chance(kind: str) -> None:
    site = Site()
    real = site.enqueue(kind)
    frame = site.command_of(real)
    site.honest_again()
    site.restart_daemon()
    for _ in range(3):
        site.hostile_stream()
        site.relay(command=frame)
        site.restart_daemon()
    assert site.started == [frame.body]
    site.honest_again()
    assert site.rows[real].state is CommandState.FAILED


def test_a_withheld_command_may_come_late_and_out_of_order_but_only_once_and_in_time():
    site = Site()
    first, second, third = (site.enqueue("gpu.reset", not_after_ms=HOUR_MS) for _ in range(3))
    frames = {name: site.command_of(name) for name in (first, second, third)}
    site.hostile_stream()
    for name in (third, first, third):
        site.relay(command=frames[name])
    assert site.started == [frames[third].body, frames[first].body]
    site.wait(HOUR_MS)
    site.relay(command=frames[second])
    assert site.started == [frames[third].body, frames[first].body]
    assert site.refused("command") == {"repeated": 1, "expired": 1}


def test_a_cancel_is_a_withholding():
    """It stops what runs and keeps away what has not come; it starts nothing, and an honest gateway hears of it."""
    site = Site()
    running, waiting = site.enqueue("gpu.reset"), site.enqueue("gpu.reset")
    frame = site.command_of(waiting)
    site.hostile_stream()
    site.relay(command=site.command_of(running))
    for name in (running, waiting, "nobody"):
        site.relay(cancel=messages.Cancel(command_id=name))
    site.relay(command=frame)
    assert site.started == [site.rows[running].body]
    site.honest_again()
    assert {site.rows[name].state for name in (running, waiting)} == {CommandState.CANCELLED}


def test_a_flood_of_cancels_does_not_make_the_node_busy():
    """Ids are remembered for a week; whoever may send cancels must not be able to fill the journal with them."""
    site = Site()
    site.daemon = replace(site.daemon, cancelled={f"c-old-{number}": START_MS for number in range(9_990)})
    site.hostile_stream()
    for number in range(50):
        site.relay(cancel=messages.Cancel(command_id=f"made-up-{number}"))
    site.relay(cancel=messages.Cancel(command_id="x" * 65))
    site.relay(cancel=messages.Cancel())
    assert len(site.daemon.cancelled) == 10_000
    assert site.refused("cancel") == {"not-remembered": 42}
    runs_once(site, site.enqueue("gpu.reset"))


# Any bytes at all

FRAME = messages.ServerFrame(command=ORIGINAL_SIGNED).SerializeToString()
BYTES = st.one_of(
    st.tuples(st.integers(0, len(FRAME) - 1), st.integers(1, 255)).map(
        lambda at: FRAME[: at[0]] + bytes([FRAME[at[0]] ^ at[1]]) + FRAME[at[0] + 1 :]
    ),
    st.integers(0, len(FRAME)).map(lambda cut: FRAME[:cut]),
    st.tuples(st.integers(0, len(FRAME)), st.binary(min_size=1, max_size=40)).map(
        lambda put: FRAME[: put[0]] + put[1] + FRAME[put[0] :]
    ),
    st.tuples(st.integers(0, len(FRAME)), st.integers(0, len(FRAME))).map(
        lambda cut: FRAME[: min(cut)] + FRAME[max(cut) :]
    ),
    st.binary(max_size=200),
)


@settings(max_examples=400)
@given(BYTES)
def test_any_bytes_run_the_signed_body_or_nothing(data: bytes) -> None:
    try:
        frame = messages.ServerFrame.FromString(data)
    except DecodeError:
        return  # it ends the session before any rule sees it
    site = Site()
    site.hostile_stream()
    site.tell_daemon(ServerFrameReceived(frame, wall_ms=START_MS))
    assert site.started in ([], [ORIGINAL_SIGNED.body])


def test_the_vector_is_what_an_honest_gateway_would_relay():
    assert ORIGINAL.trust_domain == TRUST_DOMAIN
    site = Site()
    site.hostile_stream()
    site.relay(command=ORIGINAL_SIGNED)
    assert site.started == [ORIGINAL_SIGNED.body]
    assert not site.daemon.refused
