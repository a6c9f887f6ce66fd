"""How short the host is of processors, memory and disks: `HostPressure` of a status report.

Pressure is the kernel's own average over 10 seconds (PSI, `some`). Steal, the time that a hypervisor gave to others,
has no average: it is the share of all processor time since the reading before.
"""

from __future__ import annotations

from dataclasses import dataclass

from bettercompute.daemon.inventory.host import HostRoot, Unreadable
from bettercompute.protocol import messages

# Columns of /proc/stat's first line: user, nice, system, idle, iowait, irq, softirq, steal. Guest time, which
# follows, is already counted in user and nice.
_COLUMNS = 8
_STEAL = 7


@dataclass(frozen=True, slots=True)
class _Ticks:
    total: int
    steal: int


class PressureMeter:
    """Reads the host's pressure, each time from the same root."""

    def __init__(self, root: HostRoot) -> None:
        self._root = root
        self._before = self._ticks()

    def read(self) -> messages.HostPressure:
        """Return the pressure in percent; absent is what the kernel does not tell, as one without PSI."""
        pressure = messages.HostPressure()
        cpu, memory, io = self._some_avg10("cpu"), self._some_avg10("memory"), self._some_avg10("io")
        if cpu is not None:
            pressure.cpu_some_avg10 = cpu
        if memory is not None:
            pressure.memory_some_avg10 = memory
        if io is not None:
            pressure.io_some_avg10 = io
        before, now = self._before, self._ticks()
        if before is not None and now is not None and now.total > before.total:
            # The kernel may correct steal downwards after a live migration.
            pressure.cpu_steal = max(0.0, 100 * (now.steal - before.steal) / (now.total - before.total))
        self._before = now
        return pressure

    def _some_avg10(self, resource: str) -> float | None:
        try:
            text = self._root.text(f"proc/pressure/{resource}")
            words = next(line.split() for line in text.splitlines() if line.startswith("some "))
            return float(next(word.removeprefix("avg10=") for word in words if word.startswith("avg10=")))
        except (Unreadable, StopIteration, ValueError):
            return None

    def _ticks(self) -> _Ticks | None:
        try:
            words = self._root.text("proc/stat").partition("\n")[0].split()
            numbers = [int(word) for word in words[1 : 1 + _COLUMNS]]
        except (Unreadable, ValueError):
            return None
        if len(numbers) < _COLUMNS:
            return None
        return _Ticks(total=sum(numbers), steal=numbers[_STEAL])
