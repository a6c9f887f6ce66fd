"""`better-compute commands why`, as an operator runs it, in each case in which a command waits."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bettercompute.cli.client import ApiClient
from bettercompute.protocol.limits import CONTROL_CREDITS
from bettercompute.testing.fake_daemon import FakeDaemon
from bettercompute.testing.profiles import BELOW_MINIMUM, BUSY, CURRENT, NEVER_ACKED, NEVER_ENDS, Levers, Profile
from tests.e2e.conftest import BETTER_COMPUTE
from tests.e2e.gateways import WORLD, GatewayProcess, Site, free_port, open_site, until

pytestmark = pytest.mark.timeout(300)


class Operator:
    """The command line and the API of a site."""

    def __init__(self, site: Site, gateway: GatewayProcess, api_url: str) -> None:
        self.site, self.gateway = site, gateway
        token = (site.folder / "operator-token").read_text().strip()
        self.client = ApiClient(address=api_url, token=token)
        self._environment = {**os.environ, "BETTER_COMPUTE_API": api_url, "BETTER_COMPUTE_TOKEN": token}

    async def node(
        self, *, profile: Profile = CURRENT, levers: Levers | None = None, gateway: GatewayProcess | None = None
    ) -> FakeDaemon:
        """Return a connected daemon of a node of its own."""
        [made] = await self.site.join(1, dial=self.site.dial_to(gateway or self.gateway))
        daemon = FakeDaemon(made.node_id, dial=made.dial, world=WORLD, profile=profile, levers=levers)
        self.site.run([daemon])
        await asyncio.wait_for(daemon.connected(), 30)
        return daemon

    async def ask(self, node_id: str, kind: str = "inventory.refresh", **more: int) -> str:
        """Ask for a command and return its id."""
        made = await asyncio.to_thread(self.client.post, "/v1/commands", {"kind": kind, "nodes": [node_id], **more})
        return str(made["commands"][0]["id"])

    async def until_state(self, command_id: str, state: str) -> None:
        """Wait until a command is in a state."""

        async def there() -> bool:
            found = await asyncio.to_thread(self.client.get, f"/v1/commands/{command_id}")
            return bool(found["state"] == state)

        await until(there, what=f"{command_id} {state}", within_s=30)

    async def why(self, command_id: str) -> dict[str, Any]:
        """Run the command line and return what it prints."""
        process = await asyncio.create_subprocess_exec(
            *BETTER_COMPUTE,
            *("commands", "why", command_id, "--json"),
            env=self._environment,
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await process.communicate()
        assert process.returncode == 0
        answer: dict[str, Any] = json.loads(said)
        return answer


def codes(answer: dict[str, Any]) -> list[str]:
    return [reason["code"] for reason in answer["reasons"]]


@pytest.fixture
async def operator(tmp_path: Path, dsn: str) -> AsyncIterator[Operator]:
    async with open_site(tmp_path, dsn) as site:
        port = free_port()
        gateway = site.add_gateway("one", roles=("gateway", "api"), more=f"[api]\nport = {port}\n")
        await gateway.start()
        operator = Operator(site, gateway, f"http://127.0.0.1:{port}")
        yield operator
        operator.client.close()


async def test_the_true_reason_in_each_case(operator: Operator) -> None:
    site = operator.site
    [away, narrow] = await site.join(2, dial=site.dial_to(operator.gateway))
    absent = await operator.ask(away.node_id)

    old = await operator.node(profile=BELOW_MINIMUM)
    outdated = await operator.ask(old.node_id)

    taken = await operator.node(levers=Levers(answer=NEVER_ENDS))
    holders = [await operator.ask(taken.node_id) for _ in range(CONTROL_CREDITS)]
    await operator.until_state(holders[-1], "running")
    ninth = await operator.ask(taken.node_id)

    busy = await operator.node(levers=Levers(answer=BUSY))
    refused = await operator.ask(busy.node_id)

    await site.database.query(
        "UPDATE node_certs SET allowed_kinds = '{logs.collect}' WHERE node_id = $1", narrow.node_id
    )
    site.run([narrow])
    await asyncio.wait_for(narrow.connected(), 30)
    foreign = await operator.ask(narrow.node_id)

    unable = await operator.node(profile=Profile(daemon_version="0.5.0", capabilities=()))
    reboot = await operator.ask(unable.node_id, kind="node.reboot")

    later = await operator.ask(unable.node_id, not_before_ms=3_600_000)
    soon = await operator.ask(unable.node_id, not_before_ms=300)

    asked = [absent, outdated, ninth, foreign, reboot, later]
    said = dict(zip(asked, await asyncio.gather(*map(operator.why, asked)), strict=True))
    assert codes(said[absent]) == ["no-session"]
    assert codes(said[outdated]) == ["upgrade-only"]
    assert codes(said[ninth]) == ["no-credit"]
    assert said[ninth]["credit_holders"] == holders
    assert all(holder in said[ninth]["reasons"][0]["sentence"] for holder in holders)
    assert codes(said[foreign]) == ["kind-not-allowed"]
    assert codes(said[reboot]) == ["capability-missing"]
    assert codes(said[later]) == ["not-before"]
    assert "59 min" in said[later]["reasons"][0]["sentence"] or "1 h" in said[later]["reasons"][0]["sentence"]
    await operator.until_state(soon, "succeeded")
    ran = await asyncio.to_thread(operator.client.get, f"/v1/commands/{soon}")
    assert ran["dispatched_at"] >= ran["asked_not_before"]
    # Between two refusals it may be on its way: the back-off doubles, so that it is soon seen waiting.
    await until(lambda: shows(operator, refused, "busy-back-off"), what="the back-off", within_s=30)


async def shows(operator: Operator, command_id: str, code: str) -> bool:
    return code in codes(await operator.why(command_id))


async def test_a_drain_and_what_a_resume_holds_back(operator: Operator) -> None:
    site = operator.site
    other = site.add_gateway("two")
    await other.start()
    staying = await operator.node(gateway=other)
    gateway_id = await site.gateway_id(other)
    # The moment between the request and the last session's end, held here on however slow a machine.
    other.pause()
    await site.database.query(
        "UPDATE leases SET expires_at = compute_now() + interval '1 hour' WHERE name = $1", gateway_id
    )
    await asyncio.to_thread(operator.client.post, f"/v1/gateways/{gateway_id}/drain", {})
    command_id = await operator.ask(staying.node_id)
    answer = await operator.why(command_id)
    other.go_on()
    assert codes(answer) == ["draining"]
    assert gateway_id in answer["reasons"][0]["sentence"]

    # In flight in one session, and the next one may be sent upgrades alone.
    young = await operator.node(levers=Levers(answer=NEVER_ACKED))
    in_flight = await operator.ask(young.node_id)
    await operator.until_state(in_flight, "dispatched")
    facts = young.state.facts
    young.levers.redials = False
    young.hang_up()
    old = FakeDaemon(
        young.node_id,
        dial=young.dial,
        world=WORLD,
        profile=BELOW_MINIMUM,
        boot_id=facts.boot_id,
        journal_id=young.state.journal_id,
    )
    site.run([old])
    await asyncio.wait_for(old.connected(), 30)
    assert codes(await operator.why(in_flight)) == ["held-back", "upgrade-only"]
