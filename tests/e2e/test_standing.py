"""A node's standing and the doctor, with a real control plane and a real bcd."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import BCD, READY_S, Stack, dev_stack, until


@pytest.fixture(scope="module")
def one_node() -> Iterator[Stack]:
    """A fresh stack with one node, for the tests of this module in their order."""
    with dev_stack("--nodes", "1") as running:
        yield running


def node(stack: Stack) -> dict[str, Any]:
    shown: dict[str, Any] = stack.client.get("/v1/nodes/node-1")
    return shown


def test_the_doctor_is_green_on_a_fresh_stack(one_node: Stack) -> None:
    done = one_node.run("doctor", "--json", check=False)
    found = json.loads(done.stdout)
    assert [check for check in found["checks"] if check["level"] != "ok"] == []
    assert (done.returncode, found["level"], len(found["checks"])) == (0, "ok", 20)
    table = one_node.run("doctor", "db.migrations", "pki.quorum-lag").stdout.splitlines()
    assert [line.split("\t")[:2] for line in table] == [
        ["check", "level"], ["db.migrations", "ok"], ["pki.quorum-lag", "ok"]
    ]  # fmt: skip


def test_a_locked_node_waits_and_comes_back_by_itself(one_node: Stack) -> None:
    one_node.run("nodes", "lock", "node-1", "--ttl", "5s", "--reason", "disk swap")
    until(lambda: node(one_node)["state_reason"] == "locked", what="the end of the session")
    log = until(
        lambda: [line for line in bcd_log(one_node).splitlines() if "is locked by operator for another" in line],
        what="the reason in bcd's log",
    )
    assert "disk swap" in log[0]
    until(lambda: node(one_node)["state"] == "connected", what="the node")
    assert "NEEDS_REJOIN" not in bcd_log(one_node)


def test_a_revoked_node_needs_a_new_token(one_node: Stack) -> None:
    one_node.run("nodes", "revoke", "node-1", "--reason", "stolen")
    until(lambda: node(one_node)["state_reason"] == "revoked", what="the end of the session")
    until(lambda: "NEEDS_REJOIN" in bcd_log(one_node), what="the log entry")
    listed = one_node.run("nodes", "list").stdout.splitlines()
    assert listed[1].split("\t")[:3] == ["node-1", "disconnected", "revoked"]


def test_it_joins_again_as_its_next_generation(one_node: Stack) -> None:
    token = json.loads(one_node.run("token", "create", "--node-id", "node-1", "--json").stdout)["token"]
    config = Path(one_node.ready["state_dir"]) / "nodes" / "node-1" / "config.toml"
    subprocess.run([*BCD, "rejoin", "--config", str(config)], input=token, text=True, check=True, timeout=READY_S)
    until(lambda: node(one_node)["state"] == "connected", what="the node")
    shown = json.loads(one_node.run("nodes", "show", "node-1", "--json").stdout)
    assert (shown["identity_generation"], shown["revoked"]) == (2, None)
    assert [(one["identity_generation"], one["state"]) for one in shown["certificates"]][:2] == [
        (2, "in-use"), (1, "revoked")
    ]  # fmt: skip


def test_a_node_that_is_gone_is_forgotten(one_node: Stack) -> None:
    refused = one_node.run("nodes", "forget", "node-1", check=False)
    assert (refused.returncode, "has a session on dev-" in refused.stderr) == (2, True), refused.stderr
    one_node.run("nodes", "revoke", "node-1")
    until(lambda: node(one_node)["state"] == "disconnected", what="the end of the session")
    done = one_node.run("nodes", "forget", "node-1", "--json")
    assert json.loads(done.stdout)["node_id"] == "node-1"
    assert one_node.run("nodes", "show", "node-1", check=False).returncode == 2


def bcd_log(stack: Stack) -> str:
    log = Path(stack.ready["state_dir"]) / "nodes" / "node-1" / "bcd.log"
    return log.read_text()
