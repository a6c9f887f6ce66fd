"""`gateway drain`: it waits, says how far it is, and who remains."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from bettercompute.cli import gateways
from bettercompute.cli.client import ApiClient

IDLE = {
    "gateway_id": "gw-1",
    "live": True,
    "draining": True,
    "refuses": True,
    "retired_at": None,
    "nodes": 0,
    "node_ids": [],
}


class ScriptedApi:
    """Answers each look at the gateway with the next count of nodes, and the last one for ever."""

    def __init__(self, counts: list[int], others: int = 1, **fields: Any) -> None:
        self.counts = counts
        self.others = others
        self.fields = fields
        self.asked: list[str] = []

    def get(self, path: str) -> Any:
        if path == "/v1/gateways":
            others = [{**IDLE, "gateway_id": f"other-{number}", "draining": False} for number in range(self.others)]
            return {"items": [IDLE, *others]}
        return self.look()

    def post(self, path: str, _: dict[str, Any]) -> Any:
        self.asked.append(f"POST {path}")
        return self.look()

    def delete(self, path: str) -> Any:
        self.asked.append(f"DELETE {path}")
        return {**IDLE, "draining": False}

    def look(self) -> dict[str, Any]:
        count = self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]
        return {**IDLE, "nodes": count, "node_ids": [f"n{number}" for number in range(min(count, 100))], **self.fields}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(gateways, "POLL_S", 0.001)
    monkeypatch.setattr(gateways, "LINE_EVERY_S", 0.0)


def drain(monkeypatch, api: ScriptedApi, *arguments: str):
    monkeypatch.setattr(ApiClient, "from_environment", classmethod(lambda *_: api))
    return CliRunner().invoke(gateways.app, ["drain", "gw-1", *arguments])


def test_it_waits_until_no_node_is_left(monkeypatch):
    api = ScriptedApi([3, 3, 1, 0])
    done = drain(monkeypatch, api)
    assert (done.exit_code, api.asked) == (0, ["POST /v1/gateways/gw-1/drain"])
    assert done.stdout == "gw-1 holds no session: it may be stopped\n"
    assert "2 of 3 sessions have left gw-1" in done.stderr


def test_json_lines(monkeypatch):
    done = drain(monkeypatch, ScriptedApi([2, 1, 0]), "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0] == {"event": "progress", "nodes": 1, "of": 2}
    assert (lines[-1]["event"], lines[-1]["gateway_id"], lines[-1]["nodes"]) == ("drained", "gw-1", 0)


def test_who_remains_is_named(monkeypatch):
    done = drain(monkeypatch, ScriptedApi([30]), "--timeout", "20ms")
    assert done.exit_code == 1
    assert "gw-1 still holds 30 sessions after 20ms: n0, n1," in done.stdout
    assert done.stdout.endswith(", ...\n")


def test_a_gateway_that_does_not_follow_is_not_called_drained(monkeypatch):
    done = drain(monkeypatch, ScriptedApi([0], refuses=False), "--timeout", "20ms")
    assert done.exit_code == 1
    assert "has not seen the drain" in done.stdout


def test_a_gateway_that_ends_meanwhile(monkeypatch):
    done = drain(monkeypatch, ScriptedApi([2], retired_at="2026-01-01T00:00:00Z"))
    assert done.exit_code == 1
    assert "has ended while it held 2 sessions" in done.stdout
    assert drain(monkeypatch, ScriptedApi([0], retired_at="2026-01-01T00:00:00Z")).exit_code == 0


def test_the_only_gateway_is_drained_with_a_warning(monkeypatch):
    done = drain(monkeypatch, ScriptedApi([0], others=0))
    assert done.exit_code == 0
    assert "no other gateway takes sessions" in done.stderr


def test_undo_does_not_wait(monkeypatch):
    api = ScriptedApi([5])
    done = drain(monkeypatch, api, "--undo")
    assert (done.exit_code, api.asked) == (0, ["DELETE /v1/gateways/gw-1/drain"])
    assert done.stdout == "gw-1 takes sessions again\n"
