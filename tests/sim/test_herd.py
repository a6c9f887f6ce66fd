"""Herds, small: each story ends with everybody connected, and what is told of it adds up."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from bettercompute.testing import postgres
from bettercompute.testing.sim import herd, picture
from bettercompute.testing.sim.herd import Herd, HerdOutcome, Sample

SMALL = Herd(nodes=40, gateways=2, handshakes_per_s=10, streams_max=40)


def run(server: postgres.TestServer, wanted: Herd) -> HerdOutcome:
    dsn = server.create_database()
    try:
        return herd.run(wanted, dsn=dsn)
    finally:
        server.drop_database(dsn)


@pytest.mark.parametrize("story", herd.STORIES)
def test_everybody_is_back_in_the_end(postgres_server: postgres.TestServer, story: str) -> None:
    outcome = run(postgres_server, replace(SMALL, story=story))
    assert outcome.bugs == ()
    assert outcome.all_connected_s is not None
    assert outcome.ratio == pytest.approx(outcome.all_connected_s / 2)
    assert outcome.samples[-1].connected == SMALL.nodes
    assert 0 < outcome.dropped <= SMALL.nodes
    assert outcome.attempts_max >= outcome.refusals_max + 1
    assert 1 <= outcome.attempts_mean <= outcome.attempts_max
    assert 0 < outcome.statements_per_s <= outcome.statements_per_s_max
    assert [sample.at_s for sample in outcome.samples] == sorted(sample.at_s for sample in outcome.samples)
    assert sum(outcome.reasons.values()) == round((outcome.attempts_mean - 1) * SMALL.nodes)


def test_the_bucket_is_the_bound_and_equal_seeds_are_equal(postgres_server: postgres.TestServer) -> None:
    first = run(postgres_server, SMALL)
    again = run(postgres_server, SMALL)
    assert replace(first, real_s=0) == replace(again, real_s=0)
    assert first.ratio is not None
    assert first.ratio < 2
    assert "handshakes" in first.reasons


def outcome_of(samples: tuple[Sample, ...]) -> HerdOutcome:
    return HerdOutcome(
        herd=SMALL,
        all_connected_s=3.0,
        attempts_mean=1.5,
        attempts_max=2,
        refusals_max=1,
        reasons={},
        pending_hellos_max=1,
        statements_per_s=10,
        statements_per_s_max=20,
        dropped=40,
        samples=samples,
        bugs=(),
        real_s=1,
    )


@pytest.mark.parametrize("count", [1, 2, 72, 73, 500])
def test_a_picture_of_any_length(count: int) -> None:
    samples = tuple(
        Sample(
            at_s=number / 2,
            connected=number,
            attempts=2 * number,
            refusals=number,
            failed_dials=0,
            pending_hellos=0,
            statements=number,
        )
        for number in range(count)
    )
    outcome = outcome_of(samples)
    lines = picture.text(outcome).splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["connected", "attempts", "refusals"]
    assert lines[0].endswith(str(count - 1))
    assert all(len(line) <= 100 for line in lines)
    drawing = ET.fromstring(picture.svg(outcome))
    assert len(drawing.findall("{http://www.w3.org/2000/svg}polyline")) == 3


def test_nothing_happened_is_a_flat_line() -> None:
    still = Sample(at_s=0, connected=0, attempts=0, refusals=0, failed_dials=0, pending_hellos=0, statements=0)
    assert "█" not in picture.text(outcome_of((still, still)))
