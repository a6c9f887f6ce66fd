"""A node gets another identity, with real processes: by a token handed to its running daemon, or by its expired key."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bettercompute.cli import bcd
from bettercompute.cli.client import ApiClient
from bettercompute.cli.provisioning import write_identity
from tests.e2e.conftest import BCD, READY_S, Stack, run_here, until
from tests.e2e.test_roles import START_S, Site


def _bcd() -> None:
    sys.exit(bcd.run(sys.argv[1:]))


class Daemon:
    """A `bcd node` of the session's stack."""

    def __init__(self, stack: Stack, folder: Path, *, identity: Path) -> None:
        self.stack, self.folder = stack, folder
        self.config = folder / "config.toml"
        self.config.write_text(
            f'state_dir = "{folder / "state"}"\nidentity_import = "{identity}"\n[reboot]\nallowed = false\n'
        )
        with (folder / "bcd.log").open("ab") as log:
            self.process = subprocess.Popen([*BCD, "node", "--config", str(self.config)], stdout=log, stderr=log)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_here(_bcd, "bcd", *arguments, "--config", str(self.config), check=False)

    def status(self, *, code: int) -> dict[str, Any]:
        """Wait until `bcd status` exits with this code."""

        def asked() -> dict[str, Any] | None:
            done = self.run("status", "--json")
            return dict(json.loads(done.stdout)) if done.returncode == code else None

        found: dict[str, Any] = until(asked, what=f"exit code {code} of bcd status")
        return found

    def token(self, *arguments: str) -> str:
        token: str = json.loads(self.stack.run("token", "create", "--json", *arguments).stdout)["token"]
        return token

    def log(self, event: str) -> list[dict[str, Any]]:
        lines = (self.folder / "bcd.log").read_text().splitlines()
        return [entry for entry in map(json.loads, lines) if entry["event"] == event]


@pytest.fixture
def daemon(stack: Stack, provisioned: tuple[str, Path], tmp_path: Path) -> Iterator[Daemon]:
    _, identity = provisioned
    made = Daemon(stack, tmp_path, identity=identity)
    yield made
    made.process.terminate()
    made.process.wait(READY_S)


def test_a_revoked_node_is_handed_a_new_token_without_a_restart(daemon: Daemon, provisioned: tuple[str, Path]) -> None:
    node_id, _ = provisioned
    before = daemon.status(code=0)
    daemon.stack.run("nodes", "revoke", node_id, "--reason", "stolen")
    needs = daemon.status(code=4)
    assert needs["needs_rejoin"] is True
    assert daemon.log("NEEDS_REJOIN")[0]["level"] == "error"
    (daemon.folder / "token").write_text(daemon.token("--node-id", node_id))
    done = daemon.run("rejoin", "--token-file", str(daemon.folder / "token"))
    assert (done.returncode, done.stderr.startswith(f"joined as {node_id} ")) == (0, True), done.stderr
    after = daemon.status(code=0)
    assert (after["node_id"], after["pid"]) == (node_id, before["pid"])
    assert after["journal_id"] == before["journal_id"]
    assert after["epoch"] > before["epoch"]
    again = daemon.run("rejoin", "--token-file", str(daemon.folder / "token"))
    assert (again.returncode, "each is good for one machine" in again.stderr) == (2, True), "it has been used"


def test_a_token_for_another_node_begins_anew_in_the_same_process(daemon: Daemon) -> None:
    before = daemon.status(code=0)
    done = daemon.run("rejoin", "--json", "--token", daemon.token("--site", "oslo"))
    assert done.returncode == 0, done.stderr
    joined = json.loads(done.stdout)
    assert (joined["site"], joined["role"]) == ("oslo", "node")
    assert joined["node_id"] != before["node_id"]

    def renamed() -> bool:
        return bool(daemon.status(code=0)["node_id"] == joined["node_id"])

    until(renamed, what="the node under its new name")
    after = daemon.status(code=0)
    assert after["pid"] == before["pid"]
    assert after["journal_id"] != before["journal_id"], "what the old name has acked would be missing to the new one"


def test_what_is_refused_is_said_by_sentence_and_exit_code(daemon: Daemon, provisioned: tuple[str, Path]) -> None:
    node_id, _ = provisioned
    before = daemon.status(code=0)
    used = daemon.token()
    foreign = daemon.token("--node-id", node_id, "--attestor", "provisioned", "--machine-serial", "no-such-machine")
    cases = [
        (("rejoin", "--token", "nonsense"), 2, "the join token is malformed"),
        (("rejoin", "--token", used, "--role", "site"), 2, "is for role node, not site"),
        (("rejoin", "--token", used, "--attestor", "tpm"), 2, "attestor tpm is not supported by this version of bcd"),
        (("rejoin", "--token", used, "--attestor", "cloud-iid"), 2, "join by join-token, provisioned or discovery"),
        (("rejoin", "--token", used, "--attestor", "discovery"), 2, "needs the site agent's assertion"),
        (("rejoin", "--token", foreign), 2, "this is not the machine that the credential of node"),
        (("rejoin", "--token", foreign, "--attestor", "join-token"), 2, "is for attestor provisioned, not join-token"),
        (("join", "--token", used), 3, "a new token is handed to it by `bcd rejoin`"),
    ]
    for arguments, code, words in cases:
        done = daemon.run(*arguments)
        assert (done.returncode, words in done.stderr) == (code, True), f"{arguments[:1]}: {done.stderr}"
        assert done.stderr.count("\n") == 1, done.stderr
    after = daemon.status(code=0)
    assert (after["node_id"], after["epoch"]) == (before["node_id"], before["epoch"])


def test_a_credential_is_asked_for_in_words(stack: Stack) -> None:
    for arguments, words in (
        (("--attestor", "provisioned"), "is for one node: say node_id"),
        (("--machine-serial", "S1"), "a join token is good for any machine"),
        (("--attestor", "tpm"), "attestor"),
    ):
        done = stack.run("token", "create", *arguments, check=False)
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_node_that_is_killed_while_it_comes_back_comes_back(tmp_path: Path, dsn: str) -> None:
    site = Site(tmp_path, dsn=dsn, of_api="[pki]\nnode_certificate_s = 12\n")
    try:
        api, _ = site.start_api(), site.start_gateway()
        until(site.answers, what="the api", timeout_s=START_S)
        client = site.client()
        write_identity(client, node_id="n1", site=None, role="node", out=tmp_path / "identity")
        config = site.node_config("n1", f'identity_import = "{tmp_path / "identity"}"\n')
        node = site.spawn(*BCD, "node", "--config", config, log="n1.log")
        until(lambda: connected(client), what="the node")
        # Nobody answers until the certificate has expired and the node wants to come back by it.
        api.kill()
        api.wait(READY_S)
        pending = tmp_path / "n1" / "identity.d" / "pending-rejoin" / "node.csr"
        until(pending.exists, what="the request for a re-join", timeout_s=60)
        request = pending.read_bytes()
        node.kill()
        node.wait(READY_S)
        site.spawn(*BCD, "node", "--config", config, log="n1.log")
        site.start_api()
        until(lambda: connected(client), what="the node that is back", timeout_s=START_S)
        assert '"joined again"' in (tmp_path / "n1.log").read_text()
        assert not pending.exists() or pending.read_bytes() != request
        assert "NEEDS_REJOIN" not in (tmp_path / "n1.log").read_text()
    finally:
        site.stop()


def connected(client: ApiClient) -> bool:
    with contextlib.suppress(Exception):  # the api is away for a while
        return bool(client.get("/v1/nodes/n1")["state"] == "connected")
    return False
