"""Which versions of packages are installed, read from the package manager's own files: no program is run for it.

Debian's, Alpine's and Arch's databases are text. RPM's is not, so on such a host versions stay empty.
"""

from __future__ import annotations

from bettercompute.daemon.inventory.findings import Findings
from bettercompute.daemon.inventory.host import MAX_PACKAGE_DATABASE_BYTES

DPKG = "var/lib/dpkg/status"
APK = "lib/apk/db/installed"
PACMAN = "var/lib/pacman/local"


def installed_versions(findings: Findings) -> dict[str, str]:
    """Return the version of every installed package by its name; empty where no known database is."""
    if text := findings.optional(DPKG, limit_bytes=MAX_PACKAGE_DATABASE_BYTES):
        return _dpkg(text)
    if text := findings.optional(APK, limit_bytes=MAX_PACKAGE_DATABASE_BYTES):
        return _apk(text)
    return _pacman(findings.entries(PACMAN, expected=False))


def _dpkg(text: str) -> dict[str, str]:
    found = {}
    for paragraph in text.split("\n\n"):
        name = version = status = ""
        for line in paragraph.splitlines():
            if line.startswith("Package: "):
                name = line.removeprefix("Package: ")
            elif line.startswith("Version: "):
                version = line.removeprefix("Version: ")
            elif line.startswith("Status: "):
                status = line.removeprefix("Status: ")
        # What is wanted, whether it is broken, and what is: a removed package leaves its configuration behind.
        if name and status.endswith(" installed"):
            found[name] = version
    return found


def _apk(text: str) -> dict[str, str]:
    found = {}
    for paragraph in text.split("\n\n"):
        keys = {line[:2]: line[2:] for line in reversed(paragraph.splitlines()) if line[1:2] == ":"}
        if "P:" in keys:
            found[keys["P:"]] = keys.get("V:", "")
    return found


def _pacman(folders: list[str]) -> dict[str, str]:
    """Return what the folders' names say: name-version-release."""
    found = {}
    for folder in folders:
        name, _, rest = folder.rpartition("-")
        name, _, version = name.rpartition("-")
        if name:
            found[name] = f"{version}-{rest}"
    return found
