"""How the benches measure and report: processor time of another process, medians over repeats, one JSON line a row.

Processor time is user and system of the measured process with all its threads, as the kernel counts it; children and
PostgreSQL are not in it. A row holds the medians of its repeats, the least and greatest of each under `spread`, and
what is needed to compare it with another: machine, commit, repeats.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor time and memory of a process at one moment."""

    cpu_s: float
    rss_kb: float


class Meter:
    """Reads one process."""

    def __init__(self, process_id: int) -> None:
        self._process = psutil.Process(process_id)

    def read(self) -> Usage:
        """Return what the process has used so far, and what it holds now."""
        times = self._process.cpu_times()
        return Usage(cpu_s=times.user + times.system, rss_kb=self._process.memory_info().rss / 1024)


class TreeMeter:
    """Reads a process with all its children, dead ones included: PostgreSQL."""

    def __init__(self, process_id: int) -> None:
        self._process = psutil.Process(process_id)

    def cpu_s(self) -> float:
        """Return the processor time that all have used so far."""
        times = self._process.cpu_times()
        total = times.user + times.system + times.children_user + times.children_system
        for child in self._process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                own = child.cpu_times()
                total += own.user + own.system
        return total


class Shares:
    """Where the processors' time goes while a figure is taken: what limits it."""

    def __init__(self, *, gateway: int, database: int) -> None:
        self._gateway, self._database, self._bench = Meter(gateway), TreeMeter(database), Meter(os.getpid())
        self._process_ids = gateway, database, os.getpid()
        self._before, self._waited_before = self._read(), self._waited()

    def restart(self) -> None:
        """Begin anew."""
        self._before, self._waited_before = self._read(), self._waited()

    @property
    def gateway_s(self) -> float:
        """Return the gateway's processor time since the beginning."""
        return self._read()[0] - self._before[0]

    def waited_per(self, count: int) -> Figures:
        """Return microseconds that gateway, database and this process stood ready and had no core, by item."""
        names = ("core_wait_us", "database_core_wait_us", "bench_core_wait_us")
        spent = zip(names, self._waited_before, self._waited(), strict=True)
        return {name: (after - before) / 1e3 / count for name, before, after in spent}

    def per(self, count: int) -> Figures:
        """Return microseconds for each of `count` items: gateway, database, and this process, which plays the rest."""
        names = ("cpu_us", "database_cpu_us", "bench_cpu_us")
        spent = zip(names, self._before, self._read(), strict=True)
        return {name: (after - before) * 1e6 / count for name, before, after in spent}

    def _read(self) -> tuple[float, float, float]:
        return self._gateway.read().cpu_s, self._database.cpu_s(), self._bench.read().cpu_s

    def _waited(self) -> tuple[int, int, int]:
        gateway, database, bench = self._process_ids
        return _waited_ns(gateway), _waited_ns(database, children=True), _waited_ns(bench)


def _waited_ns(process_id: int, *, children: bool = False) -> int:
    """Return how long the threads of a process have stood ready and had no core, as the kernel counts it."""
    process_ids = [process_id]
    if children:
        process_ids += [child.pid for child in psutil.Process(process_id).children(recursive=True)]
    waited = 0
    for known in process_ids:
        for thread in Path(f"/proc/{known}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # it has ended
                waited += int(thread.read_text(encoding="ascii").split()[1])
    return waited


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of all lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def fdatasync_ms(folder: Path, *, times: int = 200) -> list[float]:
    """Return how long writes of 8 KiB take to reach the disk of a folder: what each commit waits for."""
    took = []
    with (folder / "fdatasync").open("wb") as file:
        for _ in range(times):
            file.seek(0)
            file.write(b"x" * 8192)
            file.flush()
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            took.append((time.perf_counter() - began) * 1000)
    return took


def pause_ratio(*, pause_s: float = 0.005, times: int = 200) -> float:
    """Return how much more processor time the same work takes after a pause than back to back: caches, clock, host.

    What comes singly pays it on each wake-up, and it is the machine's: two machines with the same figures at saturation
    may differ by it.
    """

    def took_s() -> float:
        began = time.thread_time()
        json.dumps({str(number): number for number in range(300)})
        return time.thread_time() - began

    together = [took_s() for _ in range(10 * times)]
    apart = []
    for _ in range(times):
        time.sleep(pause_s)
        apart.append(took_s())
    return statistics.median(apart) / statistics.median(together)


def report(bench: str, runs: Sequence[Figures], **facts: object) -> dict[str, object]:
    """Print one row as a JSON line and return it: medians over `runs`, with `facts` beside them."""
    row: dict[str, object] = {"bench": bench}
    row |= {name: _short(statistics.median(run[name] for run in runs)) for name in runs[0]}
    row |= facts
    row["repeats"] = len(runs)
    row["spread"] = {name: [_short(pick(run[name] for run in runs)) for pick in (min, max)] for name in runs[0]}
    row["machine"] = machine()
    row["commit"] = commit()
    print(json.dumps(row), flush=True)
    return row


def machine() -> dict[str, object]:
    """Return what the figures depend on most."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load1": round(os.getloadavg()[0], 2),
    }


def commit() -> str:
    """Return the commit that is measured; with a plus when files differ from it."""
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout.strip() or "unknown"


def options(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with what every bench understands."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that the bench runs, not a figure")
    parser.add_argument("--repeats", type=int, help="how often each figure is measured")
    parser.add_argument("--json", action="store_true", help="print JSON lines (always on)")
    return parser


def allow_many_files() -> int:
    """Raise the limit of open files to what the system allows, and return it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def _short(value: float) -> float:
    """Round to what a measurement of this kind can mean: four digits."""
    rounded = float(f"{value:.4g}")
    return int(rounded) if rounded.is_integer() else rounded
