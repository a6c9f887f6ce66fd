"""Decide that a request made twice acts once: its key is claimed in the transaction of the act and keeps its answer."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Any

from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import json_columns
from bettercompute.store.database import Queries, Transaction


async def claim(
    transaction: Transaction, *, principal: str, key: str, request_sha256: bytes
) -> Mapping[str, Any] | None:
    """Return the answer that this request got before, or None: then act, and `complete` in the same transaction.

    A second request of the same key waits for the first to commit. Refuses a key that came with another request.
    """
    claimed = await transaction.fetch_one(
        "idempotency.claim", principal=principal, key=key, request_sha256=request_sha256
    )
    if claimed is not None:
        return None
    stored = await transaction.fetch_one("idempotency.get", principal=principal, key=key)
    if stored is None or not hmac.compare_digest(stored["request_sha256"], request_sha256):
        raise refuse(
            Reason.CONFLICT, f"Idempotency-Key {key} was used for another request: draw a new key for each request"
        )
    return json_columns.decode(stored["response"])


async def complete(transaction: Transaction, *, principal: str, key: str, response: Mapping[str, Any]) -> None:
    """Keep the answer for the next request of this key."""
    await transaction.execute(
        "idempotency.complete", principal=principal, key=key, response=json_columns.encode(response)
    )


async def delete_old(queries: Queries, *, older_than_ms: int, batch_size: int) -> int:
    """Forget keys of requests made long ago; return how many."""
    return len(await queries.fetch("idempotency.delete_old", older_than_ms=older_than_ms, batch_size=batch_size))
