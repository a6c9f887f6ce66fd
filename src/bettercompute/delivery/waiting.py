"""Why a command waits: every condition of dispatch that does not hold, by name, and what would cure it.

Pure. The facts are rows, read at one moment; a command may have moved on by the time somebody reads the answer. See
docs/delivery.md, "Why a command waits".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from bettercompute.delivery.commands import IN_FLIGHT, TERMINAL, CommandState
from bettercompute.delivery.lanes import DEFAULT_CREDITS, Lane
from bettercompute.protocol.kinds import KINDS
from bettercompute.protocol.versions import UPGRADE_KIND


class Wait(StrEnum):
    """What a command waits for."""

    NOTHING = "ended"
    EXPIRY = "expired"
    APPROVALS = "approvals"
    NOT_BEFORE = "not-before"
    BUSY = "busy-back-off"
    NODE_REVOKED = "node-revoked"
    NODE_LOCKED = "node-locked"
    NO_SESSION = "no-session"
    DRAINING = "draining"
    UPGRADE_ONLY = "upgrade-only"
    KIND_NOT_ALLOWED = "kind-not-allowed"
    CAPABILITY_MISSING = "capability-missing"
    UNSIGNED = "unsigned"
    NO_CREDIT = "no-credit"
    TURN = "behind-others"
    DISPATCH = "dispatch"
    HELD_BACK = "held-back"
    CANCEL = "cancel-requested"
    NODE = "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A command that holds a credit of the lane."""

    command_id: str
    kind: str
    state: CommandState


@dataclass(frozen=True, slots=True, kw_only=True)
class Approvals:
    """How the batch of a destructive command stands with its approvers."""

    batch_id: str
    approved_by: tuple[str, ...]
    """Names, or key ids."""
    required: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingFacts:
    """A command with everything that dispatch asks of it, its node and its session. Times by the database's clock."""

    command_id: str
    kind: str
    lane: int
    state: CommandState
    signed: bool
    held_back: bool
    busy_count: int
    cancel_requested: bool
    not_before_ms: int | None
    """From when dispatch may take it."""
    not_after_ms: int
    now_ms: int
    node_id: str
    node_state: str
    node_state_reason: str
    quarantine_reason: str | None
    revoked_by: str | None
    locked_by: str | None
    """None: it is not locked, or no more."""
    locked_left_ms: int | None
    """None: until it is unlocked."""
    gateway_id: str | None
    """The gateway that has the node's session; None: nobody has."""
    gateway_live: bool
    gateway_draining: bool
    upgrade_only: bool
    signed_only: bool
    capabilities: frozenset[str]
    allowed_kinds: frozenset[str] | None
    holders: tuple[Holder, ...]
    ahead: int
    """Pending commands of the same lane with an earlier place."""
    approval: Approvals | None = None
    """None: nobody has to approve it, or enough have."""
    asked_not_before_ms: int | None = None
    """From when it may be sent as its maker asked; None: at once."""
    abandoned: tuple[Holder, ...] = ()
    """Commands of this session that were ended here without its node's word: they may hold a credit there."""
    led_by: str | None = None
    """Who releases it: it is of an approved run in steps, and its step has not come."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that a command waits for, and the sentence that says it."""

    wait: Wait
    sentence: str


Rule = Callable[[WaitingFacts], str | None]


def decide(facts: WaitingFacts) -> tuple[Reason, ...]:
    """Return what the command waits for, the decisive reason first; never empty."""
    if facts.state in TERMINAL:
        return (Reason(Wait.NOTHING, f"it has {facts.state.name.lower()}"),)
    rules = _IN_FLIGHT if facts.state in IN_FLIGHT else _PENDING
    found = [Reason(wait, sentence) for wait, rule in rules if (sentence := rule(facts)) is not None]
    if found:
        return tuple(found)
    return (Reason(*_last(facts)),)


def _last(facts: WaitingFacts) -> tuple[Wait, str]:
    if facts.state is CommandState.PENDING:
        if facts.ahead:
            return Wait.TURN, f"{facts.ahead} commands of the lane come before it; dispatch is at work on them"
        return Wait.DISPATCH, "nothing stands in its way: dispatch takes it within its polling interval, 5 s"
    said = {
        CommandState.DISPATCHED: "it was sent, and the node has not confirmed it yet",
        CommandState.ACKED: "the node has it, and has not begun it yet",
        CommandState.RUNNING: "it runs on the node",
    }[facts.state]
    return Wait.NODE, said


def _expired(facts: WaitingFacts) -> str | None:
    return "its deadline has passed: it ends expired within 10 s" if facts.not_after_ms <= facts.now_ms else None


def _not_before(facts: WaitingFacts) -> str | None:
    # Held for approvers, for a step, or by a back-off, it is pending until then by their word, not by its maker's.
    held = facts.approval is not None or facts.led_by is not None or facts.busy_count
    left_ms = ((facts.asked_not_before_ms if held else facts.not_before_ms) or 0) - facts.now_ms
    asked = f"it is not to be sent before {_span(left_ms)} from now" if left_ms > 0 else None
    if facts.led_by is None or facts.approval is not None:
        return asked
    step = f"it is approved, and waits for its step of the rolling run that {facts.led_by} leads"
    return f"{step}; and {asked}" if asked else step


def _span(left_ms: int) -> str:
    """Return a time to wait as people say it."""
    if left_ms < 10_000:
        return f"{left_ms} ms"
    minutes, seconds = divmod(-(-left_ms // 1000), 60)
    if minutes < 10:
        return f"{minutes * 60 + seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _approvals(facts: WaitingFacts) -> str | None:
    held = facts.approval
    if held is None:
        return None
    by = f", by {', '.join(held.approved_by)}" if held.approved_by else ""
    given = f"{len(held.approved_by)} of {held.required}{by}"
    return f"waiting for approvals ({given}): better-compute approve {held.batch_id}"


def _busy(facts: WaitingFacts) -> str | None:
    left_ms = (facts.not_before_ms or 0) - facts.now_ms
    if left_ms <= 0 or not facts.busy_count:
        return None
    return f"{facts.node_id} refused it BUSY {facts.busy_count} times; it is tried again in {left_ms} ms"


def _node_revoked(facts: WaitingFacts) -> str | None:
    if facts.revoked_by is None:
        return None
    return f"{facts.node_id} was revoked by {facts.revoked_by}: it has no session until it joins anew"


def _node_locked(facts: WaitingFacts) -> str | None:
    if facts.locked_by is None:
        return None
    left_ms = facts.locked_left_ms
    end = "until it is unlocked" if left_ms is None else f"for another {-(-left_ms // 1000)} s"
    return f"{facts.node_id} is locked by {facts.locked_by} {end}: nothing is sent to it"


def _no_session(facts: WaitingFacts) -> str | None:
    if facts.gateway_id is not None and facts.gateway_live:
        return None
    if facts.quarantine_reason is not None:
        return f"{facts.node_id} is quarantined ({facts.quarantine_reason}): it has no session until it joins anew"
    if facts.gateway_id is not None:
        return f"gateway {facts.gateway_id}, which has the session of {facts.node_id}, has lost its lease"
    if facts.node_state == "joined":
        return f"{facts.node_id} has joined and never connected: start `bcd node` there"
    why = f" ({facts.node_state_reason})" if facts.node_state_reason else ""
    return f"{facts.node_id} has no session: it is {facts.node_state}{why}; see `bcd status` there"


def _draining(facts: WaitingFacts) -> str | None:
    if not facts.gateway_draining:
        return None
    return f"gateway {facts.gateway_id} is draining and begins nothing new: the node's next session gets it"


def _upgrade_only(facts: WaitingFacts) -> str | None:
    if not facts.upgrade_only or facts.kind == UPGRADE_KIND:
        return None
    return f"the daemon of {facts.node_id} is too old: until it is upgraded it is sent {UPGRADE_KIND} only"


def _kind_not_allowed(facts: WaitingFacts) -> str | None:
    if facts.allowed_kinds is None or facts.kind in facts.allowed_kinds:
        return None
    allowed = ", ".join(sorted(facts.allowed_kinds)) or "none"
    return f"the certificate of {facts.node_id} does not allow {facts.kind}; it allows: {allowed}"


def _capability_missing(facts: WaitingFacts) -> str | None:
    kind = KINDS.get(facts.kind)
    if kind is None or kind.capability is None or kind.capability in facts.capabilities:
        return None
    return f"{facts.kind} needs the capability {kind.capability}, which {facts.node_id} does not advertise"


def _unsigned(facts: WaitingFacts) -> str | None:
    if not facts.signed_only or facts.signed:
        return None
    return f"the session of {facts.node_id} takes signed commands only, and this one is not signed"


def _no_credit(facts: WaitingFacts) -> str | None:
    granted = DEFAULT_CREDITS[Lane(facts.lane)] if facts.lane in DEFAULT_CREDITS else 0
    if len(facts.holders) + len(facts.abandoned) < granted:
        return None
    held = ", ".join(
        [f"{item.command_id} ({item.kind}, {item.state.name.lower()})" for item in facts.holders]
        + [f"{item.command_id} ({item.kind}, abandoned, and may run there still)" for item in facts.abandoned]
    )
    return f"all {granted} credits of the lane are taken: {held or 'the node grants none'}"


def _held_back(facts: WaitingFacts) -> str | None:
    if not facts.held_back:
        return None
    if facts.busy_count:
        return (
            f"it is in flight, and {facts.node_id} has refused it BUSY {facts.busy_count} times when it was sent "
            "again: it is held back until its back-off is over, then sent before anything that is pending"
        )
    return "it is in flight since an earlier session and held back: it is sent again before anything that is pending"


def _cancel(facts: WaitingFacts) -> str | None:
    return "its cancel was requested: the node stops it between actions" if facts.cancel_requested else None


def _with_session(rule: Rule) -> Rule:
    """Ask only while there is a session: what the last one was says nothing of the next."""
    return lambda facts: None if facts.gateway_id is None or not facts.gateway_live else rule(facts)


def _while_held(rule: Rule) -> Rule:
    """Ask only of a command that is not on the node."""
    return _with_session(lambda facts: rule(facts) if facts.held_back else None)


_OF_SESSION: tuple[tuple[Wait, Rule], ...] = (
    (Wait.DRAINING, _draining),
    (Wait.UPGRADE_ONLY, _upgrade_only),
    (Wait.KIND_NOT_ALLOWED, _kind_not_allowed),
    (Wait.CAPABILITY_MISSING, _capability_missing),
    (Wait.UNSIGNED, _unsigned),
    (Wait.NO_CREDIT, _no_credit),
)
_PENDING: tuple[tuple[Wait, Rule], ...] = (
    (Wait.EXPIRY, _expired),
    (Wait.APPROVALS, _approvals),
    (Wait.NODE_REVOKED, _node_revoked),
    (Wait.NODE_LOCKED, _node_locked),
    (Wait.NO_SESSION, _no_session),
    (Wait.NOT_BEFORE, _not_before),
    (Wait.BUSY, _busy),
    *((wait, _with_session(rule)) for wait, rule in _OF_SESSION),
)
_IN_FLIGHT: tuple[tuple[Wait, Rule], ...] = (
    (Wait.NODE_REVOKED, _node_revoked),
    (Wait.NODE_LOCKED, _node_locked),
    (Wait.NO_SESSION, _no_session),
    (Wait.CANCEL, _cancel),
    (Wait.HELD_BACK, _with_session(_held_back)),
    *((wait, _while_held(rule)) for wait, rule in _OF_SESSION),
)
