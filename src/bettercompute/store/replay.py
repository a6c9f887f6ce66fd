"""Decide that a proof or a ticket is used once, on any gateway and over restarts: the first row wins."""

from __future__ import annotations

from bettercompute.store.database import Queries


async def consume(queries: Queries, *, purpose: str, jti: str, expires_at_ms: int) -> bool:
    """Use an id; False when it was used before. `expires_at_ms` is when the proof itself stops being accepted."""
    return await queries.fetch_one("replay.consume", purpose=purpose, jti=jti, expires_at_ms=expires_at_ms) is not None


async def delete_expired(queries: Queries, *, kept_after_expiry_ms: int, batch_size: int) -> int:
    """Forget ids whose proofs are refused by their age anyway; return how many."""
    rows = await queries.fetch(
        "replay.delete_expired", kept_after_expiry_ms=kept_after_expiry_ms, batch_size=batch_size
    )
    return len(rows)
