"""Machines as text: what the collectors read of a host, in one reviewable file, and how to record another one.

An entry is `@ path` and the file's text, `@ path base64` and its bytes, `@ path -> target` for a symbolic link, or
`@ path/` and the names in a folder of which more was listed than read; `#` begins a comment before the first entry.
`python -m tests.unit.daemon.inventory.recorded > hosts/NAME.txt` runs the collectors on this machine and writes what
they read. Look it over for serial numbers and names before you share it.
"""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pynvml

from bettercompute.daemon.inventory.collection import COLLECTORS
from bettercompute.daemon.inventory.host import HostRoot, InterfaceAddress, SystemCalls, Unreadable
from bettercompute.daemon.inventory.load import node_load
from bettercompute.daemon.inventory.packages import DPKG
from bettercompute.daemon.inventory.pressure import PressureMeter
from bettercompute.daemon.inventory.software import PROGRAMS

HOSTS = Path(__file__).parent / "hosts"


class NoDriver:
    """NVML on a machine without NVIDIA's driver."""

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's name
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)


def recorded_host(folder: Path, name: str, *, nvml: Any = None, ipv4: dict[str, str] | None = None) -> HostRoot:
    """Unpack a recorded machine below `folder`; `ipv4` gives interfaces their addresses."""
    _unpack((HOSTS / f"{name}.txt").read_text(), folder)
    addresses = [InterfaceAddress(interface=interface, address=address) for interface, address in (ipv4 or {}).items()]
    return host_at(folder, nvml=nvml, addresses=addresses)


def host_at(folder: Path, *, nvml: Any = None, addresses: list[InterfaceAddress] | None = None) -> HostRoot:
    """A machine whose files are below `folder`, with 1 TB file systems."""
    return HostRoot(
        folder=folder,
        calls=SystemCalls(
            nvml=lambda: nvml or NoDriver(),
            ipv4_addresses=lambda: addresses or [],
            file_system_bytes=lambda _: 10**12,
            architecture="x86_64",
            page_size_bytes=4096,
            libc_version="glibc 2.35",
        ),
    )


def _unpack(text: str, folder: Path) -> None:
    for entry in ("\n" + text).split("\n@ ")[1:]:
        head, _, body = entry.partition("\n")
        path, _, target = head.partition(" -> ")
        place = folder / path.removesuffix(" base64")
        place.parent.mkdir(parents=True, exist_ok=True)
        if target:
            place.symlink_to(target)
        elif path.endswith("/"):
            place.mkdir(parents=True, exist_ok=True)
            for name in body.split():
                (place / name).touch()
        elif path.endswith(" base64"):
            place.write_bytes(base64.b64decode(body))
        else:
            place.write_text(body + "\n")


@dataclass(slots=True)
class Recording:
    """The entries of a machine, in the order of their paths."""

    root: Path
    files: dict[str, bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    folders: dict[str, list[str]] = field(default_factory=dict)

    def way(self, path: str) -> str:
        """Return the true path, and record the links on the way to it."""
        true = ""
        for part in Path(path).parts:
            here = os.path.normpath(f"{true}/{part}").lstrip("/")
            if (self.root / here).is_symlink():
                self.links[here] = str((self.root / here).readlink())
                here = self.way(os.path.normpath(Path(here).parent / self.links[here]))
            true = here
        return true

    def entries(self) -> Iterator[str]:
        known = {*self.files, *self.links}
        for path in sorted({*known, *self.folders}):
            if path in self.links:
                yield f"@ {path} -> {self.links[path]}"
            elif path in self.files:
                yield _file(path, self.files[path])
            else:
                names = [name for name in self.folders[path] if f"{path}/{name}" not in known]
                unread = [name for name in names if not any(entry.startswith(f"{path}/{name}/") for entry in known)]
                yield f"@ {path}/\n{' '.join(unread)}".rstrip()


@dataclass(frozen=True, slots=True)
class RecordedRoot(HostRoot):
    """The real machine, which notes down whatever is asked of it."""

    recording: Recording = field(kw_only=True)

    def data(self, path: str, *, limit_bytes: int = 1 << 20) -> bytes:
        data = HostRoot.data(self, path, limit_bytes=limit_bytes)
        self.recording.files[self.recording.way(path)] = _wanted(path, data)
        return data

    def entries(self, path: str) -> list[str]:
        names = HostRoot.entries(self, path)
        self.recording.folders[self.recording.way(path)] = names
        return names

    def exists(self, path: str) -> bool:
        found = HostRoot.exists(self, path)
        if found:
            true = self.recording.way(path)
            if (self.folder / true).is_dir():
                self.recording.folders.setdefault(true, [])
            else:
                self.recording.files.setdefault(true, b"")
        return found

    def link_target(self, path: str) -> str:
        target = HostRoot.link_target(self, path)
        if target:
            parent, name = os.path.split(path)
            self.recording.links[f"{self.recording.way(parent)}/{name}"] = target
        return target

    def device_path(self, path: str) -> str:
        self.recording.way(path)
        return HostRoot.device_path(self, path)


def _wanted(path: str, data: bytes) -> bytes:
    """Return a package database's paragraphs of the programs that are looked for, any other file whole."""
    if path != DPKG:
        return data
    names = {f"Package: {package}" for packages in PROGRAMS.values() for package in packages}
    paragraphs = data.decode(errors="replace").split("\n\n")
    return "\n\n".join(text for text in paragraphs if text.partition("\n")[0] in names).encode()


def _file(path: str, data: bytes) -> str:
    text = data.decode(errors="replace").rstrip("\n")
    if "\N{REPLACEMENT CHARACTER}" in text or "\0" in text:
        return f"@ {path} base64\n{base64.b64encode(data).decode()}"
    return f"@ {path}\n{text}".rstrip()


def record() -> Recording:
    """Run every collector on this machine."""
    live = HostRoot.live()
    recording = Recording(root=live.folder)
    root = RecordedRoot(folder=live.folder, calls=live.calls, recording=recording)
    for name, collect in COLLECTORS.items():
        try:
            collect(root)
        except Unreadable as error:
            sys.stderr.write(f"{name}: {error}\n")
    node_load(root, running_commands=0, pending_events=0, journal_bytes=0)
    PressureMeter(root).read()
    return recording


if __name__ == "__main__":
    for line in record().entries():
        sys.stdout.write(line + "\n")
