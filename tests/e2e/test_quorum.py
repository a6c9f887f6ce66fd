"""A destructive command from its asking to its end, with people in between and a control plane that goes round them."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import pytest

from bettercompute.cli import approver_keys, approving
from bettercompute.store.database import Database
from tests.e2e.in_process import Node, Site, in_process_site

__all__ = ["in_process_site"]


async def ended(site: Site, command_id: str) -> dict[str, str]:
    """Return a command once it has ended."""
    command = await site.ask("get", f"/v1/commands/{command_id}")
    batch = await site.ask("get", f"/v1/batches/{command['batch_id']}", wait_ms=20_000, size=1)
    while batch["open"]:
        batch = await site.ask(
            "get", f"/v1/batches/{command['batch_id']}", wait_ms=20_000, size=1, since=batch["cursor"]
        )
    return dict(await site.ask("get", f"/v1/commands/{command_id}"))


@pytest.mark.timeout(300)  # eight processes of the command line
async def test_a_destructive_command_runs_once_enough_people_have_signed_it(
    in_process_site: Site, database: Database, tmp_path: Path
) -> None:
    site = in_process_site
    node = await site.join("node-1")
    await site.all_run()
    keys = {name: tmp_path / f"{name}.key" for name in ("alice", "bob")}
    for path in keys.values():
        code, printed, _ = await site.run("pki", "approvers", "keygen", "--out", str(path))
        assert code == 0
        assert path.name in printed
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    named = [part for name, path in keys.items() for part in ("--approver", f"{name}={path}.pub")]
    code, _, told = await site.run("pki", "approvers", "propose", *named, "--threshold", "2", "--tier", "node")
    assert code == 0, told
    # The node comes for the bundle, and enforces the set from there on.
    epoch = None
    while epoch != 1:
        [held] = (await site.ask("get", "/v1/pki/trust/nodes"))["items"]
        epoch = held["approver_set_epoch"]

    code, printed, told = await site.run("run", "gpu.reset", "--node", "node-1", "--detach", "--json")
    assert code == 0, told
    made = json.loads(printed)
    assert "APPROVAL_REQUIRED: gpu.reset is destructive, and 2 approvers must sign" in told
    batch, [command] = made["batch_id"], made["commands"]
    for name, says in (("alice", "1 of 2; the commands wait for 1 more"), ("bob", "2 of 2 have signed")):
        code, _, told = await site.run("approve", batch, "--key", str(keys[name]), "--yes")
        assert code == 0, told
        assert says in told
        for shown in ("gpu.reset: what interrupts a node", "on 1 nodes of bc.local", "node-1", "asked by   operator"):
            assert shown in told
        assert node.resets.runs == 0 or name == "bob"
    assert (await ended(site, command["id"]))["state"] == "succeeded"
    assert node.resets.runs == 1

    # Whoever holds the database can send what nobody has approved. The node does not run it.
    made = await site.ask("post", "/v1/commands", {"kind": "gpu.reset", "nodes": ["node-1"]})
    [command] = made["commands"]
    await database.query("UPDATE commands SET not_before = NULL WHERE id = $1", command["id"])
    await database.query("SELECT pg_notify('bc_dispatch', 'node-1')")
    refused = await ended(site, command["id"])
    assert (refused["state"], refused["reason"]) == ("failed", "rejected-approval-required")
    assert node.resets.runs == 1
    await rolls(site, node, list(keys.values()))


async def rolls(site: Site, first: Node, keys: list[Path]) -> None:
    """See a rolling run approved as a whole: its second node is asked when the first has told its end."""
    second = await site.join("node-2")
    await site.all_run()
    asked: list[int] = []
    second.resets.on_run = lambda: asked.append(first.resets.runs)
    rolling = ("--all", "--max-concurrency", "1", "--json")
    run = asyncio.create_task(site.run("run", "gpu.reset", *rolling))
    while not (waiting := [one for one in await site.ask("get", "/v1/approvals") if one["stepwise"]]):
        assert not run.done(), run.result()
    [batch] = waiting
    for path in keys:
        with site.api() as client:
            reviewed = await asyncio.to_thread(approving._reviewed, client, batch)
        signature = approving._signature(reviewed, approver_keys.read(path))
        await site.ask("post", f"/v1/approvals/{batch['batch_id']}/signatures", signature)
    code, printed, told = await run
    assert code == 0, told
    assert "approved: the first nodes are asked" in told
    assert [json.loads(line)["state"] for line in printed.splitlines()] == ["succeeded", "succeeded"]
    assert (first.resets.runs, second.resets.runs, asked) == (2, 1, [2])
