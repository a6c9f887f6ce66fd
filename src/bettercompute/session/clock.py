"""Clocks: what time a daemon believes.

`server_time` is not signed, so it is judged. The daemon keeps two times. *Confirmed* time is an anchor plus monotonic
time; the anchor moves only when the host's own clock agrees with the server within an hour, at Join, or by an
operator's reset. *Session* time is this Welcome's. The stored mark rises with session time but never passes confirmed
time + 1 h in total; a Welcome further ahead is obeyed for its session only. So one lie about the future locks out
nobody, and one about the past brings no expired command back. Time in which this process did not look at its clock
counts for nothing: a leap of the clock would enter the mark and lock out every honest gateway, and nothing on the host
tells a leap from a suspend. See docs/sessions.md, "Clocks"; decisions 0110 and 0167.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

BACKWARDS_ALLOWED_MS = 5 * 60_000
"""How far a Welcome may lie before the mark: gateways' clocks and the network between them."""
AHEAD_ALLOWED_MS = 3_600_000
AGREEMENT_MS = 3_600_000
LEAF_SLACK_MS = 5 * 60_000
STORE_EVERY_MS = 60_000
UNSEEN_MAX_MS = 60_000
"""How long a daemon may be without a look at its clock: it looks at each input, and ticks every five seconds. A leap of
less passes for time; several of these fit into what a Welcome may lie before the mark."""
LOOK_EVERY_MS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """A daemon's times. Those named `_at_ms` are on the monotonic clock, all others are server time."""

    mark_ms: int = 0
    """The stored server time mark; 0: none."""
    confirmed_ms: int | None = None
    """Confirmed time at `confirmed_at_ms`; None: nobody has confirmed any."""
    confirmed_at_ms: int = 0
    session_ms: int | None = None
    """Session time at `session_at_ms`; None: no Welcome yet in this process."""
    session_at_ms: int = 0
    unconfirmed: bool = False
    """This session's time is too far ahead to be believed beyond it: condition `ClockUnconfirmed`."""
    host_off: bool = False
    """The host's own clock is far from the time that this session runs on: condition `HostClockOff`."""
    stored_at_ms: int | None = None
    """When the mark was last written."""
    looked_at_ms: int | None = None
    """When this process last looked at the monotonic clock; None: not yet."""


@dataclass(frozen=True, slots=True)
class TimeRefused:
    """This Welcome's time ends the session."""

    reason: str
    message: str


def restored(*, mark_ms: int, confirmed_ms: int | None, now_ms: int) -> Clock:
    """Return the clock at process start: the time that passed meanwhile is unknown and counts 0."""
    return Clock(mark_ms=mark_ms, confirmed_ms=confirmed_ms, confirmed_at_ms=now_ms, looked_at_ms=now_ms)


def looked(clock: Clock, *, now_ms: int) -> tuple[Clock, int]:
    """Return the clock after a look at it, and how much passed before it that this process cannot vouch for, or 0.

    Such a time is as unknown as that of a restart: it counts 0, and the time that a Welcome told before it is over. A
    suspend, a SIGSTOP and a leap look alike from here, also on the wall's clock, which the kernel keeps by the same
    source. To count too little costs a host without a battery a `ClockUnconfirmed`; to count too much would cost it
    every honest gateway.
    """
    unseen_ms = 0 if clock.looked_at_ms is None else now_ms - clock.looked_at_ms
    if clock.looked_at_ms is not None and 0 <= unseen_ms < LOOK_EVERY_MS:
        return clock, 0
    clock = replace(clock, looked_at_ms=now_ms)
    if unseen_ms <= UNSEEN_MAX_MS:
        return clock, 0
    counted_at_ms = clock.confirmed_at_ms + unseen_ms
    return replace(clock, confirmed_at_ms=counted_at_ms, session_ms=None, unconfirmed=False), unseen_ms


def joined(clock: Clock, *, server_time_ms: int, now_ms: int) -> Clock:
    """Return the clock after Join, or after an operator's reset: its server time is the anchor, whatever was
    believed.
    """
    return replace(
        clock,
        mark_ms=server_time_ms,
        confirmed_ms=server_time_ms,
        confirmed_at_ms=now_ms,
        session_ms=None,
        unconfirmed=False,
        stored_at_ms=None,
    )


def confirmed_time(clock: Clock, *, now_ms: int) -> int | None:
    """Return confirmed time now; None when nothing has been confirmed."""
    return None if clock.confirmed_ms is None else clock.confirmed_ms + (now_ms - clock.confirmed_at_ms)


def session_time(clock: Clock, *, now_ms: int) -> int:
    """Return the time by which every `not_after` is judged: this Welcome's; before the first one, the best that is
    known.
    """
    if clock.session_ms is not None:
        return clock.session_ms + (now_ms - clock.session_at_ms)
    return max(clock.mark_ms, confirmed_time(clock, now_ms=now_ms) or 0)


def welcomed(
    clock: Clock,
    *,
    server_time_ms: int,
    wall_ms: int,
    now_ms: int,
    leaf_not_before_ms: int | None,
    leaf_not_after_ms: int | None,
) -> Clock | TimeRefused:
    """Return the clock after a Welcome's `server_time`, or why it ends the session.

    `wall_ms` is the host's own clock.
    """
    if server_time_ms < clock.mark_ms - BACKWARDS_ALLOWED_MS:
        return TimeRefused(
            "server-time-backwards",
            f"server time went backwards: {server_time_ms} ms is {clock.mark_ms - server_time_ms} ms before the mark "
            f"kept here, and {BACKWARDS_ALLOWED_MS} ms are allowed; if the mark is wrong, run `bcd clock reset`",
        )
    if leaf_not_before_ms is not None and server_time_ms < leaf_not_before_ms - LEAF_SLACK_MS:
        return _outside_leaf(server_time_ms, f"begins at {leaf_not_before_ms} ms")
    if leaf_not_after_ms is not None and server_time_ms > leaf_not_after_ms + LEAF_SLACK_MS:
        return _outside_leaf(server_time_ms, f"ended at {leaf_not_after_ms} ms")
    clock = _confirmed_by_host(clock, server_time_ms, wall_ms=wall_ms, now_ms=now_ms)
    known = confirmed_time(clock, now_ms=now_ms)
    # A clock that this process ran on and believed steps back for nobody; an unconfirmed one may.
    running = 0 if clock.session_ms is None or clock.unconfirmed else session_time(clock, now_ms=now_ms)
    session_ms = max(server_time_ms, clock.mark_ms, known or 0, running)
    unconfirmed = known is None or server_time_ms > known + AHEAD_ALLOWED_MS
    clock = replace(clock, session_ms=session_ms, session_at_ms=now_ms, unconfirmed=unconfirmed)
    return _marked(_compared(clock, wall_ms=wall_ms, now_ms=now_ms), now_ms=now_ms)


def ticked(clock: Clock, *, wall_ms: int, now_ms: int) -> Clock:
    """Return the clock at a heartbeat: the host's clock may have been set right meanwhile, and the mark moves on."""
    if clock.session_ms is None:
        return clock
    if clock.unconfirmed:
        server_ms = session_time(clock, now_ms=now_ms)
        clock = _confirmed_by_host(clock, server_ms, wall_ms=wall_ms, now_ms=now_ms)
        known = confirmed_time(clock, now_ms=now_ms)
        clock = replace(clock, unconfirmed=known is None or server_ms > known + AHEAD_ALLOWED_MS)
    return _marked(_compared(clock, wall_ms=wall_ms, now_ms=now_ms), now_ms=now_ms)


def store_due(clock: Clock, *, now_ms: int) -> bool:
    """Say whether the mark is to be written again: at each Welcome the caller writes it anyway, then once a minute."""
    return clock.stored_at_ms is None or now_ms - clock.stored_at_ms >= STORE_EVERY_MS


def stored(clock: Clock, *, now_ms: int) -> Clock:
    """Return the clock after its mark was handed to the journal."""
    return replace(clock, stored_at_ms=now_ms)


def proof_time(clock: Clock, *, refusal_server_time_ms: int | None, now_ms: int) -> int:
    """Return the time for a proof (renewal, re-join): a refusal's server time may date it, never below the mark - 5
    min.
    """
    if refusal_server_time_ms is None:
        return session_time(clock, now_ms=now_ms)
    return max(refusal_server_time_ms, clock.mark_ms - BACKWARDS_ALLOWED_MS)


def _outside_leaf(server_time_ms: int, bound: str) -> TimeRefused:
    return TimeRefused(
        "server-time-outside-certificate",
        f"server time {server_time_ms} ms is outside the validity of the gateway's own certificate, which {bound}; "
        f"{LEAF_SLACK_MS} ms are allowed: the gateway's clock or its certificate is wrong",
    )


def _confirmed_by_host(clock: Clock, server_time_ms: int, *, wall_ms: int, now_ms: int) -> Clock:
    """Move the anchor when the host's own clock agrees; forwards only, so that confirmed time never steps back."""
    if abs(wall_ms - server_time_ms) > AGREEMENT_MS:
        return clock
    known = confirmed_time(clock, now_ms=now_ms)
    if known is not None and known >= server_time_ms:
        return clock
    return replace(clock, confirmed_ms=server_time_ms, confirmed_at_ms=now_ms)


def _compared(clock: Clock, *, wall_ms: int, now_ms: int) -> Clock:
    """Note whether the host's clock is far off. A gateway that lies as that clock does would be believed for good."""
    return replace(clock, host_off=abs(wall_ms - session_time(clock, now_ms=now_ms)) > AGREEMENT_MS)


def _marked(clock: Clock, *, now_ms: int) -> Clock:
    """Raise the mark to session time, bounded by confirmed time + 1 h; an unconfirmed session does not move it."""
    known = confirmed_time(clock, now_ms=now_ms)
    if clock.unconfirmed or known is None:
        return clock
    bounded = min(session_time(clock, now_ms=now_ms), known + AHEAD_ALLOWED_MS)
    return replace(clock, mark_ms=max(clock.mark_ms, bounded))
