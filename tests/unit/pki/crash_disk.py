"""A disk in memory that can lose power before any step, and then keeps only what was fsynced and a part of the rest.

The rules are POSIX's, not those of one file system: a file's content survives from its fsync on, a name (made, renamed,
removed) from the fsync of its folder on. Names that were not fsynced survive or not one by one, as `after_crash` is
told.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


class PowerLossError(Exception):
    """The machine stopped here."""


@dataclass(eq=False)
class File:
    content: bytes


@dataclass(eq=False)
class Link:
    target: str


@dataclass(eq=False)
class Folder:
    pass


Node = File | Link | Folder


@dataclass(eq=False)
class Change:
    """One change of names: what goes away, and what appears where."""

    removes: tuple[Path, ...]
    sets: dict[Path, Node]

    def touches(self, folder: Path) -> bool:
        return any(path.parent == folder for path in (*self.sets, *self.removes))

    def ends(self, earlier: Change) -> bool:
        """Say whether `earlier` was about names in a folder that this change took away."""
        return any(removed in path.parents for removed in self.removes for path in (*earlier.sets, *earlier.removes))

    def apply(self, tree: dict[Path, Node]) -> None:
        for path in self.removes:
            for inside in [known for known in tree if known == path or path in known.parents]:
                del tree[inside]
        tree.update(self.sets)


@dataclass(eq=False)
class CrashDisk:
    """`stop_before` counts the changing steps from 0; `torn` leaves half of the file that was being written."""

    stop_before: int | None = None
    torn: bool = False
    fail_with: int | None = None
    """An errno to raise once instead of losing power."""
    steps: int = 0
    log: list[str] = field(default_factory=list)
    _live: dict[Path, Node] = field(default_factory=lambda: {Path("/"): Folder()})
    _durable: dict[Path, Node] = field(default_factory=lambda: {Path("/"): Folder()})
    _pending: list[Change] = field(default_factory=list)

    def read(self, path: Path) -> bytes | None:
        node = self._live.get(self._resolve(path))
        return node.content if isinstance(node, File) else None

    def is_folder(self, path: Path) -> bool:
        return isinstance(self._live.get(self._resolve(path)), Folder)

    def names(self, folder: Path) -> list[str]:
        folder = self._resolve(folder)
        return sorted(path.name for path in self._live if path.parent == folder and path != folder)

    def link_target(self, path: Path) -> str | None:
        node = self._live.get(path)
        return node.target if isinstance(node, Link) else None

    def make_folder(self, folder: Path) -> None:
        self._step(f"make folder {folder}")
        if isinstance(self._live.get(folder), Folder):
            return
        self._need_parent(folder)
        self._change({folder: Folder()})

    def write_synced(self, path: Path, data: bytes) -> None:
        if self.torn and self.steps == self.stop_before:
            self._change({path: File(data[: len(data) // 2])})
        self._step(f"write {path}")
        self._need_parent(path)
        self._change({path: File(data)})

    def link(self, path: Path, target: str) -> None:
        self._step(f"link {path}")
        if path in self._live:
            raise FileExistsError(errno.EEXIST, "there is something", str(path))
        self._change({path: Link(target)})

    def rename(self, source: Path, destination: Path) -> None:
        self._step(f"rename {source} to {destination}")
        if source not in self._live:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(source))
        if isinstance(self._live.get(destination), Folder) and self.names(destination):
            raise OSError(errno.ENOTEMPTY, "not empty", str(destination))
        removes = (source, destination)
        Change(removes, _moved(self._live, source, destination)).apply(self._live)
        # Of a folder that moves, only the names that were fsynced in it are sure to arrive.
        survivors = {**self._durable, source: self._live[destination]}
        self._pending.append(Change(removes, _moved(survivors, source, destination)))

    def remove(self, path: Path) -> None:
        self._step(f"remove {path}")
        if path in self._live:
            self._change({}, removes=(path,))

    def remove_folder(self, folder: Path) -> None:
        self._step(f"remove folder {folder}")
        if self.names(folder):
            raise OSError(errno.ENOTEMPTY, "not empty", str(folder))
        if folder in self._live:
            self._change({}, removes=(folder,))

    def sync_folder(self, folder: Path) -> None:
        self._step(f"sync {folder}")
        self._need_parent(folder / "any")
        folder = self._resolve(folder)
        for change in [change for change in self._pending if change.touches(folder)]:
            if change not in self._pending:
                continue
            change.apply(self._durable)
            position = self._pending.index(change)
            earlier, later = self._pending[:position], self._pending[position + 1 :]
            self._pending = [one for one in earlier if not change.ends(one)] + later

    def after_crash(self, keep: Callable[[int], bool]) -> CrashDisk:
        """Return the disk as the next start finds it; `keep` says of each unsynced change whether it survived."""
        tree = dict(self._durable)
        for number, change in enumerate(self._pending):
            if keep(number):
                change.apply(tree)
        # Of what hangs below a folder that did not survive, nothing can be found.
        found = {path: node for path, node in tree.items() if all(parent in tree for parent in path.parents)}
        return CrashDisk(_live=dict(found), _durable=dict(found))

    def copy(self, *, stop_after: int, torn: bool = False, fail_with: int | None = None) -> CrashDisk:
        """Return the same disk, which will stop before the step that comes `stop_after` steps from now."""
        return CrashDisk(
            stop_before=stop_after,
            torn=torn,
            fail_with=fail_with,
            _live=dict(self._live),
            _durable=dict(self._durable),
            _pending=list(self._pending),
        )

    def _step(self, what: str) -> None:
        if self.steps == self.stop_before:
            self.steps += 1
            if self.fail_with is not None:
                raise OSError(self.fail_with, "injected", what)
            raise PowerLossError(what)
        self.steps += 1
        self.log.append(what)

    def _change(self, sets: dict[Path, Node], removes: tuple[Path, ...] = ()) -> None:
        change = Change(removes, sets)
        change.apply(self._live)
        self._pending.append(change)

    def _need_parent(self, path: Path) -> None:
        if not self.is_folder(path.parent):
            raise FileNotFoundError(errno.ENOENT, "no such folder", str(path.parent))

    def _resolve(self, path: Path) -> Path:
        for parent in (path, *path.parents):
            node = self._live.get(parent)
            if isinstance(node, Link):
                return self._resolve(parent.parent / node.target / path.relative_to(parent))
        return path


def _moved(tree: dict[Path, Node], source: Path, destination: Path) -> dict[Path, Node]:
    return {
        destination / path.relative_to(source): node
        for path, node in tree.items()
        if path == source or source in path.parents
    }
