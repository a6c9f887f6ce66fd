"""The built-in kinds from an operator's command line to a real `bcd` and back."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import BCD, READY_S, Stack, until
from tests.unit.daemon.put_server import PutServer, put_server

pytestmark = pytest.mark.timeout(300)


class Store:
    """The PUT server on a thread of its own, since these tests wait for processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))
        self._thread.start()
        assert self._ready.wait(READY_S)

    async def _serve(self) -> None:
        async with put_server(self._folder) as (self.server, self.ca_file):
            self._ready.set()
            await self._over.wait()

    server: PutServer
    ca_file: Path

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(READY_S)
        self._loop.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path)
    yield made
    made.close()


class Node:
    """A real `bcd` that is rebooted by a command of the test's: a new boot id, and nothing more."""

    def __init__(self, folder: Path, *, identity: Path, gateway_url: str, ca_file: Path) -> None:
        self.config, self.log = folder / "bcd.toml", folder / "bcd.log"
        self.boot_id, self.reboots, self.logs = folder / "boot_id", folder / "reboots", folder / "logs"
        self.logs.mkdir()
        self.boot_id.write_text("boot-1\n")
        reboot = folder / "reboot"
        reboot.write_text(
            f'#!/bin/sh\necho boot-2 > {self.boot_id}\necho "$BC_REASON" >> {self.reboots}\necho going down\n'
        )
        reboot.chmod(0o700)
        self.config.write_text(
            f'state_dir = "{folder / "state"}"\nidentity_import = "{identity}"\ngateway_url = ["{gateway_url}"]\n'
            f'[reboot]\ncommand = ["{reboot}"]\nboot_id_file = "{self.boot_id}"\n'
            f'[logs]\nfolders = ["{self.logs}"]\nallow_networks = ["127.0.0.1/32"]\nca_file = "{ca_file}"\n'
        )
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*BCD, "node", "--config", str(self.config)], stdout=log, stderr=log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(READY_S)


@pytest.fixture
def node(stack: Stack, provisioned: tuple[str, Path], tmp_path: Path, store: Store) -> Iterator[Node]:
    made = Node(tmp_path, identity=provisioned[1], gateway_url=stack.ready["gateway"], ca_file=store.ca_file)
    yield made
    made.kill()


def run(stack: Stack, node_id: str, kind: str, payload: dict[str, Any], *more: str) -> dict[str, Any]:
    done = stack.run("run", kind, "--node", node_id, "--payload", json.dumps(payload), "--json", *more, check=False)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def printed(stack: Stack, command_id: str) -> bytes:
    pieces = stack.client.get(f"/v1/commands/{command_id}/output")["items"]
    return b"".join(base64.b64decode(piece["data_base64"]) for piece in pieces)


def test_the_kinds(stack: Stack, provisioned: tuple[str, Path], node: Node, store: Store) -> None:
    node_id, _ = provisioned
    (node.logs / "app.log").write_text("first\nsecond\n")
    payload = {"upload_url": store.server.url, "files": [str(node.logs / "app.log")], "contains": "second"}
    ended = run(stack, node_id, "logs.collect", payload)
    assert ended["state"] == "succeeded", json.dumps(ended)
    assert gzip.decompress(store.server.requests[0][1]) == b"second\n"

    ended = run(stack, node_id, "gpu.reset", {"gpu_uuids": ["GPU-1"]})
    assert (ended["state"], ended["reason"]) == ("failed", "no-driver"), ended

    made = stack.client.post(
        "/v1/commands", {"kind": "node.reboot", "nodes": [node_id], "payload": {"reason": "new kernel"}}
    )
    command_id = made["commands"][0]["id"]
    until(node.reboots.exists, what="the reboot command")
    # Told while the command runs: of a reboot nobody would hear it afterwards.
    until(lambda: printed(stack, command_id) == b"going down\n", what="what the reboot command printed")
    until(lambda: stack.client.get(f"/v1/commands/{command_id}")["state"] == "running", what="the running command")
    node.kill()
    node.start()
    until(lambda: stack.client.get(f"/v1/commands/{command_id}")["state"] == "succeeded", what="the proof by boot id")
    node.kill()
    node.start()
    ended = run(stack, node_id, "inventory.refresh", {"sections": ["system"]})
    assert ended["state"] == "succeeded", ended
    assert node.reboots.read_text() == "new kernel\n", "rebooted exactly once"
