"""Rotations under real nodes: who joined before, in or after one, restarted or not, connects and runs what is signed.

With crashes of the control plane between any two steps.
"""

from __future__ import annotations

import asyncio

import pytest

from bettercompute.cli import rotation as cli
from bettercompute.cli.rotation import StageName
from bettercompute.errors import Refused
from bettercompute.pki import rotation
from bettercompute.pki.rotation import Purpose
from bettercompute.services import pki_setup, rotation_files
from tests.e2e.in_process import WAIT_S, WORLD, Site, in_process_site

__all__ = ["in_process_site"]


@pytest.fixture
def site(in_process_site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(rotation, "SETTLE_MS", 0)
    return in_process_site


async def run_stage(site: Site, purpose: Purpose, stage: str) -> None:
    """Run a stage as the command line does, again for as long as it has to wait for nodes."""
    async with asyncio.timeout(WAIT_S):
        while True:
            with site.api() as client:
                try:
                    await asyncio.to_thread(cli.run_stage, client, site.keys, purpose, StageName(stage))
                except Refused as refused:
                    # Nodes come for the bundle, and gateways tell of their certificates, within seconds.
                    if not any(
                        waits in refused.message
                        for waits in ("do not hold", "signed under", "do not know", "show a certificate")
                    ):
                        raise
                else:
                    return
            await asyncio.sleep(0.1)


async def whole_rotation(site: Site, purpose: Purpose, *, away: bool) -> None:
    """Go through the stages with nodes that join at each, half of which are restarted at each stage after that."""
    restarting: list[str] = []

    async def stage(name: str) -> None:
        await site.restart_nodes(restarting)
        await asyncio.gather(*(site.join(f"{name}-{kind}") for kind in ("stays", "restarts")))
        restarting.append(f"{name}-restarts")
        await site.all_run()

    await stage("before")
    if away:
        await (await site.join("away")).stop()
    await run_stage(site, purpose, "prepare")
    await stage("prepared")
    await run_stage(site, purpose, "switch")
    if purpose is Purpose.SERVING_CA:
        pki_setup.issue_gateway(site.keys, names=["127.0.0.1"], world=WORLD)
    await stage("switched")
    if purpose is not Purpose.NODE_CA:
        await run_stage(site, purpose, "retire")
    await stage("retired")
    if away:
        site.nodes["away"].start()
        await site.all_run()


async def test_the_command_root_under_nodes_that_join_at_every_stage(site: Site) -> None:
    await whole_rotation(site, Purpose.COMMAND_ROOT, away=True)


@pytest.mark.long
@pytest.mark.parametrize("purpose", [Purpose.JOIN_SIGNING, Purpose.SERVING_CA, Purpose.NODE_CA], ids=str)
async def test_the_other_keys_under_nodes_that_join_at_every_stage(site: Site, purpose: Purpose) -> None:
    await whole_rotation(site, purpose, away=False)


@pytest.mark.long
@pytest.mark.parametrize("purpose", list(Purpose), ids=str)
async def test_a_crash_between_any_two_steps_locks_nobody_out(site: Site, purpose: Purpose) -> None:
    await site.join("node-1")
    await site.all_run()

    async def crash() -> None:
        await site.restart()
        await site.all_run()

    # The next key lies in the folder, and the API was not told.
    new = rotation_files.prepare(site.keys, purpose, world=WORLD)
    await crash()
    # It was told, and its answer was lost.
    prepared = {"public_der": new.public_der.hex(), "companion_der": new.companion_der.hex()}
    await site.ask("post", f"/v1/pki/keys/{purpose}/prepare", prepared)
    await crash()
    await run_stage(site, purpose, "prepare")
    trust = await site.ask("get", "/v1/pki/trust")
    [key] = [key for key in trust["keys"] if key["purpose"] == purpose and key["stage"] == "next"]

    async def held() -> bool:
        [node] = (await site.ask("get", "/v1/pki/trust/nodes"))["items"]
        return bool(node["trust_version"] >= key["first_version"])

    async with asyncio.timeout(WAIT_S):
        while not await held():  # noqa: ASYNC110 - asked of the API, which has no event for it
            await asyncio.sleep(0.1)
    # Switched, and the files not renamed.
    await site.ask("post", f"/v1/pki/keys/{purpose}/switch", {"key_sha256": new.key_sha256})
    await crash()
    await run_stage(site, purpose, "switch")
    if purpose is Purpose.SERVING_CA:
        pki_setup.issue_gateway(site.keys, names=["127.0.0.1"], world=WORLD)
    await crash()
    if purpose is Purpose.NODE_CA:
        return
    # Retired, and the files not removed.
    await site.ask("post", f"/v1/pki/keys/{purpose}/retire", {})
    await crash()
    await run_stage(site, purpose, "retire")
    await crash()
    trust = await site.ask("get", "/v1/pki/trust")
    assert sorted(key["stage"] for key in trust["keys"] if key["purpose"] == purpose) == ["current", "retired"]
