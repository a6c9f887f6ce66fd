"""The `access` section: whose tickets open tunnels here, kept for whoever judges one.

See docs/desired-state.md, "Sections".
"""

from __future__ import annotations

from bettercompute.daemon.sections import require_sound
from bettercompute.protocol import messages


class AccessSection:
    """Who may open tunnels now. An empty section, or none, lets nobody in."""

    def __init__(self) -> None:
        self.current = messages.AccessSection()

    def converge(self, spec: messages.NodeSpec) -> str:
        """Let these rules hold; a section with a fault in it lets nobody in until it is mended."""
        self.current = messages.AccessSection()
        require_sound(spec, "access")
        self.current = spec.access
        return ""
