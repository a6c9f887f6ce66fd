"""What is offered of a spec, and what a daemon takes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from bettercompute.delivery import desired_state
from bettercompute.delivery.desired_state import HeldSpec, NodeGenerations, Offer, StoredSpec, Verdict

FULL = Offer(b"full", b"full-signature")
PATCH = Offer(b"patch", b"patch-signature")
SPEC = StoredSpec(
    generation=5,
    body=b"full",
    signature=b"full-signature",
    patch_base_generation=4,
    patch_body=b"patch",
    patch_signature=b"patch-signature",
)


@pytest.mark.parametrize("offered", [4, 5, 6])
@pytest.mark.parametrize("applied", [3, 4, 5])
@pytest.mark.parametrize(("requested", "full_only", "signed_only"), list(product([True, False], repeat=3)))
@pytest.mark.parametrize("signatures", ["both", "full", "patch", "none"])
def test_every_offer(
    offered: int, applied: int, signatures: str, *, requested: bool, full_only: bool, signed_only: bool
) -> None:
    spec = replace(
        SPEC,
        signature=b"full-signature" if signatures in ("both", "full") else b"",
        patch_signature=b"patch-signature" if signatures in ("both", "patch") else b"",
    )
    given = desired_state.offer(
        spec,
        offered_generation=offered,
        applied_generation=applied,
        requested=requested,
        full_only=full_only,
        signed_only=signed_only,
    )
    if offered >= 5 and not requested:
        assert given is None, "each generation is offered once"
        return
    may_patch = applied == 4 and not requested and not full_only
    candidates = ([Offer(b"patch", spec.patch_signature)] if may_patch else []) + [Offer(b"full", spec.signature)]
    fit = [one for one in candidates if one.signature or not signed_only]
    assert given == (fit[0] if fit else None)


@pytest.mark.parametrize(
    ("generation", "applied", "sha256", "due"),
    [
        (0, 0, b"", False),
        (1, 0, b"", True),
        (1, 1, b"x", False),
        (1, 1, b"", True),
        (2, 1, b"x", True),
        (1, 2, b"x", False),
    ],
)
def test_what_is_due_at_welcome(generation: int, applied: int, sha256: bytes, *, due: bool) -> None:
    assert (
        desired_state.due_at_welcome(
            generation=generation, has_spec=generation > 0, applied_generation=applied, spec_sha256=sha256
        )
        is due
    )


HELD = HeldSpec(
    node_id="n",
    trust_domain="bc.local",
    observed_generation=7,
    applied_generation=6,
    floor_generation=6,
    holds_spec=True,
)
WHOLE = replace(HELD, applied_generation=7, floor_generation=7)


@pytest.mark.parametrize(
    ("held", "said", "verdict"),
    [
        (HELD, {"generation": 8}, Verdict.TAKE),
        (HELD, {"generation": 7}, Verdict.HELD),
        (HELD, {"generation": 5}, Verdict.GENERATION_BEHIND),
        (replace(HELD, floor_generation=9), {"generation": 8}, Verdict.GENERATION_BEHIND),
        (HELD, {"generation": 8, "node_id": "m"}, Verdict.WRONG_NODE),
        (HELD, {"generation": 8, "trust_domain": "other"}, Verdict.WRONG_TRUST_DOMAIN),
        (HELD, {"generation": 8, "full": False}, Verdict.EMPTY),
        (WHOLE, {"generation": 8, "full": False, "patch_base_generation": 7}, Verdict.TAKE),
        (WHOLE, {"generation": 8, "full": False, "patch_base_generation": 6}, Verdict.BASE_MISMATCH),
        # Generation 7 is parked: a patch over what is applied would be laid over what is held.
        (HELD, {"generation": 8, "full": False, "patch_base_generation": 6}, Verdict.BASE_MISMATCH),
        (HELD, {"generation": 8, "full": False, "patch_base_generation": 7}, Verdict.BASE_MISMATCH),
        (HELD, {"generation": 0}, Verdict.BAD_GENERATION),
        (HELD, {"generation": 2**63}, Verdict.BAD_GENERATION),
        (HELD, {"generation": 7, "full": False, "patch_base_generation": 6}, Verdict.HELD),
        (replace(HELD, holds_spec=False), {"generation": 6}, Verdict.TAKE),
        (
            replace(HELD, holds_spec=False),
            {"generation": 8, "full": False, "patch_base_generation": 6},
            Verdict.BASE_MISMATCH,
        ),
    ],
)
def test_every_verdict(held: HeldSpec, said: dict[str, object], verdict: Verdict) -> None:
    body: dict[str, object] = {"node_id": "n", "trust_domain": "bc.local", "full": True, "patch_base_generation": None}
    assert desired_state.judge(held, **{**body, **said}) is verdict  # type: ignore[arg-type]  # test data


@pytest.mark.parametrize(
    ("generation", "observed", "applied", "overtaken_by", "following"),
    [
        (0, 0, 0, None, 1),
        (3, 3, 3, None, 4),
        (3, 2, 1, None, 4),
        (3, 5, 5, 5, 6),
        (3, 5, 2, 5, 6),
        (3, 2**62, 3, None, 4),
        (3, 3 + desired_state.GENERATION_LEAP_MAX, 3, 3 + desired_state.GENERATION_LEAP_MAX, 1_000_004),
    ],
)
def test_a_new_generation_is_above_what_the_daemon_knows(
    generation: int, observed: int, applied: int, overtaken_by: int | None, following: int
) -> None:
    held = NodeGenerations(generation=generation, observed_generation=observed, applied_generation=applied)
    assert desired_state.overtaken_by(held) == overtaken_by
    assert desired_state.next_generation(held) == following
