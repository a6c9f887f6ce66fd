"""What a token with a label scope may ask about: nodes that carry its labels, and the commands of those.

A scope never widens a role. Routes that are about the whole installation refuse such a token (`auth.require`); those
that are about nodes say `scoped` and ask here, so that a route that forgets to ask is closed and not open. Setting
labels is closed to it as well: nobody draws a node into one's own scope. See docs/operations.md, "Who may do what";
decisions 0154.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bettercompute.api.auth import Principal
from bettercompute.delivery.selectors import Requirement
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import commands, nodes
from bettercompute.store.database import Queries

SHOWN_MAX = 10


def requirements(caller: Principal) -> tuple[Requirement, ...]:
    """Return what every node must meet that the caller may see; nothing for a caller without a scope."""
    return tuple(Requirement(key=key, values=(value,)) for key, value in sorted((caller.labels or {}).items()))


async def check_nodes(queries: Queries, caller: Principal, node_ids: Sequence[str]) -> None:
    """Refuse nodes that lack a label of the caller's scope; ids that no node has are refused alike."""
    if caller.labels is None:
        return
    outside = await nodes.outside(queries, requirements(caller), node_ids=node_ids)
    if outside:
        more = f" and {len(outside) - SHOWN_MAX} more" if len(outside) > SHOWN_MAX else ""
        raise refuse(
            Reason.ACCESS_DENIED,
            f"the token of {caller.name} is for nodes with {caller.scope_text} only, not for "
            f"{', '.join(outside[:SHOWN_MAX])}{more}",
        )


async def within(queries: Queries, caller: Principal, node_ids: Collection[str]) -> set[str] | None:
    """Return which of these nodes are within the caller's scope now; None: all of them, and what is of no node."""
    if caller.labels is None:
        return None
    if not node_ids:
        return set()
    return set(node_ids) - set(await nodes.outside(queries, requirements(caller), node_ids=list(node_ids)))


async def check_batch(queries: Queries, caller: Principal, batch_id: str) -> None:
    """Refuse a batch of which any command is of a node outside of the caller's scope."""
    if caller.labels is not None:
        await check_nodes(queries, caller, await commands.nodes_of_batch(queries, batch_id=batch_id))


async def check_command(queries: Queries, caller: Principal, command_id: str) -> None:
    """Refuse a command of a node outside of the caller's scope; one that is not there is for the route to refuse."""
    if caller.labels is None:
        return
    command = await commands.get(queries, command_id=command_id)
    if command is not None:
        await check_nodes(queries, caller, [command.node_id])
