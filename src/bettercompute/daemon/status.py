"""What `bcd status` shows: asked of the living daemon over a socket in its state folder.

A file would still say "connected" after a kill -9 or while the process hangs; an answer cannot. See docs/daemon.md,
"When it is not connected"; decisions 0084.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bettercompute.daemon import local_socket
from bettercompute.errors import Unavailable

SOCKET_NAME = "bcd.sock"
ANSWER_TIMEOUT_S = 3.0
ANSWER_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionStatus:
    """A condition that holds."""

    type: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonStatus:
    """The daemon as it is now. Times are Unix milliseconds, 0 where there is none."""

    state: str
    """`connected`, `connecting`, `waiting`, `stopping` or `starting`."""
    reason: str = ""
    """Why it is not connected, in words; empty when it is."""
    reason_code: str = ""
    node_id: str = ""
    site: str = ""
    role: str = ""
    version: str = ""
    pid: int = 0
    gateway_url: str = ""
    gateway_id: str = ""
    epoch: int = 0
    since_ms: int = 0
    """Since when it is in this state."""
    next_dial_in_ms: int = 0
    certificate_not_after_ms: int = 0
    applied_generation: int = 0
    running_commands: tuple[str, ...] = ()
    unacked_results: int = 0
    unacked_events: int = 0
    journal_id: str = ""
    journal_bytes: int = 0
    conditions: tuple[ConditionStatus, ...] = ()
    inventory: dict[str, str] = field(default_factory=dict)
    """SHA-256 by section, hexadecimal."""
    refusals: dict[str, int] = field(default_factory=dict)
    """How often this process refused what gateways relayed, by what and why: `command: bad-signature`."""

    @property
    def needs_rejoin(self) -> bool:
        """Whether only a new join token helps."""
        return any(condition.type == "NeedsRejoin" for condition in self.conditions)

    @property
    def connected(self) -> bool:
        """Whether a gateway has welcomed this daemon and is still heard."""
        return self.state == "connected"


class StatusServer:
    """Answers whoever connects with one JSON line, then hangs up."""

    def __init__(self, state_dir: Path, report: Callable[[], DaemonStatus]) -> None:
        self._state_dir = state_dir
        self._report = report
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. The folder's lock is held, so a socket that is there belongs to nobody."""
        self._server = await local_socket.serve(self._state_dir, SOCKET_NAME, self._answer)

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            (self._state_dir / SOCKET_NAME).unlink(missing_ok=True)

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(json.dumps(asdict(self._report())).encode() + b"\n")
            await writer.drain()
        writer.close()


def ask(state_dir: Path) -> DaemonStatus:
    """Return the status of the daemon that holds `state_dir`; raise `Unavailable` saying why there is none."""
    try:
        with local_socket.connect(state_dir, SOCKET_NAME, timeout_s=ANSWER_TIMEOUT_S) as asking:
            return _parsed(json.loads(local_socket.received(asking, limit=ANSWER_BYTES_MAX)))
    except (FileNotFoundError, ConnectionRefusedError):
        problem = "no bcd runs there: start it with `bcd node`, or `systemctl start bcd`"
    except TimeoutError:
        problem = f"bcd did not answer within {ANSWER_TIMEOUT_S:g} s: it hangs, or the host is overloaded"
    except PermissionError:
        problem = "only its owner may ask: run `bcd status` as the user that bcd runs as, or as root"
    except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        problem = f"bcd's answer cannot be read: {error}"
    raise Unavailable(f"state_dir {state_dir}: {problem}", reason="not-running")


def _parsed(values: dict[str, Any]) -> DaemonStatus:
    conditions = tuple(ConditionStatus(**condition) for condition in values.pop("conditions"))
    running = tuple(values.pop("running_commands"))
    return DaemonStatus(**values, conditions=conditions, running_commands=running)
