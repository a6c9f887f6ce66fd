"""The desired state a node holds: what is taken, kept, refused, and how its sections stand."""

from __future__ import annotations

import pytest

from bettercompute.daemon.desired import DOCUMENT, DesiredState, SectionFailed, SpecOwner
from bettercompute.daemon.journal_records import PutDocument, Write
from bettercompute.delivery.desired_state import Verdict
from bettercompute.protocol import messages

CONVERGED = messages.SECTION_CONVERGENCE_CONVERGED
FAILED = messages.SECTION_CONVERGENCE_FAILED
UNSUPPORTED = messages.SECTION_CONVERGENCE_UNSUPPORTED


class Bench:
    def __init__(self, *, floor: int = 0, kept: bytes = b"") -> None:
        self.writes: list[Write] = []
        self.levels: list[str] = []
        self.held = DesiredState(
            SpecOwner(node_id="n1", trust_domain="bc.local", floor_generation=floor),
            kept=kept,
            write=self.write,
            converge={"daemon": self.converge},
        )

    async def write(self, write: Write) -> None:
        self.writes.append(write)

    def converge(self, spec: messages.NodeSpec) -> None:
        if spec.daemon.log_level == "loud":
            raise SectionFailed("log-level", "loud is no level")
        self.levels.append(spec.daemon.log_level)


def full(generation: int, spec: messages.NodeSpec, **changes: object) -> messages.DesiredState:
    values: dict[str, object] = {"node_id": "n1", "trust_domain": "bc.local", "spec_sha256": b"%d" % generation}
    body = messages.DesiredStateBody(generation=generation, full=spec, **(values | changes))  # type: ignore[arg-type]
    return messages.DesiredState(body=body.SerializeToString())


def daemon(level: str) -> messages.NodeSpec:
    return messages.NodeSpec(daemon=messages.DaemonSection(log_level=level))


async def test_a_whole_spec_is_kept_before_it_is_enforced_and_outlives_a_restart() -> None:
    bench = Bench()
    assert await bench.held.take(full(3, daemon("info"))) is None
    assert bench.levels == ["info"]
    assert (bench.held.held.observed_generation, bench.held.held.applied_generation) == (3, 3)
    [write] = bench.writes
    assert isinstance(write, PutDocument)
    assert write.name == DOCUMENT
    again = Bench(kept=write.body)
    assert again.held.held.applied_generation == 0, "nothing is applied before it is enforced"
    again.held.enforce()
    assert again.levels == ["info"]
    assert again.held.held == bench.held.held


async def test_what_cannot_be_converged_is_reported_and_the_rest_converges() -> None:
    bench = Bench()
    spec = daemon("info")
    spec.devices.assignments.add(allocation_id="a1")
    spec.MergeFromString(b"\xfa\x3f\x00")  # field 1023 of a later release
    await bench.held.take(full(1, spec))
    assert [(state.section, state.field_number, state.convergence) for state in bench.held.sections] == [
        ("daemon", 2, CONVERGED),
        ("devices", 3, UNSUPPORTED),
        ("", 1023, UNSUPPORTED),
    ]
    assert [state.reason for state in bench.held.sections[1:]] == ["3", "1023"]
    assert (bench.held.held.observed_generation, bench.held.held.applied_generation) == (1, 0)
    await bench.held.take(full(2, daemon("loud")))
    assert [(state.convergence, state.reason) for state in bench.held.sections] == [(FAILED, "log-level")]


async def test_a_patch_replaces_one_section_over_its_base_only() -> None:
    bench = Bench()
    await bench.held.take(full(1, daemon("info")))
    patch = messages.SectionPatch(base_generation=1, section="daemon", field_number=2, spec=daemon("debug"))
    body = messages.DesiredStateBody(node_id="n1", trust_domain="bc.local", generation=2, patch=patch)
    assert await bench.held.take(messages.DesiredState(body=body.SerializeToString())) is None
    assert bench.levels == ["info", "debug"]
    body.generation = 4
    body.patch.base_generation = 3
    request = await bench.held.take(messages.DesiredState(body=body.SerializeToString()))
    assert request == messages.SpecRequest(held_generation=2, reason="base-mismatch")
    body.generation = 3
    body.patch.base_generation = 2
    body.patch.ClearField("spec")
    await bench.held.take(messages.DesiredState(body=body.SerializeToString()))
    assert bench.held.sections == []
    assert bench.held.held.applied_generation == 3


@pytest.mark.parametrize(
    ("floor", "state", "verdict"),
    [
        (5, full(4, daemon("info")), Verdict.GENERATION_BEHIND),
        (0, full(1, daemon("info"), node_id="n2"), Verdict.WRONG_NODE),
        (0, full(1, daemon("info"), trust_domain="other"), Verdict.WRONG_TRUST_DOMAIN),
    ],
)
async def test_what_is_not_for_this_node_or_behind_is_refused(
    floor: int, state: messages.DesiredState, verdict: Verdict
) -> None:
    bench = Bench(floor=floor)
    assert await bench.held.take(state) is None
    assert bench.held.refused is not None
    assert bench.held.refused[0] is verdict
    assert bench.writes == []
    await bench.held.take(full(6, daemon("info")))
    assert bench.held.refused is None


async def test_nonsense_and_repeats_change_nothing() -> None:
    bench = Bench()
    assert await bench.held.take(messages.DesiredState(body=b"\xff")) is None
    bench.held.enforce()
    await bench.held.take(full(1, daemon("info")))
    await bench.held.take(full(1, daemon("info")))
    assert len(bench.writes) == 1
