"""Epochs and fencing: which writes carry the epoch and what a write that matched no row means.

Routing and liveness writes are fenced: they name epoch, session and gateway, and match no row once the node has said
Hello elsewhere. Facts are not: results, events and status are true whichever session carried them. The daemon records
the epoch and never fences on it. See docs/sessions.md, "Epochs and fencing"; decisions 0105.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from bettercompute.protocol.limits import MAX_BIGINT

LAST_EPOCH_WITHIN = 1_000_000
"""How far ahead a Hello's `last_epoch` counts: a restored database is behind by minutes of reconnects, a lie by more.
"""


@dataclass(frozen=True, slots=True)
class NextEpoch:
    """The epoch of a new session."""

    epoch: int
    behind: bool
    """The daemon knows a higher one than the row: the database was restored, or lost commits in a failover."""


@dataclass(frozen=True, slots=True)
class Fence:
    """What every fenced statement compares."""

    node_id: str
    session_epoch: int
    session_id: str
    gateway_id: str


def next_epoch(*, row_epoch: int, last_epoch: int) -> NextEpoch:
    """Return greatest(row, last_epoch) + 1, so that epochs rise after a restore too; a wild `last_epoch` is ignored."""
    believed = last_epoch if is_behind(row_epoch=row_epoch, last_epoch=last_epoch) else row_epoch
    return NextEpoch(epoch=believed + 1, behind=last_epoch > row_epoch)


def is_possible(epoch: int) -> bool:
    """Say whether a control plane can have such an epoch: it counts from 1 and stores a bigint."""
    return 1 <= epoch <= MAX_BIGINT


def remembered(last_epoch: int, *, told: int) -> int:
    """Return the epoch that a daemon keeps after a Welcome: the told one, also a lower one.

    A control plane that believes a Hello's `last_epoch` answers above it; so a lower answer is that of one that did not
    believe it, and what was kept, perhaps a gateway's lie, is of no use. What cannot be an epoch changes nothing.
    """
    return told if is_possible(told) else last_epoch


def is_behind(*, row_epoch: int, last_epoch: int) -> bool:
    """Say whether a Hello shows, credibly, that the row has forgotten sessions."""
    return row_epoch < last_epoch <= row_epoch + LAST_EPOCH_WITHIN


def holds(fence: Fence, *, row_epoch: int, row_session_id: str, row_gateway_id: str) -> bool:
    """Say whether a row still belongs to a session: what `WHERE` says in each fenced statement."""
    return (
        row_epoch == fence.session_epoch and row_session_id == fence.session_id and row_gateway_id == fence.gateway_id
    )


def zombies(flushed: Iterable[str], *, matched: Collection[str]) -> tuple[str, ...]:
    """Return the nodes of a chunk whose row is no longer this gateway's session.

    Only a chunk that committed says so.
    """
    return tuple(node_id for node_id in flushed if node_id not in matched)
