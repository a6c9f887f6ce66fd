"""Decide when a trust bundle is published: a new version exactly when the content changes.

What the content is made of lies in `trust_keys` and `approver_sets`; whoever changes them publishes in the same
transaction, under `lock`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bettercompute.pki.rotation import EXCEPTED_MAX, NAMED_MAX, Behind, KeyStage, Purpose, TrustedKey
from bettercompute.store import channels
from bettercompute.store.database import Queries, Row, Transaction

# A node is believed to hold a version that the database lost in a restore, not one from nowhere.
LOST_VERSIONS_MAX = 1_000_000
VERSIONS_SHOWN_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBundle:
    """A published bundle."""

    version: int
    content_sha256: bytes
    """Of the content without its version."""
    signed_bundle: bytes
    """A serialized SignedTrustBundle, relayed as it is."""
    created_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """How many nodes hold a version."""

    version: int
    connected: int
    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTrust:
    """What one node holds, as it said last."""

    node_id: str
    trust_version: int
    connected: bool
    approver_set_epoch: int | None
    approver_set_sha256: bytes | None


async def current(queries: Queries) -> StoredBundle | None:
    """Return the newest bundle."""
    row = await queries.fetch_one("trust.current")
    return None if row is None else StoredBundle(**{name: row[name] for name in StoredBundle.__dataclass_fields__})


async def lock(transaction: Transaction) -> None:
    """Take turns with all who change what is trusted, until the transaction ends."""
    await transaction.execute("trust.lock")


async def publish(
    transaction: Transaction, *, content_sha256: bytes, sign: Callable[[int], bytes], purposes: Sequence[Purpose]
) -> StoredBundle:
    """Return the bundle with this content, publishing it under the next version unless it is the current one.

    Under `lock`. `sign` gets the version and returns the serialized SignedTrustBundle, which lists the keys of
    `purposes`. The version also rises above what nodes hold, so that a database that was restored is heard again.
    """
    newest = await current(transaction)
    if newest is not None and newest.content_sha256 == content_sha256:
        return newest
    known = 0 if newest is None else newest.version
    row = await transaction.fetch_one("trust.highest_held", believed_max=known + LOST_VERSIONS_MAX)
    version = max(known, 0 if row is None else row["version"]) + 1
    await transaction.execute(
        "trust.insert", version=version, content_sha256=content_sha256, signed_bundle=sign(version)
    )
    await transaction.execute("trust.listed_since", version=version, purposes=[str(purpose) for purpose in purposes])
    await transaction.execute("trust.notify", channel=channels.TRUST, payload=str(version))
    published = await current(transaction)
    assert published is not None, "the row was inserted above"
    return published


async def keys(queries: Queries) -> tuple[TrustedKey, ...]:
    """Return every key that is or was trusted, with its stage."""
    return tuple(_key(row) for row in await queries.fetch("trust.keys"))


async def key_in_use(queries: Queries, purpose: Purpose) -> str | None:
    """Return the SHA-256 of the key of a purpose that is in use; None before the first start."""
    row = await queries.fetch_one("trust.key_in_use", purpose=str(purpose))
    return None if row is None else str(row["key_sha256"])


async def store_keys(
    transaction: Transaction, *, before: Sequence[TrustedKey], after: Sequence[TrustedKey], changed_by: str
) -> bool:
    """Write those keys that differ, under `lock`; return whether any did."""
    changed = [key for key in after if key not in before]
    # One at most is current and one at most next: those that leave a stage go before those that come to it.
    leaving = {KeyStage.RETIRED: 0, KeyStage.PREVIOUS: 1, KeyStage.CURRENT: 2, KeyStage.NEXT: 3}
    for key in sorted(changed, key=lambda key: leaving[key.stage]):
        await transaction.execute(
            "trust.put_key",
            purpose=str(key.purpose),
            key_sha256=key.key_sha256,
            public_der=key.public_der,
            companion_der=key.companion_der,
            stage=str(key.stage),
            first_version=key.first_version,
            changed_by=changed_by,
        )
    return bool(changed)


async def connected_behind(
    queries: Queries, *, version: int, excepted: Sequence[str] = (), of_excepted: bool = False
) -> Behind:
    """Return the connected nodes that do not hold `version`, but for the excepted ones; `of_excepted`: only those."""
    return await _nodes_behind(queries, "trust.connected_behind", excepted, of_excepted, version=version)


async def returning_behind(
    queries: Queries, *, version: int, grace_ms: int, excepted: Sequence[str] = (), of_excepted: bool = False
) -> Behind:
    """Return the nodes that may come back by their certificate and do not hold `version`, connected or not."""
    asked = {"version": version, "grace_ms": grace_ms}
    return await _nodes_behind(queries, "trust.returning_behind", excepted, of_excepted, **asked)


async def issued_before(
    queries: Queries, *, moment_ms: int, grace_ms: int, excepted: Sequence[str] = (), of_excepted: bool = False
) -> Behind:
    """Return the nodes whose certificate in use was issued before a moment, or is not on record."""
    asked = {"moment_ms": moment_ms, "grace_ms": grace_ms}
    return await _nodes_behind(queries, "trust.issued_before", excepted, of_excepted, **asked)


async def gateways_serving_under(queries: Queries, *, keys: Sequence[str]) -> Behind:
    """Return the live gateways whose certificate is of one of these serving CAs, as far as they have said."""
    return _behind(await queries.fetch("trust.gateways_serving_under", keys=list(keys), named_max=NAMED_MAX))


async def gateways_without_node_ca(queries: Queries, *, key: str) -> Behind:
    """Return the live gateways that do not believe this node CA, as far as they have said."""
    return _behind(await queries.fetch("trust.gateways_without_node_ca", key=key, named_max=NAMED_MAX))


async def tokens_before(queries: Queries, *, version: int, moment_ms: int) -> Behind:
    """Return the join tokens that are good and were made before `version` was published; 0: before the moment."""
    return _behind(
        await queries.fetch("trust.tokens_before", version=version, moment_ms=moment_ms, named_max=NAMED_MAX)
    )


async def signed_under(queries: Queries, *, keys: Sequence[str]) -> tuple[int, int]:
    """Return how many open commands, and the specs of how many nodes, are signed under these command roots."""
    row = await queries.fetch_one("trust.signed_under", keys=list(keys))
    assert row is not None, "it counts"
    return row["open_commands"], row["specs"]


async def specs_signed_under(queries: Queries, *, keys: Sequence[str], after: str, page_size: int) -> list[str]:
    """Return the next nodes whose newest spec is signed under these command roots."""
    rows = await queries.fetch("trust.specs_signed_under", keys=list(keys), after=after, page_size=page_size)
    return [row["node_id"] for row in rows]


async def holders(queries: Queries) -> list[Holders]:
    """Return how many nodes hold which version, the newest first."""
    rows = await queries.fetch("trust.holders", versions_max=VERSIONS_SHOWN_MAX)
    return [Holders(version=row["trust_version"], connected=row["connected"], nodes=row["nodes"]) for row in rows]


async def nodes(
    queries: Queries, *, after: str, page_size: int, version: int = 0, behind_only: bool = False
) -> list[NodeTrust]:
    """Return what the next nodes hold; with `behind_only` those that hold less than `version`."""
    rows = await queries.fetch(
        "trust.nodes", after=after, page_size=page_size, version=version, behind_only=behind_only
    )
    return [NodeTrust(**{name: row[name] for name in NodeTrust.__dataclass_fields__}) for row in rows]


async def _nodes_behind(
    queries: Queries, statement: str, excepted: Sequence[str], of_excepted: bool, **asked: int
) -> Behind:
    named_max = EXCEPTED_MAX if of_excepted else NAMED_MAX
    return _behind(
        await queries.fetch(statement, excepted=list(excepted), of_excepted=of_excepted, named_max=named_max, **asked)
    )


def _behind(rows: Sequence[Row]) -> Behind:
    return Behind(count=rows[0]["total"] if rows else 0, names=tuple(row["name"] for row in rows))


def _key(row: Row) -> TrustedKey:
    return TrustedKey(
        purpose=Purpose(row["purpose"]),
        key_sha256=row["key_sha256"],
        public_der=row["public_der"],
        companion_der=row["companion_der"],
        stage=KeyStage(row["stage"]),
        first_version=row["first_version"],
        changed_at_ms=row["changed_at_ms"],
    )
