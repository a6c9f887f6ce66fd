"""Each supported line of bcd against each range a gateway may speak, and what each line said, said again for ever.

`tests/vectors/lines/LINE.txt` holds the frames of a line as hex, one a row. They are never recorded anew: a gateway
that does not understand them has broken a daemon that somebody runs. A new line is recorded, once, by
`BC_RECORD_LINES=1 pytest tests/contract/gateway/test_skew_matrix.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from bettercompute.delivery.commands import CommandState
from bettercompute.delivery.spec_generations import Circumstances, compose
from bettercompute.gateway.config import GatewayConfig
from bettercompute.protocol import messages
from bettercompute.protocol.frames import decode_message
from bettercompute.protocol.versions import ProtocolRange
from bettercompute.store import specs
from bettercompute.store.database import Transaction
from bettercompute.testing.fake_daemon import FakeDaemon
from bettercompute.testing.fake_dial import in_memory
from bettercompute.testing.profiles import CURRENT, PROFILES, Levers, Profile
from tests.contract.gateway import seed
from tests.contract.gateway.rig import WAIT_S, Rig

RANGES = {"1-1": ProtocolRange(min=1, max=1), "1-3": ProtocolRange(min=1, max=3), "2-3": ProtocolRange(min=2, max=3)}
GENERATION = 1
DAEMON_SECTION = messages.NodeSpec.DESCRIPTOR.fields_by_name["daemon"].number
VECTORS = Path(__file__).parents[2] / "vectors" / "lines"


async def publish_spec(rig: Rig, node_id: str) -> None:
    """Give the node a spec whose one section an old line does not know."""
    spec = messages.NodeSpec(daemon=messages.DaemonSection(log_level="info"))

    async def publish(transaction: Transaction) -> None:
        locked = await specs.lock(transaction, node_id=node_id)
        assert locked is not None
        of = Circumstances(node_id=node_id, trust_domain="bc.local", generation=GENERATION, issued_at_ms=locked.now_ms)
        new = compose(spec, before=None, of=of)
        await specs.publish(
            transaction, new, node_id=node_id, issued_at_ms=locked.now_ms, issued_by="op", why="the matrix"
        )

    await rig.database.retrying(publish)


@contextlib.asynccontextmanager
async def running(
    rig: Rig, profile: Profile, *, protocol: ProtocolRange, levers: Levers | None = None
) -> AsyncIterator[FakeDaemon]:
    """A daemon of a line on a gateway of a range, with a spec and two commands waiting for it."""
    node = await rig.add_node("node-1")
    await publish_spec(rig, "node-1")
    for command_id, kind in (("refresh", "inventory.refresh"), ("snapshot", "instance.snapshot")):
        await seed.add_command(rig.database, "node-1", command_id, kind=kind)
    _, server = await rig.start_another(GatewayConfig(name="skewed", protocol=protocol))
    dial = in_memory(lambda: server, certificate_chain=node.chain)
    daemon = FakeDaemon(
        "node-1", dial=dial, world=rig.world, profile=profile, levers=levers, sections={"cpu": b"\x0a\x03one"}
    )
    life = asyncio.create_task(daemon.run())
    try:
        async with asyncio.timeout(WAIT_S):
            await daemon.connected()
        yield daemon
    finally:
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)


def shared(profile: Profile, protocol: ProtocolRange) -> bool:
    return profile.proto_min <= protocol.max and protocol.min <= profile.proto_max


# All lines there are speak version 1. Which of several shared ones is spoken shows with one that does not exist yet.
LINES = {**PROFILES, "n+1": replace(CURRENT, daemon_version="0.6.0", proto_max=2)}
ROWS = [*((line, name) for line in PROFILES for name in RANGES), ("n+1", "1-3")]


@pytest.mark.parametrize(("line", "name"), ROWS, ids=[f"{line} on {name}" for line, name in ROWS])
async def test_a_line_on_a_gateway(rig: Rig, line: str, name: str) -> None:
    profile, protocol = LINES[line], RANGES[name]
    async with running(rig, profile, protocol=protocol) as daemon:
        [row] = await rig.database.query("SELECT upgrade_only, daemon_version FROM node_sessions")
        assert row["daemon_version"] == profile.daemon_version
        assert row["upgrade_only"] is not shared(profile, protocol)
        spoken = min(profile.proto_max, protocol.max) if shared(profile, protocol) else protocol.min
        assert daemon.protocol_version == spoken
        if shared(profile, protocol):
            await works(rig, daemon)
        else:
            await takes_only_an_upgrade(rig, daemon)


async def works(rig: Rig, daemon: FakeDaemon) -> None:
    """Its spec is applied as far as it knows it; what it does not know it says, and does the rest."""
    await rig.until_state("refresh", CommandState.SUCCEEDED)
    lacks_kind = "instance.snapshot" in daemon.profile.lacks_kinds
    await rig.until_state("snapshot", CommandState.FAILED if lacks_kind else CommandState.SUCCEEDED)
    [ended] = await rig.database.query("SELECT reason FROM commands WHERE id = 'snapshot'")
    assert ended["reason"] == ("rejected-unsupported" if lacks_kind else "")
    lacks_section = "daemon" in daemon.profile.lacks_sections
    applied = 0 if lacks_section else GENERATION
    await rig.until_query(
        f"SELECT 1 FROM nodes JOIN node_status USING (node_id) WHERE observed_generation = {GENERATION}"
        f" AND applied_generation = {applied}"
    )
    [stored] = await rig.database.query("SELECT report FROM node_status")
    report = decode_message(messages.StatusReport, bytes(stored["report"]))
    assert report.observed_generation == GENERATION
    unsupported = [
        section.reason for section in report.sections if section.convergence == messages.SECTION_CONVERGENCE_UNSUPPORTED
    ]
    assert unsupported == ([str(DAEMON_SECTION)] if lacks_section else [])


async def takes_only_an_upgrade(rig: Rig, daemon: FakeDaemon) -> None:
    """It holds its session and beats; what is not its upgrade waits for the version that can do it."""
    await seed.add_command(rig.database, "node-1", "upgrade", kind="daemon.upgrade", lane=messages.LANE_BULK)
    await rig.database.query("SELECT pg_notify('bc_dispatch', 'node-1')")
    async with asyncio.timeout(WAIT_S):
        await daemon.until(lambda: daemon.received["command"] == 1)
    assert daemon.received["desired"] == 0
    assert [await seed.state_of(rig.database, waiting) for waiting in ("refresh", "snapshot")] == [
        CommandState.PENDING,
        CommandState.PENDING,
    ]


def keep(path: Path, frames: list[bytes]) -> None:
    path.write_text("".join(f"{frame.hex()}\n" for frame in frames), encoding="ascii")


def kept(path: Path) -> list[bytes]:
    return [bytes.fromhex(row) for row in path.read_text(encoding="ascii").split()]


async def record(rig: Rig, line: str, path: Path) -> None:
    """Write down what a line sends from its Hello to the end of two commands."""
    said: list[bytes] = []

    def note(frame: messages.AgentFrame) -> bytes:
        said.append(frame.SerializeToString())
        return said[-1]

    async with running(rig, PROFILES[line], protocol=RANGES["1-1"], levers=Levers(rewrite=note)) as daemon:
        daemon.record_events([("disk.failed", '{"disk": "sda"}')])
        if shared(PROFILES[line], RANGES["1-1"]):
            await works(rig, daemon)
        await rig.until_query("SELECT 1 FROM node_events")
    keep(path, said)


@pytest.mark.parametrize("line", PROFILES)
async def test_what_a_line_said_is_understood_for_ever(rig: Rig, line: str) -> None:
    path = VECTORS / f"{line}.txt"
    if not path.exists() and os.environ.get("BC_RECORD_LINES"):
        await record(rig, line, path)
        pytest.skip(f"{path} was recorded; run again without BC_RECORD_LINES")
    hello, *rest = kept(path)
    profile = PROFILES[line]
    works_here = shared(profile, RANGES["1-1"])
    node = await rig.add_node("node-1")
    for command_id in ("refresh", "snapshot"):
        await seed.add_command(rig.database, "node-1", command_id, not_before_s=3600)
    daemon = await rig.dial(node)
    daemon.call.send(hello)
    welcome = (await daemon.receive("welcome")).welcome
    assert welcome.upgrade_required is not works_here
    assert welcome.protocol_version == 1
    for frame in rest:
        daemon.call.send(frame)
    await rig.until_query("SELECT 1 FROM node_events WHERE type = 'disk.failed'")
    [row] = await rig.database.query("SELECT daemon_version, proto_max FROM node_sessions")
    assert (row["daemon_version"], row["proto_max"]) == (profile.daemon_version, profile.proto_max)
    if works_here:
        await rig.until_state("refresh", CommandState.SUCCEEDED)
        lacks = "instance.snapshot" in profile.lacks_kinds
        await rig.until_state("snapshot", CommandState.FAILED if lacks else CommandState.SUCCEEDED)
        await rig.until_query(f"SELECT 1 FROM nodes WHERE observed_generation = {GENERATION}")
