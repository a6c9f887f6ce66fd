"""A certificate's whole life with real processes: renewed in time, or else its session ends with it and comes back."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from bettercompute.cli.client import ApiClient
from bettercompute.cli.provisioning import write_identity
from tests.e2e.conftest import BCD, READY_S, until
from tests.e2e.test_roles import START_S, Site

# How late the gateway may be: a liveness tick, and a machine that runs other tests too.
TICK_S = 5.0
SLACK_S = 10.0


def entries(log: Path, event: str) -> list[dict[str, Any]]:
    """Return the entries of a log with this event."""
    found = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [entry for entry in found if entry.get("event") == event]


def connected(client: ApiClient) -> bool:
    return bool(client.get("/v1/nodes/n1")["state"] == "connected")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lifetime_s", [12, 60])
@pytest.mark.long
def test_a_short_certificate_with_an_open_session(tmp_path: Path, dsn: str, lifetime_s: int) -> None:
    site = Site(tmp_path, dsn=dsn, of_api=f"[pki]\nnode_certificate_s = {lifetime_s}\n")
    try:
        api, gateway = site.start_api(), site.start_gateway()
        until(site.answers, what="the api", timeout_s=START_S)
        client = site.client()
        write_identity(client, node_id="n1", site=None, role="node", out=tmp_path / "identity")
        config = site.node_config("n1", f'identity_import = "{tmp_path / "identity"}"\n')
        node = site.spawn(*BCD, "node", "--config", config, log="n1.log")
        until(lambda: connected(client), what="the node")

        # It renews by itself at two thirds, and goes on under the new certificate.
        renewals = lambda: entries(tmp_path / "n1.log", "certificate renewed")  # noqa: E731 - asked three times
        until(renewals, what="the renewal", timeout_s=2 * lifetime_s + SLACK_S)
        until(lambda: connected(client), what="the node under its new certificate")

        # Nobody answers renewals: the session lives as long as its certificate, and no longer.
        api.kill()
        api.wait(READY_S)
        last = renewals()[-1]
        until(
            lambda: [
                entry
                for entry in entries(tmp_path / "gateway.log", "session closed")
                if entry["reason"] == "certificate-expired" and last["serial"] in entry["message"]
            ],
            what="the end of the session",
            timeout_s=lifetime_s + TICK_S + SLACK_S,
        )
        late_s = time.time() - last["not_after_ms"] / 1000
        assert 0 <= late_s < TICK_S + SLACK_S

        # And when somebody answers again the node is back, without anybody's help.
        site.start_api()
        until(site.answers, what="the api that is back", timeout_s=START_S)
        until(lambda: connected(client), what="the node that is back", timeout_s=START_S)
        assert (gateway.poll(), node.poll()) == (None, None), "the very same processes"
    finally:
        site.stop()
