"""Which nodes a run is for: those that are named, those that a selector means, or all that can run the kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bettercompute.delivery.selectors import Requirement
from bettercompute.pki.identity import role_of
from bettercompute.protocol.kinds import CommandKind
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import nodes
from bettercompute.store.database import Queries
from bettercompute.store.nodes import Chosen

# One transaction holds them all; a larger fleet is run in several batches.
BATCH_NODES_MAX = 20_000
PAGE_ROWS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The nodes by name, or, `node_ids` None, all that meet the requirements and whose role can run the kind."""

    node_ids: Sequence[str] | None
    requirements: tuple[Requirement, ...] = ()


async def choose(queries: Queries, kind: CommandKind, targets: Targets) -> list[Chosen]:
    """Return the nodes by id.

    Raises `Refused` for a name that no node has or whose role cannot run the kind, for none, and for too many.
    """
    roles = {name for role in kind.roles if (name := role_of(role)) is not None}
    if targets.node_ids is not None:
        return await _named(queries, kind, targets.node_ids, roles=roles)
    found: list[Chosen] = []
    after = ""
    while True:
        page = await nodes.choose(queries, targets.requirements, after=after, page_size=PAGE_ROWS)
        found += [node for node in page if node.role in roles]
        if len(found) > BATCH_NODES_MAX:
            raise refuse(
                Reason.BAD_REQUEST, f"these are more than {BATCH_NODES_MAX} nodes: select fewer, in several runs"
            )
        if len(page) < PAGE_ROWS:
            break
        after = page[-1].node_id
    if not found:
        which = "matches the selector and " if targets.requirements else ""
        raise refuse(Reason.NOT_FOUND, f"there is no node that {which}can run {kind.name}")
    return found


async def _named(
    queries: Queries, kind: CommandKind, node_ids: Sequence[str], *, roles: frozenset[str] | set[str]
) -> list[Chosen]:
    wanted = sorted(set(node_ids))
    if len(wanted) > BATCH_NODES_MAX:
        raise refuse(Reason.BAD_REQUEST, f"{len(wanted)} nodes: one run takes at most {BATCH_NODES_MAX}")
    found = await nodes.existing(queries, node_ids=wanted)
    unknown = sorted(set(wanted) - {node.node_id for node in found})
    if unknown:
        more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
        raise refuse(
            Reason.NOT_FOUND, f"no node {', '.join(unknown[:10])}{more}: `nodes list` shows the ones there are"
        )
    for node in found:
        if node.role not in roles:
            raise refuse(
                Reason.BAD_REQUEST,
                f"{node.node_id} has the role {node.role}; {kind.name} runs on {', '.join(sorted(roles))}",
            )
    return found
