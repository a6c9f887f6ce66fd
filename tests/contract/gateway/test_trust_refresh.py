"""A trust bundle that is published while nodes are connected: each that was told an older one is asked to come anew.

See docs/rotation.md, "How nodes hear".
"""

from __future__ import annotations

import asyncio

from bettercompute.gateway import trust
from bettercompute.protocol import messages
from tests.contract.gateway.rig import Rig

BUNDLE = messages.SignedTrustBundle(body=b"bundle").SerializeToString()


async def test_who_was_told_an_older_bundle_is_asked_to_reconnect_once(rig: Rig) -> None:
    nodes = [await rig.add_node(f"n{number}") for number in range(3)]
    behind = await rig.connect(nodes[0], trust_version=1)
    ahead = await rig.connect(nodes[1], trust_version=2)
    rig.services.bundle = (2, BUNDLE)
    await rig.gateway.trust.read()
    drain = (await behind.receive("drain")).drain
    assert 0 <= drain.reconnect_after_ms <= 1_000
    offered = await rig.connect(nodes[0], trust_version=1)
    assert offered.welcome.trust.body == b"bundle"
    # Whoever holds it, and whoever refuses it, is left alone.
    rig.gateway.trust.renewed.set()
    late = await rig.connect(nodes[2], trust_version=1)
    asked = [asyncio.create_task(daemon.receive("drain")) for daemon in (ahead, offered, late)]
    done, _ = await asyncio.wait(asked, timeout=0.2)
    assert not done
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_a_bundle_that_could_not_be_had_is_asked_for_again_soon(rig: Rig, monkeypatch) -> None:
    monkeypatch.setattr(trust, "RETRY_S", 0.05)
    behind = await rig.connect(await rig.add_node("n1"), trust_version=1)
    asked = asyncio.Event()
    trust_bundle = rig.services.trust_bundle

    async def answer():
        asked.set()
        return await trust_bundle()

    monkeypatch.setattr(rig.services, "trust_bundle", answer)
    rig.services.failure = RuntimeError("away")
    rig.gateway.trust.poke()
    await asyncio.wait_for(asked.wait(), 20)
    rig.services.bundle, rig.services.failure = (2, BUNDLE), None
    await behind.receive("drain")
