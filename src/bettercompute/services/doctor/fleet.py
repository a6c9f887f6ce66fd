"""Checks of nodes: those that cannot come back, will soon not be able to, or do not come to rest."""

from __future__ import annotations

from collections.abc import Sequence

from bettercompute import telemetry
from bettercompute.services.attestors.x509pop import EXPIRED_MAX_MS
from bettercompute.services.doctor.finding import Finding, Surroundings, count_of, failed, ok, warning
from bettercompute.store import doctor
from bettercompute.store.doctor import Named

# A node renews at two thirds of 24 h; who has less than a sixth left has tried for four hours.
EXPIRING_WITHIN_MS = 4 * 3_600_000
UNSETTLED_WITHIN_MS = 600_000
UNSETTLED_ENDS_MIN = 5

CLOCKS = ("ClockUnconfirmed", "HostClockOff")
DISKS = ("JournalFull", "JournalDiskFull")
REFUSALS = ("TrustBundleRefused", "ApproverSetRefused", "SpecRefused")


async def check_certificates(around: Surroundings) -> Finding:
    """Whether connected nodes renew their certificates."""
    return judge_certificates(await doctor.expiring(around.database, within_ms=EXPIRING_WITHIN_MS))


def judge_certificates(expiring: Sequence[Named]) -> Finding:
    """Judge those in the last sixth of their certificate's life."""
    if not expiring:
        return ok("every connected node has renewed in time")
    return failed(
        f"{count_of(expiring)} connected in the last sixth of a certificate's life",
        cure="their renewals fail: `the certificate was not renewed` in bcd's log says why; the API must be reachable "
        "from the gateways",
        nodes=expiring,
    )


async def check_rejoin(around: Surroundings) -> Finding:
    """Whether nodes that are away can come back by themselves."""
    return judge_rejoin(await doctor.locked_out(around.database, comes_back_ms=EXPIRED_MAX_MS))


def judge_rejoin(locked_out: Sequence[Named]) -> Finding:
    """Judge those whose `bcd status` says NeedsRejoin, as far as it is known here."""
    if not locked_out:
        return ok("every node that is away can come back by itself")
    return warning(
        f"{count_of(locked_out)} away whose certificates have all ended",
        cure="re-join each with a new token (`bcd rejoin`); forget those that are gone for good (`nodes forget`)",
        nodes=locked_out,
    )


async def check_quarantined(around: Surroundings) -> Finding:
    """Whether identities are in quarantine."""
    return judge_quarantined(await doctor.quarantined(around.database))


def judge_quarantined(quarantined: Sequence[Named]) -> Finding:
    """Judge those that two machines have claimed."""
    if not quarantined:
        return ok("no identity is in quarantine")
    return failed(
        f"{count_of(quarantined)} in quarantine: two machines say that they are the node",
        cure="find the real machine, stop the other, re-join the real one (`bcd rejoin`)",
        nodes=quarantined,
    )


async def check_clocks(around: Surroundings) -> Finding:
    """Whether nodes could confirm the time that they were told."""
    return judge_clocks(await doctor.conditions(around.database, types=CLOCKS))


def judge_clocks(unconfirmed: Sequence[Named]) -> Finding:
    """Judge those whose own clock is far from the control plane's, whether they believe that or not."""
    if not unconfirmed:
        return ok("no node has a clock of its own that is far from the time that it is told")
    return warning(
        f"{count_of(unconfirmed)} with a clock of their own that is more than an hour from the control plane's",
        cure="set the clocks of these hosts (chrony): a gateway that lies as such a clock does is believed, and locks "
        "the node out until `bcd clock reset`; or, if theirs are right, see db.clock and gateways.clocks",
        nodes=unconfirmed,
    )


async def check_unsettled(around: Surroundings) -> Finding:
    """Whether sessions of some nodes end again and again: they refuse what they are told, the time above all."""
    return judge_unsettled(
        await doctor.unsettled(
            around.database,
            within_ms=UNSETTLED_WITHIN_MS,
            ends_min=UNSETTLED_ENDS_MIN,
            event_type=telemetry.EVENT_NODE_DISCONNECTED,
        )
    )


def judge_unsettled(unsettled: Sequence[Named]) -> Finding:
    """Judge those whose sessions end often."""
    minutes = UNSETTLED_WITHIN_MS // 60_000
    if not unsettled:
        return ok(f"no node has lost {UNSETTLED_ENDS_MIN} sessions within {minutes} min")
    return warning(
        f"{count_of(unsettled)} lost at least {UNSETTLED_ENDS_MIN} sessions within {minutes} min",
        cure="`bcd status` there says why: a time that it refuses (server-time-backwards: `bcd clock reset`, once "
        "db.clock is green), another machine with its identity, a network that cuts connections",
        nodes=unsettled,
    )


async def check_disks(around: Surroundings) -> Finding:
    """Whether nodes have room for their journals."""
    return judge_disks(await doctor.conditions(around.database, types=DISKS))


def judge_disks(full: Sequence[Named]) -> Finding:
    """Judge those that take no new work."""
    if not full:
        return ok("every node has room for its journal")
    return failed(
        f"{count_of(full)} without room for the journal: they refuse new commands",
        cure="make room on the file system of bcd's state folder",
        nodes=full,
    )


async def check_refusals(around: Surroundings) -> Finding:
    """Whether nodes take what the control plane signs."""
    return judge_refusals(await doctor.conditions(around.database, types=REFUSALS))


def judge_refusals(refusing: Sequence[Named]) -> Finding:
    """Judge those that hold on to an older spec, bundle or set."""
    if not refusing:
        return ok("no node refuses a spec, a trust bundle or an approver set")
    return failed(
        f"{count_of(refusing)} refuse what was signed for them",
        cure="`nodes show` has the reason: another installation's keys, a version that went back after a restore, a "
        "gateway that alters what it relays",
        nodes=refusing,
    )
