"""What a session offers of a spec that its daemon has applied already."""

from __future__ import annotations

from dataclasses import replace

from bettercompute.session import inputs
from bettercompute.session.hello_plan import NodeFacts
from tests.unit.session.test_gateway_side import SPEC, begin, facts, frames, step


def test_what_a_daemon_has_applied_is_not_offered_anew() -> None:
    given = facts(node=NodeFacts(identity_generation=1, spec_generation=3))
    state, effects = begin(given, applied_generation=3, observed_generation=3, spec_sha256=b"h")
    assert [frame.WhichOneof("frame") for frame in frames(effects)] == ["welcome"]
    assert step(state, inputs.SpecPublished(SPEC))[1] == ()
    _, effects = step(state, inputs.SpecPublished(replace(SPEC, generation=4)))
    assert [frame.WhichOneof("frame") for frame in frames(effects)] == ["desired"]


def test_a_generation_that_is_parked_is_offered_once_in_each_session() -> None:
    given = facts(node=NodeFacts(identity_generation=1, spec_generation=3))
    state, effects = begin(given, applied_generation=2, observed_generation=3, spec_sha256=b"h")
    assert [frame.WhichOneof("frame") for frame in frames(effects)] == ["welcome", "desired"]
    assert step(state, inputs.SpecPublished(SPEC))[1] == ()
