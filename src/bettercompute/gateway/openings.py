"""The streams of each node that are open and not yet a session: one node must not take what all of them share.

Without a bound a single certificate could hold every stream of a gateway, and every place of those who are held, while
its Hellos stand in line at one a second. See docs/sessions.md, "Opening"; decisions 0102.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from bettercompute.session import opening
from bettercompute.transport.streams import ServerCall
from bettercompute.world import World


class Openings:
    """Counts them; nothing is kept of a node without any."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._calls: dict[str, list[ServerCall]] = {}

    @contextlib.contextmanager
    def add(self, call: ServerCall, node_id: str) -> Iterator[None]:
        """Count a stream until it is a session or has failed. Raises its refusal when the node has too many.

        Those whose daemon has left do not count, although nobody may have noticed yet.
        """
        calls = self._calls.setdefault(node_id, [])
        waiting = sum(not other.ended for other in calls)
        opening.admit_opening(node_id=node_id, opening=waiting, drawn=self._world.dice.uniform(0, 1))
        calls.append(call)
        try:
            yield
        finally:
            calls.remove(call)
            if not calls:
                del self._calls[node_id]
