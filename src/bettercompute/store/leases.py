"""Decide what a gateway's lease is in the database: a row told by name and token, not taken over, retired for good."""

from __future__ import annotations

from dataclasses import dataclass

from bettercompute.store.database import Queries, Transaction

LEASE_LIFETIME_MS = 15_000


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
    )
    return row is not None


async def renew(queries: Queries, *, name: str, token: str, stream_count: int, draining: bool = False) -> bool:
    """Extend the lease. False: it was retired, and the gateway must fence for good."""
    row = await queries.fetch_one(
        "leases.renew",
        name=name,
        token=token,
        lifetime_ms=LEASE_LIFETIME_MS,
        stream_count=stream_count,
        draining=draining,
    )
    return row is not None


async def release(queries: Queries, *, name: str, token: str) -> bool:
    """Give the lease up at an orderly stop."""
    return await queries.fetch_one("leases.release", name=name, token=token) is not None


async def retire(transaction: Transaction, *, name: str, expired_for_ms: int) -> bool:
    """End a lease that has been expired for longer than `expired_for_ms`; False when it has not, or has ended."""
    return await transaction.fetch_one("leases.retire", name=name, expired_for_ms=expired_for_ms) is not None


async def list_all(queries: Queries, *, with_retired: bool = False) -> list[Lease]:
    """Return the gateways by name."""
    rows = await queries.fetch("leases.list", with_retired=with_retired)
    return [Lease(**{name: row[name] for name in Lease.__dataclass_fields__}) for row in rows]


async def delete_retired(queries: Queries, *, retired_for_ms: int) -> int:
    """Remove rows that were retired long ago; return how many."""
    return len(await queries.fetch("leases.delete_retired", retired_for_ms=retired_for_ms))
