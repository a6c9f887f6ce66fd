import pytest
from hypothesis import given
from hypothesis import strategies as st

from bettercompute.protocol import capabilities


@pytest.mark.parametrize(
    ("claimed", "kept"),
    [
        (["reboot", "cdi", "reboot"], ("cdi", "reboot")),
        (["instance.network-policy", "a_b", "0", "a" * 64], ("0", "a_b", "a" * 64, "instance.network-policy")),
        (["", "A", "-a", ".a", "_a", "a b", "a\n", "a\0", "ä", "a" * 65, "a/b", "a=b"], ()),
        ([], ()),
    ],
)
def test_only_well_formed_names_are_kept_once_and_sorted(claimed, kept):
    assert capabilities.normalise(claimed) == kept


def test_at_most_64_are_kept_the_first_in_order():
    claimed = [f"c{number:03}" for number in reversed(range(100))]
    assert capabilities.normalise(claimed) == tuple(f"c{number:03}" for number in range(64))


@given(st.lists(st.text(max_size=70)))
def test_normalising_twice_changes_nothing(claimed):
    once = capabilities.normalise(claimed)
    assert capabilities.normalise(once) == once
    assert len(once) <= 64
    assert list(once) == sorted(set(once))


def test_each_capability_is_a_label():
    assert capabilities.labels(["reboot", "instance.volumes", "NOT ONE"]) == {
        "bc.dev/cap.reboot": "1",
        "bc.dev/cap.instance.volumes": "1",
    }


def test_known_names_are_well_formed_and_described():
    names = tuple(capabilities.CAPABILITIES)
    assert set(capabilities.normalise(names)) == set(names)
    assert capabilities.normalise(capabilities.GATEWAY_CAPABILITIES) == capabilities.GATEWAY_CAPABILITIES
    for row in capabilities.CAPABILITIES.values():
        assert row.advertised_by
        assert row.needed_by
