"""Which machine a credential is for: all that is expected must be claimed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bettercompute.services.attestors import machine

NAMES = st.text(max_size=20)
CLAIMS = st.fixed_dictionaries(
    {},
    optional={"dmi_uuid": NAMES, "serial": NAMES, "board_serial": NAMES, "mac_addresses": st.lists(NAMES, max_size=3)},
)


@given(CLAIMS, st.dictionaries(st.sampled_from(["hostname", "machine_id"]), NAMES))
def test_the_same_machine_is_the_same_whatever_runs_on_it(claims, others):
    expected = machine.expected_of({**claims, **others})
    assert set(expected) <= set(machine.FIELDS)
    assert machine.difference(expected, claims) == ""
    shouted = {
        name: value.swapcase() if isinstance(value, str) and value.isascii() else value
        for name, value in claims.items()
    }
    assert machine.difference(expected, shouted) == ""


@given(CLAIMS, CLAIMS)
def test_nothing_that_is_expected_may_be_left_out(expected, claimed):
    wanted = machine.expected_of(expected)
    lacking = {name for name in wanted if not claimed.get(name)}
    if any(str(wanted[name]).strip() for name in lacking if name != "mac_addresses"):
        assert machine.difference(wanted, claimed) != ""


@pytest.mark.parametrize(
    ("expected", "claimed", "why"),
    [
        ({}, {}, ""),
        ({"serial": "S1"}, {"serial": " s1"}, ""),
        ({"serial": "S1"}, {}, "serial 'S1' was expected, and it claims ''"),
        ({"mac_addresses": ["a", "b"]}, {"mac_addresses": ["B"]}, ""),
        ({"mac_addresses": ["a"]}, {"mac_addresses": ["c"]}, "none of its hardware addresses is one of a"),
        ({"mac_addresses": ["a"]}, {}, "none of its hardware addresses is one of a"),
        ({"serial": "S1", "board_serial": "B"}, {"serial": "S1", "board_serial": "C"}, "board_serial 'B' was expected"),
    ],
)
def test_how_a_machine_differs(expected, claimed, why):
    found = machine.difference(expected, claimed)
    assert found.startswith(why)
    assert bool(found) == bool(why)
