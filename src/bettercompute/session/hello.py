"""Hello, both ends: what the Hello transaction decides, and what a daemon says.

`decide` is the one decision of the Hello transaction: facts read under the row's lock go in, a plan of every write
and of everything the session begins with comes out. `new_hello` is what a daemon says, built from its journal. See
docs/sessions.md, "Hello", "The Hello transaction"; decisions 0050, 0101 and 0104.
"""

from __future__ import annotations

from bettercompute import telemetry
from bettercompute.delivery import desired_state, events, inventory
from bettercompute.delivery.commands import TERMINAL
from bettercompute.delivery.facts import CommandFact, command_fact
from bettercompute.protocol import capabilities, messages
from bettercompute.protocol.limits import MAX_DONE_RESULTS, MAX_HELLO_BYTES
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.protocol.versions import Negotiated, ProtocolRange, negotiate
from bettercompute.session import announcements, duplicate_identity, epochs, resume, standing
from bettercompute.session.announcements import JournalSeen
from bettercompute.session.daemon_state import DaemonSession
from bettercompute.session.hello_plan import (
    EventGap,
    HelloFacts,
    HelloPlan,
    HelloRefusal,
    PublishedEvent,
    RefusalWrites,
    RowValues,
    SessionRow,
)
from bettercompute.session.replay import replay

ROLLED_BACK = "rolled-back:"
"""Before a journal id in the row: the control plane knows more than that journal, and waits for a new id."""
INTEGER_MAX = 2**31 - 1
"""Versions are a 4-byte column; a claim past it is stored as its end."""
UPDATE_OVERHEAD_BYTES = 8
"""Field number and length of one result inside a Hello, rounded up."""


def decide(facts: HelloFacts, hello: messages.Hello) -> HelloPlan | HelloRefusal:
    """Return everything that a Hello writes and begins, or why it is refused. Pure: the same facts give the same plan.

    The Hello has passed `opening.check_hello` and `protocol.validation`.
    """
    if facts.node.revocation is not None:
        return HelloRefusal(standing.refuse_revoked(hello.node_id, facts.node.revocation))
    refusal = _refused_certificate(facts)
    if refusal is not None:
        return refusal
    row = facts.row
    if row is None:
        return HelloRefusal(
            refuse(
                Reason.NOT_JOINED,
                f"node {hello.node_id} has not joined here: join it with a token (`better-compute token create`)",
            )
        )
    lock = standing.in_force(facts.node.lock, now_ms=facts.now_ms)
    if lock is not None:
        return HelloRefusal(standing.refuse_locked(hello.node_id, lock, now_ms=facts.now_ms, drawn=facts.gateway.drawn))
    judgement = duplicate_identity.judge(
        row,
        duplicate_identity.Claim(
            boot_id=hello.boot_id,
            hello_nonce=hello.hello_nonce,
            previous_hello_nonce=hello.previous_hello_nonce,
            epoch_behind=epochs.is_behind(row_epoch=row.session_epoch, last_epoch=hello.last_epoch),
        ),
        facts.gateway,
        now_ms=facts.now_ms,
    )
    if judgement.quarantine:
        return announcements.quarantined(facts, row, hello, judgement)
    return _plan(facts, row, hello, judgement)


def _refused_certificate(facts: HelloFacts) -> HelloRefusal | None:
    """Step 1: a serial that is recorded may be revoked, of an older identity generation, or superseded by use; and any
    may have expired, which TLS judges by its host's clock, and a session that was let in by the database's.
    """
    certificate = facts.certificate
    named = f"certificate {certificate.serial} of node {certificate.node_id}"
    refusal = _void_on_record(facts, named) if certificate.recorded else None
    expired_ms = facts.now_ms - certificate.not_after_ms
    if refusal is None and expired_ms >= 0:
        message = f"{named} expired {expired_ms} ms ago by the database's clock: renew it, or re-join the machine"
        return HelloRefusal(refuse(Reason.CERTIFICATE_EXPIRED, message))
    return refusal


def _void_on_record(facts: HelloFacts, named: str) -> HelloRefusal | None:
    certificate = facts.certificate
    if certificate.revocation_reason is not None:
        reason = (
            Reason.QUARANTINED if certificate.revocation_reason == announcements.QUARANTINE_REASON else Reason.REVOKED
        )
        return HelloRefusal(
            refuse(
                reason,
                f"{named} is revoked ({certificate.revocation_reason}): re-join the machine with a new join token",
            )
        )
    if certificate.generation < facts.node.identity_generation:
        return HelloRefusal(
            refuse(
                Reason.OLD_GENERATION,
                f"{named} is of identity generation {certificate.generation}, the node is at "
                f"{facts.node.identity_generation}: it has been re-joined since, this copy of the identity is void",
            )
        )
    if certificate.superseded:
        event = PublishedEvent(
            name=telemetry.EVENT_SUPERSEDED_CERTIFICATE,
            node_id=certificate.node_id,
            attributes={
                "nodeId": certificate.node_id,
                "serial": certificate.serial,
                "gatewayId": facts.gateway.gateway_id,
                "address": facts.gateway.peer_address,
            },
        )
        return HelloRefusal(
            refuse(
                Reason.SUPERSEDED_CERTIFICATE,
                f"{named} is superseded: a newer one of the same identity has been used; whoever holds the old one is "
                "a copy, or lost its renewal: re-join it",
            ),
            RefusalWrites(events=(event,)),
        )
    return None


# The plan


def _plan(
    facts: HelloFacts, row: SessionRow, hello: messages.Hello, judgement: duplicate_identity.Judgement
) -> HelloPlan:
    gateway = facts.gateway
    journal = _journal(row, hello, forked=judgement.forked)
    negotiated = negotiate(
        ProtocolRange(min=gateway.protocol_min, max=gateway.protocol_max),
        proto_min=hello.proto_min,
        proto_max=hello.proto_max,
    )
    epoch = epochs.next_epoch(row_epoch=row.session_epoch, last_epoch=hello.last_epoch)
    results = _results(hello, authenticated_only=gateway.signed_only)
    stored = frozenset(fact.command_id for fact in results)
    work = replay(
        facts,
        _reconnect(facts, row, hello, judgement, journal, results=stored | frozenset(hello.done_ids)),
        stored=stored,
        upgrade_only=negotiated.upgrade_required,
        withheld=journal.rolled_back,
    )
    reported = dict(hello.inventory_hashes)
    observed_generation = desired_state.known_at_hello(
        generation=facts.node.spec_generation,
        spec_sha256=facts.node.spec_sha256,
        observed_generation=hello.observed_generation,
        held_sha256=hello.spec_sha256,
    )
    ahead = max(observed_generation, hello.applied_generation) > facts.node.spec_generation
    spec_due = desired_state.due_at_welcome(
        generation=facts.node.spec_generation,
        has_spec=facts.node.spec_generation > 0,
        applied_generation=hello.applied_generation,
        spec_sha256=hello.spec_sha256,
    )
    gap = journal.cursor.gap
    return HelloPlan(
        node_id=facts.certificate.node_id,
        row=_row_values(facts, hello, judgement, journal, epoch=epoch.epoch, negotiated=negotiated),
        first_use=facts.certificate.recorded and not facts.certificate.used,
        results=results,
        ends=work.ends,
        in_flight=work.in_flight,
        resent=work.resent,
        events=announcements.published(facts, row, hello, judgement, journal, epoch),
        capability_labels=capabilities.labels(hello.capabilities),
        inventory_hashes=reported,
        conditions=announcements.conditions(facts, judgement),
        event_gap=None if gap is None else EventGap(*gap),
        wake_nodes=ahead or judgement.boot_changed or journal.changed,
        wake_commands=work.wake,
        close_previous=row.gateway_id == gateway.gateway_id,
        protocol_version=negotiated.protocol_version,
        upgrade_required=negotiated.upgrade_required,
        new_journal=journal.rolled_back,
        send_trust=gateway.trust_version > hello.trust_version,
        send_spec=spec_due and not negotiated.upgrade_required and not journal.rolled_back,
        request_sections=inventory.sections_to_request(stored=facts.inventory_hashes or {}, reported=reported),
        running=work.running,
        held=work.held,
        cancels=work.cancels,
        allowed_kinds=facts.certificate.allowed_kinds,
        tenant_controlled=facts.certificate.tenant_controlled,
        certificate_left_ms=facts.certificate.not_after_ms - facts.now_ms,
        next_event_seq=journal.cursor.acked_seq + 1,
        observed_generation=observed_generation,
        applied_generation=hello.applied_generation,
        lane_credits=gateway.lane_credits,
        gateway_capabilities=gateway.capabilities,
    )


def _journal(row: SessionRow, hello: messages.Hello, *, forked: bool) -> JournalSeen:
    """Judge the journal. A rollback shows as a fork, as an ack past the journal's end, or as one already told so.

    The row then keeps the id under a mark, so that the next Hello is judged again although its nonce continues: a
    Welcome that got lost must not leave a rolled-back journal in use.
    """
    same = row.journal_id == hello.journal_id
    rolled_back = (
        forked
        or row.journal_id == ROLLED_BACK + hello.journal_id
        or (same and row.acked_event_seq > hello.last_event_seq)
    )
    if rolled_back:
        return JournalSeen(changed=True, rolled_back=True, cursor=events.Cursor(acked_seq=0, gap=None))
    cursor = events.cursor_at_hello(
        row_acked_seq=row.acked_event_seq if same else 0,
        first_unacked_seq=hello.first_unacked_event_seq,
        last_seq=hello.last_event_seq,
    )
    return JournalSeen(changed=bool(row.journal_id) and not same, rolled_back=False, cursor=cursor)


def _results(hello: messages.Hello, *, authenticated_only: bool) -> tuple[CommandFact, ...]:
    """Return the terminal facts among the done results."""
    facts = (
        command_fact(update, authenticated=not authenticated_only or update.HasField("signature"))
        for update in hello.done_results
    )
    return tuple(fact for fact in facts if fact is not None and fact.state in TERMINAL)


def _row_values(
    facts: HelloFacts,
    hello: messages.Hello,
    judgement: duplicate_identity.Judgement,
    journal: JournalSeen,
    *,
    epoch: int,
    negotiated: Negotiated,
) -> RowValues:
    holds_set = bool(hello.approver_set_sha256)
    return RowValues(
        gateway_id=facts.gateway.gateway_id,
        session_id=facts.gateway.session_id,
        session_epoch=epoch,
        boot_id=hello.boot_id,
        recent_boots=judgement.recent_boots,
        journal_id=ROLLED_BACK + hello.journal_id if journal.rolled_back else hello.journal_id,
        hello_nonce=hello.hello_nonce,
        role=hello.role,
        daemon_version=hello.daemon_version,
        proto_max=min(hello.proto_max, INTEGER_MAX),
        trust_version=hello.trust_version,
        capabilities=capabilities.normalise(hello.capabilities),
        approver_set_epoch=hello.approver_set_epoch if holds_set else None,
        approver_set_sha256=hello.approver_set_sha256 if holds_set else None,
        acked_event_seq=journal.cursor.acked_seq,
        cert_serial=facts.certificate.serial,
        upgrade_only=negotiated.upgrade_required,
        signed_only=facts.gateway.signed_only,
        heartbeat_interval_ms=facts.gateway.heartbeat_interval_ms,
        duplicate_hellos=judgement.alternations,
        duplicate_since_ms=judgement.since_ms,
        peer_address=facts.gateway.peer_address,
    )


def _reconnect(
    facts: HelloFacts,
    row: SessionRow,
    hello: messages.Hello,
    judgement: duplicate_identity.Judgement,
    journal: JournalSeen,
    *,
    results: frozenset[str],
) -> resume.Reconnect:
    return resume.Reconnect(
        boot_id=hello.boot_id,
        role=hello.role,
        previous_role=row.role,
        daemon_version=hello.daemon_version,
        journal_changed=journal.changed,
        boot_changed=judgement.boot_changed,
        doubtful=judgement.duplicate or judgement.forked,
        proven=facts.gateway.hello_proven,
        running=frozenset(hello.running_command_ids),
        results=results,
        allowed_kinds=facts.certificate.allowed_kinds,
    )


# What a daemon says


def new_hello(state: DaemonSession) -> tuple[messages.Hello, frozenset[str]]:
    """Return the Hello of a dial, and the ids of the results that ride in it.

    Results that are not acked come oldest first, as many as fit 1 MiB; all of their ids are named. Running are the
    commands that this process has and that are not done: after a restart none, and the crash rules apply instead.
    """
    facts, advertised = state.facts, state.advertised
    done = sorted(
        (entry for entry in state.entries.values() if entry.done and not entry.acked),
        key=lambda entry: entry.done_mark_ms,
    )
    holds_events = state.last_event_seq > state.acked_event_seq
    hello = messages.Hello(
        node_id=facts.node_id,
        role=messages.AgentRole.ValueType(facts.role),
        boot_id=facts.boot_id,
        journal_id=state.journal_id,
        last_epoch=state.last_epoch,
        proto_min=facts.proto_min,
        proto_max=facts.proto_max,
        daemon_version=facts.daemon_version,
        capabilities=advertised.capabilities,
        drivers=advertised.drivers,
        inventory_hashes=advertised.inventory_hashes,
        observed_generation=advertised.observed_generation,
        applied_generation=advertised.applied_generation,
        spec_sha256=advertised.spec_sha256,
        running_command_ids=[
            entry.command_id
            for entry in state.entries.values()
            if not entry.done and entry.process_id == facts.process_id
        ],
        done_ids=[entry.command_id for entry in done[:MAX_DONE_RESULTS]],
        first_unacked_event_seq=state.acked_event_seq + 1 if holds_events else 0,
        last_event_seq=state.last_event_seq,
        hello_nonce=state.hello_nonce,
        previous_hello_nonce=state.previous_hello_nonce,
        trust_version=advertised.trust_version,
        approver_set_epoch=state.authority.approvers.epoch,
        approver_set_sha256=state.authority.approvers.sha256,
        process_id=facts.process_id,
    )
    room = MAX_HELLO_BYTES - hello.ByteSize()
    riding: set[str] = set()
    for entry in done[:MAX_DONE_RESULTS]:
        room -= len(entry.update) + UPDATE_OVERHEAD_BYTES
        if room < 0:
            break
        hello.done_results.add().MergeFromString(entry.update)
        riding.add(entry.command_id)
    return hello, frozenset(riding)
