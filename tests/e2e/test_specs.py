"""Desired state from an operator's command line to the kernel's files of a real `bcd`, and through its restarts."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bettercompute.store.database import DedicatedConnection
from tests.e2e.conftest import BCD, BETTER_COMPUTE, READY_S, Stack, until
from tests.e2e.test_kill import free_port

pytestmark = pytest.mark.timeout(300)

PAGES = "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"


class Node:
    """A real `bcd` whose kernel's files are a folder of the test."""

    def __init__(self, folder: Path, *, node_id: str, identity: Path, gateway_url: str) -> None:
        self.node_id, self.log, self.config = node_id, folder / "bcd.log", folder / "bcd.toml"
        self.pages = folder / "kernel" / PAGES
        self.pages.parent.mkdir(parents=True)
        self.pages.write_text("0\n")
        self._gateway_url = gateway_url
        self._settings = (
            f'state_dir = "{folder / "state"}"\nidentity_import = "{identity}"\n'
            f'[host]\nroot = "{folder / "kernel"}"\n[reboot]\nallowed = false\n'
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, alone: bool = False) -> None:
        """Start it; `alone` where no gateway listens."""
        url = f"https://127.0.0.1:{free_port()}" if alone else self._gateway_url
        self.config.write_text(f'gateway_url = ["{url}"]\n{self._settings}')
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*BCD, "node", "--config", str(self.config)], stdout=log, stderr=log)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(READY_S)

    def logged(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def applied(self) -> list[int]:
        """Return the generations that the daemon says it applied, in order."""
        return [line["generation"] for line in self.logged() if line["event"] == "desired state applied"]


@pytest.fixture
def node(stack: Stack, provisioned: tuple[str, Path], tmp_path: Path) -> Iterator[Node]:
    node_id, identity = provisioned
    made = Node(tmp_path, node_id=node_id, identity=identity, gateway_url=stack.ready["gateway"])
    made.start()
    yield made
    made.kill()


def pages(count: int) -> dict[str, Any]:
    return {"huge_pages": [{"size_bytes": 2**21, "count": count}]}


def spec_set(stack: Stack, node: Node, spec: object, *more: str) -> subprocess.CompletedProcess[str]:
    return stack.run("spec", "set", node.node_id, json.dumps(spec), *more, check=False)


def standing(stack: Stack, node: Node) -> dict[str, Any]:
    shown = stack.client.get(f"/v1/nodes/{node.node_id}/spec")
    assert isinstance(shown, dict)
    return shown


def query(stack: Stack, sql: str) -> None:
    async def asked() -> None:
        connection = await DedicatedConnection.open(stack.ready["database"], application_name="tests")
        try:
            await connection.script(sql)
        finally:
            await connection.close()

    asyncio.run(asked())


def test_set_enforced_offline_and_patched(stack: Stack, node: Node) -> None:
    done = spec_set(stack, node, {"daemon": {"log_level": "debug"}, "host": pages(64)}, "--wait", "40s", "--json")
    assert done.returncode == 0, done.stderr
    assert (json.loads(done.stdout)["generation"], node.pages.read_text()) == (1, "64\n")

    # Killed, changed by hand, and started where no gateway can be reached: it goes on enforcing what it knows.
    node.kill()
    node.pages.write_text("3\n")
    node.start(alone=True)
    until(lambda: node.pages.read_text() == "64\n", what="the enforced spec of a node that is alone")
    node.kill()

    # What was set while it was away comes with the next session; what is set then, as a patch over it.
    assert spec_set(stack, node, pages(8), "--section", "host").returncode == 0
    node.start()
    until(lambda: standing(stack, node)["state"] == "applied", what="generation 2")
    assert node.pages.read_text() == "8\n"
    done = spec_set(stack, node, pages(16), "--section", "host", "--wait", "40s")
    assert done.returncode == 0, done.stderr
    assert "+ host.huge_pages[0].count = " in done.stdout
    assert node.pages.read_text() == "16\n"
    until(lambda: node.applied() == [1, 2, 3], what="three applied generations in the log")

    diff = stack.run("spec", "diff", node.node_id, "--from", "1", "--json")
    assert json.loads(diff.stdout)["changes"] == [{"path": "host.huge_pages[0].count", "before": "64", "after": "16"}]


def test_parked_and_free_again(stack: Stack, node: Node) -> None:
    spec = {"host": pages(4), "devices": {"assignments": [{"allocation_id": "a1"}]}}
    done = spec_set(stack, node, spec, "--wait", "40s")
    assert done.returncode == 1
    assert (
        f"{node.node_id} cannot apply generation 1: devices: this bcd does not converge section devices" in done.stderr
    )
    assert node.pages.read_text() == "4\n", "the rest converges"
    shown = standing(stack, node)
    assert (shown["state"], shown["observed_generation"], shown["applied_generation"]) == ("parked", 1, 0)
    assert [(item["section"], item["convergence"], item["reason"]) for item in shown["sections"]] == [
        ("devices", "unsupported", "3"),
        ("host", "converged", ""),
    ]

    def unsupported() -> bool:
        conditions = stack.client.get(f"/v1/nodes/{node.node_id}")["conditions"]
        return ("SectionUnsupported", "3") in [(item["type"], item["reason"]) for item in conditions]

    until(unsupported, what="the condition")
    done = spec_set(stack, node, {"host": {"huge_pages": [{"size_bytes": 2**30, "count": 1}]}}, "--wait", "40s")
    assert "host: huge pages of 1 GiB: this host has 2 MiB" in done.stderr
    assert spec_set(stack, node, {"host": pages(5)}, "--wait", "40s").returncode == 0


def restore_first(stack: Stack, node: Node) -> None:
    """Have the database as a backup had it when the node's generation was 1."""
    query(
        stack,
        f"UPDATE nodes n SET spec_generation = 1, observed_generation = 1, applied_generation = 1, spec_body = s.body,"
        f" spec_sha256 = s.spec_sha256 FROM node_specs s WHERE s.node_id = n.node_id AND s.generation = 1"
        f" AND n.node_id = '{node.node_id}';"
        f" DELETE FROM node_specs WHERE node_id = '{node.node_id}' AND generation > 1",
    )


def test_a_restored_database_and_two_who_set_at_once(stack: Stack, node: Node) -> None:
    for count in (1, 2, 3):
        stack.client.put(f"/v1/nodes/{node.node_id}/spec", {"spec": {"host": pages(count)}})
    until(lambda: standing(stack, node)["applied_generation"] == 3, what="generation 3")
    node.kill()
    restore_first(stack, node)
    node.start()
    until(lambda: standing(stack, node)["applied_generation"] == 4, what="the spec published above the daemon's")
    shown = standing(stack, node)
    assert (shown["generation"], shown["issued_by"]) == (4, "controller/node_spec")
    assert node.pages.read_text() == "1\n"

    node.kill()
    restore_first(stack, node)
    for count in (7, 8, 9):  # this time operators give the numbers away once more, the node's own to another spec
        stack.client.put(f"/v1/nodes/{node.node_id}/spec", {"spec": {"host": pages(count)}})
    assert standing(stack, node)["generation"] == 4
    node.start()
    until(lambda: standing(stack, node)["applied_generation"] == 6, what="the spec under a number of its own")
    assert node.pages.read_text() == "9\n"

    racing = [
        subprocess.Popen(
            [*BETTER_COMPUTE, "spec", "set", node.node_id, json.dumps({"host": pages(count)}), "--expect", "6"],
            env=stack.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for count in (21, 22)
    ]
    ended = [(each.communicate(timeout=READY_S)[1], each.returncode) for each in racing]
    assert sorted(code for _, code in ended) == [0, 2]
    [told] = [error for error, code in ended if code]
    assert f"the spec of node {node.node_id} is at generation 7, not 6" in told
