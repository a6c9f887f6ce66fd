"""Decide when a trust bundle is published: a new version exactly when the content changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bettercompute.store import channels
from bettercompute.store.database import Database, Queries, Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBundle:
    """A published bundle."""

    version: int
    content_sha256: bytes
    """Of the content without its version."""
    signed_bundle: bytes
    """A serialized SignedTrustBundle, relayed as it is."""
    created_at_ms: int


async def current(queries: Queries) -> StoredBundle | None:
    """Return the newest bundle."""
    row = await queries.fetch_one("trust.current")
    return None if row is None else StoredBundle(**{name: row[name] for name in StoredBundle.__dataclass_fields__})


async def publish(database: Database, *, content_sha256: bytes, sign: Callable[[int], bytes]) -> StoredBundle:
    """Return the bundle with this content, publishing it under the next version unless it is the current one.

    `sign` gets the version and returns the serialized SignedTrustBundle; it must not wait for anything.
    """

    async def work(transaction: Transaction) -> StoredBundle:
        await transaction.execute("trust.lock")
        newest = await current(transaction)
        if newest is not None and newest.content_sha256 == content_sha256:
            return newest
        version = 1 if newest is None else newest.version + 1
        await transaction.execute(
            "trust.insert", version=version, content_sha256=content_sha256, signed_bundle=sign(version)
        )
        await transaction.execute("trust.notify", channel=channels.TRUST, payload=str(version))
        published = await current(transaction)
        assert published is not None, "the row was inserted above"
        return published

    return await database.retrying(work)
