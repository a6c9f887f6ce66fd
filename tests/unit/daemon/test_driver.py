"""The driver: what is durable before what is sent, a journal without room, events in batches, floods held back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from bettercompute.daemon import driver as driver_module
from bettercompute.daemon import group_commit
from bettercompute.daemon.driver import Driver
from bettercompute.daemon.group_commit import Journal
from bettercompute.delivery.commands import CommandState
from bettercompute.pki import certificates
from bettercompute.pki.trust import CommandRoot
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import pack_payload
from bettercompute.session import daemon_side, effects
from bettercompute.session.authority import ANYBODY, Authority
from bettercompute.session.daemon_state import Advertised, DaemonFacts, DaemonSession, JournalFacts
from bettercompute.session.effects import DaemonEffect
from bettercompute.session.inputs import (
    DaemonTick,
    Dialed,
    HandlerFinished,
    JournalRoom,
    ServerFrameReceived,
    TrustHeld,
)
from bettercompute.system import system_world
from tests.unit.daemon.journal_samples import SMALL

WORLD = system_world()


@dataclass
class Outside:
    """The shell, as a list of what it was asked for."""

    obeyed: list[DaemonEffect] = field(default_factory=list)
    frames: asyncio.Queue[messages.AgentFrame] = field(default_factory=asyncio.Queue)

    async def obey(self, effect: DaemonEffect) -> None:
        self.obeyed.append(effect)

    def send(self, frame: messages.AgentFrame) -> None:
        self.frames.put_nowait(frame)

    def tick(self) -> DaemonTick:
        return DaemonTick(
            wall_ms=WORLD.clock.now_ms(), load=messages.NodeLoad(), last_heard_ms=WORLD.clock.monotonic_ms()
        )

    async def frame(self, case: str) -> messages.AgentFrame:
        async with asyncio.timeout(30):
            while (frame := await self.frames.get()).WhichOneof("frame") != case:
                pass
        return frame


def session(journal: Journal) -> tuple[DaemonSession, tuple[DaemonEffect, ...]]:
    meta = journal.contents.meta
    facts = DaemonFacts(
        node_id="n1",
        role=messages.AGENT_ROLE_NODE,
        boot_id="b1",
        process_id="p1",
        daemon_version="0.1.0",
        proto_min=1,
        proto_max=1,
        trust_domain="bc.local",
    )
    held = JournalFacts(
        journal_id=meta.journal_id,
        entries={entry.command_id: entry for entry in journal.contents.commands},
        cancelled={},
        last_epoch=0,
        last_event_seq=meta.last_event_seq,
        acked_event_seq=0,
        hello_nonce=b"",
        previous_hello_nonce=b"",
        mark_ms=0,
        confirmed_ms=None,
    )
    return daemon_side.start(facts, Advertised(), held, now_ms=WORLD.clock.monotonic_ms())


@dataclass
class Bench:
    journal: Journal
    driver: Driver
    outside: Outside
    task: asyncio.Task[None]

    async def welcome(self, *, trust: messages.SignedTrustBundle | None = None) -> messages.Hello:
        self.driver.give(Dialed(fresh_nonce=b"n" * 16))
        hello = (await self.outside.frame("hello")).hello
        welcome = messages.Welcome(
            session_id="s1",
            epoch=1,
            protocol_version=1,
            heartbeat_interval_ms=60_000,
            lane_credits=[messages.LaneCredits(lane=messages.LANE_CONTROL, credits=8)],
            server_time_ms=WORLD.clock.now_ms(),
            trust=trust,
        )
        self.frame(welcome=welcome)
        return hello

    def frame(self, **frame: object) -> None:
        given = messages.ServerFrame(**frame)  # type: ignore[arg-type]
        self.driver.give(ServerFrameReceived(given, WORLD.clock.now_ms()))

    def command(self, command_id: str, *, size_bytes: int = 0) -> None:
        body = messages.CommandBody(
            command_id=command_id,
            node_id="n1",
            kind="inventory.refresh",
            lane=messages.LANE_CONTROL,
            timeout_ms=1_000,
            not_after_ms=WORLD.clock.now_ms() + 60_000,
            trust_domain="bc.local",
            issued_by="x" * size_bytes,
        )
        body.payload.CopyFrom(pack_payload(messages.InventoryRefreshPayload()))
        self.frame(command=messages.Command(body=body.SerializeToString(), attempt=1))

    async def update(self) -> messages.CommandUpdate:
        return (await self.outside.frame("update")).update


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    journal = await Journal.open(tmp_path / "state", world=WORLD, limits=SMALL)
    outside = Outside()
    state, first = session(journal)
    driver = Driver(state, world=WORLD, journal=journal, shell=outside)
    task = asyncio.create_task(driver.run(first))
    yield Bench(journal, driver, outside, task)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await journal.close()


async def test_everything_is_durable_before_it_is_sent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    write, send = bench.journal.write, bench.outside.send

    async def noted_write(*writes: object) -> None:
        await write(*writes)  # type: ignore[arg-type]
        order.extend(type(item).__name__ for item in writes)

    def noted_send(frame: messages.AgentFrame) -> None:
        order.append(frame.WhichOneof("frame") or "")
        send(frame)

    monkeypatch.setattr(bench.journal, "write", noted_write)
    monkeypatch.setattr(bench.outside, "send", noted_send)
    await bench.welcome()
    bench.command("c1")
    await bench.update()
    bench.driver.give(HandlerFinished(command_id="c1", state=CommandState.SUCCEEDED, result=b"r"))
    update = await bench.update()
    assert update.state == messages.COMMAND_STATE_SUCCEEDED
    assert order.index("StoreNonces") < order.index("hello")
    assert order.index("AcceptCommand") < order.index("update")
    assert order.index("FinishCommand") < len(order) - 1 - order[::-1].index("update")
    assert [type(effect) for effect in bench.outside.obeyed].count(effects.StartHandler) == 1


async def test_a_journal_without_room_makes_the_command_busy_and_nothing_starts(bench: Bench) -> None:
    await bench.welcome()
    bench.command("first", size_bytes=900_000)
    assert (await bench.update()).state == messages.COMMAND_STATE_RUNNING
    bench.command("second", size_bytes=900_000)
    update = await bench.update()
    assert (update.command_id, update.reject_reason) == ("second", messages.COMMAND_REJECT_REASON_BUSY)
    started = [effect for effect in bench.outside.obeyed if isinstance(effect, effects.StartHandler)]
    assert [effect.command_id for effect in started] == ["first"]
    assert set(bench.driver.state.entries) == {"first"}


async def test_what_comes_behind_a_trust_bundle_is_judged_by_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    root = certificates.make_command_root(serial=bytes(16), now_ms=WORLD.clock.now_ms())
    signed_only = Authority(command_roots=(CommandRoot(certificate=root.certificate),))
    obey = bench.outside.obey

    async def taking(effect: DaemonEffect) -> None:
        await obey(effect)
        if isinstance(effect, effects.ApplyTrust):
            # Verifying and keeping it takes its time, in which the gateway goes on sending.
            bench.command("c1")
            bench.driver.give_first(TrustHeld(2, signed_only))

    monkeypatch.setattr(bench.outside, "obey", taking)
    await bench.welcome(trust=messages.SignedTrustBundle(body=b"bundle"))
    update = await bench.update()
    assert (update.command_id, update.reject_reason) == ("c1", messages.COMMAND_REJECT_REASON_BAD_SIGNATURE)


async def test_events_are_journaled_numbered_and_sent_when_there_is_a_session(bench: Bench) -> None:
    for number in range(3):
        bench.driver.record_event("test.happened", f'{{"number": {number}}}')
    hello = await bench.welcome()
    assert hello.last_event_seq == 3
    batch = (await bench.outside.frame("events")).events
    assert [event.seq for event in batch.events] == [1, 2, 3]
    assert len({event.event_id for event in batch.events}) == 3
    bench.driver.record_event("test.happened")
    batch = (await bench.outside.frame("events")).events
    assert [(event.seq, event.type) for event in batch.events] == [(4, "test.happened")]
    bench.frame(ack=messages.Ack(journal_id=hello.journal_id, acked_event_seq=4))
    bench.driver.record_event("test.last")
    await bench.outside.frame("events")
    assert [entry.seq for entry in await bench.journal.events_after(0, limit=9, limit_bytes=9_999)] == [5]


async def test_an_event_without_room_is_dropped_and_counted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "RECOVERY_INTERVAL_S", 0.02)
    await bench.welcome()
    bench.driver.record_event("test.large", "x" * SMALL.max_bytes)
    bench.driver.record_event("test.small")
    while bench.driver.dropped_events < 2:
        await bench.journal.update("")
    # As the journal's health tells it, once it takes entries again: told with the next event that there is room for.
    bench.driver.give(JournalRoom(full=False))
    while not bench.journal.health.accepting:
        await bench.journal.update("")
    bench.driver.give(JournalRoom(full=False))
    [event] = (await bench.outside.frame("events")).events.events
    assert (event.type, json.loads(event.payload_json)) == (driver_module.EVENTS_DROPPED, {"dropped": 2})


async def test_a_stored_result_is_sent_again_from_the_journal(bench: Bench) -> None:
    await bench.welcome()
    bench.command("c1")
    bench.driver.give(HandlerFinished(command_id="c1", state=CommandState.SUCCEEDED, result=b"r"))
    while (done := await bench.update()).state != messages.COMMAND_STATE_SUCCEEDED:
        pass
    bench.frame(ack=messages.Ack(command_ids=["c1"]))
    bench.command("c1")
    assert await bench.update() == done


async def test_a_flood_waits_for_room(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "QUEUED_INPUTS_MAX", 2)
    await bench.welcome()
    bench.task.cancel()
    await asyncio.gather(bench.task, return_exceptions=True)
    frame = ServerFrameReceived(messages.ServerFrame(ack=messages.Ack()), 0)
    fed = [asyncio.create_task(bench.driver.feed(frame)) for _ in range(5)]
    await asyncio.sleep(0)
    assert 0 < sum(task.done() for task in fed) <= 2
    bench.task = asyncio.create_task(bench.driver.run(()))
    await asyncio.wait_for(asyncio.gather(*fed), 30)


async def test_what_hello_claims_is_replaced_between_streams(bench: Bench) -> None:
    bench.driver.advertise(replace(bench.driver.state.advertised, capabilities=("nvml",)), ANYBODY)
    hello = await bench.welcome()
    assert list(hello.capabilities) == ["nvml"]
