"""The doctor over HTTP and by the command line: levels, exit codes, cures, names."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from bettercompute.api.app import create_app
from bettercompute.api.context import ApiContext
from bettercompute.cli.better_compute import app
from bettercompute.cli.client import ApiClient
from bettercompute.protocol.statuses import Reason, refuse


@dataclass(frozen=True)
class Concerned:
    node_id: str
    about: str = ""


@dataclass(frozen=True)
class Found:
    level: int
    sentence: str = "it is so"
    cure: str = ""
    nodes: Sequence[Concerned] = ()


@dataclass(frozen=True)
class Checked:
    name: str
    finding: Found
    took_ms: int = 3


@dataclass
class Doctor:
    checks: list[Checked]
    asked: list[Sequence[str]] = field(default_factory=list)

    async def examine(self, names: Sequence[str] = ()) -> Sequence[Checked]:
        self.asked.append(names)
        if "none" in names:
            raise refuse(Reason.BAD_REQUEST, "no check none; there are a, b")
        return [check for check in self.checks if not names or check.name in names]


FINE = Checked("a", Found(0))
WARNS = Checked("b", Found(1, cure="wait", nodes=(Concerned("n1", "late"), Concerned("n2"))))
FAILS = Checked("c", Found(2, cure="run"))


@pytest.fixture
async def ask(clients: Mapping[str, httpx.AsyncClient], context: ApiContext) -> AsyncIterator[Any]:
    """Ask an API with a doctor of these checks, as a viewer."""
    opened: list[httpx.AsyncClient] = []

    async def asking(doctor: Doctor | None, query: str = "") -> httpx.Response:
        transport = httpx.ASGITransport(app=create_app(replace(context, doctor=doctor)), raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://api.test", headers=clients["viewer"].headers)
        opened.append(client)
        return await client.get(f"/v1/doctor{query}")

    yield asking
    for client in opened:
        await client.aclose()


@pytest.mark.parametrize(
    ("checks", "level", "exit_code"),
    [([], "ok", 0), ([FINE], "ok", 0), ([FINE, WARNS], "warning", 4), ([FAILS, WARNS, FINE], "failed", 1)],
    ids=["none", "fine", "warns", "fails"],
)
async def test_the_worst_of_all_counts(ask: Any, checks: list[Checked], level: str, exit_code: int) -> None:
    found = (await ask(Doctor(checks))).json()
    assert (found["level"], found["exit_code"]) == (level, exit_code)
    assert [check["name"] for check in found["checks"]] == [check.name for check in checks]


async def test_a_check_is_told_with_its_cure_and_its_nodes(ask: Any) -> None:
    doctor = Doctor([FINE, WARNS])
    [check] = (await ask(doctor, "?check=b")).json()["checks"]
    assert check == {
        "name": "b",
        "level": "warning",
        "exit_code": 4,
        "sentence": "it is so",
        "cure": "wait",
        "nodes": [{"node_id": "n1", "about": "late"}, {"node_id": "n2", "about": ""}],
        "took_ms": 3,
    }
    assert doctor.asked == [["b"]]


async def test_what_cannot_be_asked_is_refused(ask: Any, clients: Mapping[str, httpx.AsyncClient]) -> None:
    unknown = await ask(Doctor([FINE]), "?check=none")
    assert (unknown.status_code, unknown.json()["detail"]) == (400, "no check none; there are a, b")
    assert (await ask(None)).status_code == 503
    assert (await clients["nobody"].get("/v1/doctor")).status_code == 401


MANY = [{"node_id": f"n{number}", "about": ""} for number in range(12)]
RED = {"name": "c", "level": "failed", "exit_code": 1, "sentence": "it broke", "cure": "mend it", "nodes": MANY}
GREEN = {"name": "a", "level": "ok", "exit_code": 0, "sentence": "it is well", "cure": "", "nodes": []}


@pytest.mark.parametrize("exit_code", [0, 4, 1])
@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_ends_with_the_code_of_the_worst(
    monkeypatch: pytest.MonkeyPatch, exit_code: int, as_json: bool
) -> None:
    answer = {"level": "x", "exit_code": exit_code, "checks": [GREEN, RED]}
    asked: list[tuple[str, Any]] = []

    class Api:
        def get(self, path: str, **query: Any) -> Any:
            asked.append((path, query))
            return answer

    monkeypatch.setattr(ApiClient, "from_environment", classmethod(lambda *_: Api()))
    done = CliRunner().invoke(app, ["doctor", "a", "c", *(["--json"] if as_json else [])])
    assert (done.exit_code, asked) == (exit_code, [("/v1/doctor", {"check": ["a", "c"]})])
    if as_json:
        assert json.loads(done.stdout) == answer
        return
    assert done.stdout.splitlines() == ["check\tlevel\twhat", "a\tok\tit is well", "c\tfailed\tit broke"]
    assert "cure: mend it" in done.stderr
    assert "n9" in done.stderr
    assert "and 2 more" in done.stderr
    assert "it is well" not in done.stderr
