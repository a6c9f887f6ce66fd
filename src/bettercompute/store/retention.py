"""What is removed when it has been kept long enough: ended commands, events, what has long expired."""

from __future__ import annotations

from bettercompute.store.database import Queries


async def delete_commands(queries: Queries, *, older_than_ms: int, batch_size: int) -> int:
    """Remove commands that ended long ago, with their output; return how many."""
    return len(await queries.fetch("retention.commands", older_than_ms=older_than_ms, batch_size=batch_size))


async def delete_approvals(queries: Queries, *, older_than_ms: int, batch_size: int) -> int:
    """Remove approvals of batches that ended long ago and of which no command is left; return how many."""
    return len(await queries.fetch("retention.approvals", older_than_ms=older_than_ms, batch_size=batch_size))


async def delete_certificates(queries: Queries, *, older_than_ms: int, batch_size: int) -> int:
    """Remove certificates that expired long ago; return how many."""
    return len(await queries.fetch("retention.certificates", older_than_ms=older_than_ms, batch_size=batch_size))


async def delete_join_tokens(queries: Queries, *, older_than_ms: int, batch_size: int) -> int:
    """Remove join tokens that expired long ago; return how many."""
    return len(await queries.fetch("retention.join_tokens", older_than_ms=older_than_ms, batch_size=batch_size))


async def delete_outbox(queries: Queries, *, older_than_ms: int, batch_size: int) -> int:
    """Remove published events; return how many."""
    return len(await queries.fetch("retention.outbox", older_than_ms=older_than_ms, batch_size=batch_size))


async def delete_events(queries: Queries, *, older_than_ms: int, batch_size: int) -> int:
    """Remove events that nodes reported long ago; return how many."""
    return len(await queries.fetch("retention.events", older_than_ms=older_than_ms, batch_size=batch_size))


async def delete_event_gaps(queries: Queries, *, older_than_ms: int, batch_size: int) -> int:
    """Remove gaps in what nodes reported that were noticed long ago; return how many."""
    return len(await queries.fetch("retention.event_gaps", older_than_ms=older_than_ms, batch_size=batch_size))
