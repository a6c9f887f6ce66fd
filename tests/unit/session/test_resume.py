"""The resume rules over their whole product, against an oracle written from the page, and invariants beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import pytest

from bettercompute.delivery.commands import CommandState
from bettercompute.delivery.journal_rules import JournalEntry
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import KINDS, CommandKind, Proof, pack_payload
from bettercompute.session import resume
from bettercompute.session.hello_plan import CommandInFlight
from bettercompute.session.resume import AtDelivery, AtStart, Reconnect, Rule, Settled

# Kinds of every flavour that the rules know, by retry-safe and proof.
FLAVOURS: dict[str, CommandKind] = {
    "safe": KINDS["inventory.refresh"],
    "unsafe": KINDS["gpu.reset"],
    "reboot": KINDS["node.reboot"],
    "reboot-unsafe": replace(KINDS["node.reboot"], retry_safe=False),
    "kexec": replace(KINDS["node.reboot"], proof=Proof.BOOT_ID_AND_ROLE),
    "upgrade": KINDS["daemon.upgrade"],
}
KINDS_TRIED = {name: replace(kind, name=name) for name, kind in FLAVOURS.items()}


@dataclass(frozen=True)
class Case:
    """One point of the product."""

    flavour: str
    state: CommandState
    attempt: int
    boot_changed: bool
    role_changed: bool
    version_reached: bool
    journal_changed: bool
    running: bool
    result: bool
    cancel: bool
    allowed: bool
    doubtful: bool
    proven: bool


def cases() -> Iterator[Case]:
    flags = [True, False]
    states = [CommandState.DISPATCHED, CommandState.ACKED, CommandState.RUNNING]
    for flavour in KINDS_TRIED:
        roles = flags if flavour == "kexec" else [False]
        versions = flags if flavour == "upgrade" else [False]
        for values in product(states, [1, 3], flags, roles, versions, *([flags] * 7)):
            yield Case(flavour, *values)  # type: ignore[arg-type]  # product() forgets the types


def settle(case: Case) -> Settled:
    payload = messages.DaemonUpgradePayload(target_version="9.9.9")
    body = messages.CommandBody(command_id="c", payload=pack_payload(payload)).SerializeToString()
    command = CommandInFlight(
        command_id="c",
        kind=case.flavour,
        lane=1,
        seq=1,
        state=case.state,
        attempt=case.attempt,
        sent_boot_id="boot-1",
        cancel_requested=case.cancel,
        body=body,
    )
    reconnect = Reconnect(
        boot_id="boot-2" if case.boot_changed else "boot-1",
        role=3 if case.role_changed else 1,
        previous_role=1,
        daemon_version="9.9.9" if case.version_reached else "1.0.0",
        journal_changed=case.journal_changed,
        boot_changed=case.boot_changed,
        doubtful=case.doubtful,
        proven=case.proven,
        running=frozenset({"c"} if case.running else ()),
        results=frozenset({"c"} if case.result else ()),
        allowed_kinds=None if case.allowed else frozenset({"other"}),
    )
    return resume.settle(command, reconnect, kinds=KINDS_TRIED)


def oracle(case: Case) -> str:
    """The outcome in one word, from a list of the page's sentences, each independent of the code."""
    kind = KINDS_TRIED[case.flavour]
    effect_seen = {
        "reboot": case.boot_changed,
        "reboot-unsafe": case.boot_changed,
        "kexec": case.boot_changed and case.role_changed,
        "upgrade": case.version_reached,
    }.get(case.flavour, False)
    rule_5 = case.proven and kind.self_terminating and case.state is not CommandState.DISPATCHED
    rule_6 = case.proven and not rule_5 and case.journal_changed and not kind.retry_safe
    sentences = [
        (case.result, "result"),
        (case.running and (case.cancel or not case.allowed), "keep+cancel"),
        (case.running, "keep"),
        (not case.allowed, "cancelled:kind-not-allowed"),
        (case.cancel and case.journal_changed, "cancelled:cancelled"),
        (case.cancel, "cancel"),
        (rule_5 and effect_seen and not case.doubtful, "succeeded:"),
        (rule_5 and case.boot_changed, "failed:not-proven"),
        (rule_5 and case.journal_changed, "failed:journal-lost"),
        (rule_6, "failed:journal-lost"),
        (kind.self_terminating and case.attempt >= 3, "failed:attempts-exhausted"),
    ]
    return next((outcome for holds, outcome in sentences if holds), "resend")


def in_one_word(settled: Settled) -> str:
    if settled.end is not None:
        return f"{settled.end.state.name.lower()}:{settled.end.reason}"
    if settled.rule is Rule.RESULT:
        return "result"
    if settled.keeps_credit:
        return "keep+cancel" if settled.cancel_frame else "keep"
    if settled.cancel_frame:
        return "cancel"
    assert settled.resend
    return "resend"


RULES_OF: dict[str, set[Rule]] = {
    "result": {Rule.RESULT},
    "keep": {Rule.RUNNING},
    "keep+cancel": {Rule.RUNNING},
    "cancelled:kind-not-allowed": {Rule.KIND_NOT_ALLOWED},
    "cancelled:cancelled": {Rule.CANCEL_REQUESTED},
    "cancel": {Rule.CANCEL_REQUESTED},
    "succeeded:": {Rule.SELF_TERMINATING},
    "failed:not-proven": {Rule.SELF_TERMINATING},
    "failed:journal-lost": {Rule.SELF_TERMINATING, Rule.JOURNAL_LOST},
    "failed:attempts-exhausted": {Rule.RESEND},
    "resend": {Rule.RESEND},
}


def test_the_whole_product_against_the_oracle() -> None:
    tried, seen = 0, set()
    for case in cases():
        settled = settle(case)
        word = in_one_word(settled)
        assert word == oracle(case), case
        assert settled.rule in RULES_OF[word], case
        seen.add(word)
        tried += 1
    assert tried == (4 * 1 + 2 * 2) * 3 * 2 * 2 * 2**7
    assert seen == {
        *("result", "keep", "keep+cancel", "cancel", "resend", "succeeded:"),
        *("failed:not-proven", "failed:journal-lost", "failed:attempts-exhausted"),
        *("cancelled:kind-not-allowed", "cancelled:cancelled"),
    }


def test_invariants_of_the_whole_product() -> None:
    for case in cases():
        settled = settle(case)
        kind = KINDS_TRIED[case.flavour]
        if case.result:
            assert settled.end is None, "a fact beats every guess"
            assert not settled.resend
        if settled.resend:
            assert not case.running, "what runs is not sent again"
            assert case.allowed
            assert not case.cancel
            assert kind.retry_safe or not case.journal_changed or not case.proven or kind.self_terminating
        if settled.end is not None and settled.end.state is CommandState.SUCCEEDED:
            assert kind.self_terminating
            assert not case.doubtful, "a clone proves nothing"
        if not case.proven:
            assert settled.rule not in (Rule.SELF_TERMINATING, Rule.JOURNAL_LOST)
        assert settled.wakes_owner == (settled.rule in (Rule.SELF_TERMINATING, Rule.JOURNAL_LOST))


def test_a_kind_that_this_release_does_not_know_is_not_run_twice() -> None:
    unknown = replace(case_of("unsafe"), flavour="newer.kind", journal_changed=True)
    settled = settle(unknown)
    assert settled.end is not None
    assert settled.end.reason == resume.JOURNAL_LOST


def case_of(flavour: str) -> Case:
    return Case(
        flavour=flavour,
        state=CommandState.RUNNING,
        attempt=1,
        boot_changed=False,
        role_changed=False,
        version_reached=False,
        journal_changed=False,
        running=False,
        result=False,
        cancel=False,
        allowed=True,
        doubtful=False,
        proven=True,
    )


@pytest.mark.parametrize(
    ("case", "reason", "message"),
    [
        (
            {"flavour": "unsafe", "allowed": False},
            resume.KIND_NOT_ALLOWED,
            "the node's certificate does not allow unsafe",
        ),
        (
            {"flavour": "safe", "cancel": True, "journal_changed": True},
            resume.CANCELLED,
            "a cancel was asked for, and the node came back with a new journal: nothing there knows the command",
        ),
        (
            {"flavour": "upgrade", "boot_changed": True},
            resume.NOT_PROVEN,
            f"the node booted anew, but this does not prove upgrade ({Proof.DAEMON_VERSION.value})",
        ),
        (
            {"flavour": "reboot", "journal_changed": True},
            resume.JOURNAL_LOST,
            "the node came back with a new journal; reboot may have run and is not run twice",
        ),
        (
            {"flavour": "unsafe", "journal_changed": True},
            resume.JOURNAL_LOST,
            "the node came back with a new journal; unsafe may have run and is not run twice",
        ),
        (
            {"flavour": "reboot", "attempt": 3},
            resume.ATTEMPTS_EXHAUSTED,
            "sent 3 times, at most 3 for a kind that ends the daemon",
        ),
        ({"flavour": "reboot", "boot_changed": True}, "", ""),
    ],
    ids=["not-allowed", "cancelled", "not-proven", "lost-proof", "lost", "exhausted", "proven"],
)
def test_what_people_are_told_of_an_end(case: dict[str, object], reason: str, message: str) -> None:
    end = settle(replace(case_of("safe"), **case)).end  # type: ignore[arg-type]  # fields of Case
    assert end is not None
    assert (end.command_id, end.reason, end.message) == ("c", reason, message)


@pytest.mark.parametrize(
    ("sent_boot_id", "boot_changed", "ended"),
    [("", True, True), ("", False, False), ("boot-1", False, True), ("boot-2", True, False)],
)
def test_the_boot_of_the_sending_counts_where_it_is_known(
    sent_boot_id: str, *, boot_changed: bool, ended: bool
) -> None:
    """A Hello without this command may lie between; and what an older control plane has sent says no boot."""
    command = CommandInFlight(
        command_id="c",
        kind="reboot",
        lane=1,
        seq=1,
        state=CommandState.RUNNING,
        attempt=1,
        sent_boot_id=sent_boot_id,
        cancel_requested=False,
        body=b"",
    )
    reconnect = Reconnect(
        boot_id="boot-2",
        role=1,
        previous_role=1,
        daemon_version="",
        journal_changed=False,
        boot_changed=boot_changed,
        doubtful=False,
        proven=True,
        running=frozenset(),
        results=frozenset(),
        allowed_kinds=None,
    )
    settled = resume.settle(command, reconnect, kinds=KINDS_TRIED)
    assert (settled.end is not None) is ended


def test_the_wrong_payload_proves_no_upgrade() -> None:
    command = CommandInFlight(
        command_id="c",
        kind="daemon.upgrade",
        lane=2,
        seq=1,
        state=CommandState.RUNNING,
        attempt=1,
        sent_boot_id="boot-1",
        cancel_requested=False,
        body=b"\xff\xff",
    )
    reconnect = Reconnect(
        boot_id="boot-1",
        role=1,
        previous_role=1,
        daemon_version="",
        journal_changed=False,
        boot_changed=False,
        doubtful=False,
        proven=True,
        running=frozenset(),
        results=frozenset(),
        allowed_kinds=None,
    )
    assert resume.settle(command, reconnect).resend


# The daemon's half


def left(flavour: str, *, started: bool, boot_id: str = "boot-1", role: int = 1) -> JournalEntry:
    payload = messages.DaemonUpgradePayload(target_version="9.9.9")
    body = messages.CommandBody(command_id="c", payload=pack_payload(payload))
    return JournalEntry(
        command_id="c",
        kind=flavour,
        lane=1,
        attempt=1,
        state=CommandState.RUNNING if started else CommandState.ACKED,
        not_after_ms=1,
        process_id="earlier",
        started=started,
        start_boot_id=boot_id if started else "",
        start_role=role if started else 0,
        start_version="1.0.0" if started else "",
        command=messages.Command(body=body.SerializeToString()).SerializeToString(),
    )


@pytest.mark.parametrize("flavour", [*KINDS_TRIED, "newer.kind"])
@pytest.mark.parametrize(("boot_changed", "role_changed", "reached"), list(product([True, False], repeat=3)))
@pytest.mark.parametrize("started", [True, False])
def test_every_entry_that_an_earlier_process_left(
    flavour: str, *, started: bool, boot_changed: bool, role_changed: bool, reached: bool
) -> None:
    verdict = resume.at_start(
        left(flavour, started=started),
        boot_id="boot-2" if boot_changed else "boot-1",
        role=3 if role_changed else 1,
        daemon_version="9.9.9" if reached else "1.0.0",
        kinds=KINDS_TRIED,
    )
    effect_seen = {
        "reboot": boot_changed,
        "reboot-unsafe": boot_changed,
        "kexec": boot_changed and role_changed,
        "upgrade": reached,
    }
    if not started:
        expected = AtStart.NOT_STARTED
    elif flavour in effect_seen:
        expected = AtStart.SUCCEEDED if effect_seen[flavour] else AtStart.NO_EFFECT
    else:
        expected = AtStart.MAY_RUN_AGAIN if flavour == "safe" else AtStart.INTERRUPTED
    assert verdict is expected


def test_what_cannot_be_read_of_an_entry_proves_nothing() -> None:
    entry = replace(left("upgrade", started=True), command=b"\xff\xff")
    verdict = resume.at_start(entry, boot_id="boot-1", role=1, daemon_version="", kinds=KINDS_TRIED)
    assert verdict is AtStart.NO_EFFECT


@pytest.mark.parametrize("entry_state", [None, *CommandState])
@pytest.mark.parametrize("process_id", ["this", "earlier"])
@pytest.mark.parametrize("cancelled", [True, False])
@pytest.mark.parametrize("seen", [0, CommandState.ACKED, CommandState.RUNNING])
@pytest.mark.parametrize("flavour", ["safe", "unsafe", "newer.kind"])
def test_every_delivery(
    entry_state: CommandState | None, process_id: str, seen: int, flavour: str, *, cancelled: bool
) -> None:
    entry = None
    if entry_state is not None:
        entry = replace(left(flavour, started=True), state=entry_state, process_id=process_id)
    met = resume.at_delivery(entry, cancelled=cancelled, seen=seen, process_id="this", kind=KINDS_TRIED.get(flavour))
    if entry_state is not None and entry_state >= CommandState.SUCCEEDED:
        expected = AtDelivery.DONE
    elif entry_state is not None:
        expected = AtDelivery.RUNNING if process_id == "this" else AtDelivery.TAKE_UP
    elif cancelled:
        expected = AtDelivery.REFUSED_CANCELLED
    elif seen == 0:
        expected = AtDelivery.NEW
    else:
        expected = AtDelivery.FORGOTTEN_RUNS if flavour == "safe" else AtDelivery.FORGOTTEN_FAILS
    assert met is expected
