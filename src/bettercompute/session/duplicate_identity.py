"""Duplicate identity: one certificate, several machines.

Two signs. The *boot id* changes while the previous session is live: either a clone, or a machine that crashed and
came back. The *continuity nonce* does not continue: the identity has forked, which a clone of a live snapshot shows
although boot and journal ids are the same. Alternations are counted; past the limit the certificate is quarantined
only when there is proof of two machines (a boot id that came back, or a fork), because a machine in a crash loop
shows new boot ids honestly. See docs/sessions.md, "Duplicate identity"; decisions 0101 and 0107.
"""

from __future__ import annotations

from dataclasses import dataclass

from bettercompute.session.hello_plan import BootSeen, GatewayFacts, SessionRow
from bettercompute.session.liveness import live_window_ms

BOOTS_KEPT = 8
DUPLICATE_IDENTITY = "DuplicateIdentity"
REBOOT_LOOP = "RebootLoop"

CURE = (
    "find out which machine is the real one, stop the other, and re-join the real one with a new join token "
    "(`better-compute token create`, then `bcd rejoin`)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a Hello says of the machine behind it."""

    boot_id: str
    hello_nonce: bytes
    previous_hello_nonce: bytes
    epoch_behind: bool = False
    """It knows a later session than the row: the database was restored, and it is the row that does not continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a Hello's claim means beside the row before it."""

    forked: bool
    boot_changed: bool
    duplicate: bool
    """An alternation: it supersedes a live session of another machine."""
    alternations: int
    since_ms: int | None
    recent_boots: tuple[BootSeen, ...]
    quarantine: bool
    reboot_loop: bool


def has_forked(row_nonce: bytes, claim: Claim) -> bool:
    """Say whether the row's nonce is neither of the pair. One that is missing anywhere switches the check off, and so
    does a row that is older than the daemon: a whole fleet would seem to have forked when a database is restored.
    """
    if claim.epoch_behind or not (row_nonce and claim.hello_nonce and claim.previous_hello_nonce):
        return False
    return row_nonce not in (claim.hello_nonce, claim.previous_hello_nonce)


def was_live(row: SessionRow, *, now_ms: int) -> bool:
    """Say whether the previous session is inside its live window: held by a gateway and seen lately by its own
    interval.
    """
    return (
        bool(row.gateway_id)
        and row.disconnected_at_ms is None
        and row.last_seen_ms is not None
        and now_ms - row.last_seen_ms < live_window_ms(row.heartbeat_interval_ms)
    )


def judge(row: SessionRow, claim: Claim, gateway: GatewayFacts, *, now_ms: int) -> Judgement:
    """Return what a Hello's claim means. A Hello that a proxy could have written is never counted."""
    forked = has_forked(row.hello_nonce, claim)
    boot_changed = bool(row.boot_id) and claim.boot_id != row.boot_id
    duplicate = gateway.hello_proven and was_live(row, now_ms=now_ms) and (boot_changed or forked)
    window_start_ms = now_ms - gateway.duplicate_window_ms
    in_window = row.duplicate_since_ms is not None and row.duplicate_since_ms >= window_start_ms
    alternations = row.duplicate_hellos if in_window else 0
    since_ms = row.duplicate_since_ms if in_window else None
    if duplicate:
        alternations += 1
        since_ms = now_ms if since_ms is None else since_ms
    past_limit = duplicate and alternations > gateway.duplicate_hellos_max
    proven = forked or _two_machines(row, claim, window_start_ms)
    return Judgement(
        forked=forked,
        boot_changed=boot_changed,
        duplicate=duplicate,
        alternations=alternations,
        since_ms=since_ms,
        recent_boots=_with_boot(row, claim, forked=forked, now_ms=now_ms),
        quarantine=past_limit and proven,
        reboot_loop=past_limit and not proven,
    )


def _two_machines(row: SessionRow, claim: Claim, window_start_ms: int) -> bool:
    """Say whether the row proves two machines within the window: a boot id came back, or a Hello forked."""
    recent = [seen for seen in row.recent_boots if seen.seen_at_ms >= window_start_ms]
    if any(seen.forked for seen in recent):
        return True
    boots = [seen.boot_id for seen in recent]
    if claim.boot_id != row.boot_id:
        boots.append(claim.boot_id)
    return len(set(boots)) < len(boots)


def _with_boot(row: SessionRow, claim: Claim, *, forked: bool, now_ms: int) -> tuple[BootSeen, ...]:
    """Add this Hello's boot to the last ones, when it is another one or the proof of a fork must be kept."""
    if claim.boot_id == row.boot_id and not forked:
        return row.recent_boots
    if claim.boot_id == row.boot_id and row.recent_boots and row.recent_boots[-1].boot_id == claim.boot_id:
        # A fork under one boot id: noted on that boot's own entry, so that the list still holds changes of boot only.
        noted = BootSeen(boot_id=claim.boot_id, seen_at_ms=now_ms, forked=True)
        return (*row.recent_boots[:-1], noted)
    seen = BootSeen(boot_id=claim.boot_id, seen_at_ms=now_ms, forked=forked)
    return (*row.recent_boots, seen)[-BOOTS_KEPT:]
