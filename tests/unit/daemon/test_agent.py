"""A whole node against a gateway in memory: joins its session, runs commands, survives what ends sessions."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import structlog

from bettercompute.daemon import group_commit
from bettercompute.daemon.agent import Agent
from bettercompute.daemon.config import Config
from bettercompute.daemon.handlers import HandlerContext
from bettercompute.daemon.identity import IdentityStore
from bettercompute.daemon.inventory.host import HostRoot
from bettercompute.daemon.journal_records import LIMITS, JournalDamagedError, JournalFullError
from bettercompute.daemon.node_round import CurrentConfig, NodeParts
from bettercompute.daemon.notify import SystemdNotifier
from bettercompute.daemon.status import DaemonStatus, ask
from bettercompute.delivery.commands import CommandState
from bettercompute.errors import Bug, Refused, Unavailable
from bettercompute.pki import certificates, trust
from bettercompute.pki.trust import CommandRoot
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Status
from bettercompute.session.inputs import ServerFrameReceived
from bettercompute.system import system_world
from bettercompute.transport.calls import DialFailed, DialKind
from tests.unit.daemon.fake_gateway import FakeGateway, FakeSession, control_plane, join, state_config
from tests.unit.daemon.journal_samples import open_journal

TERMINAL = (CommandState.SUCCEEDED, CommandState.FAILED, CommandState.CANCELLED)


@dataclass
class Held:
    """A handler that a test can hold."""

    kind: str = "inventory.refresh"
    began: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    runs: int = 0

    async def run(self, context: HandlerContext) -> bytes:
        assert context.kind == self.kind
        self.runs += 1
        self.began.set()
        await self.go.wait()
        return messages.InventoryRefreshResult().SerializeToString()


@dataclass
class Node:
    """A node that a test starts, stops and starts again."""

    config: Config
    gateway: FakeGateway
    handler: Held
    root: Path
    running: list[tuple[Agent, asyncio.Task[None]]] = field(default_factory=list)

    def start(self, **changes: object) -> Agent:
        parts = NodeParts(
            world=system_world(),
            config=CurrentConfig(self.config),
            environment={},
            identities=IdentityStore(self.config.state_dir),
            notifier=SystemdNotifier({}),
            root=lambda: replace(HostRoot.live(), folder=self.root),
            handlers={self.handler.kind: self.handler},
            dial=self.gateway.dial,
        )
        agent = Agent(parts, config_path=self.root / "config.toml", **changes)  # type: ignore[arg-type]
        self.running.append((agent, asyncio.create_task(agent.run())))
        return agent

    async def stop(self) -> None:
        agent, task = self.running.pop()
        agent.stop.set()
        await asyncio.wait_for(task, 30)

    async def kill(self) -> None:
        """End the daemon without its farewells, as far as that goes inside one process."""
        _, task = self.running.pop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def status(self) -> DaemonStatus:
        return await asyncio.to_thread(ask, self.config.state_dir)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    root = tmp_path / "root"
    files = {"proc/sys/kernel/random/boot_id": "boot-1\n", "etc/machine-id": "m1\n"}
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    config = state_config(tmp_path)
    join(config)
    made = Node(config, FakeGateway(), Held(), root)
    yield made
    while made.running:
        await made.kill()


async def test_a_fault_of_ours_costs_the_session_and_not_the_node(node: Node) -> None:
    agent = node.start()
    session = await node.gateway.session()
    assert agent.round is not None
    obeyed = agent.round.driver.feed

    async def faulty(given: ServerFrameReceived) -> None:
        agent.round.driver.feed = obeyed  # type: ignore[method-assign, union-attr]  # once is enough
        raise ZeroDivisionError("by design")

    agent.round.driver.feed = faulty  # type: ignore[method-assign, assignment]  # as above
    with structlog.testing.capture_logs() as logs:
        session.welcome()
        again = await node.gateway.session()
    assert any(entry["event"] == "a frame could not be obeyed" for entry in logs)
    again.welcome()
    await again.frame("events")


async def test_a_disk_that_is_full_beside_the_identity_costs_no_session(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(IdentityStore, "raise_marks", full)
    node.start()
    session = await node.gateway.session()
    session.welcome()
    await session.frame("events")
    node.handler.go.set()
    session.command("c1")
    assert (await session.update("c1", *TERMINAL)).state == messages.COMMAND_STATE_SUCCEEDED


async def test_a_node_says_hello_works_and_says_farewell(node: Node) -> None:
    node.start()
    session = await node.gateway.session()
    hello = session.hello
    assert (hello.node_id, hello.role, hello.boot_id) == ("n1", messages.AGENT_ROLE_NODE, "boot-1")
    assert hello.journal_id
    assert hello.hello_nonce
    assert "system" in hello.inventory_hashes
    assert session.metadata["x-bc-attempt"] == "0"
    session.welcome(request_sections=["system"])
    section = await session.frame("inventory")
    assert isinstance(section, messages.InventorySection)
    assert section.sha256 == hello.inventory_hashes["system"]
    events = await session.frame("events")
    assert isinstance(events, messages.EventBatch)
    assert [(event.seq, event.type) for event in events.events] == [(1, "daemon.started")]
    session.send(ack=messages.Ack(journal_id=hello.journal_id, acked_event_seq=1))
    node.handler.go.set()
    session.command("c1")
    assert (await session.update("c1", CommandState.ACKED, CommandState.RUNNING)).attempt == 1
    assert (await session.update("c1", *TERMINAL)).state == messages.COMMAND_STATE_SUCCEEDED
    session.send(ack=messages.Ack(command_ids=["c1"]))
    beat = await session.frame("heartbeat")
    assert isinstance(beat, messages.Heartbeat)
    assert {(lane.lane, lane.free) for lane in beat.lanes} == {(1, 8), (2, 2)}
    status = await node.status()
    assert status.connected
    assert (status.node_id, status.gateway_id, status.epoch, status.unacked_events) == ("n1", "fake", 1, 0)
    await node.stop()
    await session.ended()
    with pytest.raises(Unavailable, match="no bcd runs there"):
        await node.status()


async def test_a_bundle_that_came_with_a_renewal_is_in_force_from_the_next_session_on(node: Node) -> None:
    keys = control_plane()
    shutil.rmtree(node.config.state_dir)
    join(node.config, keys=keys)
    node.start()
    session = await node.gateway.session()
    session.welcome()
    store = IdentityStore(node.config.state_dir)
    held = store.load()
    assert held is not None
    root = certificates.make_command_root(serial=bytes(16), now_ms=system_world().clock.now_ms())
    content = replace(held.trust.content, command_roots=(CommandRoot(certificate=root.certificate),))
    store.take_trust(trust.sign(content, version=2, key=keys.signing, now_ms=1).signed)
    session.end(Status.UNAVAILABLE, "go", reason="draining", pushback_ms=1)
    again = await node.gateway.session()
    assert again.hello.trust_version == 2
    again.welcome()
    again.command("c1")
    update = await again.update("c1", CommandState.REJECTED)
    assert update.reject_reason == messages.COMMAND_REJECT_REASON_BAD_SIGNATURE


async def test_a_bundle_that_came_in_a_session_is_in_force_on_the_same_connection_too(node: Node) -> None:
    keys = control_plane()
    shutil.rmtree(node.config.state_dir)
    join(node.config, keys=keys)
    node.start()
    session = await node.gateway.session()
    held = IdentityStore(node.config.state_dir).load()
    assert held is not None
    root = certificates.make_command_root(serial=bytes(16), now_ms=system_world().clock.now_ms())
    content = replace(held.trust.content, command_roots=(CommandRoot(certificate=root.certificate),))
    newer = trust.sign(content, version=2, key=keys.signing, now_ms=1)
    session.welcome(trust=messages.SignedTrustBundle.FromString(newer.signed))
    session.command("c0")
    early = await session.update("c0", CommandState.REJECTED)
    assert early.reject_reason == messages.COMMAND_REJECT_REASON_BAD_SIGNATURE, "Welcome is a barrier with its bundle"
    session.end(Status.RESOURCE_EXHAUSTED, "later", reason="handshakes", pushback_ms=1)
    again = await node.gateway.session()
    assert again.hello.trust_version == 2
    again.welcome()
    again.command("c1")
    update = await again.update("c1", CommandState.REJECTED)
    assert update.reject_reason == messages.COMMAND_REJECT_REASON_BAD_SIGNATURE


async def test_a_result_is_kept_until_it_is_acked(node: Node) -> None:
    node.start()
    session = await node.gateway.session()
    session.welcome()
    node.handler.go.set()
    session.command("c1")
    first = await session.update("c1", *TERMINAL)
    await node.stop()
    node.start()
    again = await node.gateway.session()
    assert again.hello.journal_id == session.hello.journal_id
    assert again.hello.process_id != session.hello.process_id
    assert again.hello.last_epoch == 1
    assert session.hello.hello_nonce in (again.hello.hello_nonce, again.hello.previous_hello_nonce)
    assert list(again.hello.done_results) == [first]
    again.welcome()
    again.send(ack=messages.Ack(command_ids=["c1"]))
    again.command("c1")  # a late duplicate: its result comes from the journal
    assert (await again.update("c1", *TERMINAL)) == first
    assert node.handler.runs == 1


async def test_a_command_cut_off_runs_again_at_its_redelivery(node: Node) -> None:
    node.start()
    session = await node.gateway.session()
    session.welcome()
    session.command("c1")
    await node.handler.began.wait()
    await node.kill()
    node.handler.go.set()
    node.start()
    again = await node.gateway.session()
    assert list(again.hello.running_command_ids) == []
    again.welcome()
    again.command("c1")
    assert (await again.update("c1", *TERMINAL)).state == messages.COMMAND_STATE_SUCCEEDED
    assert node.handler.runs == 2


async def test_a_refusal_is_said_in_words_and_obeyed(node: Node) -> None:
    node.start()
    session = await node.gateway.session()
    session.end(16, "the client certificate is revoked", reason="revoked", pushback_ms=600_000)
    status = await until(node, lambda status: status.state == "waiting" and status.next_dial_in_ms > 0)
    assert status.reason == "the gateway refused this node's certificate: the client certificate is revoked"
    assert status.reason_code == "revoked"
    assert 590_000 < status.next_dial_in_ms <= 600_000
    assert len(node.gateway.connections) == 1
    os.kill(os.getpid(), signal.SIGHUP)  # an operator who does not want to wait
    again = await node.gateway.session()
    assert again.hello.hello_nonce == session.hello.hello_nonce, "no Welcome was applied: the same pair again"


async def test_what_was_queued_when_the_stream_ended_does_not_make_the_node_connected_again(node: Node) -> None:
    node.start()
    session = await node.gateway.session()
    session.welcome()
    await session.frame("heartbeat")
    with structlog.testing.capture_logs() as logs:
        session.send(revoked=messages.RevocationNotice(reason="rejoined", message="the certificate is revoked"))
        session.end(16, "the certificate is revoked", reason="revoked", pushback_ms=600_000)
        status = await until(node, lambda status: status.state == "waiting" and status.next_dial_in_ms > 0)
    assert (status.reason_code, status.needs_rejoin) == ("revoked", True)
    assert "connected" not in [line["event"] for line in logs]


async def test_the_need_of_a_new_token_is_said_once_for_each_reason(node: Node) -> None:
    node.start()
    endings = [("revoked", 1), ("revoked", 1), ("superseded-certificate", 1), ("superseded-certificate", 600_000)]
    with structlog.testing.capture_logs() as logs:
        for reason, pushback_ms in endings:
            session = await node.gateway.session()
            session.end(16, "the certificate is of no use", reason=reason, pushback_ms=pushback_ms)
        status = await until(node, lambda status: status.state == "waiting" and status.next_dial_in_ms > 1_000)
    told = [entry["reason"] for entry in logs if entry["event"] == "NEEDS_REJOIN"]
    assert told == ["revoked", "superseded-certificate"]
    assert status.needs_rejoin


async def test_a_short_bucket_refusal_keeps_the_connection(node: Node) -> None:
    node.start()
    session = await node.gateway.session()
    session.end(8, "busy", reason="handshakes", pushback_ms=1)
    again = await node.gateway.session()
    assert again.metadata["x-bc-attempt"] == "1"
    assert len(node.gateway.connections) == 1


async def test_a_dial_that_fails_is_said_and_repeated_elsewhere(node: Node) -> None:
    node.gateway.fail = DialFailed(DialKind.PIN_MISMATCH, "gw-a:443: the serving CA is not the pinned one")
    node.start()
    await node.gateway.session()
    assert {target.url for target in node.gateway.targets} == {"https://gw-a:443", "https://gw-b:443"}
    target = node.gateway.targets[0]
    assert target.serving_ca_spki_sha256 == bytes.fromhex("ab" * 32)
    assert target.identity is not None
    assert b"BEGIN CERTIFICATE" in target.identity.certificate_chain_pem


async def test_a_lost_connection_is_dialed_anew(node: Node) -> None:
    node.start()
    session = await node.gateway.session()
    session.welcome()
    await session.frame("heartbeat")
    node.gateway.connections[0].close()
    again = await node.gateway.session()
    assert again.hello.last_epoch == 1


async def test_a_rolled_back_journal_goes_on_under_a_new_id(node: Node) -> None:
    node.start()
    session = await node.gateway.session()
    session.welcome(new_journal=True)
    again = await node.gateway.session()
    assert again.hello.journal_id != session.hello.journal_id
    again.welcome()
    events = await again.frame("events")
    assert isinstance(events, messages.EventBatch)
    assert (events.journal_id, events.events[0].recovered) == (again.hello.journal_id, True)


async def test_a_desired_state_is_kept_and_reported(node: Node) -> None:
    node.start()
    session = await node.gateway.session()
    session.welcome()
    spec = messages.NodeSpec(daemon=messages.DaemonSection(log_level="warning"))
    body = messages.DesiredStateBody(node_id="n1", trust_domain="bc.local", generation=3, spec_sha256=b"h", full=spec)
    session.send(desired=messages.DesiredState(body=body.SerializeToString()))
    await report_with(session, lambda report: report.applied_generation == 3)
    body.generation, body.full.devices.assignments.add().allocation_id = 4, "a1"
    session.send(desired=messages.DesiredState(body=body.SerializeToString()))
    report = await report_with(session, lambda report: len(report.conditions) == 1)
    assert (report.observed_generation, report.applied_generation) == (4, 3)
    assert [condition.type for condition in report.conditions] == ["SectionUnsupported"]
    body.generation = 2
    session.send(desired=messages.DesiredState(body=body.SerializeToString()))
    report = await report_with(session, lambda report: len(report.conditions) == 2)
    assert report.conditions[1].reason == "generation-behind"
    await node.stop()
    node.start()
    again = await node.gateway.session()
    assert (again.hello.observed_generation, again.hello.applied_generation) == (4, 3)
    assert again.hello.spec_sha256 == b"h"


async def test_a_damaged_journal_begins_a_new_round(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = node.start()
    session = await node.gateway.session()
    session.welcome()
    await session.frame("heartbeat")
    assert agent.round is not None
    journal = agent.round._journal
    journal._queue.put(group_commit._Read(_damage, asyncio.get_running_loop().create_future()))
    again = await node.gateway.session()
    assert again.hello.journal_id != session.hello.journal_id


def _damage() -> None:
    raise JournalDamagedError("a bit has flipped")


async def test_a_daemon_with_a_full_disk_stops_when_it_is_told_to(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = node.start()
    session = await node.gateway.session()
    session.welcome()
    session.command("c1")
    await asyncio.wait_for(node.handler.began.wait(), 30)
    assert agent.round is not None
    journal = agent.round._journal

    def full(_: object) -> None:
        raise JournalFullError("the disk is full", disk=True)

    no_room = asyncio.Event()
    with monkeypatch.context() as patch:
        patch.setattr(journal._database, "apply", full)
        patch.setattr(journal, "on_health", lambda _: no_room.set())
        agent.round._keep_serving_ca(b"pem")
        node.handler.go.set()
        await asyncio.wait_for(no_room.wait(), 30)
        await node.stop()
    database, contents = open_journal(node.config.state_dir, limits=LIMITS)
    database.close()
    assert [(entry.command_id, entry.state) for entry in contents.commands] == [("c1", CommandState.RUNNING)]


async def test_a_fault_of_ours_in_the_journals_thread_ends_the_daemon(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = node.start()
    session = await node.gateway.session()
    session.welcome()
    assert agent.round is not None

    def fail() -> int:
        raise RuntimeError("nobody thought of this")

    monkeypatch.setattr(agent.round._journal._database, "room_bytes", fail)
    session.command("c1")
    with pytest.raises(Bug, match="nobody thought of this"):
        await asyncio.wait_for(node.running.pop()[1], 30)


async def test_what_only_a_person_can_cure_ends_the_daemon(node: Node) -> None:
    node.start()
    await node.gateway.session()
    node.start()  # a second daemon for the same folder
    _, second = node.running.pop()
    with pytest.raises(Unavailable, match="another bcd"):
        await second
    await node.stop()
    (node.config.state_dir / "identity.json").unlink()
    node.start()
    with pytest.raises(Refused, match=r"this node has no identity in .*bcd join"):
        await node.running.pop()[1]


async def test_a_copied_disk_is_refused_until_adopted(node: Node) -> None:
    (node.root / "sys/class/dmi/id").mkdir(parents=True)
    (node.root / "sys/class/dmi/id/product_uuid").write_text("U1\n")
    node.start(adopt=True)
    await node.gateway.session()
    await node.stop()
    (node.root / "etc/machine-id").write_text("m2\n")
    node.start()
    await node.gateway.session()  # one of both only warns
    await node.stop()
    (node.root / "sys/class/dmi/id/product_uuid").write_text("U2\n")
    node.start()
    with pytest.raises(
        Refused, match="not the machine that n1 joined on: machine id m1 became m2, DMI uuid u1 became u2"
    ):
        await node.running.pop()[1]
    node.start(adopt=True)
    await node.gateway.session()


async def test_a_wrong_configuration_is_not_taken_at_reload(node: Node) -> None:
    agent = node.start()
    await node.gateway.session()
    config = agent._parts.config
    (node.root / "config.toml").write_text("gateway_url = 7")
    agent.reload()
    assert config.value == node.config
    (node.root / "config.toml").write_text('gateway_url = "https://gw-c:443"\nstate_dir = "/elsewhere"')
    agent.reload()
    assert config.value.gateway_url == ("https://gw-c:443",)
    assert config.value.state_dir == node.config.state_dir


async def until(node: Node, holds: Callable[[DaemonStatus], bool]) -> DaemonStatus:
    """Ask until the status is as expected; each question is a turn of the daemon's loop."""
    async with asyncio.timeout(30):
        while not holds(status := await node.status()):
            pass
    return status


async def report_with(session: FakeSession, holds: Callable[[messages.StatusReport], bool]) -> messages.StatusReport:
    while True:
        report = await session.frame("status")
        assert isinstance(report, messages.StatusReport)
        if holds(report):
            return report
