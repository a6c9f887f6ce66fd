"""Conditions and the status report: told when something changed, once a turn, and never on a timer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from bettercompute.daemon import conditions as conditions_module
from bettercompute.daemon.conditions import Conditions, StatusReporter, pressure_jumped
from bettercompute.daemon.inventory.host import HostRoot
from bettercompute.daemon.inventory.pressure import PressureMeter
from bettercompute.daemon.journal_records import JOURNAL_DISK_FULL, JOURNAL_FULL, JournalHealth
from bettercompute.protocol import messages
from bettercompute.protocol.limits import MAX_CONDITIONS
from bettercompute.session.inputs import JournalRoom, StatusChanged


class Bench:
    def __init__(self, root: Path) -> None:
        self.now_ms = 1_000
        self.told: list[StatusChanged | JournalRoom] = []
        self.root = root
        self.set_pressure(1.0)
        self.conditions = Conditions(lambda: self.now_ms)
        self.reporter = StatusReporter(
            self.conditions,
            meter=PressureMeter(replace(HostRoot.live(), folder=root)),
            sections=lambda: [messages.SectionState(section="daemon")],
            attest=lambda: messages.AttestedReport(body=b"statement"),
            now_ms=lambda: self.now_ms,
            tell=self.told.append,
        )

    def set_pressure(self, percent: float) -> None:
        path = self.root / "proc/pressure/cpu"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"some avg10={percent} avg60=0.00 avg300=0.00 total=0\n")

    async def reports(self) -> list[messages.StatusReport]:
        await asyncio.sleep(0)
        found = [told.report for told in self.told if isinstance(told, StatusChanged)]
        self.told.clear()
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_changes_of_one_turn_are_one_report(bench: Bench) -> None:
    bench.conditions.set("B", holds=True, reason="b", message="be")
    bench.conditions.set("A", holds=True)
    [report] = await bench.reports()
    assert [condition.type for condition in report.conditions] == ["A", "B"]
    assert report.conditions[1].since_ms == 1_000
    assert report.sections[0].section == "daemon"
    assert report.pressure.cpu_some_avg10 == 1.0


async def test_nothing_new_is_not_told_and_a_new_reason_keeps_its_time(bench: Bench) -> None:
    bench.conditions.set("A", holds=False)
    assert await bench.reports() == []
    bench.conditions.set("A", holds=True, reason="one")
    await bench.reports()
    bench.now_ms = 2_000
    bench.conditions.set("A", holds=True, reason="one")
    assert await bench.reports() == []
    bench.conditions.set("A", holds=True, reason="two")
    [report] = await bench.reports()
    assert (report.conditions[0].reason, report.conditions[0].since_ms) == ("two", 1_000)
    assert [shown.reason for shown in bench.conditions.shown()] == ["two"]
    bench.conditions.set("A", holds=False)
    [report] = await bench.reports()
    assert list(report.conditions) == []


async def test_a_report_never_carries_more_than_it_may(bench: Bench) -> None:
    for number in range(MAX_CONDITIONS + 5):
        bench.conditions.set(f"C{number}", holds=True, message="x" * 10_000)
    [report] = await bench.reports()
    assert len(report.conditions) == MAX_CONDITIONS
    assert len(report.conditions[0].message) == 4_096


async def test_the_journals_health_is_a_condition_and_an_input(bench: Bench) -> None:
    bench.reporter.journal_health(JournalHealth(accepting=False, condition=JOURNAL_DISK_FULL, message="full"))
    assert JournalRoom(full=True) in bench.told
    [report] = await bench.reports()
    assert [condition.type for condition in report.conditions] == [JOURNAL_DISK_FULL]
    bench.reporter.journal_health(JournalHealth(accepting=False, condition=JOURNAL_FULL, message="bound"))
    [report] = await bench.reports()
    assert [condition.type for condition in report.conditions] == [JOURNAL_FULL]
    bench.reporter.journal_health(JournalHealth())
    assert JournalRoom(full=False) in bench.told
    [report] = await bench.reports()
    assert list(report.conditions) == []


@pytest.mark.parametrize(("percent", "jumps"), [(10.0, False), (20.9, False), (21.0, True), (90.0, True)])
def test_a_jump_is_twenty_points(percent: float, jumps: bool) -> None:
    before = messages.HostPressure(cpu_some_avg10=1.0, io_some_avg10=50.0)
    now = messages.HostPressure(cpu_some_avg10=percent, io_some_avg10=45.0)
    assert pressure_jumped(before, now) is jumps
    assert pressure_jumped(now, before) is jumps


async def test_only_a_jump_of_pressure_is_reported(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions_module, "PRESSURE_INTERVAL_S", 0)
    watching = asyncio.create_task(bench.reporter.watch_pressure())
    for _ in range(5):
        await asyncio.sleep(0)
    assert bench.told == []
    bench.set_pressure(80.0)
    for _ in range(5):
        await asyncio.sleep(0)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    reports = await bench.reports()
    assert [report.pressure.cpu_some_avg10 for report in reports] == [80.0]
