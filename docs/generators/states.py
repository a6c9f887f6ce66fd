"""A page for each table of states: a diagram drawn from the table that the code obeys, and what the table says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from bettercompute.delivery import cancel
from bettercompute.delivery import commands as command_tables
from bettercompute.delivery.commands import CommandState
from bettercompute.session import closing, liveness, resume
from bettercompute.session.liveness import Connectivity, NodeLiveness
from bettercompute.transport import grpc_call as calls
from docs.generators.markdown import code, generated, table

FOR_EVER_MS = 10**12


def commands() -> str:
    """Return the page of a command's states."""
    moves: dict[tuple[str, str], list[str]] = {}
    for (state, move), to in sorted(command_tables.MOVES.items()):
        moves.setdefault((_name(state), _name(to)), []).append(move.value)
    ends = [(_name(state), "[*]", "") for state in sorted(command_tables.TERMINAL)]
    edges = [("[*]", _name(CommandState.PENDING), "enqueued")]
    edges += [(state, to, ", ".join(labels)) for (state, to), labels in moves.items()]
    reported = [_name(state) for state in command_tables.REPORTABLE]
    merges = [
        (
            code(_name(stored)),
            *(command_tables.FACT_MERGE[stored, state].value for state in command_tables.REPORTABLE),
        )
        for stored in CommandState
        if stored is not CommandState.REJECTED
    ]
    cancels = [(code(_name(state)), action.value) for state, action in cancel.CONTROL_PLANE.items()]
    return _page(
        "src/bettercompute/delivery/commands.py and cancel.py",
        "The states of a command",
        "What the control plane itself does to a command (`MOVES`). Anything that is not here is a bug and raises.",
        _diagram([*edges, *ends]),
        "## What a daemon reports",
        "Never a reason to raise: every pair of a stored and a reported state says what becomes of it (`FACT_MERGE`). "
        "`store` takes the reported state, `repeat` only its progress and output; `backwards` is ignored and counted; "
        "`late` is acked, counted and dropped. Steps may be skipped, because acks and commits may be lost.",
        table(("stored \\ reported", *map(code, reported)), merges),
        "## What a cancel means",
        "In the control plane, by the command's state (`CONTROL_PLANE`).",
        table(("state", "a cancel"), cancels),
    )


def session_endings() -> str:
    """Return the page of the ways in which a session ends."""
    rows = [
        (
            code(_name(cause)),
            ending.status.name,
            code(str(ending.reason)),
            "yes" if ending.disconnect_write else "no: the row belongs to somebody else",
        )
        for cause, ending in closing.CLOSINGS.items()
    ]
    edges = [
        ("live", "closed" if row.disconnect_write else "left", _name(cause)) for cause, row in closing.CLOSINGS.items()
    ]
    return _page(
        "src/bettercompute/session/closing.py",
        "How a session ends",
        "Every cause, the status and the reason that the daemon sees, and whether the disconnect is written (fenced by "
        "the epoch). Commands in flight stay as they are in every case. A protocol error, and any other refusal in the "
        "middle of a session, ends it with [its own status](../reference/reasons.md) and a disconnect write.",
        _diagram(
            [
                ("[*]", "live", "Hello commits"),
                *edges,
                ("closed", "[*]", "node.disconnected"),
                ("left", "[*]", "nothing is written"),
            ]
        ),
        table(("cause", "status", "reason", "disconnect write"), rows),
    )


def connectivity() -> str:
    """Return the page of a node's connectivity."""
    longest = {
        "gateway_lease_expired_ms": FOR_EVER_MS,
        "last_seen_age_ms": FOR_EVER_MS,
        "disconnected_age_ms": FOR_EVER_MS,
    }
    edges = [
        ("[*]", "joined", "Join"),
        ("joined", "connected", "Hello"),
        ("connected", "disconnected", "the gateway closes the session"),
    ]
    rows = []
    for state in Connectivity:
        for name, age_ms in longest.items():
            found = liveness.transition(NodeLiveness(connectivity=state, **{name: age_ms}))
            if found is not None and (edge := (state.value, found.to.value, found.reason)) not in edges:
                edges.append(edge)
                rows.append((code(state.value), code(found.to.value), code(found.reason), _after(found)))
        if state is not Connectivity.CONNECTED:
            edges.append((state.value, Connectivity.CONNECTED.value, "Hello"))
    return _page(
        "src/bettercompute/session/liveness.py",
        "The connectivity of a node",
        "Gateways write `connected` at Hello and `disconnected` when a session closes. What no gateway can report, the "
        "liveness controller finds. None of these transitions releases anything that belongs to the node.",
        _diagram(edges),
        table(("from", "to", "reason", "when"), rows),
        f"After the database or the controller was away for {liveness.OUTAGE_MS // 1000} s, or the database's clock "
        f"jumped, the controller makes no transition for {liveness.GRACE_MS // 60_000} minutes.",
    )


def resume_rules() -> str:
    """Return the page of the resume rules."""
    return _page(
        "src/bettercompute/session/resume.py",
        "The resume rules",
        "What a reconnect settles. The gateway's half looks at each command in flight; the first match wins.",
        table(("rule", "looks for"), [_split(rule.value) for rule in resume.Rule]),
        "The daemon's half: what a new process makes of an entry that an earlier one left unfinished (`at_start`), and "
        "what a delivery meets in the journal (`at_delivery`).",
        table(("at start",), [(code(one.value),) for one in resume.AtStart]),
        table(("at a delivery",), [(code(one.value),) for one in resume.AtDelivery]),
    )


def grpc_call() -> str:
    """Return the page of a gRPC call's lifecycle."""
    edges = [
        (_name(state), _name(to), given.value) for (state, given), to in calls.LIFECYCLE.items() if state is not to
    ]
    return _page(
        "src/bettercompute/transport/grpc_call.py",
        "The lifecycle of a gRPC call",
        "Which halves of a call are open, for both ends (`LIFECYCLE`). What a state cannot take leaves it as it is.",
        _diagram(
            [
                ("[*]", _name(calls.CallState.OPEN), "headers"),
                *_merged(edges),
                (_name(calls.CallState.CLOSED), "[*]", ""),
            ]
        ),
    )


def _page(source: str, title: str, *parts: str) -> str:
    return "\n\n".join((generated(source), f"# {title}", *parts))


def _diagram(edges: Iterable[tuple[str, str, str]]) -> str:
    """Return a mermaid state diagram; names with a dash get an alias, which mermaid needs."""
    edges = list(edges)
    lines = ["```mermaid", "stateDiagram-v2"]
    names = sorted({name for start, end, _ in edges for name in (start, end) if "-" in name})
    lines += [f'    state "{name}" as {_alias(name)}' for name in names]
    lines += [f"    {_alias(start)} --> {_alias(end)}" + (f": {label}" if label else "") for start, end, label in edges]
    return "\n".join((*lines, "```"))


def _alias(name: str) -> str:
    return name.replace("-", "_")


def _grouped(edges: Iterable[tuple[str, str, str]]) -> Mapping[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for start, end, label in edges:
        found.setdefault((start, end), []).append(label)
    return found


def _merged(edges: Iterable[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    return [(start, end, ", ".join(labels)) for (start, end), labels in _grouped(edges).items()]


def _after(found: liveness.Transition) -> str:
    return {
        liveness.GATEWAY_LOST: f"its gateway's lease expired more than {liveness.GATEWAY_LOST_AFTER_MS // 1000} s ago",
        liveness.STALE: "a living gateway has not flushed it for three of its intervals, one flush period and "
        f"{liveness.STALE_SLACK_MS // 1000} s",
        liveness.UNREACHABLE: f"disconnected for more than {liveness.UNREACHABLE_AFTER_MS // 60_000} minutes",
    }[found]


def _name(member: Enum) -> str:
    value = member.value
    return value if isinstance(value, str) else member.name.lower().replace("_", "-")


def _split(rule: str) -> tuple[str, str]:
    number, _, words = rule.partition(" ")
    return number, words
