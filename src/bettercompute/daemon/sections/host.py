"""The `host` section: huge pages, written to the kernel and read back. Its other units are not built yet, and say so.

The kernel reserves what it finds free and in one piece, so fewer pages than asked for is an ordinary outcome: it is
reported, and tried again with each look. See docs/desired-state.md, "Sections"; decisions 0086.
"""

from __future__ import annotations

import errno
from pathlib import Path

import structlog

from bettercompute.daemon.sections import SectionFailed, require_sound
from bettercompute.protocol import messages

WHOLE_HOST = Path("sys/kernel/mm/hugepages")
NUMA_NODES = Path("sys/devices/system/node")
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})

log = structlog.get_logger("bcd.host")


class HostSection:
    """The kernel's files lie below `root`: `/`, but for tests and containers that have the host's elsewhere."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def converge(self, spec: messages.NodeSpec) -> str:
        """Reserve what is asked for, each size by itself: one that fails does not keep the others back.

        A size that is not named is left alone, whoever set it; `count` 0 gives its pages back.
        """
        require_sound(spec, "host")
        failed: list[SectionFailed] = []
        for entry in spec.host.huge_pages:
            try:
                self._reserve(entry)
            except SectionFailed as failure:
                failed.append(failure)
        failed += [
            SectionFailed("unit-unsupported", f"this bcd has no unit for host.{name}: upgrade it, or take it out")
            for name in ("k8s_join", "telemetry")
            if spec.host.HasField(name)
        ]
        if failed:
            raise SectionFailed(failed[0].reason, "; ".join(failure.message for failure in failed))
        return ""

    def _reserve(self, entry: messages.HugePageReservation) -> None:
        file = self._file(entry)
        where = f"huge pages of {_size(entry.size_bytes)}"
        if entry.HasField("numa_node"):
            where += f" on NUMA node {entry.numa_node}"
        try:
            if _read(file) == entry.count:
                return
            file.write_text(f"{entry.count}\n", encoding="ascii")
            held = _read(file)
        except OSError as error:
            raise self._explained(error, entry, where=where) from None
        except ValueError:
            raise SectionFailed("read-failed", f"{where}: {file} holds no number") from None
        if held != entry.count:
            short = "the kernel found no more memory in one piece: free some, or reboot"
            why = short if held < entry.count else "the others are in use: stop what uses them"
            raise SectionFailed("not-enough-memory", f"{where}: asked for {entry.count}, the host has {held}; {why}")
        log.info("huge pages reserved", size_bytes=entry.size_bytes, pages=held)

    def _file(self, entry: messages.HugePageReservation) -> Path:
        folder = f"hugepages-{entry.size_bytes // 1024}kB"
        if entry.HasField("numa_node"):
            return self._root / NUMA_NODES / f"node{entry.numa_node}" / "hugepages" / folder / "nr_hugepages"
        return self._root / WHOLE_HOST / folder / "nr_hugepages"

    def _explained(self, error: OSError, entry: messages.HugePageReservation, *, where: str) -> SectionFailed:
        if error.errno in _DENIED:
            cure = "run bcd as root, or on a host that lets it write there"
            return SectionFailed("not-permitted", f"{where}: bcd may not write {error.filename}; {cure}")
        if error.errno == errno.ENOENT:
            if entry.HasField("numa_node") and not (self._root / NUMA_NODES / f"node{entry.numa_node}").is_dir():
                return SectionFailed("no-numa-node", f"{where}: this host has no such NUMA node")
            return SectionFailed("no-such-size", f"{where}: this host has {self._sizes() or 'none at all'}")
        return SectionFailed("write-failed", f"{where}: {error.filename}: {error.strerror}")

    def _sizes(self) -> str:
        """Return the sizes that the kernel has, in words."""
        try:
            names = [folder.name for folder in (self._root / WHOLE_HOST).iterdir()]
        except OSError:
            return ""
        numbers = [name.removeprefix("hugepages-").removesuffix("kB") for name in names]
        return ", ".join(_size(kib * 1024) for kib in sorted(int(number) for number in numbers if number.isdecimal()))


def _read(file: Path) -> int:
    with file.open(encoding="ascii") as opened:
        return int(opened.read(32))


def _size(size_bytes: int) -> str:
    for shift, unit in ((30, "GiB"), (20, "MiB")):
        if size_bytes >= 1 << shift:
            return f"{size_bytes >> shift} {unit}"
    return f"{size_bytes >> 10} KiB"
