"""A rolling run that approvers must sign, led from a command line: its steps, its brakes, and a leader who was lost.

See docs/operations.md, "Runs".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from bettercompute.cli.better_compute import app
from bettercompute.cli.client import ApiClient

END, MADE = "2026-01-02T00:00:00.000Z", "2026-01-01T00:00:00.000Z"


class Api:
    """An API with three nodes: what is released ends as `ends` says, at the next look."""

    def __init__(self) -> None:
        self.approval = "waiting"
        self.ends: Callable[[str], str] = lambda _: "succeeded"
        self.at_once = 0
        """How many were under way at most."""
        self.looks = 0
        self.on_look: Callable[[], object] = lambda: None
        self.commands: dict[str, dict[str, Any]] = {}

    def make(self, nodes: list[str]) -> dict[str, Any]:
        for node in nodes:
            self.commands[f"c-{node}"] = {
                "id": f"c-{node}",
                "node_id": node,
                "kind": "node.reboot",
                "state": "pending",
                "reason": "",
                "message": "",
                "not_before": END,
                "not_after": END,
                "created_at": MADE,
                "age_ms": 60_000,
                "timeout_ms": 1_000,
            }
        commands = [{"id": one["id"], "node_id": one["node_id"]} for one in self.commands.values()]
        return {
            "batch_id": "b-1",
            "kind": "node.reboot",
            "gives_up_after_ms": 600_000,
            "commands": commands,
            "without_session": [],
            "approvals_required": 2,
        }

    def post(self, path: str, body: dict[str, Any], **_: Any) -> dict[str, Any]:
        match path:
            case "/v1/commands/preview":
                asked = [{"node_id": node, "state": "connected"} for node in ("n1", "n2", "n3")]
                return {"kind": "node.reboot", "nodes": asked, "approvals_required": 2}
            case "/v1/commands":
                assert body["stepwise"] is True
                return self.make(body["nodes"])
            case "/v1/batches/b-1/steps":
                if self.approval == "approved":
                    for command_id in body["commands"]:
                        self.commands[command_id] |= {"not_before": None, "state": "running"}
                    self.at_once = max(self.at_once, len(self.in_state("running")))
                return {"batch_id": "b-1", "state": self.approval, "released": 0}
            case "/v1/batches/b-1/stop":
                held = [one for one in self.in_state("pending") if one["not_before"] == END]
                for one in held:
                    one["state"] = "cancelled"
                return {"batch_id": "b-1", "cancelled": len(held)}
        raise AssertionError(path)

    def get(self, path: str, **_: Any) -> dict[str, Any]:
        assert path in {"/v1/batches/b-1", "/v1/batches/b-1/output"}
        if path.endswith("output"):
            return {"items": []}
        self.looks += 1
        self.on_look()
        for one in self.in_state("running"):
            one["state"] = self.ends(one["node_id"])
        return {"batch_id": "b-1", "open": 0, "items": list(self.commands.values()), "cursor": str(self.looks)}

    def in_state(self, state: str) -> list[dict[str, Any]]:
        return [one for one in self.commands.values() if one["state"] == state]

    def pages(self, path: str, **_: Any) -> Iterator[dict[str, Any]]:
        assert path == "/v1/commands"
        return iter(list(self.commands.values()))


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    made = Api()
    monkeypatch.setattr(ApiClient, "from_environment", lambda _: made)
    return made


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--max-concurrency", "1", "--json"])


def states(done: Result) -> list[str]:
    return [json.loads(line)["state"] for line in done.stdout.splitlines()]


def test_nobody_is_asked_before_it_is_approved_and_then_one_after_the_other(api: Api) -> None:
    def look() -> None:
        if api.looks == 2:
            assert api.at_once == 0
            api.approval = "approved"

    api.on_look = look
    done = run("run", "node.reboot", "--all")
    assert (done.exit_code, states(done)) == (0, ["succeeded"] * 3)
    assert api.at_once == 1
    assert "2 approvers must sign the batch" in done.stderr


def test_what_was_not_asked_when_too_many_failed_is_cancelled(api: Api) -> None:
    api.approval = "approved"
    api.ends = lambda node: "failed" if node == "n2" else "succeeded"
    done = run("run", "node.reboot", "--all")
    assert (done.exit_code, states(done)) == (1, ["succeeded", "failed"])
    assert "1 nodes were not asked: n3" in done.stderr
    assert "the commands of 1 nodes that were not asked are cancelled" in done.stderr
    assert [one["state"] for one in api.commands.values()] == ["succeeded", "failed", "cancelled"]


def test_ctrl_c_is_its_brake(api: Api) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    api.on_look = interrupt
    done = run("run", "node.reboot", "--all")
    assert done.exit_code == 130
    assert "3 nodes were not asked; the commands of 3 nodes that were not asked are cancelled" in done.stderr


def test_a_refused_run_ends_by_itself(api: Api) -> None:
    def refuse() -> None:
        for one in api.commands.values():
            one |= {"state": "cancelled", "message": "approval refused: not on a Friday"}

    api.on_look = refuse
    done = run("run", "node.reboot", "--all")
    assert (done.exit_code, states(done), api.looks) == (1, ["cancelled"] * 3, 1)


def test_a_run_whose_leader_was_lost_is_led_on(api: Api) -> None:
    api.make(["n1", "n2", "n3"])
    api.approval = "approved"
    api.commands["c-n1"] |= {"state": "succeeded", "not_before": None}
    api.commands["c-n2"] |= {"state": "running", "not_before": None}
    done = run("resume", "b-1")
    assert (done.exit_code, states(done), api.at_once) == (0, ["succeeded"] * 3, 1)
    again = run("resume", "b-1")
    assert again.exit_code == 2
    assert "batch b-1 holds no command back" in again.stderr


def test_each_step_of_a_run_for_later_is_asked_for_the_rest_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    ends = {"state": "succeeded", "reason": "", "message": ""}

    class Plain:
        """An API with two nodes where every command ends at the first look."""

        def post(self, path: str, body: dict[str, Any], **_: Any) -> dict[str, Any]:
            if path.endswith("preview"):
                nodes = [{"node_id": node, "state": "connected"} for node in ("n1", "n2")]
                return {"kind": "inventory.refresh", "nodes": nodes, "approvals_required": 0}
            asked.append(body)
            made = [{"id": f"c-{node}", "node_id": node} for node in body["nodes"]]
            return {"batch_id": "b-1", "gives_up_after_ms": 600_000, "commands": made}

        def get(self, path: str, **_: Any) -> dict[str, Any]:
            return {"items": [] if path.endswith("output") else list(self.pages("")), "cursor": "1"}

        def pages(self, _: str, **__: Any) -> Iterator[dict[str, Any]]:
            yield from ({"id": f"c-{node}", "node_id": node, **ends} for body in asked for node in body["nodes"])

    monkeypatch.setattr(ApiClient, "from_environment", lambda _: Plain())
    done = run("run", "inventory.refresh", "--all", "--not-before", "8h")
    assert done.exit_code == 0, done.output
    first, second = (body["not_before_ms"] for body in asked)
    assert 7 * 3_600_000 < second <= first <= 8 * 3_600_000
    assert "nothing is sent before 8h from now" in done.stderr
