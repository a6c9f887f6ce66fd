"""The node's conditions and its status report: what lasts and is worth knowing, told when it changes.

Nothing is told on a timer: an idle fleet must not write its control plane's database. Pressure rides along, and a
jump of it is worth a report of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bettercompute.daemon.status import ConditionStatus
from bettercompute.protocol import messages
from bettercompute.protocol.limits import MAX_CONDITIONS, MAX_SENTENCE_CHARS

# A share of time that a resource made somebody wait, in percent: what an operator would look at twice.
PRESSURE_JUMP_PERCENT = 20.0


@dataclass(slots=True)
class _Held:
    reason: str
    message: str
    since_ms: int


class Conditions:
    """What holds now. `changed` is called after each change, with nothing."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self.changed: Callable[[], None] = lambda: None
        self._now_ms = now_ms
        self._held: dict[str, _Held] = {}

    def set(self, name: str, *, holds: bool, reason: str = "", message: str = "") -> None:
        """Raise or clear a condition. A new reason or message keeps the time since when it holds."""
        held = self._held.get(name)
        if not holds:
            if held is None:
                return
            del self._held[name]
        elif held is None:
            if len(self._held) >= MAX_CONDITIONS:
                return  # only as many as a report may carry; the names are ours and fewer
            self._held[name] = _Held(reason, message[:MAX_SENTENCE_CHARS], self._now_ms())
        elif (held.reason, held.message) != (reason, message[:MAX_SENTENCE_CHARS]):
            held.reason, held.message = reason, message[:MAX_SENTENCE_CHARS]
        else:
            return
        self.changed()

    def reported(self) -> list[messages.Condition]:
        """Return the conditions that hold, as a status report carries them."""
        return [
            messages.Condition(
                type=name,
                status=messages.CONDITION_STATUS_TRUE,
                reason=held.reason,
                message=held.message,
                since_ms=held.since_ms,
            )
            for name, held in sorted(self._held.items())
        ]

    def shown(self) -> tuple[ConditionStatus, ...]:
        """Return the conditions that hold, as `bcd status` shows them."""
        return tuple(
            ConditionStatus(type=name, reason=held.reason, message=held.message)
            for name, held in sorted(self._held.items())
        )


def pressure_jumped(before: messages.HostPressure, now: messages.HostPressure) -> bool:
    """Say whether the host's pressure differs enough from what was reported to be reported anew."""
    return any(
        abs(getattr(now, name) - getattr(before, name)) >= PRESSURE_JUMP_PERCENT
        for name in ("cpu_some_avg10", "memory_some_avg10", "io_some_avg10", "cpu_steal")
    )
