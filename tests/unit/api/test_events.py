"""Events as pages and as a stream that resumes from any position."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping

import httpx

from bettercompute.api import events
from bettercompute.api.context import ApiContext
from bettercompute.store import outbox
from bettercompute.store.outbox import NewEvent

Clients = Mapping[str, httpx.AsyncClient]


def event(name: str, node_id: str | None = "n1") -> NewEvent:
    return NewEvent(id=name, type="node.joined", node_id=node_id, payload={"name": name})


async def publish(context: ApiContext, *published: NewEvent) -> None:
    async with context.database.transaction() as transaction:
        await outbox.publish(transaction, published)
    await outbox.assign_positions(context.database)


def names(text: str) -> list[str]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line)["id"] for line in lines]


async def opened(context: ApiContext, *, after: int) -> AsyncGenerator[str, None]:
    """A stream whose first word, where it begins, has been read."""
    stream = events.follow(context, after=after)
    assert await asyncio.wait_for(anext(stream), 10) == f": {after}\nid: {after}\n\n"
    return stream


async def test_pages_go_on_by_position(clients: Clients, context: ApiContext) -> None:
    await publish(context, event("a"), event("b", "n2"), event("c"))
    first = (await clients["viewer"].get("/v1/events", params={"limit": 2})).json()
    assert ([item["id"] for item in first["items"]], first["next"], first["last_position"]) == (["a", "b"], 2, 3)
    rest = (await clients["viewer"].get("/v1/events", params={"after": 2})).json()
    assert ([item["id"] for item in rest["items"]], rest["next"]) == (["c"], None)
    of_node = (await clients["viewer"].get("/v1/events", params={"node_id": "n2"})).json()
    assert [item["id"] for item in of_node["items"]] == ["b"]
    assert (await clients["nobody"].get("/v1/events")).status_code == 401
    assert (await clients["viewer"].get("/v1/events", params={"after": -1})).status_code == 400


async def test_what_commits_late_is_read_by_who_has_read_the_later_one(context: ApiContext) -> None:
    stream = await opened(context, after=0)
    async with context.database.transaction() as early:
        await outbox.publish(early, [event("0-drawn-first")])
        await publish(context, event("1-committed-first"))
        assert names(await asyncio.wait_for(anext(stream), 10)) == ["1-committed-first"]
    await stream.aclose()
    await outbox.assign_positions(context.database)
    resumed = await opened(context, after=1)
    assert names(await asyncio.wait_for(anext(resumed), 10)) == ["0-drawn-first"]
    waiting = asyncio.create_task(anext(resumed))
    await publish(context, event("2-while-waiting"))
    assert names(await asyncio.wait_for(waiting, 10)) == ["2-while-waiting"]
    await resumed.aclose()
    assert context.finished.subscribers == 0


async def test_what_retention_removed_is_a_gap_that_is_told(context: ApiContext) -> None:
    await publish(context, event("a"), event("b"), event("c"))
    await context.database.query("DELETE FROM outbox WHERE position < 3")
    stream = events.follow(context, after=0)
    gap = await asyncio.wait_for(anext(stream), 10)
    assert gap == 'id: 2\nevent: gap\ndata: {"after":0,"first_position":3}\n\n'
    assert names(await asyncio.wait_for(anext(stream), 10)) == ["c"]
    await stream.aclose()


async def test_a_reader_who_reads_on_late_is_told_why_nothing_follows(context: ApiContext, monkeypatch) -> None:
    monkeypatch.setattr(events, "SEND_S", 0.01)
    await publish(context, event("a"))
    sent = []

    async def send(message) -> None:
        sent.append(message)
        if b"joined" in message.get("body", b""):
            await asyncio.Event().wait()

    await asyncio.wait_for(events.EventStream(events.follow(context, after=0)).stream_response(send), 10)
    assert [message.get("more_body") for message in sent] == [None, True, True, False]
    assert sent[-1]["body"].startswith(b'event: dropped\ndata: {"reason": "slow-consumer", ')
    assert context.finished.subscribers == 0


async def test_a_reader_who_never_reads_costs_no_more_than_its_time(context: ApiContext, monkeypatch) -> None:
    monkeypatch.setattr(events, "SEND_S", 0.01)
    monkeypatch.setattr(events, "END_S", 0.01)
    sent = []

    async def send(message) -> None:
        sent.append(message)
        if "body" in message:
            await asyncio.Event().wait()

    await asyncio.wait_for(events.EventStream(events.follow(context, after=0)).stream_response(send), 10)
    assert [message.get("more_body") for message in sent] == [None, True, False]
    assert context.finished.subscribers == 0


async def test_subscribers_are_bounded(clients: Clients, context: ApiContext) -> None:
    context.finished.subscribers = events.SUBSCRIBERS_MAX
    answer = await clients["viewer"].get("/v1/events", headers={"accept": "text/event-stream"})
    assert (answer.status_code, answer.json()["reason"]) == (503, "overloaded")


async def test_what_nodes_told_of_themselves_is_shown_newest_first(
    clients: Clients, context: ApiContext, two_nodes: object
) -> None:
    far, widest = "253402300799999", "x" * 256
    for journal_id, seqs in (("j1", (1, 2)), ("j2", (1, 4)), (widest, (2**63 - 1,))):
        for seq in seqs:
            await context.database.query(
                "INSERT INTO node_events (node_id, journal_id, seq, event_id, type, occurred_at, payload)"
                f" VALUES ('n1', $1, $2, $3, 'daemon.started', at_ms({far}), $4)",
                *(journal_id, seq, f"{journal_id[:8]}-{seq}", b'{"n": 1' + b"0" * 400 + b"}" if seq == 4 else b""),
            )
    await context.database.query("INSERT INTO node_event_gaps VALUES ('n1', 'j2', 2, 3)")
    seen, before = [], None
    while True:
        query = {"limit": 2} | ({"before": before} if before else {})
        page = (await clients["viewer"].get("/v1/nodes/n1/events", params=query)).json()
        seen += [item["id"] for item in page["items"]]
        before = page["next"]
        if before is None:
            break
    assert seen == [f"{widest[:8]}-{2**63 - 1}", "j2-4", "j2-1", "j1-2", "j1-1"]
    assert [(gap["journal_id"], gap["first_seq"], gap["last_seq"]) for gap in page["gaps"]] == [("j2", 2, 3)]
    [item] = page["items"]
    assert (item["at"], item["recovered"], item["payload"]) == ("9999-12-31T23:59:59.999Z", False, {})
    for place in ("", "x", "1", f"{2**63}:j", "-1:j", "1:\0", "1:" + "j" * 280):
        answer = await clients["viewer"].get("/v1/nodes/n1/events", params={"before": place})
        assert answer.status_code == 400, place
    assert (await clients["viewer"].get("/v1/nodes/n2/events")).json() == {"items": [], "gaps": [], "next": None}
    assert (await clients["viewer"].get("/v1/nodes/n3/events")).status_code == 404
    assert (await clients["nobody"].get("/v1/nodes/n1/events")).status_code == 401
