"""Streams of a story: two queues that take no time, unless the story holds them, loses what is in them or cuts them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Status

if TYPE_CHECKING:
    from tests.stories.gateway import Gateway, Live
    from tests.stories.machine import Machine


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a stream as one side sees it. `status` None: no gRPC status came."""

    status: Status | None = None
    reason: str = ""
    message: str = ""
    pushback_ms: int | None = None


@dataclass(eq=False)
class Stream:
    """One Session stream between a machine and a gateway."""

    machine: Machine
    gateway: Gateway
    up: deque[messages.AgentFrame | Ended] = field(default_factory=deque)
    down: deque[messages.ServerFrame | Ended] = field(default_factory=deque)
    session: Live | None = None
    up_held: bool = False
    down_held: bool = False
    silent: bool = False
    """Nothing passes any more, and neither side is told."""
    hello_at_ms: int = 0
    """When the gateway takes the Hello that waits: at most one a second per node."""

    def open(self) -> bool:
        """Say whether it is still the machine's stream."""
        return self.machine.stream is self

    def send_up(self, frame: messages.AgentFrame | Ended) -> None:
        """Send to the gateway."""
        if not self.silent:
            self.up.append(frame)

    def send_down(self, frame: messages.ServerFrame | Ended) -> None:
        """Send to the daemon."""
        if not self.silent:
            self.down.append(frame)

    def lose(self) -> None:
        """Drop what is on its way, both ways."""
        self.up.clear()
        self.down.clear()
