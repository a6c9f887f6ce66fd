from __future__ import annotations

import pytest

from bettercompute.errors import Bug
from bettercompute.store.statements import parse, statements


def one(text: str):
    [statement] = parse(text, group="things")
    return statement


def test_arguments_are_numbered_by_their_first_use():
    statement = one("-- name: things.get\n-- fact\nSELECT :b::text, :a, :b FROM t WHERE x = :a;\n")
    assert statement.sql == "/* things.get */ SELECT $1::text, $2, $1 FROM t WHERE x = $2"
    assert statement.arguments == ("b", "a")
    assert statement.bind({"a": 1, "b": 2}) == [2, 1]


def test_strings_comments_and_casts_hold_no_arguments():
    text = "-- name: things.get\n-- other: why\nSELECT 'it''s :no', x::int -- not :this\nFROM t WHERE y = :yes"
    assert one(text).arguments == ("yes",)
    assert one(text).reason == "why"


@pytest.mark.parametrize("given", [{}, {"a": 1, "b": 2, "c": 3}, {"a": 1}, {"a": 1, "c": 2}])
def test_missing_and_unknown_arguments_are_named(given):
    statement = one("-- name: things.get\n-- fenced\nSELECT :a, :b")
    with pytest.raises(Bug, match=r"things.get: missing arguments \[.*\], unknown arguments \[.*\]"):
        statement.bind(given)


@pytest.mark.parametrize(
    "text",
    [
        "-- name: others.get\n-- fact\nSELECT 1",
        "-- name: things.get\nSELECT 1",
        "-- name: things.get\n-- other\nSELECT 1",
        "-- name: things.get\n-- fact: because\nSELECT 1",
        "-- name: things.get\n-- sacred\nSELECT 1",
    ],
)
def test_a_statement_without_its_mark_is_a_bug(text):
    with pytest.raises(Bug):
        parse(text, group="things")


def test_every_statement_has_the_name_of_its_file():
    assert all(name == statement.name for name, statement in statements().items())
    assert len(statements()) > 50
