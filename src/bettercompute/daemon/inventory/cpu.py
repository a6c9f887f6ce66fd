"""The `cpu` section: sockets, cores and threads as the kernel counts them, flags, caches and known weaknesses.

Clock rates of the moment are left out: they change by the millisecond. The highest rate stays.
"""

from __future__ import annotations

from collections.abc import Iterator

from bettercompute.daemon.inventory.findings import Findings, key_values, listed_numbers
from bettercompute.daemon.inventory.host import MALFORMED, HostRoot
from bettercompute.protocol import messages

CPUS = "sys/devices/system/cpu"
_VIRTUALIZATION_FLAGS = ("vmx", "svm")


def collect(root: HostRoot) -> messages.CpuInventory:
    """Return the processors."""
    findings = Findings(root)
    processors = list(_processors(findings.expected("proc/cpuinfo")))
    online = _listed(findings, f"{CPUS}/online")
    section = messages.CpuInventory(
        architecture=findings.optional("proc/sys/kernel/arch") or root.calls.architecture,
        online=len(online) or len(processors),
        possible=len(_listed(findings, f"{CPUS}/possible")),
        isolated=findings.optional(f"{CPUS}/isolated"),
    )
    places = {number: _place(findings, number) for number in online}
    for socket in sorted({socket for socket, _ in places.values()}):
        members = [number for number, place in places.items() if place[0] == socket]
        section.sockets.append(_socket(findings, socket, members, places, processors))
    section.cores = len(set(places.values()))
    section.threads_per_core = section.online // section.cores if section.cores else 0
    if processors:
        section.flags.extend(set((processors[0].get("flags") or processors[0].get("Features", "")).split()))
    section.virtualization = next((flag for flag in _VIRTUALIZATION_FLAGS if flag in section.flags), "")
    section.vulnerabilities.extend(
        messages.CpuVulnerability(name=name, status=findings.optional(f"{CPUS}/vulnerabilities/{name}"))
        for name in findings.entries(f"{CPUS}/vulnerabilities", expected=False)
    )
    section.caches.extend(_caches(findings))
    section.unreadable.extend(findings.unreadable())
    return section


def _processors(cpuinfo: str) -> Iterator[dict[str, str]]:
    """Yield the keys of each processor; the paragraphs that describe none of them are passed over."""
    for paragraph in cpuinfo.split("\n\n"):
        keys = key_values(paragraph, separator=":")
        if "processor" in keys:
            yield keys


def _listed(findings: Findings, path: str) -> list[int]:
    text = findings.expected(path)
    try:
        return listed_numbers(text)
    except ValueError as error:
        findings.gap(f"/{path}", MALFORMED, str(error))
        return []


def _place(findings: Findings, number: int) -> tuple[int, tuple[int, int]]:
    """Return a processor's socket and its core, which counts within a die of the socket.

    One without a topology, as in some virtual machines, is a core of its own in socket 0.
    """
    topology = f"{CPUS}/cpu{number}/topology"
    core = findings.number(f"{topology}/core_id")
    socket = findings.number(f"{topology}/physical_package_id")
    die = findings.number(f"{topology}/die_id")
    return socket or 0, (die or 0, number if core is None else core)


def _socket(
    findings: Findings,
    socket: int,
    members: list[int],
    places: dict[int, tuple[int, tuple[int, int]]],
    processors: list[dict[str, str]],
) -> messages.CpuSocket:
    by_number = {keys["processor"]: keys for keys in processors}
    keys = by_number.get(str(members[0]), {})
    return messages.CpuSocket(
        number=socket,
        vendor=keys.get("vendor_id") or keys.get("CPU implementer", ""),
        model_name=keys.get("model name") or keys.get("Model", ""),
        family=_whole(keys.get("cpu family") or keys.get("CPU architecture", "")),
        model=_whole(keys.get("model") or keys.get("CPU part", "")),
        stepping=_whole(keys.get("stepping") or keys.get("CPU revision", "")),
        microcode=keys.get("microcode", ""),
        cores=len({places[number] for number in members}),
        threads=len(members),
        frequency_max_khz=findings.number(f"{CPUS}/cpu{members[0]}/cpufreq/cpuinfo_max_freq") or 0,
    )


def _whole(text: str) -> int:
    """Return a number of cpuinfo, which writes some in hexadecimal; 0 for none."""
    try:
        return int(text, 0) & 0xFFFF_FFFF
    except ValueError:
        return 0


def _caches(findings: Findings) -> Iterator[messages.CpuCache]:
    folder = f"{CPUS}/cpu0/cache"
    for name in findings.entries(folder, expected=False):
        if not name.startswith("index"):
            continue
        yield messages.CpuCache(
            level=findings.number(f"{folder}/{name}/level") or 0,
            type=findings.optional(f"{folder}/{name}/type"),
            size_bytes=_whole(findings.optional(f"{folder}/{name}/size").removesuffix("K")) * 1024,
            shared_cpus=findings.optional(f"{folder}/{name}/shared_cpu_list"),
        )
