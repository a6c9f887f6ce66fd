"""Scenario files: what is shipped can be read, and what is wrong is refused with its name and its value."""

from __future__ import annotations

from pathlib import Path

import pytest

from bettercompute.errors import Refused
from bettercompute.testing.sim import scenario, simulation
from bettercompute.testing.sim.faults import FAULTS


@pytest.mark.parametrize("name", scenario.shipped_names())
def test_what_is_shipped_names_faults_that_exist(name: str) -> None:
    assert {plan.kind for plan in scenario.load(name).faults} <= set(FAULTS)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[fleet", "is not TOML"),
        ("[flee]\nnodes = 1", "has no table [flee]"),
        ("[fleet]\nnods = 1", "has no key 'nods'"),
        ("[fleet]\nnodes = -1", "nodes = -1 is below 0"),
        ("[fleet]\nnodes = 1.5", "is no whole number"),
        ("[fleet]\nnodes = true", "is no whole number"),
        ("[fleet]\ngateways = 0", "gateways = 0 must be above 0"),
        ("[phases]\nfaults_s = 'long'", "faults_s = 'long' is no number"),
        ("[phases]\nfaults_s = inf", "faults_s = inf is no number"),
        ("[times]\ndisk_ms = [3, 1]", "disk_ms = [3, 1] is no range"),
        ("[times]\ndisk_ms = [3]", "is no range"),
        ("[times]\ndisk_ms = 3", "is no range"),
        ("[times]\ndisk_ms = ['a', 'b']", "is no range"),
        ("[[fault]]\nkind = 'clone'", "every_s"),
        ("[[fault]]\nkind = 'clone'\nevery_s = 0", "every_s = 0 must be above 0"),
        ("[[fault]]\nkind = 3\nevery_s = 1", "kind = 3 is no text"),
        ("fault = 3", "faults are [[fault]] tables"),
        ("[fault]\nkind = 'clone'\nevery_s = 1", "faults are [[fault]] tables"),
        ("fault = [1]", "[[fault]] is 1: a table is wanted"),
        ("fleet = 3", "[fleet] is 3: a table is wanted"),
        ("[[fleet]]\nnodes = 3", "a table is wanted"),
        ("[fleet]\nnodes = 0", "neither nodes nor daemons"),
        ("[fleet]\nnodes = 100001", "nodes = 100001 is above 100,000"),
        ("[fleet]\ngateways = 65", "gateways = 65 is above 64"),
        ("[phases]\nfaults_s = 1e30", "faults_s = 1e+30 is above 31,536,000"),
        ("[work]\ncancel_share = 1.5", "cancel_share = 1.5 is above 1"),
        ("[work]\nevent_every_s = 1e-9", "event_every_s = 1e-09 is more often than every 0.001 s"),
        ("[times]\ndisk_ms = [1, 1e9]", "is above 60,000"),
        ("[[fault]]\nkind = 'clone'\nevery_s = 1\nfor_s = [1, 1e9]", "is above 31,536,000"),
    ],
)
def test_a_mistake_is_named(text: str, says: str) -> None:
    with pytest.raises(Refused) as caught:
        scenario.parse(text, name="mine")
    assert says in caught.value.message
    assert "mine" in caught.value.message


def test_a_fault_that_does_not_exist_is_refused_before_anything_runs() -> None:
    wrong = scenario.parse("[[fault]]\nkind = 'earthquake'\nevery_s = 1", name="mine")
    with pytest.raises(Refused, match="'earthquake'"):
        simulation.run(wrong, seed=1, dsn="nowhere")


def test_a_file_is_named_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "quake.toml"
    file.write_text("[fleet]\nnodes = 3\n")
    assert scenario.load(str(file)).name == "quake"
    assert scenario.load(str(file)).fleet.nodes == 3
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(Refused, match=r"quake\.toml is no UTF-8 text"):
        scenario.load(str(file))
    with pytest.raises(Refused, match=r"absent\.toml cannot be read: No such file"):
        scenario.load(str(tmp_path / "absent.toml"))
    with pytest.raises(Refused, match=r"no scenario .absent.: name a \.toml file or one of all, days"):
        scenario.load("absent")
