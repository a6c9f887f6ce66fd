"""The bytes of a generation, and that a patch leads to the same spec as the whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bettercompute.delivery.spec_generations import (
    SECTIONS,
    Circumstances,
    changed_sections,
    compose,
    merged,
    spec_sha256,
)
from bettercompute.protocol import messages
from bettercompute.protocol.frames import ProtocolError

LATER = b"\xfa\x3f\x02hi"  # field 1023 of a later release


def made(generation: int) -> Circumstances:
    return Circumstances(node_id="n1", trust_domain="bc.local", generation=generation, issued_at_ms=7)


def body_of(spec: messages.NodeSpec, generation: int) -> messages.DesiredStateBody:
    return messages.DesiredStateBody.FromString(compose(spec, before=None, of=made(generation)).body)


@st.composite
def specs(draw: st.DrawFn) -> messages.NodeSpec:
    spec = messages.NodeSpec()
    if draw(st.booleans()):
        spec.daemon.SetInParent()
        spec.daemon.log_level = draw(st.sampled_from(["", "info", "debug"]))
    if draw(st.booleans()):
        spec.host.SetInParent()
        for count in draw(st.lists(st.integers(0, 3), max_size=2)):
            spec.host.huge_pages.add(size_bytes=2**21, count=count)
    if draw(st.booleans()):
        spec.devices.assignments.add(allocation_id=draw(st.sampled_from(["a", "b"])))
    if draw(st.booleans()):
        spec.MergeFromString(LATER)
    return spec


@given(specs(), specs())
def test_the_patch_leads_to_the_whole(before: messages.NodeSpec, after: messages.NodeSpec) -> None:
    held = body_of(before, 4)
    new = compose(after, before=held, of=made(5))
    whole = messages.DesiredStateBody.FromString(new.body)
    assert (whole.full, whole.generation, whole.spec_sha256) == (after, 5, spec_sha256(after))
    assert new.changed == changed_sections(before, after)
    one_known = len(new.changed) == 1 and new.changed[0] in SECTIONS
    assert bool(new.patch_body) == one_known
    if one_known:
        body = messages.DesiredStateBody.FromString(new.patch_body)
        assert (body.patch.base_generation, new.patch_base_generation) == (4, 4)
        assert spec_sha256(merged(held.full, body.patch)) == whole.spec_sha256 == body.spec_sha256


def test_a_section_may_be_there_and_empty() -> None:
    spec = messages.NodeSpec(daemon=messages.DaemonSection())
    held = body_of(messages.NodeSpec(), 1)
    patch = messages.DesiredStateBody.FromString(compose(spec, before=held, of=made(2)).patch_body).patch
    assert patch.spec.HasField("daemon")
    gone = messages.DesiredStateBody.FromString(
        compose(messages.NodeSpec(), before=body_of(spec, 2), of=made(3)).patch_body
    ).patch
    assert (gone.HasField("spec"), gone.field_number) == (False, 2)
    assert merged(spec, gone) == messages.NodeSpec()


def test_the_bound_of_a_spec() -> None:
    spec = messages.NodeSpec(access=messages.AccessSection(ticket_jwks="x" * 2**22))
    with pytest.raises(ProtocolError, match="over its bound of 4194304"):
        compose(spec, before=None, of=made(1))
