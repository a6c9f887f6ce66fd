"""bcd's journal: a command from its frame to the RUNNING frame behind the fsync, and entries a second in groups.

`accept_p50_ms`: the daemon's own driver and journal on a real disk, with a shell that only takes the time: one command
at a time, so each waits for its own fsync. `per_s`: entries written by 64 writers at once, which share commits. No
gateway, no TLS: what the network adds is in `commands`.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the file also runs by its path

from bench.measure import Figures, options, percentile, report
from bettercompute.daemon.driver import Driver
from bettercompute.daemon.group_commit import Journal
from bettercompute.delivery.commands import CommandState
from bettercompute.delivery.journal_rules import JournalEntry
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import KINDS, pack_payload
from bettercompute.session import daemon_side
from bettercompute.session.daemon_state import Advertised, DaemonFacts, JournalFacts, Phase
from bettercompute.session.effects import AcceptCommand, DaemonEffect
from bettercompute.session.inputs import DaemonTick, Dialed, HandlerFinished, ServerFrameReceived
from bettercompute.system import system_world
from bettercompute.world import World

KIND = KINDS["inventory.refresh"]
NODE_ID = "bench"
WRITERS = 64
NO_LOAD = messages.NodeLoad()


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    accepts: int
    entries: int
    repeats: int


FULL = Sizes(accepts=500, entries=20_000, repeats=3)
QUICK = Sizes(accepts=10, entries=200, repeats=1)


class TimingShell:
    """Notes when the RUNNING frame of a command is sent."""

    def __init__(self) -> None:
        self.running = asyncio.Event()
        self.running_at = 0.0

    async def obey(self, effect: DaemonEffect) -> None:
        """Do nothing: no handler runs, nobody dials."""

    def send(self, frame: messages.AgentFrame) -> None:
        """Take the time of a RUNNING frame."""
        if frame.update.state == messages.COMMAND_STATE_RUNNING:
            self.running_at = time.perf_counter()
            self.running.set()

    def tick(self) -> DaemonTick:
        """Return a moment in which the gateway was heard."""
        world = system_world()
        return DaemonTick(wall_ms=world.clock.now_ms(), load=NO_LOAD, last_heard_ms=world.clock.monotonic_ms())


def _command(number: int, *, world: World) -> messages.ServerFrame:
    now_ms = world.clock.now_ms()
    body = messages.CommandBody(
        command_id=world.ids.uuid7(),
        node_id=NODE_ID,
        kind=KIND.name,
        lane=KIND.lane,
        payload=pack_payload(KIND.payload()),
        not_after_ms=now_ms + 600_000,
        timeout_ms=KIND.timeout_ms,
        seq=number + 1,
    )
    return messages.ServerFrame(command=messages.Command(body=body.SerializeToString(), attempt=1))


async def accept_ms(journal: Journal, *, count: int, world: World) -> list[float]:
    """Return the time of each command from frame to RUNNING."""
    shell = TimingShell()
    facts = DaemonFacts(
        node_id=NODE_ID,
        role=messages.AGENT_ROLE_NODE,
        boot_id="boot",
        process_id=world.ids.uuid7(),
        daemon_version="0.1.0",
        proto_min=1,
        proto_max=1,
    )
    meta = journal.contents.meta
    held = JournalFacts(
        journal_id=meta.journal_id,
        entries={},
        cancelled={},
        last_epoch=0,
        last_event_seq=0,
        acked_event_seq=0,
        hello_nonce=b"",
        previous_hello_nonce=b"",
        mark_ms=0,
        confirmed_ms=None,
    )
    state, effects = daemon_side.start(facts, Advertised(), held, now_ms=world.clock.monotonic_ms())
    driver = Driver(state, world=world, journal=journal, shell=shell)
    driving = asyncio.create_task(driver.run(effects))
    driver.give(Dialed(fresh_nonce=world.ids.random_bytes(16)))
    welcome = messages.Welcome(
        session_id="bench",
        epoch=1,
        protocol_version=1,
        heartbeat_interval_ms=10_000,
        lane_credits=[messages.LaneCredits(lane=KIND.lane, credits=8)],
        server_time_ms=world.clock.now_ms(),
    )
    driver.give(ServerFrameReceived(messages.ServerFrame(welcome=welcome), world.clock.now_ms()))
    took = []
    for number in range(count):
        frame = _command(number, world=world)
        command_id = messages.CommandBody.FromString(frame.command.body).command_id
        shell.running.clear()
        began = time.perf_counter()
        driver.give(ServerFrameReceived(frame, world.clock.now_ms()))
        await shell.running.wait()
        took.append((shell.running_at - began) * 1000)
        driver.give(HandlerFinished(command_id=command_id, state=CommandState.SUCCEEDED))
        ack = messages.ServerFrame(ack=messages.Ack(command_ids=[command_id]))
        driver.give(ServerFrameReceived(ack, world.clock.now_ms()))
    assert driver.state.phase is Phase.LIVE
    driving.cancel()
    await asyncio.gather(driving, return_exceptions=True)
    return took


async def entries_per_s(journal: Journal, *, count: int, world: World) -> float:
    """Return how many accepted commands a second become durable when many are waiting."""
    numbers = iter(range(count))

    async def writer() -> None:
        for _ in numbers:
            entry = JournalEntry(
                command_id=world.ids.uuid7(),
                kind=KIND.name,
                lane=int(KIND.lane),
                attempt=1,
                state=CommandState.ACKED,
                not_after_ms=world.clock.now_ms() + 600_000,
                process_id="bench",
            )
            await journal.write(AcceptCommand(entry, bytes(200)))

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(WRITERS):
            group.create_task(writer())
    return count / (time.perf_counter() - began)


async def measure(sizes: Sizes) -> None:
    """Measure the row, each repeat on a journal of its own."""
    world = system_world()
    runs: list[Figures] = []
    for _ in range(sizes.repeats):
        with tempfile.TemporaryDirectory(prefix="better-compute-bench-") as folder:
            journal = await Journal.open(Path(folder), world=world)
            try:
                took = await accept_ms(journal, count=sizes.accepts, world=world)
                rate = await entries_per_s(journal, count=sizes.entries, world=world)
            finally:
                await journal.close()
        runs.append({"accept_p50_ms": percentile(took, 0.5), "accept_p99_ms": percentile(took, 0.99), "per_s": rate})
    report("journal", runs, accepts=sizes.accepts, entries=sizes.entries, writers=WRITERS)


def main() -> None:
    """Print the row."""
    wanted = options(__doc__).parse_args()
    sizes = QUICK if wanted.quick else FULL
    uvloop.run(measure(replace(sizes, repeats=wanted.repeats or sizes.repeats)))


if __name__ == "__main__":
    main()
