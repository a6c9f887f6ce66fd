"""The directives by name, how one is written, and how a passage is played.

Each function of this package that is marked `@directive` is one; its docstring says how it is written in a story.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from bettercompute.protocol.versions import ProtocolRange
from tests.stories.gateway import Gateway
from tests.stories.machine import Machine
from tests.stories.network import Stream
from tests.stories.script import Directive, StoryError
from tests.stories.stage import Stage

UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

Play = Callable[[Stage, Directive], None]
DIRECTIVES: dict[str, Play] = {}


def directive(function: Play) -> Play:
    """Give a directive the name of its function."""
    DIRECTIVES[function.__name__.replace("_", "-")] = function
    return function


def play(stage: Stage, passage: Sequence[Directive]) -> Sequence[str]:
    """Play one passage and return what was told."""
    for given in passage:
        found = DIRECTIVES.get(given.name)
        if found is None:
            raise StoryError(f"line {given.line}: no directive is named {given.name!r}: {sorted(DIRECTIVES)}")
        stage.transcript.quiet = given.quiet
        try:
            found(stage, given)
            stage.settle()
            stage.check()
        except (KeyError, IndexError, ValueError, AssertionError) as error:
            raise StoryError(f"line {given.line}: {given.name} fails: {error!r}") from error
    stage.transcript.quiet = False
    return stage.transcript.take(now_ms=stage.now_ms)


# What directives are written with


def duration_ms(text: str) -> int:
    """Return a duration: `250ms`, `30s`, `-10m`."""
    match = re.fullmatch(r"(-?\d+)(ms|s|m|h|d)", text)
    if match is None:
        raise StoryError(f"{text!r} is no duration: write 250ms, 30s, 5m, 2h or 1d")
    return int(match[1]) * UNITS_MS[match[2]]


def names(text: str | None) -> tuple[str, ...]:
    """Return a list: `a,b,c`."""
    return tuple(name for name in (text or "").split(",") if name)


def protocol(text: str) -> ProtocolRange:
    """Return a range of protocol versions: `1-2`."""
    low, high = text.split("-")
    return ProtocolRange(min=int(low), max=int(high))


def machine_of(stage: Stage, given: Directive) -> Machine:
    """Return the machine that is named first."""
    return stage.machines[given.arguments[0]]


def gateway_of(stage: Stage, given: Directive) -> Gateway:
    """Return the gateway that is named first."""
    return stage.gateways[given.arguments[0]]


def stream_of(machine: Machine) -> Stream:
    """Return the machine's stream, which must be there."""
    assert machine.stream is not None, f"{machine.name} has no stream"
    return machine.stream
