"""An operator's word on a node, over HTTP and by the command line: who may say it, what it ends, what is recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from bettercompute.api.context import ApiContext
from bettercompute.cli.better_compute import app
from bettercompute.cli.client import ApiClient
from bettercompute.delivery.waiting import Wait, decide
from bettercompute.protocol import messages
from bettercompute.store import audit, certificates, nodes, standing, waiting
from bettercompute.store.database import Database
from bettercompute.store.sessions import SessionKey
from tests.contract.gateway import seed

Clients = Mapping[str, httpx.AsyncClient]


async def states(database: Database) -> dict[str, tuple[int, str]]:
    rows = await database.query("SELECT id, state, reason FROM commands")
    return {row["id"]: (row["state"], row["reason"]) for row in rows}


async def published(database: Database) -> list[str]:
    return [row["type"] for row in await database.query("SELECT type FROM outbox ORDER BY id")]


async def give_work(database: Database, node_id: str) -> None:
    """Queue a command of each state, and a certificate."""
    await seed.add_certificate(database, node_id, serial="ab")
    key = SessionKey(node_id=node_id, session_id="s", epoch=1)
    for state, name in enumerate(("pending", "dispatched", "acked", "running"), start=1):
        await seed.add_command(database, node_id, name, state=state, key=None if state == 1 else key, attempt=1)
    await seed.add_command(database, "n2", "another", state=1)


async def test_a_lock_is_shown_until_it_ends_and_audited(clients: Clients, context: ApiContext, two_nodes) -> None:
    path = "/v1/nodes/n1/lock"
    assert (await clients["viewer"].post(path, json={})).status_code == 403
    locked = (await clients["operator"].post(path, json={"ttl_ms": 3_600_000, "reason": "disk swap"})).json()
    assert {**locked["lock"], "since": "", "until": ""} == {
        "by": "a-operator", "reason": "disk swap", "since": "", "until": ""
    }  # fmt: skip
    assert locked["lock"]["since"] < locked["lock"]["until"]
    assert (await clients["viewer"].get("/v1/nodes/n1")).json()["lock"] == locked["lock"]
    assert (await clients["viewer"].get("/v1/nodes/n2")).json()["lock"] is None
    # A second lock replaces the first.
    assert (await clients["operator"].post(path, json={})).json()["lock"]["until"] is None
    unlocked = (await clients["operator"].delete(path)).json()
    assert unlocked["lock"] is None
    assert (await clients["operator"].delete(path)).json() == unlocked
    acts = await audit.list_page(context.database, page_size=10)
    assert [(act.actor, act.action, act.target, act.why) for act in acts] == [
        ("a-operator", "node.unlock", "node/n1", ""),
        ("a-operator", "node.lock", "node/n1", ""),
        ("a-operator", "node.lock", "node/n1", "disk swap"),
    ]
    assert await published(context.database) == ["node.locked", "node.locked", "node.unlocked"]


async def test_a_lock_that_has_ended_is_not_shown(clients: Clients, context: ApiContext, two_nodes) -> None:
    await clients["operator"].post("/v1/nodes/n1/lock", json={"ttl_ms": 1})
    await context.database.query("UPDATE nodes SET locked_until = compute_now() WHERE node_id = 'n1'")
    assert (await clients["viewer"].get("/v1/nodes/n1")).json()["lock"] is None
    await clients["operator"].delete("/v1/nodes/n1/lock")
    assert await published(context.database) == ["node.locked"], "nothing was undone"


@pytest.mark.parametrize("body", [{"ttl_ms": 0}, {"ttl_ms": 10**12}, {"reason": "x" * 1_001}, {"reason": "\x00"}])
async def test_bad_locks_are_refused(clients: Clients, two_nodes, body: dict[str, Any]) -> None:
    assert (await clients["operator"].post("/v1/nodes/n1/lock", json=body)).status_code == 422


async def test_what_waits_for_a_locked_node_says_so(clients: Clients, context: ApiContext, two_nodes) -> None:
    await seed.add_command(context.database, "n1", "c1")
    await clients["operator"].post("/v1/nodes/n1/lock", json={"ttl_ms": 60_000})
    facts = await waiting.facts(context.database, command_id="c1")
    assert facts is not None
    assert [reason.wait for reason in decide(facts)] == [Wait.NODE_LOCKED, Wait.NO_SESSION]
    assert (await states(context.database))["c1"] == (1, "")


async def test_revoking_ends_certificates_and_what_was_not_sent(
    clients: Clients, context: ApiContext, two_nodes
) -> None:
    await give_work(context.database, "n1")
    path = "/v1/nodes/n1/revoke"
    assert (await clients["operator"].post(path, json={})).status_code == 403
    answer = (await clients["admin"].post(path, json={"reason": "stolen"})).json()
    assert answer == {"node_id": "n1", "revoked_serials": ["ab"], "commands_cancelled": 1, "commands_failed": 0}
    assert await states(context.database) == {
        "pending": (7, "node-revoked"),
        # The machine may join again with its journal, and tell.
        "dispatched": (2, ""), "acked": (3, ""), "running": (4, ""),
        "another": (1, ""),
    }  # fmt: skip
    node = (await clients["viewer"].get("/v1/nodes/n1")).json()
    assert (node["revoked"]["by"], node["revoked"]["reason"]) == ("a-admin", "stolen")
    [shown] = (await clients["viewer"].get("/v1/nodes/n1/certificates")).json()["items"]
    assert (shown["serial"], shown["state"], shown["reason"]) == ("ab", "revoked", "operator")
    [row] = await certificates.revoked_since(context.database, since_ms=0)
    notice = messages.RevocationNotice.FromString(row.revocation_notice or b"")
    assert (row.revocation_reason, notice.message) == ("operator", "node n1 was revoked by a-admin: stolen")
    assert await published(context.database) == ["command.finished", "security.node.revoked"]
    [act] = await audit.list_page(context.database, page_size=10)
    assert (act.action, act.why, act.details["revoked_serials"]) == ("node.revoke", "stolen", ["ab"])
    # Again: nothing is left to revoke.
    assert (await clients["admin"].post(path, json={})).json()["revoked_serials"] == []


async def test_a_join_ends_a_revocation_but_no_lock(clients: Clients, context: ApiContext, two_nodes) -> None:
    await clients["admin"].post("/v1/nodes/n1/revoke", json={})
    await clients["operator"].post("/v1/nodes/n1/lock", json={})
    async with context.database.transaction() as transaction:
        generation = await nodes.insert_joined(
            transaction,
            nodes.JoinedNode(node_id="n1", site="default", role="node", tenant_controlled=False, attestor="join-token"),
        )
    node = (await clients["viewer"].get("/v1/nodes/n1")).json()
    assert (generation, node["revoked"], node["lock"]["by"]) == (2, None, "a-operator")


async def test_forgetting_removes_the_node_and_ends_its_commands(
    clients: Clients, context: ApiContext, two_nodes
) -> None:
    await give_work(context.database, "n1")
    await clients["operator"].patch("/v1/nodes/n1/labels", json={"set": {"rack": "7"}})
    assert (await clients["operator"].delete("/v1/nodes/n1")).status_code == 403
    answer = (await clients["admin"].delete("/v1/nodes/n1", params={"reason": "scrapped"})).json()
    assert answer == {"node_id": "n1", "revoked_serials": ["ab"], "commands_cancelled": 1, "commands_failed": 3}
    assert await states(context.database) == {
        "pending": (7, "node-forgotten"),
        **dict.fromkeys(("dispatched", "acked", "running"), (6, "node-forgotten")),
        "another": (1, ""),
    }
    assert (await clients["viewer"].get("/v1/nodes/n1")).status_code == 404
    assert (await clients["admin"].delete("/v1/nodes/n1")).status_code == 404
    assert [row["node_id"] for row in await context.database.query("SELECT node_id FROM node_sessions")] == ["n2"]
    # Its certificate stays revoked: nobody comes back by it under a node id that is given anew.
    [row] = await certificates.revoked_since(context.database, since_ms=0)
    assert (row.serial, row.revocation_reason) == ("ab", "forgotten")
    assert await published(context.database) == ["command.finished"] * 4 + ["node.forgotten"]
    [act] = await audit.list_page(context.database, page_size=10, action="node.forget")
    assert (act.target, act.why, act.details["commands_failed"]) == ("node/n1", "scrapped", 3)


async def test_forgetting_ends_more_commands_than_one_statement_takes(
    clients: Clients, context: ApiContext, two_nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing, "END_BATCH", 2)
    for number in range(5):
        await seed.add_command(context.database, "n1", f"c{number}")
    assert (await clients["admin"].delete("/v1/nodes/n1")).json()["commands_cancelled"] == 5


async def test_a_node_that_has_a_session_is_not_forgotten(clients: Clients, context: ApiContext, two_nodes) -> None:
    await seed.add_lease(context.database)
    await seed.connect_node(context.database, SessionKey(node_id="n1", session_id="s", epoch=1))
    refused = await clients["admin"].delete("/v1/nodes/n1")
    assert refused.status_code == 409
    assert "has a session on gw-00000001: stop its daemon, or `nodes revoke n1`" in refused.json()["detail"]
    assert (await clients["viewer"].get("/v1/nodes/n1")).status_code == 200


@pytest.mark.parametrize(
    ("state", "sql"),
    [
        ("unused", "issued_at = issued_at"),
        ("in-use", "first_used_at = compute_now()"),
        ("superseded", "first_used_at = compute_now(), superseded_at = compute_now()"),
        ("expired", "not_before = '2001-01-01', not_after = '2001-01-02'"),
        ("revoked", "superseded_at = compute_now(), revoked_at = compute_now(), revocation_reason = 'x'"),
    ],
)
async def test_what_became_of_a_certificate(
    clients: Clients, context: ApiContext, two_nodes, state: str, sql: str
) -> None:
    await seed.add_certificate(context.database, "n1", serial="ab")
    await context.database.query(f"UPDATE node_certs SET {sql}")
    answer = (await clients["viewer"].get("/v1/nodes/n1/certificates")).json()
    assert [item["state"] for item in answer["items"]] == [state]
    assert (await clients["viewer"].get("/v1/nodes/n3/certificates")).status_code == 404


async def test_a_token_for_some_nodes_acts_on_those(clients: Clients, context: ApiContext, two_nodes) -> None:
    await clients["operator"].patch("/v1/nodes/n1/labels", json={"set": {"rack": "7"}})
    await context.database.query("""UPDATE api_tokens SET label_scope = '{"rack": "7"}' WHERE token_id = 'admin'""")
    admin = clients["admin"]
    assert (await admin.get("/v1/nodes/n1/certificates")).status_code == 200
    assert (await admin.post("/v1/nodes/n1/lock", json={})).status_code == 200
    assert (await admin.delete("/v1/nodes/n1/lock")).status_code == 200
    assert (await admin.post("/v1/nodes/n1/revoke", json={})).status_code == 200
    for method, path in (
        ("GET", "/v1/nodes/n2/certificates"),
        ("POST", "/v1/nodes/n2/lock"),
        ("DELETE", "/v1/nodes/n2/lock"),
        ("POST", "/v1/nodes/n2/revoke"),
        ("DELETE", "/v1/nodes/n2"),
    ):
        refused = await admin.request(method, path, json={} if method == "POST" else None)
        assert (refused.status_code, refused.json()["reason"]) == (403, "access-denied"), path
    assert (await admin.delete("/v1/nodes/n1")).status_code == 200
    assert (await admin.get("/v1/doctor")).status_code == 403


class Answers:
    """An API that answers with what a test gives it, and keeps what it was asked."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer
        self.asked: list[tuple[Any, ...]] = []

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(("POST", path, body))
        return self.answer

    def delete(self, path: str, **query: str) -> dict[str, Any]:
        self.asked.append(("DELETE", path, query))
        return self.answer


FREE = {"node_id": "n1", "lock": None, "revoked": None, "quarantined": None}
LOCK = {"by": "ops", "reason": "disk", "since": "a", "until": "b"}
LOCKED = {**FREE, "lock": LOCK}
ENDED = {"node_id": "n1", "revoked_serials": ["ab"], "commands_cancelled": 2, "commands_failed": 0}


@pytest.mark.parametrize(
    ("arguments", "answer", "asked", "says"),
    [
        (["lock", "n1", "--ttl", "2h", "--reason", "disk"], LOCKED,
         ("POST", "/v1/nodes/n1/lock", {"ttl_ms": 7_200_000, "reason": "disk"}), "n1: locked until b, by ops: disk"),
        (["lock", "n1"], {**FREE, "lock": {**LOCK, "until": None, "reason": ""}},
         ("POST", "/v1/nodes/n1/lock", {"ttl_ms": None, "reason": ""}), "n1: locked until it is unlocked, by ops"),
        (["unlock", "n1"], FREE, ("DELETE", "/v1/nodes/n1/lock", {}), "n1: nothing bars it"),
        (["revoke", "n1", "--reason", "stolen"], ENDED, ("POST", "/v1/nodes/n1/revoke", {"reason": "stolen"}),
         "n1: revoked; 1 certificates revoked, 2 commands cancelled"),
        (["forget", "n1"], {**ENDED, "revoked_serials": [], "commands_cancelled": 0},
         ("DELETE", "/v1/nodes/n1", {"reason": ""}), "n1: forgotten"),
    ],
    ids=["lock", "lock-for-good", "unlock", "revoke", "forget"],
)  # fmt: skip
@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    answer: dict[str, Any],
    asked: tuple[Any, ...],
    says: str,
    as_json: bool,
) -> None:
    api = Answers(answer)
    monkeypatch.setattr(ApiClient, "from_environment", classmethod(lambda *_: api))
    done = CliRunner().invoke(app, ["nodes", *arguments, *(["--json"] if as_json else [])])
    assert (done.exit_code, api.asked) == (0, [asked]), done.output
    if as_json:
        assert json.loads(done.stdout) == answer
    else:
        assert done.stdout.strip() == says
