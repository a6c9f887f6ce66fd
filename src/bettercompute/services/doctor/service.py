"""`doctor`: every check in its order, one after another, each within a bound of its own.

A check that cannot be made is itself a finding: what is asked of is away. See docs/operations.md, "Doctor"; decisions
0127.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from bettercompute.errors import BetterComputeError
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.services.doctor import database, fleet, gateways, host, trust
from bettercompute.services.doctor.finding import Check, Finding, Surroundings, failed

log = structlog.get_logger("bettercompute.services.doctor")

CHECK_S = 10.0

CHECKS: tuple[Check, ...] = (
    Check("db.migrations", database.check_migrations),
    Check("db.clock", database.check_clock),
    Check("db.notify-queue", database.check_notify_queue),
    Check("db.outbox", database.check_outbox),
    Check("worker.controllers", database.check_controllers),
    Check("host.disk", host.check_disk),
    Check("gateways.leases", gateways.check_leases),
    Check("gateways.clocks", gateways.check_clocks),
    Check("gateways.revocation-feed", gateways.check_revocation_feed),
    Check("gateways.certificates", gateways.check_certificates),
    Check("pki.authorities", trust.check_authorities),
    Check("pki.trust-version", trust.check_trust_version),
    Check("pki.quorum-lag", trust.check_quorum_lag),
    Check("nodes.certificates", fleet.check_certificates),
    Check("nodes.rejoin", fleet.check_rejoin),
    Check("nodes.quarantined", fleet.check_quarantined),
    Check("nodes.clocks", fleet.check_clocks),
    Check("nodes.unsettled", fleet.check_unsettled),
    Check("nodes.disks", fleet.check_disks),
    Check("nodes.refusals", fleet.check_refusals),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """A check that was made."""

    name: str
    finding: Finding
    took_ms: int


class DoctorService:
    """Makes the checks, for one caller at a time: they must not be what loads the database."""

    def __init__(self, around: Surroundings, *, checks: Sequence[Check] = CHECKS) -> None:
        self._around = around
        self._checks = checks
        self._turn = asyncio.Lock()

    async def examine(self, names: Sequence[str] = ()) -> list[Examined]:
        """Make all checks, or those that are named; refuse BAD_REQUEST a name that none has."""
        unknown = sorted(set(names) - {check.name for check in self._checks})
        if unknown:
            known = ", ".join(check.name for check in self._checks)
            raise refuse(Reason.BAD_REQUEST, f"no check {unknown[0]}; there are {known}")
        async with self._turn:
            return [await self._make(check) for check in self._checks if not names or check.name in names]

    async def _make(self, check: Check) -> Examined:
        clock = self._around.world.clock
        began_ms = clock.monotonic_ms()
        try:
            async with asyncio.timeout(CHECK_S):
                finding = await check.run(self._around)
        except TimeoutError:
            finding = failed(
                f"it was not answered within {CHECK_S:g} s", cure="see whether the database is overloaded or away"
            )
        except BetterComputeError as error:
            finding = failed(f"it could not be asked: {error.message}", cure="see whether the database answers")
        except Exception as error:
            # One broken check must not hide the others.
            log.exception("check failed", check=check.name)
            finding = failed(f"it failed: {type(error).__name__}: {error}", cure="tell us: the API's log says more")
        return Examined(name=check.name, finding=finding, took_ms=clock.monotonic_ms() - began_ms)
