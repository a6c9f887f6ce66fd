"""What brings the sections of a spec about, a file each; a section without one is reported unsupported.

To add one, write a class with `converge`, and name it in `daemon/node_spec.py`. See docs/desired-state.md,
"A section of your own".
"""

from __future__ import annotations

from typing import Protocol

from bettercompute.delivery.spec_values import faults
from bettercompute.protocol import messages


class SectionFailed(Exception):
    """A section could not be brought about: a short stable reason and a sentence."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class Section(Protocol):
    """Brings one section about. Runs in a thread of its own, so it may wait for the kernel."""

    def converge(self, spec: messages.NodeSpec) -> str:
        """Make it so, and read back that it is; return what people should know of it, or nothing.

        Also called when the spec has no such section: then what a former one changed here goes back to the host's own
        configuration. Runs again and again, so it changes nothing where all is as desired. Raises `SectionFailed`.
        """
        ...


def require_sound(spec: messages.NodeSpec, section: str) -> None:
    """Raise `SectionFailed` for values that this daemon does not take, whoever let them pass."""
    wrong = faults(spec, section)
    if wrong:
        raise SectionFailed("bad-value", "; ".join(fault.sentence() for fault in wrong[:3]))
