"""Scenarios: TOML files that say how large a simulation is, what work it does, and which faults befall it how often."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from bettercompute.protocol.statuses import Reason, refuse

Range = tuple[float, float]
DEFAULT = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """How many of each there are."""

    nodes: int = 6
    """FakeDaemons."""
    daemons: int = 0
    """bcd with its journal on disk."""
    gateways: int = 2
    workers: int = 1
    streams_max: int = 5_000
    handshakes_per_s: float = 200
    certificate_life_s: float = 86_400
    """Of nodes that renew theirs: those with a disk."""
    signing: bool = False
    """Intent is signed by a worker key, and bcd takes no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """How long each phase takes, in virtual seconds: faults, then none until everything must have settled."""

    calm_s: float = 30
    faults_s: float = 900
    settle_s: float = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long things take."""

    network_ms: Range = (1, 40)
    database_ms: Range = (0.2, 4)
    disk_ms: Range = (0.1, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What operators and nodes do meanwhile; 0 means never."""

    command_every_s: float = 5
    cancel_share: float = 0.15
    event_every_s: float = 8
    spec_every_s: float = 30
    abandon_every_s: float = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """One kind of fault, how often it comes, and how long it stays."""

    kind: str
    every_s: float
    for_s: Range = (1, 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One scenario."""

    name: str
    fleet: Fleet = field(default_factory=Fleet)
    phases: Phases = field(default_factory=Phases)
    times: Times = field(default_factory=Times)
    work: Work = field(default_factory=Work)
    faults: tuple[FaultPlan, ...] = ()


def load(name: str) -> Scenario:
    """Read a scenario: a file, or one of those that come with the program."""
    path = Path(name)
    if path.suffix != ".toml":
        shipped = resources.files(__package__) / "scenarios" / f"{name}.toml"
        if not shipped.is_file():
            raise refuse(
                Reason.BAD_REQUEST, f"no scenario {name!r}: name a .toml file or one of {', '.join(shipped_names())}"
            )
        return parse(shipped.read_text(), name=name)
    try:
        return parse(path.read_text(encoding="utf-8"), name=path.stem)
    except OSError as error:
        raise refuse(Reason.BAD_REQUEST, f"the scenario {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise refuse(Reason.BAD_REQUEST, f"the scenario {path} is no UTF-8 text: {error.reason}") from error


def shipped_names() -> list[str]:
    """Return the scenarios that come with the program."""
    folder = resources.files(__package__) / "scenarios"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def parse(text: str, *, name: str) -> Scenario:
    """Read a scenario; a wrong key or value is refused with its name."""
    try:
        read = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise refuse(Reason.BAD_REQUEST, f"scenario {name} is not TOML: {error}") from error
    tables: dict[str, Any] = {}
    for table, values in read.items():
        if table == "fault":
            if not isinstance(values, list):
                raise refuse(Reason.BAD_REQUEST, f"scenario {name}: faults are [[fault]] tables, one for each kind")
            tables["faults"] = tuple(_table(FaultPlan, entry, f"{name}: [[fault]]") for entry in values)
        elif table in _TABLES:
            tables[table] = _table(_TABLES[table], values, f"{name}: [{table}]")
        else:
            raise refuse(Reason.BAD_REQUEST, f"scenario {name} has no table [{table}]: {', '.join(_TABLES)}, [[fault]]")
    scenario = Scenario(name=name, **tables)
    if not scenario.fleet.nodes + scenario.fleet.daemons:
        raise refuse(Reason.BAD_REQUEST, f"scenario {name} has neither nodes nor daemons: nothing would be judged")
    return scenario


_TABLES: Mapping[str, type[Any]] = {"fleet": Fleet, "phases": Phases, "times": Times, "work": Work}


def _table(kind: type[Any], values: Mapping[str, Any], where: str) -> Any:
    if not isinstance(values, dict):
        raise refuse(Reason.BAD_REQUEST, f"{where} is {values!r}: a table is wanted")
    known = {entry.name: entry for entry in fields(kind)}
    taken: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise refuse(Reason.BAD_REQUEST, f"{where} has no key {key!r}: {', '.join(known)}")
        wrong = _fault(key, value, str(known[key].type))
        if wrong:
            raise refuse(Reason.BAD_REQUEST, f"{where}: {key} = {value!r} {wrong}")
        taken[key] = tuple(value) if isinstance(value, list) else value
    try:
        return kind(**taken)
    except TypeError as error:
        raise refuse(Reason.BAD_REQUEST, f"{where}: {error}") from error


# Of these there is at least one, or nothing happens at all.
_ABOVE_ZERO = frozenset({"gateways", "workers", "every_s", "streams_max", "handshakes_per_s", "certificate_life_s"})

# Up to here virtual time keeps its resolution, and a run comes to an end that somebody waits for.
YEAR_S = 365 * 86_400
# More often than this, time would hardly go on between one and the next.
EVERY_MIN_S = 0.001
_AT_MOST: Mapping[str, float] = {
    "nodes": 100_000,
    "daemons": 1_000,
    "gateways": 64,
    "workers": 64,
    "cancel_share": 1,
    "network_ms": 60_000,
    "database_ms": 60_000,
    "disk_ms": 60_000,
}


def _fault(key: str, value: object, kind: str) -> str:
    """Return what is wrong with a value, or nothing; `kind` is the field's annotation."""
    match kind:
        case "bool":
            return "" if isinstance(value, bool) else "is neither true nor false"
        case "str":
            return "" if isinstance(value, str) else "is no text"
        case "Range":
            return _range_fault(key, value)
        case "int":
            number = isinstance(value, int) and not isinstance(value, bool)
        case _:
            number = _is_number(value)
    if not number:
        return "is no whole number" if kind == "int" else "is no number"
    assert isinstance(value, int | float), "it was looked at above"
    if value < 0:
        return "is below 0"
    if value == 0 and key in _ABOVE_ZERO:
        return "must be above 0"
    if key.endswith("every_s") and 0 < value < EVERY_MIN_S:
        return f"is more often than every {EVERY_MIN_S:g} s"
    return _above(key, value)


def _range_fault(key: str, value: object) -> str:
    if not _is_range(value):
        return "is no range [from, to]"
    assert isinstance(value, list), "it was looked at above"
    return _above(key, value[1])


def _above(key: str, value: float) -> str:
    most = _AT_MOST.get(key, YEAR_S if key.endswith("_s") else math.inf)
    return f"is above {most:,}" if value > most else ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_range(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2 or not all(_is_number(bound) for bound in value):
        return False
    low, high = value
    return bool(0 <= low <= high)
