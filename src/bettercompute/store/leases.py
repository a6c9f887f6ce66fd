"""Decide what a gateway's lease is in the database: a row told by name and token, not taken over, retired for good."""

from __future__ import annotations

from dataclasses import dataclass

from bettercompute.store import channels
from bettercompute.store.database import Queries, Row, Transaction

LEASE_LIFETIME_MS = 15_000
# How many of the nodes that a gateway still holds are named to an operator.
HELD_NAMES_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLease:
    """What a gateway says of itself at its start."""

    name: str
    """The gateway id, made at process start and never reused."""
    token: str
    advertise_url: str
    internal_url: str
    version: str
    stream_limit: int
    drain_requested_by: str | None = None
    """Who asked this process to drain under an earlier id: the wish outlives the id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCertificates:
    """What a gateway shows to nodes, and by which CAs it judges theirs. Keys by the SHA-256 of their public half."""

    serving_not_after_ms: int
    serving_ca_sha256: str | None
    """None: its chain does not hold the CA."""
    node_cas_sha256: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What a gateway says of itself at each renewal, for `doctor` and rotations."""

    wall_ms: int
    """Its own clock."""
    revocations_age_ms: int | None
    """How old its picture of the revocations is; None: it has none yet."""
    certificates: HeldCertificates | None
    """None: it does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """What a gateway learns when it renews."""

    drain_requested_by: str | None
    """Who wants it to drain; None: nobody."""
    timeline: str
    """Which of PostgreSQL's timelines the database is on; empty where it does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The nodes whose session is a gateway's, by their rows."""

    nodes: int
    names: tuple[str, ...]
    """The first of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A gateway as the others see it; `live` by the database's clock."""

    name: str
    expires_at_ms: int
    advertise_url: str
    internal_url: str
    version: str
    stream_count: int
    stream_limit: int
    draining: bool
    """It was asked to drain, or says that it does."""
    refuses: bool
    """It says so: from then on it takes no session."""
    drain_requested_at_ms: int | None
    drain_requested_by: str | None
    started_at_ms: int
    renewed_at_ms: int
    retired_at_ms: int | None
    live: bool


async def claim(queries: Queries, lease: NewLease) -> bool:
    """Insert the row, or extend it when an earlier claim's answer was lost. False: the name is retired or another's."""
    row = await queries.fetch_one(
        "leases.claim",
        name=lease.name,
        token=lease.token,
        lifetime_ms=LEASE_LIFETIME_MS,
        advertise_url=lease.advertise_url,
        internal_url=lease.internal_url,
        version=lease.version,
        stream_limit=lease.stream_limit,
        drain_requested_by=lease.drain_requested_by,
    )
    return row is not None


async def renew(
    queries: Queries, *, name: str, token: str, stream_count: int, draining: bool = False, health: Health | None = None
) -> Renewal | None:
    """Extend the lease. None: it was retired, and the gateway must fence for good."""
    held = None if health is None else health.certificates
    row = await queries.fetch_one(
        "leases.renew",
        name=name,
        token=token,
        lifetime_ms=LEASE_LIFETIME_MS,
        stream_count=stream_count,
        draining=draining,
        wall_ms=None if health is None else health.wall_ms,
        revocations_age_ms=None if health is None else health.revocations_age_ms,
        serving_not_after_ms=None if held is None else held.serving_not_after_ms,
        serving_ca_sha256=None if held is None else held.serving_ca_sha256,
        node_cas_sha256=None if held is None else list(held.node_cas_sha256),
    )
    return None if row is None else Renewal(drain_requested_by=row["drain_requested_by"], timeline=row["timeline"])


async def timeline(queries: Queries) -> str:
    """Return which of PostgreSQL's timelines the database is on: another one once a standby was promoted."""
    [row] = await queries.fetch("leases.timeline")
    told: str = row["timeline"]
    return told


async def release(queries: Queries, *, name: str, token: str) -> bool:
    """Give the lease up at an orderly stop."""
    return await queries.fetch_one("leases.release", name=name, token=token) is not None


async def request_drain(queries: Queries, *, name: str, requested_by: str) -> bool:
    """Ask a gateway to give its sessions away. False: there is none of this name, or it is retired."""
    row = await queries.fetch_one(
        "leases.request_drain", name=name, requested_by=requested_by, channel=channels.GATEWAYS
    )
    return row is not None


async def undo_drain(queries: Queries, *, name: str) -> bool:
    """Let a gateway take sessions again. False: there is none of this name, or it is retired."""
    return await queries.fetch_one("leases.undo_drain", name=name, channel=channels.GATEWAYS) is not None


async def retire(transaction: Transaction, *, name: str, expired_for_ms: int) -> bool:
    """End a lease that has been expired for longer than `expired_for_ms`; False when it has not, or has ended."""
    return await transaction.fetch_one("leases.retire", name=name, expired_for_ms=expired_for_ms) is not None


async def list_all(queries: Queries, *, with_retired: bool = False) -> list[Lease]:
    """Return the gateways by name."""
    rows = await queries.fetch("leases.list", with_retired=with_retired, name=None)
    return [_lease(row) for row in rows]


async def get(queries: Queries, *, name: str) -> Lease | None:
    """Return one gateway, also a retired one."""
    row = await queries.fetch_one("leases.list", with_retired=True, name=name)
    return None if row is None else _lease(row)


def _lease(row: Row) -> Lease:
    return Lease(**{name: row[name] for name in Lease.__dataclass_fields__})


async def held(queries: Queries, *, name: str) -> Held:
    """Return what a gateway holds."""
    row = await queries.fetch_one("leases.held", name=name, names_max=HELD_NAMES_MAX)
    assert row is not None, "it counts"
    return Held(nodes=row["nodes"], names=tuple(row["names"]))


async def delete_retired(queries: Queries, *, retired_for_ms: int) -> int:
    """Remove rows that were retired long ago; return how many."""
    return len(await queries.fetch("leases.delete_retired", retired_for_ms=retired_for_ms))
