"""What a Hello tells others: published events, conditions, and the quarantine's sentence.

See docs/sessions.md, "The Hello transaction", "Duplicate identity"; decisions 0107.
"""

from __future__ import annotations

from dataclasses import dataclass

from bettercompute import telemetry
from bettercompute.delivery import events
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.session import duplicate_identity, epochs
from bettercompute.session.hello_plan import (
    ConditionChange,
    HelloFacts,
    HelloRefusal,
    IdentityRevocation,
    PublishedEvent,
    RefusalWrites,
    SessionRow,
)

QUARANTINE_REASON = "duplicate-identity"


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSeen:
    """What a Hello shows of the journal beside the row."""

    changed: bool
    """Another journal than the one the control plane knows the end of."""
    rolled_back: bool
    """The same journal, at an earlier time: the daemon must take a new id."""
    cursor: events.Cursor


def published(
    facts: HelloFacts,
    row: SessionRow,
    hello: messages.Hello,
    judgement: duplicate_identity.Judgement,
    journal: JournalSeen,
    epoch: epochs.NextEpoch,
) -> tuple[PublishedEvent, ...]:
    """Return the events of a Hello that commits."""
    node_id = facts.certificate.node_id
    attributes: dict[str, object] = {
        "nodeId": node_id,
        "gatewayId": facts.gateway.gateway_id,
        "sessionId": facts.gateway.session_id,
        "epoch": epoch.epoch,
        "bootId": hello.boot_id,
        "journalChanged": journal.changed,
        "bootChanged": judgement.boot_changed,
        "duplicateIdentity": judgement.duplicate,
        "epochBehind": epoch.behind,
        "newJournal": journal.rolled_back,
    }
    if journal.cursor.gap is not None:
        attributes["eventGap"] = list(journal.cursor.gap)
    connected = PublishedEvent(name=telemetry.EVENT_NODE_CONNECTED, node_id=node_id, attributes=attributes)
    if not judgement.duplicate:
        return (connected,)
    return (connected, _duplicate_event(facts, row, hello, judgement))


def _duplicate_event(
    facts: HelloFacts, row: SessionRow, hello: messages.Hello, judgement: duplicate_identity.Judgement
) -> PublishedEvent:
    node_id = facts.certificate.node_id
    return PublishedEvent(
        name=telemetry.EVENT_DUPLICATE_SESSION,
        node_id=node_id,
        attributes={
            "nodeId": node_id,
            "gatewayId": facts.gateway.gateway_id,
            "previousBootId": row.boot_id,
            "bootId": hello.boot_id,
            "alternations": judgement.alternations,
            "windowSeconds": facts.gateway.duplicate_window_ms // 1000,
            "quarantined": judgement.quarantine,
        },
    )


def conditions(facts: HelloFacts, judgement: duplicate_identity.Judgement) -> tuple[ConditionChange, ...]:
    """Raise what this Hello shows; clear what held once a whole window has passed without an alternation."""
    changes: list[ConditionChange] = []
    if judgement.duplicate:
        times = "once" if judgement.alternations == 1 else f"{judgement.alternations} times"
        message = f"another machine or boot took the live session over, {times} within the window"
        changes.append(_duplicate_condition(message))
    if judgement.reboot_loop:
        message = f"{judgement.alternations} boots took over a live session within the window, and none came back"
        changes.append(
            ConditionChange(type=duplicate_identity.REBOOT_LOOP, holds=True, reason="reboot-loop", message=message)
        )
    if judgement.alternations == 0:
        owned = (duplicate_identity.DUPLICATE_IDENTITY, duplicate_identity.REBOOT_LOOP)
        changes += [ConditionChange(type=name, holds=False) for name in owned if name in facts.node.conditions]
    return tuple(changes)


def _duplicate_condition(message: str) -> ConditionChange:
    return ConditionChange(
        type=duplicate_identity.DUPLICATE_IDENTITY, holds=True, reason=QUARANTINE_REASON, message=message
    )


def quarantined(
    facts: HelloFacts, row: SessionRow, hello: messages.Hello, judgement: duplicate_identity.Judgement
) -> HelloRefusal:
    """The Hello that trips the quarantine: counter, revocation and events commit, the epoch does not move."""
    node_id = facts.certificate.node_id
    notice = messages.RevocationNotice(
        reason=QUARANTINE_REASON,
        message=f"certificate quarantined: duplicate identity: two machines say they are {node_id}, "
        f"{judgement.alternations} alternations; all certificates of this identity are revoked",
        cure=duplicate_identity.CURE,
        claimants=(
            messages.IdentityClaimant(boot_id=row.boot_id, address=row.peer_address, seen_at_ms=row.last_seen_ms or 0),
            messages.IdentityClaimant(
                boot_id=hello.boot_id, address=facts.gateway.peer_address, seen_at_ms=facts.now_ms
            ),
        ),
    )
    message = notice_text(notice)
    quarantined = PublishedEvent(
        name=telemetry.EVENT_NODE_QUARANTINED,
        node_id=node_id,
        attributes={"nodeId": node_id, "reason": QUARANTINE_REASON, "alternations": judgement.alternations},
    )
    writes = RefusalWrites(
        events=(_duplicate_event(facts, row, hello, judgement), quarantined),
        revoke=IdentityRevocation(node_id=node_id, generation=facts.node.identity_generation, reason=QUARANTINE_REASON),
        reset_duplicates=True,
        conditions=(_duplicate_condition(message),),
        notice=notice,
    )
    return HelloRefusal(refuse(Reason.QUARANTINED, message), writes)


def revocation_notice(*, serial: str, node_id: str, reason: str, kept: bytes) -> messages.RevocationNotice:
    """Return what the holder of a revoked serial is told; `kept` is the notice stored with the revocation, or empty."""
    if kept:
        notice = messages.RevocationNotice.FromString(kept)
    else:
        notice = messages.RevocationNotice(
            reason=reason,
            message=f"certificate {serial} of node {node_id} is revoked: {reason}",
            cure="re-join the machine with a new join token (`bcd rejoin`)",
        )
    notice.serials[:] = [serial]
    return notice


def notice_text(notice: messages.RevocationNotice) -> str:
    """Return a revocation in one sentence: why, who claimed the identity, and the cure."""
    claimants = " and ".join(
        f"boot {one.boot_id} from {one.address or 'an unknown address'}" for one in notice.claimants
    )
    parts = (notice.message, claimants and f"claimed by {claimants}", notice.cure and f"cure: {notice.cure}")
    return "; ".join(part for part in parts if part)
