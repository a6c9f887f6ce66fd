import pytest
from hypothesis import given
from hypothesis import strategies as st

from bettercompute.protocol.kinds import KINDS
from bettercompute.protocol.statuses import Status
from bettercompute.protocol.versions import PROTOCOL_VERSION, UPGRADE_KIND, InvalidConfig, ProtocolRange, negotiate


@pytest.mark.parametrize(
    ("gateway", "proto_min", "proto_max", "version", "upgrade_required"),
    [
        ((1, 1), 1, 1, 1, False),
        ((1, 3), 1, 1, 1, False),
        ((1, 3), 1, 2, 2, False),
        ((1, 3), 2, 9, 3, False),
        ((2, 3), 1, 1, 2, True),
        ((1, 1), 2, 3, 1, True),
        # A claim that is missing or upside down.
        ((1, 1), 0, 0, 1, True),
        ((1, 3), 3, 1, 1, True),
        ((1, 1), 0, 1, 1, False),
    ],
)
def test_negotiation(gateway, proto_min, proto_max, version, upgrade_required):
    negotiated = negotiate(ProtocolRange(*gateway), proto_min=proto_min, proto_max=proto_max)
    assert (negotiated.protocol_version, negotiated.upgrade_required) == (version, upgrade_required)


versions = st.integers(1, 20)


@given(versions, versions, st.integers(0, 20), st.integers(0, 20))
def test_the_highest_version_inside_both_ranges(one, other, proto_min, proto_max):
    gateway = ProtocolRange(min=min(one, other), max=max(one, other))
    both = [v for v in range(gateway.min, gateway.max + 1) if proto_min <= v <= proto_max]
    negotiated = negotiate(gateway, proto_min=proto_min, proto_max=proto_max)
    assert negotiated.upgrade_required == (not both)
    assert negotiated.protocol_version == (max(both) if both else gateway.min)


@pytest.mark.parametrize(
    ("low", "high", "why"),
    [
        (0, 1, "versions begin at 1"),
        (-1, 1, "versions begin at 1"),
        (2, 1, "max is 1, below min 2"),
        (1.5, 2, "min is 1.5: it must be a whole number"),
        (1, "2", "max is '2': it must be a whole number"),
        (True, 2, "min is True"),
        (1, None, "max is None"),
    ],
)
def test_a_bad_range_is_refused_at_construction(low, high, why):
    with pytest.raises(InvalidConfig, match=why) as caught:
        ProtocolRange(min=low, max=high)
    assert (caught.value.reason, caught.value.status) == ("INVALID_CONFIG", Status.INVALID_ARGUMENT)


def test_this_release_speaks_version_1():
    assert ProtocolRange(min=1, max=1) == PROTOCOL_VERSION


def test_the_upgrade_is_a_kind():
    assert UPGRADE_KIND in KINDS
