"""The desired state a node holds: what is taken, kept, refused, and how its sections stand.

See docs/desired-state.md, "A section of your own".
"""

from __future__ import annotations

import asyncio

import pytest

from bettercompute.daemon.desired import DOCUMENT, DesiredState, SpecOwner
from bettercompute.daemon.journal_records import PutDocument, Write
from bettercompute.daemon.sections import SectionFailed
from bettercompute.delivery.desired_state import Verdict
from bettercompute.delivery.spec_generations import Circumstances, compose
from bettercompute.protocol import messages

CONVERGED = messages.SECTION_CONVERGENCE_CONVERGED
FAILED = messages.SECTION_CONVERGENCE_FAILED
UNSUPPORTED = messages.SECTION_CONVERGENCE_UNSUPPORTED


class Levels:
    """A `daemon` section that notes what it was told, and fails on demand."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.broken: Exception | None = None

    def converge(self, spec: messages.NodeSpec) -> str:
        if self.broken is not None:
            raise self.broken
        if spec.daemon.log_level == "loud":
            raise SectionFailed("bad-value", "loud is no level")
        self.seen.append(spec.daemon.log_level)
        return "as told"


class Bench:
    def __init__(self, *, floor: int = 0, kept: bytes = b"") -> None:
        self.order: list[str] = []
        self.writes: list[Write] = []
        self.floors: list[int] = []
        self.disk_full = False
        self.levels = Levels()
        self.held = DesiredState(
            SpecOwner(node_id="n1", trust_domain="bc.local", floor_generation=floor),
            kept=kept,
            write=self.write,
            raise_floor=self.raise_floor,
            sections={"daemon": self.levels},
        )

    async def write(self, write: Write) -> None:
        self.order.append(f"journal, {len(self.levels.seen)} brought about")
        self.writes.append(write)

    async def raise_floor(self, generation: int) -> None:
        if self.disk_full:
            raise OSError(28, "No space left on device")
        self.order.append(f"floor {generation}, told {self.held.held.applied_generation}")
        self.floors.append(generation)

    async def take(self, state: messages.DesiredState) -> messages.SpecRequest | None:
        request = await self.held.take(state)
        await self.held.look()
        return request


def full(generation: int, spec: messages.NodeSpec, **changes: object) -> messages.DesiredState:
    values: dict[str, object] = {"node_id": "n1", "trust_domain": "bc.local", "spec_sha256": b"%d" % generation}
    body = messages.DesiredStateBody(generation=generation, full=spec, **(values | changes))  # type: ignore[arg-type]
    return messages.DesiredState(body=body.SerializeToString())


def daemon(level: str) -> messages.NodeSpec:
    return messages.NodeSpec(daemon=messages.DaemonSection(log_level=level))


def patch(spec: messages.NodeSpec, *, over: messages.DesiredState, generation: int) -> messages.DesiredState:
    base = messages.DesiredStateBody.FromString(over.body)
    of = Circumstances(node_id="n1", trust_domain="bc.local", generation=generation, issued_at_ms=0)
    return messages.DesiredState(body=compose(spec, before=base, of=of).patch_body)


async def test_kept_then_brought_about_then_the_floor_then_told() -> None:
    bench = Bench()
    assert await bench.take(full(3, daemon("info"))) is None
    assert bench.order == ["journal, 0 brought about", "floor 3, told 0"]
    assert (bench.held.held.observed_generation, bench.held.held.applied_generation) == (3, 3)
    [write] = bench.writes
    assert isinstance(write, PutDocument)
    assert write.name == DOCUMENT
    again = Bench(kept=write.body, floor=3)
    assert again.held.held == bench.held.held
    await again.held.look()
    assert again.levels.seen == ["info"], "a restart brings it about anew"


async def test_a_crash_between_converging_and_the_floor_is_made_up_for() -> None:
    bench = Bench()
    bench.disk_full = True
    await bench.take(full(3, daemon("info")))
    assert bench.held.held.applied_generation == 0, "what is not on the disk is told to nobody"
    [write] = bench.writes
    assert isinstance(write, PutDocument)
    again = Bench(kept=write.body)
    await again.held.look()
    assert (again.floors, again.held.held.applied_generation) == ([3], 3)


async def test_what_cannot_be_converged_is_parked_and_the_rest_converges() -> None:
    bench = Bench()
    await bench.take(full(1, daemon("info")))
    spec = daemon("debug")
    spec.devices.assignments.add(allocation_id="a1")
    spec.MergeFromString(b"\xfa\x3f\x00")  # field 1023 of a later release
    await bench.take(full(2, spec))
    assert [(state.section, state.field_number, state.convergence) for state in bench.held.states] == [
        ("daemon", 2, CONVERGED),
        ("devices", 3, UNSUPPORTED),
        ("", 1023, UNSUPPORTED),
    ]
    assert [state.reason for state in bench.held.states[1:]] == ["3", "1023"]
    assert bench.held.states[0].message == "as told"
    assert (bench.held.held.observed_generation, bench.held.held.applied_generation) == (2, 1)
    await bench.take(full(3, daemon("loud")))
    assert [(state.convergence, state.reason) for state in bench.held.states] == [(FAILED, "bad-value")]
    await bench.take(full(4, daemon("info")))
    assert bench.held.held.applied_generation == 4, "a newer one is free of what parked the older"


async def test_a_parked_generation_is_tried_again_when_it_is_offered_again() -> None:
    bench = Bench()
    bench.levels.broken = SectionFailed("not-permitted", "no")
    await bench.take(full(1, daemon("info")))
    assert bench.held.applied_generation == 0
    bench.levels.broken = None
    assert await bench.take(full(1, daemon("info"))) is None
    assert (bench.held.applied_generation, len(bench.writes)) == (1, 1)


async def test_drift_is_reported_and_applied_never_falls() -> None:
    bench = Bench()
    await bench.take(full(1, daemon("info")))
    assert not await bench.held.look(), "nothing new, nothing told"
    bench.levels.broken = RuntimeError("a fault of ours")
    assert await bench.held.look()
    assert [(state.convergence, state.reason) for state in bench.held.states] == [(FAILED, "section-fault")]
    assert bench.held.held.applied_generation == 1
    bench.levels.broken = None
    assert await bench.held.look()
    assert bench.held.states[0].convergence == CONVERGED


async def test_run_brings_about_what_is_taken_and_says_so() -> None:
    bench = Bench()
    changed = asyncio.Event()
    bench.held.on_change = changed.set
    running = asyncio.create_task(bench.held.run())
    await bench.held.take(full(1, daemon("info")))
    async with asyncio.timeout(30):
        await changed.wait()
    assert bench.held.applied_generation == 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_section_that_is_gone_is_given_back_and_not_reported() -> None:
    bench = Bench()
    await bench.take(full(1, daemon("info")))
    await bench.take(full(2, messages.NodeSpec()))
    assert (bench.levels.seen, bench.held.states) == (["info", ""], [])
    assert bench.held.held.applied_generation == 2


async def test_a_patch_replaces_one_section_over_its_base_only() -> None:
    bench = Bench()
    first = full(1, daemon("info"))
    await bench.take(first)
    assert await bench.take(patch(daemon("debug"), over=first, generation=2)) is None
    assert bench.levels.seen == ["info", "debug"]
    stale = patch(daemon("error"), over=full(3, daemon("info")), generation=4)
    assert await bench.take(stale) == messages.SpecRequest(held_generation=2, reason="base-mismatch")
    await bench.take(patch(messages.NodeSpec(), over=full(2, daemon("debug")), generation=3))
    assert bench.held.states == []
    assert bench.held.held.applied_generation == 3


async def test_a_patch_that_leads_elsewhere_is_not_taken() -> None:
    bench = Bench()
    await bench.take(full(1, daemon("info")))
    other = daemon("info")
    other.access.ticket_issuer = "somebody"
    after = messages.NodeSpec()
    after.CopyFrom(other)
    after.daemon.log_level = "debug"
    request = await bench.take(patch(after, over=full(1, other), generation=2))
    assert request == messages.SpecRequest(held_generation=1, reason="hash-mismatch")
    assert (bench.held.held.observed_generation, len(bench.writes)) == (1, 1)


@pytest.mark.parametrize(
    ("floor", "state", "verdict"),
    [
        (5, full(4, daemon("info")), Verdict.GENERATION_BEHIND),
        (0, full(1, daemon("info"), node_id="n2"), Verdict.WRONG_NODE),
        (0, full(1, daemon("info"), trust_domain="other"), Verdict.WRONG_TRUST_DOMAIN),
        (0, full(0, daemon("info")), Verdict.BAD_GENERATION),
        (0, messages.DesiredState(body=b"\xff"), Verdict.UNREADABLE),
    ],
    ids=["behind", "node", "domain", "generation", "nonsense"],
)
async def test_what_is_not_for_this_node_or_behind_is_refused(
    floor: int, state: messages.DesiredState, verdict: Verdict
) -> None:
    bench = Bench(floor=floor)
    assert await bench.take(state) is None
    assert bench.held.refused is not None
    assert bench.held.refused[0] is verdict
    assert bench.writes == []
    await bench.take(full(6, daemon("info")))
    assert bench.held.refused is None


@pytest.mark.parametrize("other", [{"node_id": "n0"}, {"trust_domain": "elsewhere"}], ids=["node", "domain"])
async def test_what_was_desired_of_the_node_that_this_was_before_is_not_brought_about(other: dict[str, str]) -> None:
    renamed = Bench(kept=full(3, daemon("info"), **other).body)
    assert not await renamed.held.look()
    assert renamed.levels.seen == []
    assert renamed.held.held == Bench().held.held
    await renamed.take(full(1, daemon("debug")))
    assert (renamed.levels.seen, renamed.floors) == (["debug"], [1])


async def test_a_journal_older_than_the_identity_counts_as_holding_none() -> None:
    bench = Bench()
    await bench.take(full(3, daemon("info")))
    [write] = bench.writes
    assert isinstance(write, PutDocument)
    restored = Bench(kept=write.body, floor=5)
    assert restored.held.refused == (Verdict.GENERATION_BEHIND, 3)
    held = restored.held.held
    assert (held.observed_generation, held.applied_generation, held.spec_sha256) == (0, 5, b"")
    assert not await restored.held.look()
    assert restored.levels.seen == []
    await restored.take(full(5, daemon("debug")))
    assert (restored.levels.seen, restored.held.held.observed_generation) == (["debug"], 5)


async def test_a_repeat_changes_nothing() -> None:
    bench = Bench()
    assert not await bench.held.look()
    await bench.take(full(1, daemon("info")))
    await bench.take(full(1, daemon("info")))
    assert len(bench.writes) == 1
