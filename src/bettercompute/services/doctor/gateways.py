"""Checks of the gateways, by their leases and by what they say of themselves when they renew them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bettercompute.services.doctor.dates import judge_life
from bettercompute.services.doctor.finding import Finding, Level, Surroundings, failed, ok, warning
from bettercompute.store import doctor
from bettercompute.store.doctor import GatewayHealth

# A gateway's server_time dates proofs and Welcomes, and comes from the database; its own clock dates TLS only.
CLOCK_WARNS_MS = 5_000
CLOCK_FAILS_MS = 60_000
# It reads every 5 s and says so every 5 s; two liveness ticks are what a revocation may take at most.
REVOCATIONS_WARN_MS = 15_000
REVOCATIONS_FAIL_MS = 60_000
# At most so long a serving certificate lives.
SERVING_LIFE_MS = 90 * 86_400_000


async def check_leases(around: Surroundings) -> Finding:
    """Whether there is a gateway that takes sessions, and none that was lost."""
    return judge_leases(await doctor.gateways(around.database))


def judge_leases(gateways: Sequence[GatewayHealth]) -> Finding:
    """A lost gateway is retired by the worker two minutes after its lease; until then it only warns."""
    live = [gateway for gateway in gateways if gateway.live]
    lost = [gateway.name for gateway in gateways if not gateway.live]
    if not live:
        return failed(
            "no gateway holds a lease: no node has a session",
            cure="start a gateway (`better-compute serve --role gateway`); its log and its /readyz say what it lacks",
        )
    if all(gateway.draining for gateway in live):
        return failed("every gateway drains: none takes a session", cure="`better-compute gateway drain ID --undo`")
    if lost:
        return warning(
            f"{_names(lost)} let the lease expire",
            cure="nothing, if it was stopped or killed: its nodes go elsewhere; else see its log and its host",
        )
    return ok(f"{len(live)} hold{'s' if len(live) == 1 else ''} a lease")


async def check_clocks(around: Surroundings) -> Finding:
    """Whether the gateways' clocks agree with the database's."""
    return judge_clocks(await doctor.gateways(around.database))


def judge_clocks(gateways: Sequence[GatewayHealth]) -> Finding:
    """Judge the one that is furthest away."""
    return _judge_worst(
        gateways,
        lambda gateway: None if gateway.clock_offset_ms is None else abs(gateway.clock_offset_ms),
        says=lambda gateway, value: f"the clock of {gateway.name} is {value} ms from the database's",
        warns=CLOCK_WARNS_MS,
        fails=CLOCK_FAILS_MS,
        cure="run a time service (chrony, systemd-timesyncd) on its host",
    )


async def check_revocation_feed(around: Surroundings) -> Finding:
    """Whether every gateway hears of revocations and locks."""
    return judge_revocation_feed(await doctor.gateways(around.database))


def judge_revocation_feed(gateways: Sequence[GatewayHealth]) -> Finding:
    """Judge the one whose picture is the oldest."""
    return _judge_worst(
        gateways,
        lambda gateway: gateway.revocations_age_ms,
        says=lambda gateway, value: f"{gateway.name} last read the revocations {value} ms before it renewed its lease",
        warns=REVOCATIONS_WARN_MS,
        fails=REVOCATIONS_FAIL_MS,
        cure="see `revocations not read` in its log; restart it when the database answers others",
    )


async def check_certificates(around: Surroundings) -> Finding:
    """Whether the gateways' serving certificates are good for long enough."""
    return judge_certificates(await doctor.gateways(around.database))


def judge_certificates(gateways: Sequence[GatewayHealth]) -> Finding:
    """Judge the one that expires first."""
    known = [gateway for gateway in gateways if gateway.live and gateway.serving_left_ms is not None]
    if not known:
        return ok("no gateway has said yet until when its certificate is good")
    first = min(known, key=lambda gateway: gateway.serving_left_ms or 0)
    return judge_life(
        f"the serving certificate of {first.name}",
        left_ms=first.serving_left_ms or 0,
        life_ms=SERVING_LIFE_MS,
        cure="`better-compute pki issue-gateway --san NAME --out DIR`, then copy DIR there: no restart is needed",
    )


def _judge_worst(
    gateways: Sequence[GatewayHealth],
    value_of: Callable[[GatewayHealth], int | None],
    *,
    says: Callable[[GatewayHealth, int], str],
    warns: int,
    fails: int,
    cure: str,
) -> Finding:
    """Judge the gateway with the highest value; those that have not said anything yet are left out."""
    known = [(value, gateway) for gateway in gateways if gateway.live and (value := value_of(gateway)) is not None]
    if not known:
        return ok("no gateway has said anything yet")
    value, worst = max(known, key=lambda pair: pair[0])
    level = Level.FAILED if value > fails else Level.WARNING if value > warns else Level.OK
    return Finding(level=level, sentence=says(worst, value), cure=cure if level else "")


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
