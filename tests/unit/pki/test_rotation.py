"""The life of trusted keys: every step from every state, and that at no moment a key in use is not trusted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from bettercompute.errors import Refused
from bettercompute.pki import rotation
from bettercompute.pki.rotation import Behind, Dependents, KeyStage, Purpose, TrustedKey
from bettercompute.protocol.statuses import Reason

ROOT = Purpose.COMMAND_ROOT
LATER = Dependents(now_ms=rotation.SETTLE_MS + 1)


def test_a_switch_waits_for_absent_nodes_only_where_they_could_not_come_and_hear() -> None:
    assert {purpose for purpose in Purpose if rotation.waits_for_absent(purpose)} == {
        Purpose.SERVING_CA,
        Purpose.JOIN_SIGNING,
    }


def key(name: str, stage: KeyStage, purpose: Purpose = ROOT) -> TrustedKey:
    return TrustedKey(purpose=purpose, key_sha256=name * 64, public_der=name.encode(), stage=stage, first_version=1)


OLD, NEW, THIRD = (key(name, KeyStage.NEXT) for name in "abc")
FOUNDED = rotation.adopt((), [OLD])


def stages(keys: tuple[TrustedKey, ...]) -> dict[str, str]:
    return {one.key_sha256[0]: str(one.stage) for one in keys}


def test_a_whole_rotation() -> None:
    assert stages(FOUNDED) == {"a": "current"}
    prepared = rotation.prepare(FOUNDED, NEW)
    assert stages(prepared) == {"a": "current", "b": "next"}
    assert rotation.prepare(prepared, NEW) == prepared
    switched = rotation.switch(prepared, ROOT, key_sha256=NEW.key_sha256, dependents=Dependents())
    assert stages(switched) == {"a": "previous", "b": "current"}
    assert [one.key_sha256[0] for one in rotation.trusted(switched, ROOT)] == ["b", "a"]
    assert rotation.switch(switched, ROOT, key_sha256=NEW.key_sha256, dependents=Dependents()) == switched
    retired = rotation.retire(switched, ROOT, dependents=LATER)
    assert stages(retired) == {"a": "retired", "b": "current"}
    assert rotation.retire(retired, ROOT, dependents=LATER) == retired
    assert stages(rotation.prepare(retired, THIRD)) == {"a": "retired", "b": "current", "c": "next"}


def test_another_that_is_prepared_makes_way() -> None:
    prepared = rotation.prepare(rotation.prepare(FOUNDED, NEW), THIRD)
    assert stages(prepared) == {"a": "current", "b": "retired", "c": "next"}


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (lambda keys: rotation.prepare(keys, OLD), "is current already"),
        (
            lambda keys: rotation.switch(keys, ROOT, key_sha256="f" * 64, dependents=Dependents()),
            "run the stage prepare",
        ),
        (
            lambda keys: rotation.switch(
                rotation.prepare(keys, NEW), ROOT, key_sha256=THIRD.key_sha256, dependents=Dependents()
            ),
            "is the key folder the one",
        ),
        (lambda keys: rotation.retire(rotation.prepare(keys, NEW), ROOT, dependents=LATER), "run the stage switch"),
        (lambda keys: rotation.prepare(keys, key("z", KeyStage.NEXT, Purpose.NODE_CA)), "no node-ca in use yet"),
    ],
)
def test_what_is_out_of_order_is_refused_with_its_cure(
    step: Callable[[tuple[TrustedKey, ...]], object], says: str
) -> None:
    with pytest.raises(Refused, match=says) as caught:
        step(FOUNDED)
    assert caught.value.reason == Reason.CONFLICT


def test_a_switch_waits_for_nodes_and_names_them() -> None:
    prepared = rotation.prepare(FOUNDED, replace(NEW, first_version=7))
    behind = Dependents(behind=Behind(count=3, names=("n1", "n2")))
    with pytest.raises(Refused, match=r"3 connected nodes do not hold trust version 7.*: n1, n2 and 1 more"):
        rotation.switch(prepared, ROOT, key_sha256=NEW.key_sha256, dependents=behind)


@pytest.mark.parametrize(
    ("dependents", "says"),
    [
        (Dependents(now_ms=rotation.SETTLE_MS - 1), "ask again in 1 ms"),
        (replace(LATER, open_commands=2), "2 commands"),
        (replace(LATER, specs=5), "specs of 5 nodes"),
        (replace(LATER, behind=Behind(count=1, names=("n9",))), "1 nodes still depend .*: n9.*--except NODE"),
        (replace(LATER, gateways=Behind(count=1, names=("gw-1",))), "1 gateways show a certificate .*: gw-1"),
        (replace(LATER, tokens=Behind(count=1, names=("t-1",))), "1 join tokens that are good pin .*: t-1"),
    ],
)
def test_nothing_is_retired_that_something_depends_on(dependents: Dependents, says: str) -> None:
    switched = rotation.switch(rotation.prepare(FOUNDED, NEW), ROOT, key_sha256=NEW.key_sha256, dependents=Dependents())
    with pytest.raises(Refused, match=says):
        rotation.retire(switched, ROOT, dependents=dependents)
    with pytest.raises(Refused, match=r"last rotation .* not finished"):
        rotation.prepare(switched, THIRD)


def test_a_start_adds_and_never_takes_away() -> None:
    # The folder is of after a rotation that the restored database does not know.
    restored = rotation.adopt(FOUNDED, [NEW])
    assert stages(restored) == {"a": "previous", "b": "current"}
    assert rotation.adopt(restored, [NEW]) == restored
    # The folder still has the names of before the switch.
    assert rotation.adopt(restored, [OLD]) == restored
    retired = rotation.retire(restored, ROOT, dependents=LATER)
    # The same, once the old key was retired: what is in use lies there as well.
    assert rotation.adopt(retired, [OLD, NEW]) == retired
    # A copy of the folder from before the rotation.
    with pytest.raises(Refused, match=r"was retired.*copy the present key folder") as caught:
        rotation.adopt(retired, [OLD])
    assert caught.value.reason == Reason.INVALID_CONFIG


def test_however_the_steps_come_there_is_one_key_in_use_and_nodes_trust_it() -> None:
    steps: list[Callable[[tuple[TrustedKey, ...]], tuple[TrustedKey, ...]]] = [
        lambda keys: rotation.prepare(keys, NEW),
        lambda keys: rotation.prepare(keys, THIRD),
        lambda keys: rotation.switch(keys, ROOT, key_sha256=NEW.key_sha256, dependents=Dependents()),
        lambda keys: rotation.switch(keys, ROOT, key_sha256=THIRD.key_sha256, dependents=Dependents()),
        lambda keys: rotation.retire(keys, ROOT, dependents=LATER),
        lambda keys: rotation.adopt(keys, [NEW]),
    ]
    for order in itertools.product(steps, repeat=5):
        keys = FOUNDED
        for step in order:
            before = rotation.trusted(keys, ROOT)
            try:
                keys = step(keys)
            except Refused:
                continue
            current = rotation.in_stage(keys, ROOT, KeyStage.CURRENT)
            assert len(current) == 1
            assert len(rotation.in_stage(keys, ROOT, KeyStage.NEXT)) <= 1
            # What was in use is trusted after every step, and what comes into use by a switch was trusted before it.
            assert before[0].key_sha256 in {one.key_sha256 for one in rotation.trusted(keys, ROOT)}
