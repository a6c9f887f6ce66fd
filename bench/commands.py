"""Commands, durable, from enqueue to succeeded: 500 FakeDaemons over TLS, one gateway process, PostgreSQL with fsync.

A command is enqueued as the API does it (one transaction, then NOTIFY), marked and sent by the gateway, answered by its
FakeDaemon at once with RUNNING and SUCCEEDED, committed, and acked. Its time ends when the FakeDaemon holds the ack,
which follows the commit, in the same process and by the same clock as it began. At saturation all are enqueued as fast
as the database takes them and the rate is what came out; paced they come singly, 200 a second. Beside the paced times
stand what share of them is what: until enqueued, until it reached its FakeDaemon, how long each process was ready and
had no core, how long the disk takes for a commit, of which three follow each other, and how much dearer the same work
is on this machine after a pause of 5 ms (`pause_ratio`).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the file also runs by its path

from bench.fakes import connected_fleet
from bench.measure import Figures, Shares, allow_many_files, fdatasync_ms, options, pause_ratio, percentile, report
from bench.stack import BenchStack, add_nodes, stack
from bettercompute.pki.identity import DEFAULT_TRUST_DOMAIN
from bettercompute.protocol import messages
from bettercompute.protocol.frames import encode_message
from bettercompute.protocol.kinds import KINDS, pack_payload
from bettercompute.store import commands
from bettercompute.store.commands import NewCommand
from bettercompute.store.database import Database
from bettercompute.testing.fake_daemon import FakeDaemon
from bettercompute.world import World

KIND = KINDS["inventory.refresh"]
INSERT_ROWS = 500
NOT_AFTER_MS = 600_000
WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    daemons: int
    commands: int
    paced_per_s: int
    paced_s: float
    repeats: int


FULL = Sizes(daemons=500, commands=8_000, paced_per_s=200, paced_s=8.0, repeats=3)
QUICK = Sizes(daemons=5, commands=40, paced_per_s=50, paced_s=0.5, repeats=1)


class Acks:
    """Counts acked commands and takes their times."""

    def __init__(self, daemons: Sequence[FakeDaemon]) -> None:
        self.began: dict[str, float] = {}
        self.enqueued_ms: list[float] = []
        """Until the operator has the answer."""
        self.reached_ms: list[float] = []
        """Until the FakeDaemon holds the command."""
        self.took_ms: list[float] = []
        """Until it holds the ack of its end."""
        self.all_acked = asyncio.Event()
        for daemon in daemons:
            daemon.on_ack = self.take
            daemon.commands.on_begin = self.reach

    def restart(self) -> None:
        """Forget the times."""
        for times in (self.enqueued_ms, self.reached_ms, self.took_ms):
            times.clear()

    def reach(self, body: messages.CommandBody) -> None:
        """Take the arrival of a command."""
        self.reached_ms.append((time.perf_counter() - self.began[body.command_id]) * 1000)

    def take(self, ack: messages.Ack) -> None:
        """Take an ack."""
        now = time.perf_counter()
        for command_id in ack.command_ids:
            began = self.began.pop(command_id, None)
            if began is not None:
                self.took_ms.append((now - began) * 1000)
        if not self.began:
            self.all_acked.set()

    async def wait(self) -> None:
        """Wait until nothing is open."""
        async with asyncio.timeout(WAIT_S):
            while self.began:
                self.all_acked.clear()
                await self.all_acked.wait()


async def enqueue(database: Database, node_ids: Sequence[str], *, world: World, acks: Acks) -> None:
    """Enqueue one command for each, in one transaction, as the API does."""
    now_ms = world.clock.now_ms()
    began = time.perf_counter()
    async with database.transaction() as transaction:
        seqs = await commands.draw_seqs(transaction, count=len(node_ids))
        made = [
            _command(node_id, seq=seq, now_ms=now_ms, world=world) for node_id, seq in zip(node_ids, seqs, strict=True)
        ]
        acks.began |= dict.fromkeys((command.command_id for command in made), began)
        await commands.enqueue(transaction, made)
    acks.enqueued_ms.append((time.perf_counter() - began) * 1000)


def _command(node_id: str, *, seq: int, now_ms: int, world: World) -> NewCommand:
    command_id = world.ids.uuid7()
    body = messages.CommandBody(
        command_id=command_id,
        node_id=node_id,
        kind=KIND.name,
        lane=KIND.lane,
        payload=pack_payload(KIND.payload()),
        not_after_ms=now_ms + NOT_AFTER_MS,
        timeout_ms=KIND.timeout_ms,
        seq=seq,
        issued_at_ms=now_ms,
        trust_domain=DEFAULT_TRUST_DOMAIN,
        issued_by="bench",
    )
    return NewCommand(
        command_id=command_id,
        node_id=node_id,
        kind=KIND.name,
        lane=int(KIND.lane),
        seq=seq,
        body=encode_message(body),
        created_by="bench",
        not_after_ms=now_ms + NOT_AFTER_MS,
        timeout_ms=KIND.timeout_ms,
    )


async def saturated(
    database: Database, daemons: Sequence[FakeDaemon], *, count: int, shares: Shares, world: World, acks: Acks
) -> Figures:
    """Enqueue as fast as the database takes it."""
    turn = cycle(daemon.node_id for daemon in daemons)
    shares.restart()
    began = time.perf_counter()
    left = count
    while left:
        some = list(islice(turn, min(INSERT_ROWS, left)))
        await enqueue(database, some, world=world, acks=acks)
        left -= len(some)
    await acks.wait()
    took_s = time.perf_counter() - began
    return {"per_s": count / took_s, **shares.per(count)}


async def paced(
    database: Database, daemons: Sequence[FakeDaemon], sizes: Sizes, *, shares: Shares, world: World, acks: Acks
) -> Figures:
    """Enqueue singly, at even distances; one that is late is not caught up with."""
    loop = asyncio.get_running_loop()
    turn = cycle(daemon.node_id for daemon in daemons)
    acks.restart()
    count = round(sizes.paced_s * sizes.paced_per_s)
    shares.restart()
    began = loop.time()
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number / sizes.paced_per_s - loop.time()))
            group.create_task(enqueue(database, [next(turn)], world=world, acks=acks))
    await acks.wait()
    return {
        "paced_cpu_us": shares.gateway_s * 1e6 / count,
        "enqueued_p50_ms": percentile(acks.enqueued_ms, 0.5),
        "reached_p50_ms": percentile(acks.reached_ms, 0.5),
        "p50_ms": percentile(acks.took_ms, 0.5),
        "p99_ms": percentile(acks.took_ms, 0.99),
        **{f"paced_{name}": waited for name, waited in shares.waited_per(count).items()},
    }


async def measure(running: BenchStack, sizes: Sizes) -> None:
    """Measure the row."""
    world = running.world
    async with running.database() as database:
        nodes = await add_nodes(running, database, prefix="commands", count=sizes.daemons)
        async with connected_fleet(nodes, world=world) as daemons:
            acks, shares = Acks(daemons), running.shares()
            await saturated(database, daemons, count=sizes.commands // 5, shares=shares, world=world, acks=acks)
            runs = []
            for _ in range(sizes.repeats):
                full = await saturated(database, daemons, count=sizes.commands, shares=shares, world=world, acks=acks)
                single = await paced(database, daemons, sizes, shares=shares, world=world, acks=acks)
                runs.append({**full, **single})
            ended = sum(len(daemon.endings) for daemon in daemons)
        disk_ms = fdatasync_ms(running.folder)
        disk = {
            f"fdatasync_{name}_ms": round(percentile(disk_ms, share), 2)
            for name, share in (("p50", 0.5), ("p99", 0.99))
        }
        disk |= {"pause_ratio": round(pause_ratio(), 1)}
        facts = {"daemons": sizes.daemons, "commands": sizes.commands, "paced_per_s": sizes.paced_per_s, **disk}
        report("commands", runs, **facts, streams_lost=ended)


def main() -> None:
    """Print the row."""
    parser = options(__doc__)
    parser.add_argument("--daemons", type=int)
    parser.add_argument("--commands", type=int)
    wanted = parser.parse_args()
    sizes = QUICK if wanted.quick else FULL
    sizes = replace(
        sizes,
        daemons=wanted.daemons or sizes.daemons,
        commands=wanted.commands or sizes.commands,
        repeats=wanted.repeats or sizes.repeats,
    )
    allow_many_files()
    with stack() as running:
        uvloop.run(measure(running, sizes))


if __name__ == "__main__":
    main()
