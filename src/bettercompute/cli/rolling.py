"""A run as far as it has come, and how a rolling one takes steps: a few nodes at a time, none after too many failed.

Where nobody has to approve it, a step adds commands to the batch of the run. What approvers must sign is made whole at
the beginning, for they sign a whole, and a step releases commands that are there. See docs/operations.md, "Runs";
decisions 0097 and 0177.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from bettercompute.cli import output
from bettercompute.cli.client import ApiClient, path_of
from bettercompute.errors import Refused, Unavailable
from bettercompute.system import system_world

# After a deadline passed, what a node may still take to tell its end.
GRACE_S = 15.0
# A restarting API is back within this, or the wait ends; the commands go on without it.
RESTART_S = 120.0
# Whoever presses Ctrl-C waits no longer than this for the rest of the run to be ended.
STOP_S = 5.0
TERMINAL = frozenset({"succeeded", "failed", "cancelled", "expired"})
RETRY_S_MIN = 0.25
RETRY_S_MAX = 5.0

_SHARE = re.compile(r"(\d{1,6})(%?)", re.ASCII)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rolling:
    """How a run proceeds: so many nodes at once, and none any more when more than `failures_max` have failed."""

    at_once: int
    failures_max: int


@dataclass(slots=True, kw_only=True)
class Run:
    """A run as far as it has come."""

    kind: str
    batch_id: str = ""
    waiting: dict[str, str] = field(default_factory=dict)
    """The node of each command that was asked of it and has not ended."""
    size: int = 0
    """How many commands the batch is known to have."""
    failed: int = 0
    cursor: str | None = None
    gives_up_at: float = 0.0
    sends_from: float = 0.0
    """Before this moment of the monotonic clock no step's commands are sent."""
    not_asked: list[str] = field(default_factory=list)
    """Nodes whose turn has not come."""
    held: dict[str, str] = field(default_factory=dict)
    """The command of each of these that is made already, and not released."""
    approval: str = ""
    """`waiting`, `approved`, `refused` or `expired`; empty: nobody has to approve."""

    def add(self, made: dict[str, Any]) -> None:
        """Note commands that were made and are under way."""
        self.waiting |= {command["id"]: command["node_id"] for command in made["commands"]}
        self._made(made)

    def hold(self, made: dict[str, Any]) -> None:
        """Note commands that were made and wait for approval, and then for their step."""
        self.held |= {command["node_id"]: command["id"] for command in made["commands"]}
        self.approval = "waiting"
        self._made(made)

    def drop_held(self, ended: dict[str, Any]) -> bool:
        """Take a command that ended before its step (refused, cancelled, expired) out of those to come; say if so."""
        node = ended["node_id"]
        if self.held.get(node) != ended["id"] or node not in self.not_asked:
            return False
        self.not_asked.remove(node)
        self.failed += 1
        return True

    def _made(self, made: dict[str, Any]) -> None:
        self.batch_id = made["batch_id"]
        self.size += len(made["commands"])
        self.gives_up_at = time.monotonic() + made["gives_up_after_ms"] / 1000 + GRACE_S


def resumed(batch_id: str, commands: Sequence[dict[str, Any]]) -> Run:
    """Return a run whose maker has lost it, as far as it has come by its commands; without `held` there is no rest."""
    run = Run(kind=commands[0]["kind"] if commands else "", batch_id=batch_id, size=len(commands), approval="waiting")
    left_ms = 0
    for command in commands:
        if command["state"] in TERMINAL:
            run.failed += command["state"] != "succeeded"
            continue
        ends, made = (datetime.fromisoformat(command[name]) for name in ("not_after", "created_at"))
        until_end_ms = int((ends - made).total_seconds() * 1000) - command["age_ms"]
        left_ms = max(left_ms, until_end_ms + command["timeout_ms"])
        if command["state"] == "pending" and command["not_before"] == command["not_after"]:
            run.held[command["node_id"]] = command["id"]
        else:
            run.waiting[command["id"]] = command["node_id"]
    run.not_asked = sorted(run.held)
    run.gives_up_at = time.monotonic() + left_ms / 1000 + GRACE_S
    return run


def share_of(text: str, total: int, *, option: str) -> int:
    """Return `N` as it is, and `P%` of `total`, rounded down."""
    found = _SHARE.fullmatch(text.strip())
    if found is None or (found[2] and int(found[1]) > 100):
        output.fail(f"{option} {text!r}: write a number, as 10, or a share, as 25%", code=output.EXIT_USAGE)
    return int(found[1]) * total // 100 if found[2] else int(found[1])


def take_step(client: ApiClient, body: dict[str, Any], run: Run, rolling: Rolling) -> None:
    """Ask as many further nodes as there is room for, unless too many have failed."""
    room = rolling.at_once - len(run.waiting)
    if room <= 0 or not run.not_asked or run.failed > rolling.failures_max:
        return
    nodes = run.not_asked[:room]
    if not run.held:
        step = body | {"nodes": nodes} | ({"batch_id": run.batch_id} if run.batch_id else {})
        if (left_ms := int((run.sends_from - time.monotonic()) * 1000)) > 0:
            step["not_before_ms"] = left_ms
        # Asked again under the same key, so that an answer that was lost does not run anything twice.
        key = system_world().ids.uuid7()
        run.add(
            patiently(
                lambda: client.post("/v1/commands", step, idempotency_key=key), until=time.monotonic() + RESTART_S
            )
        )
    elif not _release(client, run, nodes):
        return
    run.not_asked = run.not_asked[len(nodes) :]


def _release(client: ApiClient, run: Run, nodes: list[str]) -> bool:
    """Have the commands of these nodes sent; False: the run is not approved (yet)."""
    asked = {run.held[node]: node for node in nodes}
    path = path_of("batches", run.batch_id, "steps")
    answer = patiently(lambda: client.post(path, {"commands": list(asked)}), until=time.monotonic() + RESTART_S)
    before, run.approval = run.approval, answer["state"]
    if run.approval == "approved":
        if before != run.approval:
            output.note("approved: the first nodes are asked")
        run.waiting |= asked
        return True
    if run.approval != "waiting":
        output.fail(f"batch {run.batch_id} is {run.approval}: no node was asked")
    return False


def stop_rest(client: ApiClient, run: Run, *, within_s: float = RESTART_S) -> str:
    """End the commands of nodes that were not asked, and return a sentence about them; empty: there are none."""
    if not run.held or not run.not_asked or run.approval in {"refused", "expired"}:
        return ""
    path = path_of("batches", run.batch_id, "stop")
    try:
        stopped = patiently(lambda: client.post(path, {}), until=time.monotonic() + within_s)
    except (Refused, Unavailable) as error:
        return (
            f"the commands of {len(run.not_asked)} nodes are held, and were not ended ({error}); nobody releases them, "
            "and they expire"
        )
    return f"the commands of {stopped['cancelled']} nodes that were not asked are cancelled"


def patiently(action: Callable[[], T], *, until: float) -> T:
    """Return what `action` returns, asking again, ever more slowly, while the API is away as for a restart."""
    gives_up_at = min(until, time.monotonic() + RESTART_S)
    retry_s = RETRY_S_MIN
    while True:
        try:
            return action()
        except Unavailable:
            if time.monotonic() + retry_s > gives_up_at:
                raise
        time.sleep(retry_s)
        retry_s = min(2 * retry_s, RETRY_S_MAX)
