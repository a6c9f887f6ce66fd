"""Two batches at once: what a node says is written in its order, nothing twice, and nothing is passed over for good."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bettercompute.delivery.commands import CommandState
from bettercompute.delivery.facts import CommandFact
from bettercompute.gateway import ingest
from bettercompute.gateway.fence import Fence
from bettercompute.gateway.ingest import Ingest, Offering
from bettercompute.gateway.metrics import GatewayMetrics
from bettercompute.session.inputs import FactsCommitted, GatewayInput
from bettercompute.system import system_world

ROWS_MAX = 4


class Owner:
    """One session of a node; a node may have an old one and a new one."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.told: list[str] = []

    def give(self, given: GatewayInput) -> None:
        self.told += given.command_ids if isinstance(given, FactsCommitted) else [repr(given)]


class GatedIngest(Ingest):
    """Commits when a test says so, in whatever order it says."""

    def __init__(self) -> None:
        world = system_world()
        super().__init__(
            None,  # type: ignore[arg-type] # nothing is written
            fence=Fence(world.clock),
            world=world,
            metrics=GatewayMetrics(),
        )
        self.open: list[tuple[Sequence[Offering], asyncio.Event]] = []
        self.committed: dict[str, list[str]] = defaultdict(list)
        self.most_at_once = 0
        self.in_both: set[str] = set()

    async def _commit(self, batch: Sequence[Offering]) -> dict[tuple[str, str], int]:
        gate = asyncio.Event()
        others = {offering.owner.node_id for written, _ in self.open for offering in written}
        self.in_both |= others & {offering.owner.node_id for offering in batch}
        self.open.append((batch, gate))
        self.most_at_once = max(self.most_at_once, len(self.open))
        await gate.wait()
        for offering in batch:
            self.committed[offering.owner.node_id] += ids_of(offering)
        return {}

    def commit(self, which: int) -> None:
        _, gate = self.open.pop(which % len(self.open))
        gate.set()


def ids_of(offering: Offering) -> list[str]:
    return [fact.command_id for fact in offering.facts if isinstance(fact, CommandFact)]


def fact(command_id: str) -> CommandFact:
    return CommandFact(command_id=command_id, state=CommandState.SUCCEEDED, attempt=1)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


# A step is an offering (of an owner, with so many facts), the commit of one of the open batches, or a breath.
offerings = st.tuples(st.integers(0, 5), st.integers(1, 3))
steps = st.lists(st.one_of(offerings, st.sampled_from(["commit first", "commit last", "breathe"])), max_size=60)


@given(steps=steps)
def test_order_holds_with_two_batches_at_once(steps):
    async def play() -> None:
        queue = GatedIngest()
        running = asyncio.create_task(queue.run())
        # Two sessions each of three nodes.
        owners = [Owner(f"node-{number % 3}") for number in range(6)]
        said: dict[str, list[str]] = defaultdict(list)
        told: dict[Owner, list[str]] = defaultdict(list)
        for number, step in enumerate(steps):
            if isinstance(step, tuple):
                owner = owners[step[0]]
                ids = [f"{number}-{part}" for part in range(step[1])]
                queue.add(owner, opening=0, facts=[fact(command_id) for command_id in ids])
                said[owner.node_id] += ids
                told[owner] += ids
            elif step == "breathe" or not queue.open:
                await settle()
            else:
                queue.commit(0 if step == "commit first" else -1)
        for _ in range(10 * len(steps)):
            await settle()
            if queue.open:
                queue.commit(0)
            elif not any(queue.pending(owner.node_id) for owner in owners):
                break
            else:
                # Under load the writer waits for a moment before it takes a batch.
                await asyncio.sleep(ingest.WINDOW_S)
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert queue.in_both == set(), "a node is in one batch at a time"
        assert queue.committed == said
        for owner in owners:
            assert owner.told == told[owner]
        assert queue.most_at_once <= 2
        assert (queue._queued_rows, queue._total_bytes, queue._held, queue._writing, queue._failed) == (
            0,
            0,
            {},
            set(),
            set(),
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ingest, "BATCH_ROWS_MAX", ROWS_MAX)
        asyncio.run(play())


async def test_a_second_batch_goes_beside_the_first_only_when_it_is_full(monkeypatch):
    monkeypatch.setattr(ingest, "BATCH_ROWS_MAX", ROWS_MAX)
    queue = GatedIngest()
    running = asyncio.create_task(queue.run())
    owners = [Owner(f"node-{number}") for number in range(12)]
    for number, owner in enumerate(owners[:ROWS_MAX]):
        queue.add(owner, opening=0, facts=[fact(f"c-{number}")])
        await settle()
    assert [len(batch) for batch, _ in queue.open] == [1], "three more wait for the first"
    queue.add(owners[0], opening=0, facts=[fact("c-again")])
    await settle()
    assert [[o.owner.node_id for o in batch] for batch, _ in queue.open] == [["node-0"], ["node-1", "node-2", "node-3"]]
    for number in range(ROWS_MAX, 12):
        queue.add(owners[number], opening=0, facts=[fact(f"c-{number}")])
    await settle()
    assert len(queue.open) == 2, "never a third"
    queue.commit(0)
    while len(queue.open) < 2:
        await settle()
    first = queue.open[-1][0][0]
    assert (first.owner.node_id, ids_of(first)) == ("node-0", ["c-again"]), "it was at the front"
    running.cancel()
    counts = Counter(o.owner.node_id for batch, _ in queue.open for o in batch)
    assert max(counts.values()) == 1
    await asyncio.gather(running, return_exceptions=True)
