"""The `daemon` and `access` sections: values that hold while they are desired, and not longer."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from bettercompute.daemon import logs
from bettercompute.daemon.config import LogSettings
from bettercompute.daemon.regularly import Intervals
from bettercompute.daemon.sections import SectionFailed
from bettercompute.daemon.sections.access import AccessSection
from bettercompute.daemon.sections.daemon import DaemonSection
from bettercompute.protocol import messages

KEYS = '{"keys": [{"kty": "EC"}]}'


def is_logged(capsys: pytest.CaptureFixture[str], level: str) -> bool:
    capsys.readouterr()
    getattr(structlog.get_logger("test"), level)("seen")
    return "seen" in capsys.readouterr().err


def test_the_log_level_and_back_to_the_hosts_own(capsys: pytest.CaptureFixture[str]) -> None:
    configured = LogSettings(level="warning", format="json")
    logs.set_up(configured)
    section = DaemonSection(configured_log=lambda: configured)
    section.converge(messages.NodeSpec())
    assert not is_logged(capsys, "info")
    section.converge(messages.NodeSpec(daemon=messages.DaemonSection(log_level="debug")))
    assert is_logged(capsys, "debug")
    section.converge(messages.NodeSpec())
    assert not is_logged(capsys, "info")


def test_intervals_and_the_pin() -> None:
    section = DaemonSection(configured_log=LogSettings)
    spec = messages.NodeSpec()
    spec.daemon.inventory_interval_ms, spec.daemon.status_interval_ms = 90_000, 10_000
    spec.daemon.pinned_version = "9.9.9"
    assert section.converge(spec).startswith("held at version 9.9.9; this is ")
    assert (section.inventory_interval_s, section.status_interval_s, section.pinned_version) == (90.0, 10.0, "9.9.9")
    assert section.converge(messages.NodeSpec()) == ""
    assert (section.inventory_interval_s, section.status_interval_s, section.pinned_version) == (None, None, "")


def test_a_wrong_value_changes_nothing() -> None:
    section = DaemonSection(configured_log=LogSettings)
    spec = messages.NodeSpec(daemon=messages.DaemonSection(inventory_interval_ms=5, pinned_version="9"))
    with pytest.raises(SectionFailed, match=r"daemon\.inventory_interval_ms is 5: it must be 0"):
        section.converge(spec)
    assert section.pinned_version == ""


def test_access_lets_nobody_in_while_it_is_wrong() -> None:
    section = AccessSection()
    assert list(section.current.ops) == []
    spec = messages.NodeSpec(access=messages.AccessSection(ticket_jwks=KEYS, ops=["exec"]))
    section.converge(spec)
    assert list(section.current.ops) == ["exec"]
    spec.access.ops.append("root")
    with pytest.raises(SectionFailed):
        section.converge(spec)
    assert list(section.current.ops) == []
    section.converge(messages.NodeSpec())
    assert section.current == messages.AccessSection()


class Even:
    def uniform(self, low: float, high: float) -> float:
        return (low + high) / 2

    def reseed(self) -> None:
        return


async def test_an_interval_that_comes_later_is_waited_for_and_can_be_taken_back() -> None:
    intervals = Intervals(Even())
    done = asyncio.Event()
    value: list[float | None] = [None]

    async def act() -> None:
        value[0] = None
        done.set()

    running = asyncio.create_task(intervals.regularly(lambda: value[0], act))
    await asyncio.sleep(0)
    value[0] = 0.001
    intervals.changed()
    async with asyncio.timeout(30):
        await done.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
