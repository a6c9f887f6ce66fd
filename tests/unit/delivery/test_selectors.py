"""The grammar of selectors, and what a label may be called."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bettercompute.delivery.selectors import REQUIREMENTS_MAX, Requirement, Source, check_label, parse
from bettercompute.errors import Refused


def test_every_form_is_read() -> None:
    assert parse(" gpu=h100 , site != x,a==1,rack in (b, a),!old,zone notin (z),bc.dev/cap.nvml ,empty=") == (
        Requirement(key="gpu", values=("h100",)),
        Requirement(key="site", values=("x",), negated=True),
        Requirement(key="a", values=("1",)),
        Requirement(key="rack", values=("a", "b")),
        Requirement(key="old", values=None, negated=True),
        Requirement(key="zone", values=("z",), negated=True),
        Requirement(key="bc.dev/cap.nvml", values=None),
        Requirement(key="empty", values=("",)),
    )


def test_a_key_has_one_source() -> None:
    sources = [requirement.source for requirement in parse("site,bc.dev/cap.nvml,gpu,in")]
    assert sources == [Source.FIELD, Source.SYSTEM, Source.OPERATOR, Source.OPERATOR]


@pytest.mark.parametrize(
    ("selector", "says"),
    [
        ("", "character 1: a label's key is expected, as in gpu=h100 or site!=x, and it ends there"),
        ("gpu=h100,", "character 10: a label's key is expected"),
        ("gpu=h100,,a", "character 10: a label's key is expected, as in gpu=h100 or site!=x, and ',a' stands there"),
        ("gpu=h 100", "character 7: a comma or the end is expected, and '100' stands there"),
        ("gpu>1", "character 4: a comma or the end is expected, and '>1' stands there"),
        ("gpu in (a", "character 10: a comma or ) is expected, and it ends there"),
        ("gpu in a", "character 5: a comma or the end is expected, and 'in a' stands there"),
        (",".join("a" for _ in range(REQUIREMENTS_MAX + 1)), "more than 32 requirements"),
        ("a=" + "v" * 257, "a value has at most 256 characters"),
        ("a" * 4_097, "at most 4096"),
    ],
    ids=str,
)
def test_what_is_not_understood_is_refused_with_its_place(selector: str, says: str) -> None:
    with pytest.raises(Refused) as refused:
        parse(selector)
    assert says in refused.value.message


@given(st.text(max_size=40) | st.text(alphabet="ab =!,()in", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(Refused):
        assert parse(text)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("bc.dev/cap.nvml", "1", "the control plane's own"),
        ("site", "x", "the node's own site"),
        ("a b", "1", "is no label key"),
        ("-a", "1", "is no label key"),
        ("a" * 318, "1", "is no label key"),
        ("a", "x,y", "is no value"),
        ("a", "v" * 257, "is no value"),
    ],
    ids=["system", "field", "space", "dash", "long-key", "comma", "long-value"],
)
def test_a_label_that_may_not_be_set_is_refused(key: str, value: str, says: str) -> None:
    check_label("example.com/rack", "a-1")
    with pytest.raises(Refused, match=says):
        check_label(key, value)
