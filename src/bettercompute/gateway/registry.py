"""The live sessions of a gateway, by node: at most one each, the newest.

See docs/sessions.md, "The Hello transaction".
"""

from __future__ import annotations

from collections.abc import Iterator

from bettercompute.gateway.session import LiveSession
from bettercompute.session.inputs import Superseded


class SessionRegistry:
    """Which session a node has here."""

    def __init__(self) -> None:
        self._by_node: dict[str, LiveSession] = {}
        self._by_serial: dict[str, set[LiveSession]] = {}

    def __len__(self) -> int:
        return len(self._by_node)

    def __iter__(self) -> Iterator[LiveSession]:
        return iter(list(self._by_node.values()))

    def get(self, node_id: str) -> LiveSession | None:
        """Return the node's live session, if it has one here."""
        return self._by_node.get(node_id)

    def with_serial(self, serial: str) -> tuple[LiveSession, ...]:
        """Return the sessions that came with this certificate."""
        return tuple(self._by_serial.get(serial, ()))

    def add(self, session: LiveSession) -> None:
        """Take a session in; an older one of the same node ends ABORTED, and its row is already the new session's."""
        older = self._by_node.get(session.node_id)
        assert older is None or older.state.epoch < session.state.epoch, "Hellos of a node are taken one after another"
        self._by_node[session.node_id] = session
        self._by_serial.setdefault(session.state.certificate_serial, set()).add(session)
        if older is not None:
            older.give(Superseded())

    def remove(self, session: LiveSession) -> None:
        """Forget a session that has ended; a newer one of the same node stays."""
        if self._by_node.get(session.node_id) is session:
            del self._by_node[session.node_id]
        same_serial = self._by_serial.get(session.state.certificate_serial)
        if same_serial is not None:
            same_serial.discard(session)
            if not same_serial:
                del self._by_serial[session.state.certificate_serial]
