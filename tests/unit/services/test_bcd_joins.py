"""bcd's half of Join against JoinService itself, over the transport's calls in memory."""

from __future__ import annotations

from pathlib import Path

from bettercompute.daemon.identity import IdentityStore
from bettercompute.daemon.join import JoinSettings, join
from bettercompute.pki import join_token
from bettercompute.pki.join_token import JoinToken
from bettercompute.protocol import messages, service
from bettercompute.protocol.statuses import Status
from bettercompute.store.database import Database
from bettercompute.transport.memory import MemoryServer
from bettercompute.transport.streams import Connection, DialTarget, ServerCall
from tests.unit.services.joining import make_plane


async def test_a_daemon_joins_the_service(database: Database, tmp_path: Path) -> None:
    plane = await make_plane(database, tmp_path)

    async def gateway(call: ServerCall) -> None:
        assert call.path == service.JOIN
        data = await call.receive()
        assert data is not None
        answer = await plane.join.join(messages.JoinRequest.FromString(data), source=call.peer.address)
        call.send(answer.SerializeToString())
        call.finish(Status.OK)

    server = MemoryServer(gateway, world=plane.world)

    async def dial(_: DialTarget) -> Connection:
        return server.connect()

    token = JoinToken(
        secret=await plane.token(node_id="n1"),
        gateway_urls=("https://gw",),
        serving_ca_pins=(plane.keys.serving_ca_pin,),
        join_signing_key=plane.keys.join_signing.public_key(),
        join_encryption_key=plane.keys.join_encryption.public_key(),
    )
    settings = JoinSettings(token=join_token.format_token(token), daemon_version="0.1.0")
    store = IdentityStore(tmp_path / "state")
    identity = await join(store, settings, world=plane.world, dial=dial)
    assert identity.record.node_id == "n1"
    assert identity.trust.content.serving_ca_pins == (plane.keys.serving_ca_pin,)
    loaded = store.load()
    assert loaded is not None
    assert loaded.record == identity.record
    await server.close()
