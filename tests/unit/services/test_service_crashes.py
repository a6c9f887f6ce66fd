"""JoinService is killed before each statement of a join and of a renewal, and after the commit: no node is locked out.

What the node does then is what bcd does: it asks again with the same request. It gets one certificate in the end, the
token is spent once, and the certificate that it had stays good until the new one is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bettercompute.pki import certificates
from bettercompute.store import certificates as stored_certificates
from bettercompute.store.database import Queries, Row
from bettercompute.testing import postgres
from tests.unit.services.joining import Node, Plane, make_plane

NOW_MS = 1_900_000_000_000
STATEMENTS_MAX = 60


class Killed(Exception):
    """The process is gone: its transaction is rolled back by the server."""


@contextmanager
def killed_before(statement: int, patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let the statement of this number, and everything after it, not happen; give the names of those that did."""
    ran: list[str] = []
    fetch = Queries.fetch

    async def counted(self: Queries, name: str, /, **arguments: Any) -> list[Row]:
        if len(ran) + 1 >= statement:
            raise Killed(name)
        ran.append(name)
        return await fetch(self, name, **arguments)

    with patch.context() as patched:
        patched.setattr(Queries, "fetch", counted)
        yield ran


@pytest.fixture
async def plane(database, tmp_path) -> Plane:
    await postgres.freeze_clock(database, now_ms=NOW_MS)
    return await make_plane(database, tmp_path)


async def serials(plane: Plane, node_id: str) -> list[str]:
    rows = await stored_certificates.of_node(plane.database, node_id=node_id)
    return [row.serial for row in rows if row.superseded_at_ms is None and row.revoked_at_ms is None]


async def test_a_join_that_was_killed_anywhere_is_asked_again_and_spends_one_token(plane, monkeypatch):
    kills = 0
    for statement in range(1, STATEMENTS_MAX):
        node, secret = Node(), await plane.token()
        request = node.join_request(secret, plane.keys)
        with killed_before(statement, monkeypatch) as ran:
            try:
                await plane.join.join(request, source="192.0.2.1")
            except Killed:
                kills += 1
            else:
                break
        assert len(ran) == statement - 1
        body = plane.verified(await plane.join.join(request, source="192.0.2.1"), node)
        assert len(await serials(plane, body.node_id)) == 1
        again = plane.verified(await plane.join.join(request, source="192.0.2.1"), node)  # the answer was lost
        assert again.certificate_chain == body.certificate_chain
    assert kills >= 5
    [row] = await plane.database.query("SELECT count(*) AS tokens FROM join_tokens WHERE used_at IS NULL")
    assert row["tokens"] == 0
    [row] = await plane.database.query("SELECT count(*) AS nodes FROM nodes")
    assert row["nodes"] == kills + 1


async def test_a_renewal_that_was_killed_anywhere_leaves_the_old_certificate_and_is_asked_again(plane, monkeypatch):
    kills = 0
    for statement in range(1, STATEMENTS_MAX):
        node, following = Node(), Node()
        body = await plane.joined(node)
        chain = list(body.certificate_chain)
        old = certificates.serial_text(certificates.load_certificate(chain[0]))
        with killed_before(statement, monkeypatch):
            try:
                request = node.renew_request(body, next_node=following, client_time_ms=NOW_MS)
                await plane.join.renew(request, peer_chain=chain)
            except Killed:
                kills += 1
            else:
                break
        assert old in await serials(plane, body.node_id)
        # The same certificate request, proven anew; and once more, since the answer may be lost, too.
        answers = []
        for later_ms in (1_000, 2_000):
            request = node.renew_request(body, next_node=following, client_time_ms=NOW_MS + later_ms)
            answers.append(plane.verified(await plane.join.renew(request, peer_chain=chain), following))
        assert answers[0].certificate_chain == answers[1].certificate_chain
        found = await serials(plane, body.node_id)
        assert len(found) == 2
        assert old in found
    assert kills >= 5
