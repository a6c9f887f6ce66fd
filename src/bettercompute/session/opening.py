"""Opening: who is let in, in which order, and when the others are told to come back.

The order is fixed so that a refusal costs little and spends nothing: the gateway's own state, then the stream limit,
then the revocation set, and only then a token of the handshake bucket. A refusal by the bucket is an *appointment*:
the k-th daemon refused is told to come back k/rate from now, so a herd drains at the bucket's rate and nobody polls.
Who kept appointments in vain is held on its stream instead of being refused again. The bucket is one value; nothing in
it grows with the fleet. See docs/sessions.md, "Opening"; decisions 0102.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from bettercompute.errors import Refused
from bettercompute.protocol import limits, messages
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.session.announcements import notice_text

RATE_PER_S = 200
"""Handshakes that one gateway's core bears beside its sessions (docs/performance.md)."""
STREAMS_MAX = 5_000
PENDING_HELLOS_MAX = 64
"""Hello transactions at once. More once starved a gateway's own lease renewal until it fenced itself."""
HORIZON_MS = 60_000
"""No appointment further away than this: a promise must outlive neither gateway nor daemon."""
JITTER = 0.1
WAITED_ATTEMPTS = 2
"""Who kept two appointments in vain is let in before the others."""
RESERVED_SHARE = 4
"""A quarter of the pending Hellos is kept for those, and a quarter of a second's tokens is lent to them: what is lent
is earned before anybody else is admitted, so that the rate stays what it is."""
HELD_S = 5
"""As many streams are held as the bucket lets in within this time: a daemon waits 60 s for its Welcome, so even a
gateway that has fallen to a tenth of its rate lets all of them in. More are refused as before."""
HELD_LOOK_MS = 10
"""How long a held stream waits before it asks again for a place: the bucket tells when it has a token, nothing tells
when a Hello will end."""
BEYOND_HORIZON_MS = (30_000, 60_000)
ROOM_ELSEWHERE_MS = (1_000, 5_000)
NO_ROOM_MS = (30_000, 60_000)
DRAINING_MS = (1_000, 5_000)
DATABASE_MS = (1_000, 5_000)
LOOP_LAG_MAX_MS = 2_000
JOIN_SHARE = 4
"""Joins get at most a quarter of the tokens while sessions queue: the fleet that is there comes first."""
JOINS_PER_SOURCE_PER_S = 20
SOURCES_MAX = 4_096
HELLOS_PUSHBACK_MIN_MS = 500
HELLO_EVERY_MS = 1_000
"""At most one Hello a second per node and gateway: a second one is delayed, not refused."""
OPENING_PER_NODE_MAX = 8
"""Streams of one node that are open and not yet a session. A daemon has one, and a few lost ones after a bad network;
a node that opens more would take the tokens, the places of those who are held and the streams of everybody else."""
ROLES: Mapping[int, str] = {
    messages.AGENT_ROLE_NODE: "node",
    messages.AGENT_ROLE_SITE: "site",
    messages.AGENT_ROLE_RAMDISK: "ramdisk",
}
ROOM_SHARE = 0.05
"""Another gateway counts as having room when more than this share of its streams is free."""


class GatewayState(Enum):
    """What keeps a gateway from serving anybody, checked before all else."""

    SERVING = "serving"
    STARTING = "starting"
    NO_LEASE = "no-lease"
    DRAINING = "draining"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayCondition:
    """The gateway as it is when a stream arrives."""

    state: GatewayState
    loop_lag_ms: int = 0
    streams: int = 0
    streams_max: int = STREAMS_MAX
    room_elsewhere: bool = False
    """Another live gateway has more than 5 % room, by the counts in the lease rows."""
    hellos_pending: int = 0
    hellos_max: int = PENDING_HELLOS_MAX
    """Near so many no token is spent: the stream would only be refused at its Hello."""
    held: int = 0
    """Streams that are held: nobody else is admitted before them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionState:
    """The handshake bucket and the Joins' own limits. Build it with `open_admission`."""

    rate_per_s: float
    tokens: float
    at_ms: int
    next_at_ms: float
    """The last appointment given: nobody is queued when it has passed."""
    join_tokens: float
    """The Joins' quarter, while sessions queue."""
    sources: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """Join tokens per source with the time they were counted; full ones are dropped, so it stays small."""


def open_admission(*, now_ms: int, rate_per_s: float = RATE_PER_S) -> AdmissionState:
    """Return a full bucket in which nobody is queued."""
    return AdmissionState(
        rate_per_s=rate_per_s,
        tokens=rate_per_s,
        at_ms=now_ms,
        next_at_ms=now_ms,
        join_tokens=rate_per_s / JOIN_SHARE,
    )


def admit_session(
    state: AdmissionState,
    condition: GatewayCondition,
    *,
    attempt: int | None,
    revocation: messages.RevocationNotice | None,
    locked: Refused | None = None,
    now_ms: int,
    drawn: float,
) -> tuple[AdmissionState, Refused | None]:
    """Return the bucket after a Session stream asked to come in, and its refusal, or None when it is admitted.

    `attempt` is the parsed `x-bc-attempt` (None: the header is missing), `revocation` what the revocation set says
    of the certificate's serial, `locked` what it says of the node, `drawn` a number even from [0, 1).
    """
    refused = _refused_by_condition(condition, drawn=drawn)
    if refused is not None:
        return state, refused
    if revocation is not None:
        return state, refuse(Reason.REVOKED, notice_text(revocation))
    if locked is not None:
        return state, locked
    state = _refilled(state, now_ms=now_ms)
    waited = _has_waited(attempt)
    turn = waited or not (condition.held or (attempt == 0 and state.next_at_ms > now_ms))
    if turn and _has_place(condition, waited=waited) and state.tokens + _owed(state, waited=waited) >= 1:
        return replace(state, tokens=state.tokens - 1), None
    return _book(state, now_ms=now_ms, drawn=drawn)


def may_be_held(state: AdmissionState, condition: GatewayCondition, *, attempt: int | None) -> bool:
    """Say whether a stream is held until its turn, behind those that are held already, in place of being refused."""
    return _has_waited(attempt) and condition.held < HELD_S * state.rate_per_s


def hold_ms(state: AdmissionState, condition: GatewayCondition, *, now_ms: int) -> int:
    """Return how long the first of the held streams waits before it looks again; 0: `admit_session` answers it now."""
    if _refused_by_condition(condition, drawn=0.0) is not None:
        return 0
    if not _has_place(condition, waited=True):
        return HELD_LOOK_MS
    state = _refilled(state, now_ms=now_ms)
    lacking = 1 - state.tokens - _owed(state, waited=True)
    return max(0, math.ceil(lacking * 1000 / state.rate_per_s))


def _has_waited(attempt: int | None) -> bool:
    return attempt is not None and attempt >= WAITED_ATTEMPTS


def _has_place(condition: GatewayCondition, *, waited: bool) -> bool:
    """Say whether a Hello has a place; the last of them are kept for those who have waited."""
    kept = 0 if waited else condition.hellos_max // RESERVED_SHARE
    return condition.hellos_pending < condition.hellos_max - kept


def _owed(state: AdmissionState, *, waited: bool) -> float:
    """Return how many tokens the bucket lends."""
    return state.rate_per_s / RESERVED_SHARE if waited else 0.0


def admit_join(
    state: AdmissionState, condition: GatewayCondition, *, source: str, now_ms: int, drawn: float
) -> tuple[AdmissionState, Refused | None]:
    """Return the bucket after a Join asked to come in, and its refusal, or None.

    `source` is the peer's network (/64).
    """
    refused = _refused_by_condition(replace(condition, streams=0), drawn=drawn)
    if refused is not None:
        return state, refused
    state = _refilled(state, now_ms=now_ms)
    queue_ms = max(0.0, state.next_at_ms - now_ms)
    source_tokens = _source_tokens(state, source, now_ms=now_ms)
    if source_tokens < 1:
        wait_ms = int((1 - source_tokens) / JOINS_PER_SOURCE_PER_S * 1000 * (1 + drawn)) + 1
        return state, refuse(
            Reason.RATE_LIMITED,
            f"more than {JOINS_PER_SOURCE_PER_S} Joins a second from {source}; come back in {wait_ms} ms",
            pushback_ms=wait_ms,
        )
    if state.tokens < 1 or (queue_ms > 0 and state.join_tokens < 1):
        slot_ms = 1000 / state.rate_per_s
        wait_ms = int(max(queue_ms, slot_ms) * (1 + drawn)) + 1
        return state, refuse(
            Reason.HANDSHAKES,
            f"the gateway takes {state.rate_per_s:g} handshakes a second and {queue_ms:.0f} ms of sessions "
            f"are queued; come back in {wait_ms} ms",
            pushback_ms=min(wait_ms, limits.MAX_PUSHBACK_MS),
        )
    sources = _spent_source(state, source, source_tokens - 1, now_ms=now_ms)
    join_tokens = max(0.0, state.join_tokens - 1)
    return replace(state, tokens=state.tokens - 1, join_tokens=join_tokens, sources=sources), None


def admit_hello(*, pending: int, recent_hello_ms: float, drawn: float, pending_max: int = PENDING_HELLOS_MAX) -> None:
    """Refuse a Hello while `pending_max` transactions run or wait.

    `recent_hello_ms` is the recent median of `hello_time_ms`: how long the queue needs for each one that is in it.
    """
    if pending < pending_max:
        return
    wait_ms = min(HORIZON_MS, max(HELLOS_PUSHBACK_MIN_MS, int(pending * recent_hello_ms * (1 + drawn))))
    raise refuse(
        Reason.HELLOS,
        f"{pending} Hello transactions are pending, at most {pending_max} are allowed; come back in {wait_ms} ms",
        pushback_ms=wait_ms,
    )


def hello_time_ms(*, took_ms: int, pending: int) -> float:
    """Return a Hello's own part of the time it took while `pending` ran or waited together, itself included.

    They share the database, so each takes about as long as all of them: told by the whole time, a daemon refused
    during a storm would come back after as many times that long.
    """
    return took_ms / max(1, pending)


def admit_opening(*, node_id: str, opening: int, drawn: float) -> None:
    """Refuse a stream of a node of which `opening` others are open and not yet a session, before it costs a token.

    They are taken one a second, so that is how long the node waits for its turn.
    """
    if opening < OPENING_PER_NODE_MAX:
        return
    wait_ms = int(opening * HELLO_EVERY_MS * (1 + drawn))
    raise refuse(
        Reason.HELLOS,
        f"{opening} streams of node {node_id} are waiting for their session, at most {OPENING_PER_NODE_MAX} are "
        f"allowed; end the others, or come back in {wait_ms} ms",
        pushback_ms=wait_ms,
    )


def refuse_database(*, drawn: float) -> Refused:
    """Return the refusal of a Hello whose transaction failed: the stream is always closed, no stream without a row."""
    wait_ms = _between(DATABASE_MS, drawn)
    return refuse(
        Reason.DATABASE,
        f"the database did not commit this Hello; nothing was changed; come back in {wait_ms} ms",
        pushback_ms=wait_ms,
    )


def hello_delay_ms(*, last_hello_at_ms: int | None, now_ms: int) -> int:
    """Return how long a node's Hello waits before its transaction: at most one a second per node and gateway."""
    if last_hello_at_ms is None:
        return 0
    return max(0, min(HELLO_EVERY_MS, last_hello_at_ms + HELLO_EVERY_MS - now_ms))


def has_room(*, streams: int, streams_max: int) -> bool:
    """Say whether a gateway with these counts in its lease row counts as having room."""
    return streams < streams_max * (1 - ROOM_SHARE)


def check_first_frame(frame: messages.AgentFrame) -> messages.Hello:
    """Return the Hello of a session's first frame; anything else closes the stream INVALID_ARGUMENT."""
    case = frame.WhichOneof("frame")
    if case != "hello":
        raise refuse(
            Reason.NOT_HELLO,
            f"the first frame is {'one this gateway does not know' if case is None else repr(case)}: it must be hello",
        )
    return frame.hello


def check_hello(hello: messages.Hello, *, certificate_node_id: str, certificate_role: int) -> None:
    """Refuse a Hello that is not its certificate's, or that lacks what every session needs.

    `certificate_role` is 0 when the certificate carries none. Bounds and NULs are `protocol.validation`'s.
    """
    if hello.node_id != certificate_node_id:
        raise refuse(
            Reason.NODE_MISMATCH,
            f"Hello.node_id is {hello.node_id!r}, the certificate is {certificate_node_id!r}'s: a node speaks for "
            "itself only",
        )
    if hello.role not in ROLES:
        raise refuse(Reason.BAD_HELLO, f"Hello.role is {int(hello.role)}: it must be node, site or ramdisk")
    if certificate_role and hello.role != certificate_role:
        raise refuse(
            Reason.ROLE_MISMATCH,
            f"Hello.role is {ROLES[hello.role]}, the certificate is for "
            f"{ROLES.get(certificate_role, certificate_role)}; re-join it under the right role",
        )
    for name, text in (("boot_id", hello.boot_id), ("journal_id", hello.journal_id)):
        if not text:
            raise refuse(Reason.BAD_HELLO, f"Hello.{name} is not set")
    if hello.proto_min > hello.proto_max:
        raise refuse(
            Reason.BAD_HELLO,
            f"Hello.proto_min is {hello.proto_min}, above proto_max {hello.proto_max}: the lowest version comes first",
        )


def _refused_by_condition(condition: GatewayCondition, *, drawn: float) -> Refused | None:
    match condition.state:
        case GatewayState.STARTING:
            return refuse(Reason.STARTING, "the gateway is starting; try again")
        case GatewayState.NO_LEASE:
            return refuse(Reason.NO_LEASE, "the gateway holds no lease; try again, or another gateway")
        case GatewayState.FENCED:
            return refuse(Reason.FENCED, "the gateway lost its lease and is fenced; try another gateway")
        case GatewayState.DRAINING:
            wait_ms = _between(DRAINING_MS, drawn)
            return refuse(Reason.DRAINING, f"the gateway drains; dial another one in {wait_ms} ms", pushback_ms=wait_ms)
        case GatewayState.SERVING:
            pass
    if condition.loop_lag_ms > LOOP_LAG_MAX_MS:
        return refuse(
            Reason.OVERLOADED,
            f"the gateway is overloaded: its loop lags {condition.loop_lag_ms} ms, {LOOP_LAG_MAX_MS} ms are allowed; "
            "try again",
        )
    if condition.streams >= condition.streams_max:
        wait_ms = _between(ROOM_ELSEWHERE_MS if condition.room_elsewhere else NO_ROOM_MS, drawn)
        return refuse(
            Reason.STREAMS,
            f"the gateway holds {condition.streams} sessions, at most {condition.streams_max} are allowed; "
            f"{'dial another gateway' if condition.room_elsewhere else 'come back'} in {wait_ms} ms",
            pushback_ms=wait_ms,
        )
    return None


def _book(state: AdmissionState, *, now_ms: int, drawn: float) -> tuple[AdmissionState, Refused]:
    """Give the next free slot away, or none beyond the horizon."""
    next_at_ms = max(state.next_at_ms, now_ms) + 1000 / state.rate_per_s
    if next_at_ms - now_ms > HORIZON_MS:
        wait_ms = _between(BEYOND_HORIZON_MS, drawn)
    else:
        wait_ms = max(1, round((next_at_ms - now_ms) * (1 - JITTER + 2 * JITTER * drawn)))
        state = replace(state, next_at_ms=next_at_ms)
    return state, refuse(
        Reason.HANDSHAKES,
        f"the gateway takes {state.rate_per_s:g} handshakes a second and others are before you; come back in "
        f"{wait_ms} ms",
        pushback_ms=wait_ms,
    )


def _refilled(state: AdmissionState, *, now_ms: int) -> AdmissionState:
    """Add what the time brought: at most one second's worth, so that an idle hour is no licence for a burst."""
    earned = max(0, now_ms - state.at_ms) * state.rate_per_s / 1000
    return replace(
        state,
        tokens=min(state.rate_per_s, state.tokens + earned),
        join_tokens=min(state.rate_per_s / JOIN_SHARE, state.join_tokens + earned / JOIN_SHARE),
        at_ms=max(now_ms, state.at_ms),
    )


def _source_tokens(state: AdmissionState, source: str, *, now_ms: int) -> float:
    tokens, at_ms = state.sources.get(source, (float(JOINS_PER_SOURCE_PER_S), now_ms))
    return min(float(JOINS_PER_SOURCE_PER_S), tokens + max(0, now_ms - at_ms) * JOINS_PER_SOURCE_PER_S / 1000)


def _spent_source(state: AdmissionState, source: str, tokens: float, *, now_ms: int) -> Mapping[str, tuple[float, int]]:
    sources = {**state.sources, source: (tokens, now_ms)}
    if len(sources) > SOURCES_MAX:
        # A second of silence refills a source: forgetting it changes nothing. A flood from more sources than fit is
        # bounded by the bucket itself.
        sources = {name: count for name, count in sources.items() if now_ms - count[1] < HELLO_EVERY_MS}
        sources = dict(list(sources.items())[-SOURCES_MAX:])
    return sources


def _between(bounds_ms: tuple[int, int], drawn: float) -> int:
    low, high = bounds_ms
    return low + int(drawn * (high - low))
