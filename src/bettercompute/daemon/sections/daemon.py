"""The `daemon` section: how much this daemon logs, how often it looks and tells, and the version it is held at.

See docs/desired-state.md, "Sections".
"""

from __future__ import annotations

from collections.abc import Callable

from bettercompute import __version__
from bettercompute.daemon import logs
from bettercompute.daemon.config import LogSettings
from bettercompute.daemon.sections import require_sound
from bettercompute.protocol import messages


class DaemonSection:
    """What holds of it now; the values say nothing (None, empty) where the host's configuration holds."""

    def __init__(self, *, configured_log: Callable[[], LogSettings]) -> None:
        self.inventory_interval_s: float | None = None
        self.status_interval_s: float | None = None
        self.pinned_version = ""
        """An upgrade to another version is refused; empty: not held."""
        self._configured_log = configured_log
        self._log_level = ""

    def converge(self, spec: messages.NodeSpec) -> str:
        """Take the values over. The log is set up only when its level changes: a reload may have changed the rest."""
        require_sound(spec, "daemon")
        section = spec.daemon
        if section.log_level != self._log_level:
            configured = self._configured_log()
            logs.set_up(LogSettings(level=section.log_level or configured.level, format=configured.format))
            self._log_level = section.log_level
        self.inventory_interval_s = section.inventory_interval_ms / 1000 or None
        self.status_interval_s = section.status_interval_ms / 1000 or None
        self.pinned_version = section.pinned_version
        if not self.pinned_version:
            return ""
        return f"held at version {self.pinned_version}; this is {__version__}"
