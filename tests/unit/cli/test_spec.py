"""`better-compute spec`: what it asks of the API, what it prints, and what its exit code says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from bettercompute.cli import spec as command
from bettercompute.cli.client import ApiClient
from bettercompute.cli.spec_diff import differences

SHOWN: dict[str, Any] = {
    "node_id": "n1",
    "generation": 4,
    "spec": {"daemon": {"log_level": "info"}},
    "state": "applied",
    "observed_generation": 4,
    "applied_generation": 4,
    "issued_at": "2026-01-01T00:00:00.000Z",
    "issued_by": "ops",
    "why": "",
    "sections": [],
}
PARKED = {
    **SHOWN,
    "generation": 5,
    "state": "parked",
    "sections": [
        {
            "section": "host",
            "field_number": 5,
            "convergence": "failed",
            "reason": "not-permitted",
            "message": "run bcd as root",
        }
    ],
}
MADE = {"node_id": "n1", "generation": 5, "before_generation": 4, "changed": ["daemon"], "dry_run": False, "spec": {}}


class ScriptedApi:
    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[Any, ...]] = []

    def get(self, path: str, **query: Any) -> Any:
        return self._answer("GET", path, query)

    def put(self, path: str, body: Any) -> Any:
        return self._answer("PUT", path, body)

    def patch(self, path: str, body: Any) -> Any:
        return self._answer("PATCH", path, body)

    def _answer(self, *asked: Any) -> Any:
        self.asked.append(asked)
        return self.answers.pop(0)


def run(monkeypatch: pytest.MonkeyPatch, api: ScriptedApi, *arguments: str, stdin: str | None = None) -> Any:
    monkeypatch.setattr(ApiClient, "from_environment", classmethod(lambda *_: api))
    monkeypatch.setattr(command, "POLL_S", 0.001)
    return CliRunner().invoke(command.app, list(arguments), input=stdin)


def test_set_expects_the_generation_that_it_saw(monkeypatch):
    api = ScriptedApi(SHOWN, MADE)
    done = run(monkeypatch, api, "set", "n1", '{"daemon": {}}', "--why", "because")
    body = {"expected_generation": 4, "why": "because", "dry_run": False, "spec": {"daemon": {}}}
    assert api.asked[1] == ("PUT", "/v1/nodes/n1/spec", body)
    assert done.stdout == 'n1: generation 4 -> 5\n- daemon = {"log_level": "info"}\n'


def test_one_section_from_standard_input(monkeypatch):
    api = ScriptedApi(SHOWN, MADE)
    done = run(monkeypatch, api, "set", "n1", "-", "--section", "host", "--expect", "3", "--json", stdin="null")
    assert api.asked[1][0] == "PATCH"
    assert api.asked[1][2]["sections"] == {"host": None}
    assert api.asked[1][2]["expected_generation"] == 3
    assert json.loads(done.stdout) == MADE


def test_waiting_until_it_is_applied(monkeypatch):
    applied = {**SHOWN, "generation": 5}
    api = ScriptedApi(SHOWN, MADE, {**applied, "state": "pending"}, {**applied, "state": "converging"}, applied)
    done = run(monkeypatch, api, "set", "n1", "{}", "--wait", "30s", "--json")
    assert (done.exit_code, json.loads(done.stdout)["state"]) == (0, "applied")


@pytest.mark.parametrize(
    ("last", "wait", "said"),
    [
        (PARKED, "30s", "n1 cannot apply generation 5: host: run bcd as root"),
        (
            {**SHOWN, "generation": 5, "state": "pending"},
            "1ms",
            "n1 has not applied generation 5 within 1ms, it is pending",
        ),
        ({**SHOWN, "generation": 6}, "30s", "generation 5 of n1 was replaced by 6 meanwhile"),
    ],
    ids=["parked", "late", "replaced"],
)
def test_what_was_not_applied_is_a_failure(monkeypatch, last, wait, said):
    done = run(monkeypatch, ScriptedApi(SHOWN, MADE, *[last] * 99), "set", "n1", "{}", "--wait", wait)
    assert done.exit_code == 1
    assert said in done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "the spec: Expecting property name"),
        ("[]", "the spec: a JSON object is needed, this is list"),
        ("@/nowhere", "the spec: [Errno 2] No such file"),
    ],
    ids=["json", "list", "file"],
)
def test_what_is_no_spec(monkeypatch, text, said):
    done = run(monkeypatch, ScriptedApi(), "set", "n1", text)
    assert (done.exit_code, said in done.stderr) == (2, True)


def test_diff_of_two_generations_and_of_one_that_is_not_set(monkeypatch):
    older = {**SHOWN, "generation": 2, "spec": {}}
    api = ScriptedApi(SHOWN, {"items": [{"generation": 2}], "next": None}, older)
    done = run(monkeypatch, api, "diff", "n1")
    assert done.stdout == 'generation 2 -> generation 4\n+ daemon = {"log_level": "info"}\n'
    api = ScriptedApi(SHOWN, {**MADE, "spec": {"daemon": {"log_level": "debug"}}})
    done = run(monkeypatch, api, "diff", "n1", "--against", "{}", "--json")
    assert api.asked[1][2] == {"spec": {}, "dry_run": True}
    change = {"path": "daemon.log_level", "before": "info", "after": "debug"}
    assert json.loads(done.stdout) == {"node_id": "n1", "from": 4, "to": None, "changes": [change]}
    assert run(monkeypatch, ScriptedApi(), "diff", "n1", "--against", "{}", "--to", "2").exit_code == 2


def test_the_first_generation_differs_from_nothing(monkeypatch):
    done = run(monkeypatch, ScriptedApi(SHOWN, {"items": [], "next": None}), "diff", "n1")
    assert done.stdout.splitlines()[0] == "nothing -> generation 4"


def test_get_and_history(monkeypatch):
    done = run(monkeypatch, ScriptedApi(PARKED), "get", "n1")
    assert "state       parked" in done.stdout
    assert "host       failed  not-permitted run bcd as root" in done.stdout
    item = {"generation": 4, "issued_at": "t", "issued_by": "ops", "changed": ["daemon"], "why": "w"}
    api = ScriptedApi({"items": [item], "next": 4}, {"items": [{**item, "generation": 3}], "next": None})
    done = run(monkeypatch, api, "history", "n1")
    assert done.stdout.splitlines()[1:] == ["4\tt\tops\tdaemon\tw", "3\tt\tops\tdaemon\tw"]
    assert api.asked[1][2] == {"before": 4}


def test_differences_name_the_place() -> None:
    before = {"a": [1, {"x": 1}], "b": True, "c": {}}
    after = {"a": [1, {"x": 2}, 3], "b": 1, "d": None}
    assert [change.as_json() for change in differences(before, after)] == [
        {"path": "a[1].x", "before": 1, "after": 2},
        {"path": "a[2]", "after": 3},
        {"path": "b", "before": True, "after": 1},
        {"path": "c", "before": {}},
        {"path": "d", "after": None},
    ]
