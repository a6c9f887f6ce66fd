"""What `doctor` reads. Lists of nodes name the first `NAMED_MAX`, and one more where there are more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bettercompute.store.database import Queries

NAMED_MAX = 100
# Of the nodes that are away, and of the newest events, no more than so many are looked at.
LOOKED_AT_MAX = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The database server now."""

    now_ms: int
    notify_queue_share: float
    """How full the queue of notifications is, 0 to 1: a listener that does not read fills it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayHealth:
    """A gateway that has not ended, by its lease. What it says of itself is None until its first renewal."""

    name: str
    expired_for_ms: int
    """Negative while the lease holds."""
    draining: bool
    age_ms: int
    clock_offset_ms: int | None
    revocations_age_ms: int | None
    serving_left_ms: int | None

    @property
    def live(self) -> bool:
        """Whether its lease holds."""
        return self.expired_for_ms < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A node and what is to be said of it."""

    node_id: str
    about: str = ""


async def server(queries: Queries) -> Server:
    """Return the server's clock and queue."""
    [row] = await queries.fetch("doctor.server")
    return Server(now_ms=row["now_ms"], notify_queue_share=row["notify_queue_share"])


async def gateways(queries: Queries) -> list[GatewayHealth]:
    """Return the gateways that have not ended, by name."""
    rows = await queries.fetch("doctor.gateways")
    return [GatewayHealth(**{name: row[name] for name in GatewayHealth.__dataclass_fields__}) for row in rows]


async def oldest_unnumbered_ms(queries: Queries) -> int:
    """Return how long the oldest event has waited for its place in the stream; 0: none waits."""
    row = await queries.fetch_one("doctor.oldest_unnumbered")
    return 0 if row is None else max(0, row["age_ms"])


async def conditions(queries: Queries, *, types: Sequence[str]) -> list[Named]:
    """Return the nodes of which one of these conditions holds."""
    rows = await queries.fetch("doctor.conditions", types=list(types), named_max=NAMED_MAX + 1)
    return [
        Named(node_id=row["node_id"], about=f"{row['type']} ({row['reason']})" if row["reason"] else row["type"])
        for row in rows
    ]


async def expiring(queries: Queries, *, within_ms: int) -> list[Named]:
    """Return the connected nodes in the last sixth of their newest certificate's life, the first to expire first."""
    rows = await queries.fetch("doctor.expiring", within_ms=within_ms, named_max=NAMED_MAX + 1)
    return [Named(node_id=row["node_id"], about=f"{row['left_ms'] // 1000} s left") for row in rows]


async def locked_out(queries: Queries, *, comes_back_ms: int) -> list[Named]:
    """Return the nodes that are away and have no certificate that was good until `comes_back_ms` ago."""
    rows = await queries.fetch(
        "doctor.locked_out", comes_back_ms=comes_back_ms, looked_at_max=LOOKED_AT_MAX, named_max=NAMED_MAX + 1
    )
    return [Named(node_id=row["node_id"]) for row in rows]


async def quarantined(queries: Queries) -> list[Named]:
    """Return the nodes in quarantine."""
    rows = await queries.fetch("doctor.quarantined", named_max=NAMED_MAX + 1)
    return [Named(node_id=row["node_id"], about=row["reason"]) for row in rows]


async def unsettled(queries: Queries, *, within_ms: int, ends_min: int, event_type: str) -> list[Named]:
    """Return the nodes whose sessions have ended so often lately, the worst first."""
    rows = await queries.fetch(
        "doctor.unsettled",
        within_ms=within_ms,
        ends_min=ends_min,
        event_type=event_type,
        looked_at_max=LOOKED_AT_MAX,
        named_max=NAMED_MAX + 1,
    )
    return [Named(node_id=row["node_id"], about=f"{row['ends']} sessions ended") for row in rows]


async def behind(queries: Queries, *, version: int) -> list[Named]:
    """Return the connected nodes that hold an older trust bundle."""
    rows = await queries.fetch("doctor.behind", version=version, named_max=NAMED_MAX + 1)
    return [Named(node_id=row["node_id"]) for row in rows]


async def other_set(queries: Queries, *, epoch: int | None, sha256: bytes | None) -> list[tuple[Named, int]]:
    """Return the connected nodes that enforce another approver set, with the trust version that they hold."""
    rows = await queries.fetch("doctor.other_set", epoch=epoch, sha256=sha256, named_max=NAMED_MAX + 1)
    return [(Named(node_id=row["node_id"]), row["trust_version"]) for row in rows]
