"""Awaiting a run: what is told, what is read for it, and steps added to a batch."""

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from bettercompute.api import batches
from bettercompute.api.context import ApiContext
from bettercompute.store import commands

Clients = Mapping[str, httpx.AsyncClient]
RUN = {"kind": "inventory.refresh", "all": True}


async def end(context: ApiContext, command_id: str) -> None:
    async with context.database.transaction() as transaction:
        await commands.request_cancel(
            transaction,
            command_ids=[command_id],
            requested_by="test",
            draw_id=context.world.ids.uuid7,
            event_type="command.finished",
        )


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each read for a waiter was of."""
    counted: list[int] = []

    def count(read: Any) -> Any:
        async def counting(*arguments: Any, **named: Any) -> Any:
            rows = await read(*arguments, **named)
            counted.append(len(rows))
            return rows

        return counting

    for name in ("states", "states_of_batch"):
        monkeypatch.setattr(commands, name, count(getattr(commands, name)))
    return counted


async def test_a_waiter_is_told_only_what_has_ended_since(clients: Clients, context: ApiContext, two_nodes) -> None:
    made = (await clients["operator"].post("/v1/commands", json=RUN)).json()
    path = f"/v1/batches/{made['batch_id']}"
    whole = (await clients["viewer"].get(path)).json()
    assert (whole["open"], [item["state"] for item in whole["items"]]) == (2, ["pending", "pending"])
    waiting = asyncio.create_task(
        clients["viewer"].get(path, params={"wait_ms": 20_000, "since": whole["cursor"], "size": 2})
    )
    await end(context, made["commands"][1]["id"])
    news = (await asyncio.wait_for(waiting, 10)).json()
    assert (news["open"], [(item["node_id"], item["state"]) for item in news["items"]]) == (1, [("n2", "cancelled")])
    again = (await clients["viewer"].get(path, params={"since": news["cursor"]})).json()
    assert (again["items"], again["cursor"]) == ([], news["cursor"])
    # As after a restart of the API: another process does not know the place, and tells the whole.
    elsewhere = (await clients["viewer"].get(path, params={"since": f"{'0' * 36}.1"})).json()
    assert [item["state"] for item in elsewhere["items"]] == ["pending", "cancelled"]
    assert (await clients["viewer"].get("/v1/batches/none")).status_code == 404


async def test_what_waiters_read_grows_with_what_ends(
    clients: Clients, context: ApiContext, two_nodes, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "POLL_MS_MIN", 3_600_000)
    made = (await clients["operator"].post("/v1/commands", json=RUN)).json()
    others = (await clients["operator"].post("/v1/commands", json=RUN)).json()
    path = f"/v1/batches/{made['batch_id']}"
    cursor = (await clients["viewer"].get(path)).json()["cursor"]
    waiting = [
        asyncio.create_task(clients["viewer"].get(path, params={"wait_ms": 20_000, "since": cursor})) for _ in range(5)
    ]
    for command in others["commands"]:
        await end(context, command["id"])
    await end(context, made["commands"][0]["id"])
    for answer in await asyncio.wait_for(asyncio.gather(*waiting), 20):
        assert [item["node_id"] for item in answer.json()["items"]] == ["n1"]
    assert reads == [2, 1], "the batch once, then the one command that ended, for all five"


async def test_a_run_proceeds_step_by_step_in_one_batch(clients: Clients, context: ApiContext, two_nodes) -> None:
    first = (await clients["operator"].post("/v1/commands", json={"kind": "inventory.refresh", "nodes": ["n1"]})).json()
    path = f"/v1/batches/{first['batch_id']}"
    cursor = (await clients["viewer"].get(path, params={"size": 1})).json()["cursor"]
    step = {"kind": "inventory.refresh", "nodes": ["n2"], "batch_id": first["batch_id"]}
    second = (await clients["operator"].post("/v1/commands", json=step)).json()
    assert second["batch_id"] == first["batch_id"]
    await end(context, second["commands"][0]["id"])
    news = (await clients["viewer"].get(path, params={"since": cursor, "size": 2, "wait_ms": 10_000})).json()
    assert (news["open"], [item["node_id"] for item in news["items"]]) == (1, ["n2"])
    foreign = await clients["admin"].post("/v1/commands", json=step)
    assert (foreign.status_code, "only its maker adds to it" in foreign.json()["detail"]) == (409, True)


async def test_a_preview_asks_nobody(clients: Clients, context: ApiContext, two_nodes) -> None:
    labelled = await clients["operator"].patch("/v1/nodes/n2/labels", json={"set": {"gpu": "h100"}})
    assert labelled.json() == {"node_id": "n2", "labels": [{"key": "gpu", "value": "h100", "source": "operator"}]}
    wanted = {"kind": "inventory.refresh", "selector": "gpu=h100"}
    answer = (await clients["operator"].post("/v1/commands/preview", json=wanted)).json()
    assert answer == {
        "kind": "inventory.refresh",
        "nodes": [{"node_id": "n2", "state": "joined"}],
        "approvals_required": 0,
    }
    assert (await clients["viewer"].get("/v1/commands")).json()["items"] == []
    made = (await clients["operator"].post("/v1/commands", json=wanted)).json()
    assert [command["node_id"] for command in made["commands"]] == ["n2"]
    await clients["operator"].post("/v1/commands", json={"kind": "inventory.refresh", "nodes": ["n1"]})
    listed = (await clients["viewer"].get("/v1/commands", params={"selector": "gpu"})).json()["items"]
    assert [command["node_id"] for command in listed] == ["n2"]
    assert (await clients["viewer"].get("/v1/commands", params={"selector": "gpu", "node_id": "n1"})).status_code == 400
