"""The node's conditions and its status report: what lasts and is worth knowing, told when it changes.

Nothing is told on a timer: an idle fleet must not write its control plane's database. Pressure rides along, and a
jump of it is worth a report of its own. See docs/daemon.md, "What is kept through what"; decisions 0084.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bettercompute.daemon.inventory.pressure import PressureMeter
from bettercompute.daemon.journal_records import JOURNAL_DISK_FULL, JOURNAL_FULL, JournalHealth
from bettercompute.daemon.status import ConditionStatus
from bettercompute.protocol import messages
from bettercompute.protocol.limits import MAX_CONDITIONS, MAX_SENTENCE_CHARS
from bettercompute.session.inputs import JournalRoom, StatusChanged

# A share of time that a resource made somebody wait, in percent: what an operator would look at twice.
PRESSURE_JUMP_PERCENT = 20.0
PRESSURE_INTERVAL_S = 60.0


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


class StatusReporter:
    """Makes the status report when something in it has changed, once however many things change in one turn."""

    def __init__(
        self,
        conditions: Conditions,
        *,
        meter: PressureMeter,
        sections: Callable[[], Iterable[messages.SectionState]],
        attest: Callable[[], messages.AttestedReport],
        now_ms: Callable[[], int],
        tell: Callable[[StatusChanged | JournalRoom], None],
    ) -> None:
        self._conditions = conditions
        self._meter = meter
        self._pressure = meter.read()
        self._sections = sections
        self._attest = attest
        self._now_ms = now_ms
        self._tell = tell
        self._due = False
        conditions.changed = self.report_soon

    def report_soon(self) -> None:
        """Report at the end of this turn of the loop."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._report)

    def journal_health(self, health: JournalHealth) -> None:
        """Raise or clear what the journal's health says, and tell the rules whether there is room."""
        for name in (JOURNAL_FULL, JOURNAL_DISK_FULL):
            self._conditions.set(name, holds=name == health.condition, reason="no-room", message=health.message)
        self._tell(JournalRoom(full=not health.accepting))

    async def watch_pressure(self) -> None:
        """Report a jump of the host's pressure, looked for each minute."""
        while True:
            await asyncio.sleep(PRESSURE_INTERVAL_S)
            now = self._meter.read()
            if pressure_jumped(self._pressure, now):
                self._pressure = now
                self.report_soon()

    def _report(self) -> None:
        self._due = False
        report = messages.StatusReport(
            sections=self._sections(),
            conditions=self._conditions.reported(),
            pressure=self._pressure,
            at_ms=self._now_ms(),
            attested=self._attest(),
        )
        self._tell(StatusChanged(report))


def pressure_jumped(before: messages.HostPressure, now: messages.HostPressure) -> bool:
    """Say whether the host's pressure differs enough from what was reported to be reported anew."""
    return any(
        abs(getattr(now, name) - getattr(before, name)) >= PRESSURE_JUMP_PERCENT
        for name in ("cpu_some_avg10", "memory_some_avg10", "io_some_avg10", "cpu_steal")
    )
