"""Durations as people write and read them."""

import pytest
import typer

from bettercompute.cli.durations import format_age, parse_duration_ms


@pytest.mark.parametrize(
    ("text", "duration_ms"),
    [("90s", 90_000), ("5m", 300_000), ("24h", 86_400_000), ("7d", 604_800_000), ("250ms", 250), ("3", 3_000)],
)
def test_durations_are_read(text: str, duration_ms: int) -> None:
    assert parse_duration_ms(text) == duration_ms


@pytest.mark.parametrize("text", ["", "s", "-1s", "1w", "1.5h", "٣s"])
def test_other_forms_are_refused_with_the_allowed_ones(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="write 90s, 5m, 24h or 7d"):
        parse_duration_ms(text)


@pytest.mark.parametrize(
    ("age_ms", "shown"),
    [
        (None, "-"),
        (-5, "0s"),
        (1_999, "1s"),
        (119_999, "119s"),
        (120_000, "2m"),
        (7_200_000, "2h"),
        (172_800_000, "2d"),
    ],
)
def test_ages_are_shown_in_their_largest_unit(age_ms: int | None, shown: str) -> None:
    assert format_age(age_ms) == shown
